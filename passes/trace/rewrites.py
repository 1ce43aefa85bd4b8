"""Rewrites of single operations of the traced graph as ones that the analysis follows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import marks, nodes
from ..building import Symbols, derived
from ..nodes import Unsupported, arguments, packet, shape
from ..pullback.contractions import is_parameter, products_above
from ..pullback.heads import head_sum

aten = torch.ops.aten


def fill_by_masks(graph: Graph) -> None:
    """Rewrite fills of scores at listed positions (`s[:, :, i, i] = -inf`, `index_fill`, a diagonal) as fills by a
    mask. The graph computes it by the same operation, over only the dimensions that the positions are in."""
    symbols: Symbols | None = None
    for node in list(graph.nodes):
        mask_of = _MASKS.get(packet(node))
        if mask_of is None or not isinstance(node.args[0], Node) or not products_above(node.args[0]):
            continue
        symbols = symbols or Symbols(graph)
        with graph.inserting_before(node), contextlib.suppress(Unsupported):  # sizes that are data
            if (fill := mask_of(symbols, node, nodes.arguments(node))) is None:
                continue
            mask, number = fill
            overload = aten.masked_fill.Tensor if isinstance(number, Node) else aten.masked_fill.Scalar
            node.target, node.args, node.kwargs = overload, (node.args[0], mask, number), {}


Fill = tuple[Node, Any] | None
"""A mask, and the number that is put where it holds; None where each place has a number of its own."""


def _of_indices(symbols: Symbols, node: Node, args: dict[str, Any]) -> Fill:
    """Mask and number of an `index_put` with integer indices."""
    indices, number = args["indices"], args["values"]
    listed = [k for k, index in enumerate(indices) if index is not None]
    masks = any(nodes.dtype(indices[k]) in (torch.bool, torch.uint8) for k in listed)
    if args.get("accumulate") or masks or nodes.fake(number).dim() or not _is_float(node):
        return None
    nothing = _no_mask(symbols, node, listed)
    everywhere = _made(symbols.graph, node, aten.ones.default, [], torch.bool)
    mask = derived(symbols.graph, node, aten.index_put.default, (nothing, indices, everywhere))
    return mask, number


def _of_positions(symbols: Symbols, node: Node, args: dict[str, Any]) -> Fill:
    """Mask and number of an `index_fill`."""
    dim = nodes.normalize_dim(args["dim"], len(shape(node)))
    if not _is_float(node):
        return None
    arguments = (_no_mask(symbols, node, [dim]), dim, args["index"], True)
    return derived(symbols.graph, node, aten.index_fill.int_Scalar, arguments), args["value"]


def _of_diagonal(symbols: Symbols, node: Node, args: dict[str, Any]) -> Fill:
    """Mask and number of a `diagonal_scatter` of one number: true where row plus offset equals the column."""
    source, rank = args["src"], len(shape(node))
    if packet(source) is not aten.fill or not _is_float(node):
        return None
    rows, columns = (nodes.normalize_dim(args[name], rank) for name in ("dim1", "dim2"))
    graph = symbols.graph
    positions = []
    for dim in (rows, columns):
        count = symbols.value(shape(node)[dim])
        line = _made(graph, node, aten.arange.default, count, torch.int64)
        sides = [1 if other != dim else -1 for other in range(rank)]
        positions.append(derived(graph, node, aten.reshape.default, (line, sides)))
    moved = derived(graph, node, aten.add.Tensor, (positions[0], args["offset"]))
    return derived(graph, node, aten.eq.Tensor, (moved, positions[1])), nodes.arguments(source)["value"]


_MASKS: dict[Any, Callable[[Symbols, Node, dict[str, Any]], Fill]] = {
    aten.index_put: _of_indices, aten.index_fill: _of_positions, aten.diagonal_scatter: _of_diagonal,
}  # fmt: skip


def _is_float(node: Node) -> bool:
    return nodes.dtype(node).is_floating_point


def _no_mask(symbols: Symbols, node: Node, dims: list[int]) -> Node:
    """False everywhere, in the shape of a node with all dimensions but these set to 1."""
    sizes = [symbols.value(extent) if dim in dims else 1 for dim, extent in enumerate(shape(node))]
    return _made(symbols.graph, node, aten.zeros.default, sizes, torch.bool)


def _made(graph: Graph, origin: Node, target: Any, size: Any, dtype: torch.dtype) -> Node:
    """Node of a tensor that is created from its size."""
    like = nodes.fake(origin)
    node = graph.call_function(target, (size,), {"dtype": dtype, "device": like.device})
    nodes.copy_provenance(origin, node)
    node.meta["val"] = like.new_empty(torch.fx.node.map_arg(size, nodes.fake), dtype=dtype)
    return node


_OF_SIZES: dict[Any, Any] = {
    aten.empty_like: aten.empty.memory_format, aten.zeros_like: aten.zeros.default, aten.ones_like: aten.ones.default,
    aten.full_like: aten.full.default, aten.rand_like: aten.rand.default, aten.randn_like: aten.randn.default,
}  # fmt: skip
_VIEWS: dict[Any, Any] = {
    aten.expand_as: aten.expand.default, aten.view_as: aten.view.default, aten.reshape_as: aten.reshape.default,
}  # fmt: skip


def make_by_size(graph: Graph) -> None:
    """Rewrite uses of scores for their shape alone, as in `torch.rand_like(scores)` or `prior.expand_as(weights)`, with
    sizes: then they do not need the scores. Results have to be contiguous, as those of calls by sizes are."""
    symbols: Symbols | None = None
    for node in list(graph.nodes):
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
