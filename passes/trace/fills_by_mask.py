"""Fills of scores at listed positions (`s[:, :, i, i] = -inf`, `index_fill`, a diagonal), rewritten as fills by a mask.
The graph computes the mask by the same operation, over only the dimensions that the positions are in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import nodes
from ..building import Symbols, derived
from ..nodes import Unsupported, packet, shape
from ..pullback.contractions import products_above

aten = torch.ops.aten


def fill_by_masks(graph: Graph) -> None:
    """Rewrite such operations on tensors that depend on a product."""
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


Found = tuple[Node, Any] | None
"""A mask, and the number that is put where it holds; None where each place has a number of its own."""


def _of_indices(symbols: Symbols, node: Node, args: dict[str, Any]) -> Found:
    """Mask and number of an `index_put` with integer indices."""
    indices, number = args["indices"], args["values"]
    listed = [k for k, index in enumerate(indices) if index is not None]
    masks = any(nodes.dtype(indices[k]) in (torch.bool, torch.uint8) for k in listed)
    if args.get("accumulate") or masks or nodes.fake(number).dim() or not _is_float(node):
        return None
    nothing = _no_mask(symbols, node, listed)
    mask = derived(symbols.graph, node, aten.index_put.default, (nothing, indices, _yes(symbols, node)))
    return mask, number


def _of_positions(symbols: Symbols, node: Node, args: dict[str, Any]) -> Found:
    """Mask and number of an `index_fill`."""
    dim = nodes.normalize_dim(args["dim"], len(shape(node)))
    if not _is_float(node):
        return None
    arguments = (_no_mask(symbols, node, [dim]), dim, args["index"], True)
    return derived(symbols.graph, node, aten.index_fill.int_Scalar, arguments), args["value"]


def _of_diagonal(symbols: Symbols, node: Node, args: dict[str, Any]) -> Found:
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


_MASKS: dict[Any, Callable[[Symbols, Node, dict[str, Any]], Found]] = {
    aten.index_put: _of_indices, aten.index_fill: _of_positions, aten.diagonal_scatter: _of_diagonal,
}  # fmt: skip


def _is_float(node: Node) -> bool:
    return nodes.dtype(node).is_floating_point


def _no_mask(symbols: Symbols, node: Node, dims: list[int]) -> Node:
    """False everywhere, in the shape of a node with all dimensions but these set to 1."""
    sizes = [symbols.value(extent) if dim in dims else 1 for dim, extent in enumerate(shape(node))]
    return _made(symbols.graph, node, aten.zeros.default, sizes, torch.bool)


def _yes(symbols: Symbols, node: Node) -> Node:
    return _made(symbols.graph, node, aten.ones.default, [], torch.bool)


def _made(graph: Graph, origin: Node, target: Any, size: Any, dtype: torch.dtype) -> Node:
    """Node of a tensor that is created from its size."""
    like = nodes.fake(origin)
    node = graph.call_function(target, (size,), {"dtype": dtype, "device": like.device})
    nodes.copy_provenance(origin, node)
    node.meta["val"] = like.new_empty(torch.fx.node.map_arg(size, nodes.fake), dtype=dtype)
    return node
