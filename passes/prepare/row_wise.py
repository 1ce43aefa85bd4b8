"""Row-wise dataflow: the rows of its inputs that a node reads for some rows of its result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import Expr, contains, coord
from fusion.torch_private.trees import tree_leaves

from .. import marks, nodes
from ..building import Symbols
from ..nodes import arguments, normalize_dim, packet, shape
from ..pullback.pointwise import is_pointwise
from ..pullback.views import EXPANSIONS, source

aten = torch.ops.aten
ONE = integers.integer(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a tensor that are read: a range of one dimension, or of a factor of one.

    dim: the dimension, of size outer * extent * inner; a row is the middle digit of a position.
    start, end: the range, as in a slice.
    extent, count: the number of rows there are, and of those read.
    """

    dim: int
    outer: Expr = ONE
    inner: Expr = ONE
    start: int
    end: int
    extent: Expr
    count: Expr

    @property
    def is_factor(self) -> bool:
        """Whether the rows are only a factor of the dimension."""
        return self.outer is not ONE or self.inner is not ONE

    def at(self, dim: int) -> Rows:
        """Equal rows of another tensor, at its dimension `dim`."""
        return replace(self, dim=dim)

    def within(self, extents: tuple[Expr, ...]) -> list[Expr]:
        """Shape of the tensor with only the rows that are read."""
        size = integers.mul(self.outer, self.count, self.inner)
        return [*extents[: self.dim], size, *extents[self.dim + 1 :]]


Inputs = dict[Node, Rows]
"""Of a node: the inputs of which it does not read all rows, and those that it reads."""
Rule = Callable[[Node, dict[str, Any], Rows], Inputs]
"""(node, its arguments, the rows that are read of it) -> what it reads; raises `NotRowWise`."""


class NotRowWise(Exception):
    """A node does not work row by row, or has to be computed for all rows."""


def row_wise(node: Node, rows: Rows, symbols: Symbols) -> Inputs:
    """Inputs that a node reads for these rows of its result, with the rows read of each."""
    if node.op != "call_function" or marks.mutations.on(node) or marks.dtensor(node) or nodes.is_active_dropout(node):
        raise NotRowWise
    rule = _RULES.get(packet(node))
    if nodes.is_tensor(node):
        for extent in rows.within(shape(node)):
            symbols.require(extent)
    elif rule is None:
        raise NotRowWise
    if is_pointwise(node):
        return _broadcast(node, node.all_input_nodes, rows)
    inputs = _of_view(node, rows) if rule is None else rule(node, arguments(node), rows)
    leaves = tree_leaves((node.args, node.kwargs))
    for origin, wanted in inputs.items():
        if sum(argument is origin for argument in leaves) > 1:
            raise NotRowWise  # an operand that is read in two ways
        for extent in shape(origin) if wanted.is_factor and nodes.is_tensor(origin) else ():
            symbols.require(extent)
    return inputs


def _broadcast(node: Node, operands: Iterable[Node], rows: Rows) -> Inputs:
    """Rows of operands that are broadcast with each other."""
    result, inputs = shape(node), {}
    for operand in filter(nodes.is_tensor, operands):
        extents = shape(operand)
        dim = rows.dim - len(result) + len(extents)
        if dim < 0 or extents[dim] is ONE:
            continue
        if extents[dim] is not result[rows.dim]:
            raise NotRowWise
        inputs[operand] = rows.at(dim)
    return inputs


_RULES: dict[Any, Rule] = {}
_rule = nodes.rules(_RULES)


@_rule(aten.linear)
def _linear(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim == len(shape(node)) - 1:
        raise NotRowWise
    return {args["input"]: rows}


@_rule(aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
def _product(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    *added, left, right = filter(nodes.is_tensor, args.values())
    rank = len(shape(node))
    if min(len(shape(left)), len(shape(right)), rank) < 2:
        raise NotRowWise
    behind = rank - 1 - rows.dim
    inputs = _broadcast(node, added, rows)
    if behind > 1:
        return inputs | _broadcast(node, (left, right), rows)
    operand = left if behind else right
    return inputs | {operand: rows.at(len(shape(operand)) - 1 - behind)}


@_rule(aten.scaled_dot_product_attention)
def _attention(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim != len(shape(node)) - 2 or rows.is_factor:
        raise NotRowWise
    query, mask = args["query"], args["attn_mask"]
    inputs = {query: rows.at(len(shape(query)) - 2)}
    if mask is not None and len(extents := shape(mask)) > 1 and extents[-2] is not ONE:
        inputs[mask] = rows.at(len(extents) - 2)
    return inputs


@_rule(aten.layer_norm, aten.rms_norm)
def _normalisation(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim >= len(shape(node)) - len(args["normalized_shape"]):
        raise NotRowWise
    return {args["input"]: rows}


@_rule(aten.softmax, aten._softmax, aten.log_softmax, aten.glu, aten.cumsum)
def _along(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if normalize_dim(args["dim"], len(shape(node))) == rows.dim:
        raise NotRowWise
    return {args["self"]: rows}


@_rule(aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.linalg_vector_norm)
def _reduction(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    rank = len(shape(args["self"]))
    if not (reduced := nodes.normalize_dims(args.get("dim"), rank)):
        raise NotRowWise
    left = [dim for dim in range(rank) if args["keepdim"] or dim not in reduced]
    if left[rows.dim] in reduced:
        raise NotRowWise
    return {args["self"]: rows.at(left[rows.dim])}


@_rule(aten.cat, aten.stack)
def _joined(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    rank, stacked = len(shape(node)), packet(node) is aten.stack
    dim = normalize_dim(args["dim"], rank)
    if dim == rows.dim or any(len(shape(tensor)) != rank - stacked for tensor in args["tensors"]):
        raise NotRowWise
    return dict.fromkeys(args["tensors"], rows.at(rows.dim - (stacked and dim < rows.dim)))


@_rule(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
def _pieces(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    """Rows of the input of an operation with several results; `rows` are those of each result."""
    dim = normalize_dim(args["dim"], len(shape(args["self"])))
    if packet(node) is aten.unbind:
        return {args["self"]: rows.at(rows.dim + (dim <= rows.dim))}
    if dim == rows.dim:
        raise NotRowWise
    return {args["self"]: rows}


def _of_view(node: Node, rows: Rows) -> Inputs:
    """Rows of the input of a view: of the dimension in which the row is a digit of the position."""
    if node.target is operator.getitem:
        return {node.args[0]: rows}  # type: ignore[dict-item]
    extents = shape(node)
    index = [coord(f"x{dim}") for dim in range(len(extents))]
    bounds = dict(zip(index, extents, strict=True))
    row, outer, inner = coord("row"), coord("outer"), coord("inner")
    bounds |= {row: rows.extent, outer: rows.outer, inner: rows.inner}
    high, low = (integers.integer(0) if bounds[x] is ONE else x for x in (outer, inner))
    index[rows.dim] = integers.add(integers.mul(integers.add(integers.mul(high, rows.extent), row), rows.inner), low)
    if (element := source(node, tuple(index), bounds)) is None:
        raise NotRowWise
    origin, places = element
    depending = [dim for dim, place in enumerate(places) if contains(place, row)]
    if not depending and packet(node) in EXPANSIONS:
        return {}
    if len(depending) != 1 or depending[0] in _counted(node):
        raise NotRowWise
    return {origin: _digit(shape(origin), depending[0], places[depending[0]], row, rows, bounds)}


def _counted(node: Node) -> list[int]:
    """Dimensions of the input in which a view's arguments count positions, which change when there are fewer rows."""
    args, kind = arguments(node), packet(node)
    extents = shape(args["self"])
    if kind not in _POSITIONS or (kind is aten.slice and shape(node) == extents):
        return []
    return nodes.normalize_dims(args[_POSITIONS[kind]], len(extents))


def _digit(extents: tuple[Expr, ...], dim: int, place: Expr, row: Expr, rows: Rows, bounds: integers.Bounds) -> Rows:
    """Rows as a factor of a dimension of these extents, where `place` is the position in it."""
    parts = integers.linear(place, row)
    if parts is None:
        raise NotRowWise
    inner = parts[0]
    outer = integers.quotient(extents[dim], integers.mul(rows.extent, inner))
    digit = integers.mod(integers.floordiv(place, inner, bounds), rows.extent, bounds)
    if digit is not row or outer is None:
        raise NotRowWise
    return replace(rows, dim=dim, outer=outer, inner=inner)


_POSITIONS = {aten.slice: "dim", aten.narrow: "dim", aten.unfold: "dimension", aten.repeat_interleave: "dim",
              aten.flip: "dims", aten.roll: "dims"}  # fmt: skip
