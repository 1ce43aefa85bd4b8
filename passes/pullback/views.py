"""Operations that only move elements: the index in the input of each element of the output.

`source(node, index, bounds)` takes one step from an output element of a view, permutation, slice, expansion, copy, ...
to the input element that it equals. A reshape is resolved to floor divisions and remainders, which `fusion.ir.integers`
removes again wherever the dimension was not really split.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import Expr, coord, coordinates
from fusion.ir.ops import apply
from fusion.refusals import Reason

from .. import marks, nodes
from ..nodes import Unsupported, arguments, normalize_dim, packet, shape

aten = torch.ops.aten
Index = tuple[Expr, ...]
Rule = Callable[[Node, dict[str, Any], Index, integers.Bounds], Index | None]
"""(the node, its arguments, an index of it, bounds) -> the index of the same element of its input, "self"; None where
the call changes values (a cast) or has a form that is not resolved."""
_RULES: dict[Any, Rule] = {}
_rule = nodes.rules(_RULES)
CASTS = (aten.to, aten._to_copy, aten.type_as)
RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.view_as, aten.reshape_as)
EXPANSIONS = (aten.expand, aten.expand_as, aten.broadcast_to)
PIECES = (aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unbind, aten.unsafe_split,
          aten.unsafe_chunk)  # fmt: skip


def source(node: Node, index: Index, bounds: integers.Bounds) -> tuple[Node, Index] | None:
    """Input node and index of the element `node[index]`. None where it computes, ends a gradient, or has no rule."""
    if node.op != "call_function" or not nodes.is_tensor(node) or marks.stop_gradient(node):
        return None
    if node.target is operator.getitem:
        return _from_getitem(node, index)
    rule = _RULES.get(packet(node))
    if rule is None:
        return None
    try:
        args = arguments(node)
        moved = rule(node, args, index, bounds)
    except Unsupported:
        return None
    return None if moved is None else (args["self"], moved)


def is_view(node: Node) -> bool:
    """Whether a node is of a kind that `source` may follow."""
    return node.target is operator.getitem or packet(node) in _RULES


def _concrete(value: Any) -> int:
    if isinstance(value, int):
        return value
    raise Unsupported(Reason.LAYOUT, "a dimension or step that is not a constant")


@_rule(aten.clone, aten.contiguous, aten.alias, aten.detach, aten.detach_, aten.lift_fresh_copy, aten.lift_fresh)
def _identity(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    return index


@_rule(*CASTS)
def _conversion(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index | None:
    origin = args["self"]
    if nodes.dtype(origin) != nodes.dtype(node) or nodes.fake(origin).device != nodes.fake(node).device:
        return None
    return index


@_rule(*RESHAPES)
def _reshape(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index | None:
    if nodes.dtype(args["self"]) != nodes.dtype(node):
        return None  # view(dtype)
    return reshape_index(shape(node), shape(args["self"]), index, bounds)


def reshape_index(new: Sequence[Expr], old: Sequence[Expr], index: Index, bounds: integers.Bounds) -> Index:
    """Index into a tensor of shape `old` of the element at `index` of its reshape to `new`. Groups of dimensions with
    equal products are resolved separately, so that only dimensions that are really merged or split see a division."""
    if integers.integer(0) in old:
        raise Unsupported(
            Reason.LAYOUT, f"a reshape from {list(map(str, old))} to {list(map(str, new))}, of empty tensors"
        )
    result: list[Expr] = []
    a, b = 0, 0
    while a < len(new) or b < len(old):
        if a < len(new) and b < len(old) and new[a] is old[b]:
            result.append(index[a])
            a, b = a + 1, b + 1
            continue
        a0, b0 = a, b
        a, b = _group(new, old, a, b)
        flat, one = integers.integer(0), integers.integer(1)
        for k in range(a0, a):
            if new[k] is not one:  # else the entry is 0, whatever it is called
                flat = integers.add(integers.mul(flat, new[k]), index[k])
        result.extend(_unflatten(flat, old[b0:b], bounds))
    return tuple(result)


def number_of(index: Index, extents: Sequence[Expr]) -> Expr:
    """The number of an element in row-major order."""
    number = integers.integer(0)
    for entry, extent in zip(index, extents, strict=True):
        number = integers.add(integers.mul(number, extent), entry)
    return number


def order_of(index: Index, extents: Index, bounds: integers.Bounds) -> tuple[str, ...] | None:
    """Coordinates c1, c2, .. such that `index` is element number (c1 * n2 + c2) * n3 + .., each of them once."""
    number, count = number_of(index, extents), integers.mul(*extents)
    for order in itertools.permutations(sorted(coordinates(number))):
        extents_in_order = tuple(bounds.get(coord(name), integers.integer(0)) for name in order)
        if number_of(tuple(map(coord, order)), extents_in_order) is number and integers.mul(*extents_in_order) is count:
            return order
    return None


def linear_in(index: Index, row: Expr, column: Expr) -> bool:
    """Whether every entry is a constant times `row` plus a constant times `column` plus a function of the batch."""
    for entry in index:
        for atom in (row, column):
            parts = integers.linear(entry, atom)
            if parts is None or not parts[0].is_const:
                return False
            entry = parts[1]
        if coordinates(entry) & {"i", "j", "c", "e"}:
            return False
    return True


def _group(new: Sequence[Expr], old: Sequence[Expr], a0: int, b0: int) -> tuple[int, int]:
    """The ends of the shortest groups of dimensions, from a0 in `new` and b0 in `old`, that have equal products."""
    a, b = a0, b0
    left = right = integers.integer(1)
    while True:
        if a < len(new) and (left is not right or a == a0) and not _exceeds(left, right):
            left, a = integers.mul(left, new[a]), a + 1
        elif b < len(old):
            right, b = integers.mul(right, old[b]), b + 1
        elif a < len(new):
            left, a = integers.mul(left, new[a]), a + 1
        else:
            break
        if left is right and (a > a0 or a0 == len(new)) and (b > b0 or b0 == len(old)):
            break
    if left is not right:
        raise Unsupported(Reason.LAYOUT, f"a reshape from {list(map(str, old))} to {list(map(str, new))}")
    return a, b


def _exceeds(left: Expr, right: Expr) -> bool:
    """Whether `left` is visibly the larger product (constants, or a multiple of `right`)."""
    if left.is_const and right.is_const:
        return left.integer > right.integer
    return integers.mod(left, right) is integers.integer(0) and left is not right


def _unflatten(flat: Expr, extents: Sequence[Expr], bounds: integers.Bounds) -> list[Expr]:
    result: list[Expr] = []
    for position, extent in enumerate(reversed(extents)):
        last = position == len(extents) - 1
        if extent is integers.integer(1):
            result.append(integers.integer(0))
        else:
            result.append(flat if last else integers.mod(flat, extent, bounds))
            flat = flat if last else integers.floordiv(flat, extent, bounds)
    return result[::-1]


@_rule(aten.permute)
def _permute(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    dims = nodes.normalize_dims(args["dims"], len(index))
    return tuple(index[dims.index(k)] for k in range(len(index)))


@_rule(aten.transpose, aten.swapaxes, aten.swapdims)
def _transpose(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    first, second = (d for name, d in args.items() if name.startswith(("dim", "axis")))
    swapped = list(index)
    first, second = normalize_dim(first, len(index)), normalize_dim(second, len(index))
    swapped[first], swapped[second] = index[second], index[first]
    return tuple(swapped)


@_rule(aten.t, aten.numpy_T, aten.mT, aten.adjoint)
def _matrix_transpose(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    if packet(node) is aten.numpy_T:
        return index[::-1]
    return (*index[:-2], *index[-2:][::-1])


@_rule(aten.movedim, aten.moveaxis)
def _movedim(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    rank = len(index)
    targets, origins = (nodes.normalize_dims(args[name], rank) for name in ("destination", "source"))
    placed = dict(zip(targets, origins, strict=True))
    rest = iter(k for k in range(rank) if k not in placed.values())
    order = [placed[k] if k in placed else next(rest) for k in range(rank)]
    return tuple(index[order.index(k)] for k in range(rank))


@_rule(aten.unsqueeze)
def _unsqueeze(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    dim = normalize_dim(args["dim"], len(index))
    return index[:dim] + index[dim + 1 :]


@_rule(aten.squeeze)
def _squeeze(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    extents, dims = shape(args["self"]), args.get("dim")
    named = range(len(extents)) if dims is None else nodes.normalize_dims(dims, len(extents))
    remaining = iter(index)
    one, zero = integers.integer(1), integers.integer(0)
    return tuple(zero if extent is one and k in named else next(remaining) for k, extent in enumerate(extents))


@_rule(*EXPANSIONS)
def _expand(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    return broadcast_index(shape(node), shape(args["self"]), index)


def broadcast_index(new: Sequence[Expr], old: Sequence[Expr], index: Index) -> Index:
    """The index into `old` of element `index` of its broadcast to `new`."""
    offset = len(new) - len(old)
    one, zero = integers.integer(1), integers.integer(0)
    return tuple(
        zero if extent is one and new[offset + k] is not one else index[offset + k] for k, extent in enumerate(old)
    )


@_rule(aten.slice, aten.narrow)
def _slice(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    dim = normalize_dim(args["dim"], len(index))
    start, step = nodes.size_expr(args.get("start") or 0), _concrete(args.get("step", 1) or 1)
    extent = shape(args["self"])[dim]
    if start.is_const and start.integer < 0:
        if step == 1 and args.get("end") in (None, 2**63 - 1):
            start = integers.sub(extent, shape(node)[dim])  # a tensor may have fewer elements
        else:
            start = apply("imax", integers.add(extent, start), integers.integer(0))
    elif not start.is_const and not integers.is_nonnegative(start):
        raise Unsupported(Reason.LAYOUT, "a slice whose start may be negative")
    return (*index[:dim], integers.add(start, integers.mul(step, index[dim])), *index[dim + 1 :])


@_rule(aten.select)
def _select(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    dim = normalize_dim(args["dim"], len(index) + 1)
    at = nodes.size_expr(args["index"])
    if at.is_const and at.integer < 0:
        at = integers.add(at, shape(args["self"])[dim])
    elif not at.is_const and not integers.is_nonnegative(at):
        raise Unsupported(Reason.LAYOUT, "an index that may be negative")
    return (*index[:dim], at, *index[dim:])


@_rule(aten.repeat, aten.tile)
def _repeat(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    extents = shape(args["self"])
    last = index[len(index) - len(extents) :]
    one, zero = integers.integer(1), integers.integer(0)
    return tuple(zero if n is one else integers.mod(x, n, bounds) for x, n in zip(last, extents, strict=True))


@_rule(aten.repeat_interleave)
def _repeat_interleave(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index | None:
    repeats, dim = args.get("repeats"), args.get("dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    dim = normalize_dim(dim, len(index))
    return (*index[:dim], integers.floordiv(index[dim], repeats, bounds), *index[dim + 1 :])


@_rule(aten.flip)
def _flip(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    extents, moved = shape(node), list(index)
    for d in nodes.normalize_dims(args["dims"], len(index)):
        moved[d] = integers.sub(integers.sub(extents[d], 1), moved[d])
    return tuple(moved)


@_rule(aten.roll)
def _roll(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index | None:
    shifts = [args["shifts"]] if isinstance(args["shifts"], int) else args["shifts"]
    if not (dims := nodes.normalize_dims(args["dims"], len(index))):
        return None
    extents, moved = shape(node), list(index)
    for shift, d in zip(shifts, dims, strict=True):
        if not extents[d].is_const:
            raise Unsupported(Reason.LAYOUT, "a roll over a dimension of unknown size")
        extent = extents[d].integer
        moved[d] = integers.mod(integers.add(moved[d], (-shift) % max(extent, 1)), extents[d], bounds)
    return tuple(moved)


@_rule(aten.unfold)
def _unfold(node: Node, args: dict[str, Any], index: Index, bounds: integers.Bounds) -> Index:
    dim = normalize_dim(args["dimension"], len(index) - 1)
    moved = integers.add(integers.mul(_concrete(args["step"]), index[dim]), index[-1])
    return (*index[:dim], moved, *index[dim + 1 : -1])


def _from_getitem(node: Node, index: Index) -> tuple[Node, Index] | None:
    """An item of split, chunk, unbind: a slice or a selection of the input."""
    origin, item = node.args[0], node.args[1]
    if not isinstance(origin, Node) or not isinstance(item, int) or origin.op != "call_function":
        return None
    kind = packet(origin)
    if kind not in PIECES:
        return None
    args = arguments(origin)
    tensor = args["self"]
    pieces = nodes.fake(origin)
    item = normalize_dim(item, len(pieces))
    dim = normalize_dim(args.get("dim", 0), nodes.fake(tensor).dim())
    if kind is aten.unbind:
        return tensor, (*index[:dim], integers.integer(item), *index[dim:])
    start = integers.add(0, *(nodes.size_expr(piece.shape[dim]) for piece in pieces[:item]))
    return tensor, (*index[:dim], integers.add(start, index[dim]), *index[dim + 1 :])
