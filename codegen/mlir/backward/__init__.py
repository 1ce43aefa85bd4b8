"""Backward kernels on CPUs: scores and weights are computed again tile by tile, gradients from them.

`plan` says which gradients a spec needs and in what form. A kernel is named by what its vector lanes are:

    queries.QueriesKernel     dQ, and gradients of loads that are free of the key
    queries.DeltaErrorKernel    the sums of dx that should be 0, see `call.BackwardCall._correct_concentrated`
    keys.KeysKernel           dK, dV and gradients of all other loads
    fused.FusedKernel         the latter with dQ in it, on AMX tiles and AVX2

`kernel` has the loops that they share, `tile` the products, `element` what happens to one score, `loads` how dense
biases are read and their gradients written. `call` runs the kernels of one call.
"""
