"""Backward kernels on CPUs: scores and weights are computed again tile by tile, gradients from them.

`fusion.lowering.backward_plan` says which gradients a spec needs and in what form. A kernel is named by what its vector
lanes are:

    delta.DELTAS           what every row needs, delta among it, before the others
    delta.DELTA_ERRORS     the sums of dx that should be 0, where delta has more parts than dO and O
    lanes.QUERIES          dQ, and gradients of loads that are free of the key
    lanes.KEYS             dK, dV and gradients of all other loads
    lanes.FUSED            the latter with dQ in it (`fused`)

`kernel` has the loops that they share, `tile` the products and what happens to one score, `loads` how dense biases are
read and their gradients written, `centring` what is taken off the keys for dQ. `codegen.cpu.backward` calls them.
"""
