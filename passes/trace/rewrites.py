"""Rewrites of single operations of the traced graph as ones that the analysis follows."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import marks, nodes
from ..building import Symbols, derived
from ..nodes import Unsupported, arguments, packet, shape
from ..pullback.contractions import is_parameter, products_above
from ..pullback.heads import head_sum

aten = torch.ops.aten


_OF_SIZES: dict[Any, Any] = {
    aten.empty_like: aten.empty.memory_format, aten.zeros_like: aten.zeros.default, aten.ones_like: aten.ones.default,
    aten.full_like: aten.full.default, aten.rand_like: aten.rand.default, aten.randn_like: aten.randn.default,
}  # fmt: skip
_VIEWS: dict[Any, Any] = {
    aten.expand_as: aten.expand.default, aten.view_as: aten.view.default, aten.reshape_as: aten.reshape.default,
}  # fmt: skip


def make_by_size(graph: Graph) -> None:
    """Rewrite uses of scores for their shape alone, as in `torch.rand_like(scores)` or `prior.expand_as(weights)`, with
    sizes: then they do not need the scores. Results have to be contiguous, as those of calls by sizes are. Sizes of
    scores are computed from those of inputs."""
    symbols: Symbols | None = None
    for node in list(graph.nodes):
        if node.target is aten.sym_size.int and products_above(node.args[0]):
            symbols = symbols or Symbols(graph)
            with graph.inserting_before(node), contextlib.suppress(Unsupported):
                if isinstance(extent := symbols.value(nodes.size_expr(node)), Node) and extent is not node:
                    node.replace_all_uses_with(extent)
            continue
        is_view = packet(node) in _VIEWS
        target = (_VIEWS if is_view else _OF_SIZES).get(packet(node))
        if target is None or not _takes_shape_of_scores(node, is_view):
            continue
        symbols, fake = symbols or Symbols(graph), nodes.fake(node)
        with graph.inserting_before(node), contextlib.suppress(Unsupported):  # sizes that are data
            extents = [symbols.value(extent) for extent in shape(node)]
            node.args = (node.args[0], extents) if is_view else (extents, *node.args[1:])
            node.kwargs = {} if is_view else {"dtype": fake.dtype, "device": fake.device}
            node.target = target


def _takes_shape_of_scores(node: Node, is_view: bool) -> bool:
    like, fake = nodes.arguments(node)["other"] if is_view else node.args[0], nodes.fake(node)
    if not isinstance(like, Node) or marks.dtensor(node) or not products_above(like):
        return False
    if is_view:
        return True
    return fake.layout is torch.strided and fake.is_contiguous() and not node.kwargs.get("pin_memory")


_OF_TENSORS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
"""Whose second argument may be a float or a tensor."""


def read_floats(graph: Graph) -> None:
    """Rewrite arithmetic of tensors and floats that are symbols as that of tensors, so that another value compiles
    nothing again; floats that follow from sizes stay.

    A float that has had two values (the temperature of a call, a scale that differs between layers) arrives as a tensor
    whose `item()` is a symbol. A symbol in a kernel is compiled in: torch guards on its value. A tensor without
    dimensions, one times the symbol, is read by kernels as any other, and torch takes the symbol out of the product."""
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
    one = derived(graph, number, aten.full.default, ([], 1.0), dtype=dtype, device=beside.device)
    scaled = derived(graph, number, aten.mul.Tensor, (one, number))
    marks.of_float.set(scaled, True)
    return scaled


def write_products(graph: Graph) -> None:
    """Write a linear layer whose weight is no parameter, nor computed from parameters alone, as a product of two
    tensors, `F.linear(q, k)`, unless it mixes heads."""
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        args = arguments(node)
        weight = args["weight"]
        if args["bias"] is not None or len(shape(weight)) != 2 or not _is_data(weight) or head_sum(node):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(aten.t.default, (weight,))
        turned.meta = {**weight.meta, "val": nodes.fake(weight).t()}
        node.target, node.args, node.kwargs = aten.matmul.default, (args["input"], turned), {}


def _is_data(node: Node) -> bool:
    """Whether a tensor depends on anything but parameters."""
    origins = nodes.walk_up([node], lambda origin: origin.all_input_nodes)
    return any(origin.op == "placeholder" and not is_parameter(origin) for origin in origins)
