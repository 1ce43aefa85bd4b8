"""MLIR of CPU kernels: the function that each thread of a call runs, as text, from an `AttentionSpec` and a tiling.

`emit` (`kernel`) writes a forward, `BackwardKernel` (`backward.kernel`) a kernel of a backward. Nothing here holds a
tensor, compiles or runs: that is `codegen.cpu`, which imports this package and is not imported by it.

    builder, values, scope       MLIR's text; expressions of scores and masks as scalars and vectors
    vectormath, x86, arm         elementary functions, transpositions, instructions that only some processors have
    thread_function, skeleton    the function that each thread runs, what kernels of attention have in common
    rows, elements, dense        Q, K, V and biases of any strides, in pages, or in integers
    micro_kernel                 the loop along the reduction of every matrix product
    products, amx                packing, register tiles and epilogues for it
    kernel, tile, stream         forward of many queries: its loops, a tile's stages, one tile after or beside another
    softmax, fixed_shift         online softmax; softmax without maxima, where norms bound the scores
    parts, aux_outputs           split-K; weights and their statistics, what training keeps of each row
    mixed_heads, by_rows         forward of heads that are mixed; of few queries
    backward                     gradients
    approximate                  polynomial features, and moments that bound scores
    export                       a function on MLIR tensors that calls a kernel
"""
