"""Approximate attention, when asked for: certified, and exact where the certificate would not hold.

    options={"approximate": "polynomial", "epsilon": 1e-2}

`cost` has the approximations of the exponential and decides which one pays, `polynomial` runs a call, `certificates`
records the certificates. See docs/approximate.md.
"""
