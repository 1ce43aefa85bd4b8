"""Passes from graph to graph; `fusion/backend.py` says in which order they run.

    trace       Dynamo's graph as pre-dispatch ATen, the one form that is analysed
    subgraphs   checkpoints and function transforms, taken apart and put together again
    tensors     other kinds of tensor: jagged, DTensor
    prepare     optional changes of the graph, one of them tried on a copy
    pullback    one element of a tensor as an expression at symbolic coordinates: read `pullback/pullback.py` first
    recognize   expressions that are attention: `find` visits products with V, `recognize` has the forms of softmax
    specify     the spec of each attention, its mask, its auxiliary outputs, other forms of its call
    replace     calls of `fusion::attention` in the place of attentions

`nodes`, `marks` and `building` read, annotate and insert nodes for all of them.
"""
