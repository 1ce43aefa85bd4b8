"""Python floats that Dynamo passes on as symbols, turned into tensors, so that another value compiles nothing again.

A float that has had two values (the temperature of a call, a scale that differs between layers) arrives as a tensor
whose `item()` is a symbol. A symbol in a kernel is compiled in: torch guards on its value. A tensor without dimensions,
one times the symbol, is read by kernels as any other, and torch takes the symbol out of the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .. import marks, nodes

aten = torch.ops.aten

_OF_TENSORS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
"""Whose second argument may be a float or a tensor."""


def read_floats(graph: Graph) -> None:
    """Rewrite arithmetic of tensors and floats that are symbols, and do not follow from sizes, as that of tensors."""
    for node in list(graph.nodes):
        if node.target not in _OF_TENSORS or len(node.args) != 2 or node.kwargs:
            continue
        x, number = node.args
        if isinstance(x, Node) and isinstance(number, Node) and nodes.is_given_float(number) and _takes(x):
            with graph.inserting_before(node):
                node.args = (x, _tensor(graph, number, nodes.fake(x)))


def _takes(x: Node) -> bool:
    """Whether a tensor without dimensions acts on this one as a number does: it changes no dtype."""
    return nodes.is_tensor(x) and nodes.dtype(x).is_floating_point and nodes.fake(x).dim() > 0


def _tensor(graph: Graph, number: Node, beside: torch.Tensor) -> Node:
    """Float in the dtype that a tensor is computed in."""
    dtype = torch.float64 if beside.dtype is torch.float64 else torch.float32
    one = _call(graph, aten.full.default, ([], 1.0), dtype=dtype, device=beside.device)
    scaled = _call(graph, aten.mul.Tensor, (one, number))
    marks.of_float.set(scaled, True)
    return scaled


def _call(graph: Graph, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, nodes.fake), **kwargs)
    return node
