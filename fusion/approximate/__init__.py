"""Approximate attention, when asked for: certified, and exact where the certificate would not hold.

    options={"approximate": "polynomial" | "two_planes", "epsilon": 1e-2}

`polynomials` has the approximations of the exponential, `eligible` decides which attention may be approximated at all,
`polynomial` and `two_planes` run a call, `certificates` records the certificates. See docs/approximate.md.
"""
