"""Rules for operations that pick elements of other tensors: one element of the result.

Reads (`cache[table]`, `index_select`, `gather`) at positions that are known integer expressions are followed in every
operand. Unknown ones are followed for keys and values only (`PullBack.reads_tables`), which are then read through the
table: the gathered copy is never made. The positions come from `fusion::table`, not from the table itself: it returns
positions within the tensor, or raises the error that eager mode would have raised.

`ones(bool).scatter(-1, scores.topk(k).indices, False)` is a mask of N_q x N_k whose live keys are known without it: row
i has those at `indices[.., i, :]`, the set of keys that an indexer leaves to it (a `KeySet`). The attention may be
rewritten to read these alone (`specify.gathered_keys`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import FALSE, TRUE, Expr, J, Kind, const, coord, coordinates, load, rebuild, walk
from fusion.ir.ops import apply, where

from .. import marks, nodes
from ..nodes import arguments, packet, shape
from . import casts, pointwise
from .loads import Table
from .reductions import depends_on_product
from .views import Index, broadcast_index

if TYPE_CHECKING:
    from .pullback import PullBack

aten = torch.ops.aten
READS = (aten.index, aten.index_select, aten.gather)
_WHOLE = (aten.expand, aten.expand_as, aten.unsqueeze, aten.squeeze, aten.view, aten.reshape, aten.permute, aten.clone,
          aten.transpose, aten.contiguous, aten.alias, aten.detach, aten.flatten, aten.unflatten)  # fmt: skip
"""Views that show every element of what they are made of."""


def _triangle(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    value = pullback.value(args["self"], index)
    diagonal = nodes.size_expr(args["diagonal"])
    limit = integers.add(index[-2], diagonal)
    lower = packet(here) is aten.tril
    keep = apply("ile", index[-1], limit) if lower else apply("ile", limit, index[-1])
    return where(keep, value, const(0, value.kind))


def _cumsum(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """A running sum of one constant, such as of a comparison that is false everywhere."""
    dim = nodes.normalize_dim(args["dim"], len(index))
    if nodes.dtype(here).is_floating_point or not (value := pullback.value(args["self"], index)).is_const:
        return None
    return integers.mul(value.integer, integers.add(index[dim], 1))


def _diff(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """Differences of neighbours that are the same everywhere, the one to a prepended value included."""
    origin, front = args["self"], args.get("prepend")
    dim = nodes.normalize_dim(args.get("dim", -1), len(index))
    if args.get("n", 1) != 1 or args.get("append") is not None or nodes.dtype(here).is_floating_point:
        return None

    def at(tensor: Node, place: Expr) -> Expr:
        return pullback.value(tensor, (*index[:dim], place, *index[dim + 1 :]))

    here_at = index[dim] if front is not None else integers.add(index[dim], 1)
    step = integers.sub(at(origin, here_at), at(origin, integers.sub(here_at, 1)))
    if not step.is_const or front is None:
        return step if step.is_const else None
    if shape(front)[dim] is not integers.integer(1):
        return None
    zero = integers.integer(0)
    return step if integers.sub(at(origin, zero), at(front, zero)) is step else None


_MOST_PIECES = 4


def _cat(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """Piece that the index falls into, where the bounds of the coordinates decide; for packed columns, both halves."""
    tensors = [t for t in args["tensors"] if shape(t) != (integers.integer(0),)]
    dim = nodes.normalize_dim(args.get("dim", 0), len(index))
    position = index[dim]
    for tensor in tensors:
        extent = shape(tensor)[dim]
        if integers.is_below(position, extent, pullback.bounds):
            return pullback.value(tensor, (*index[:dim], position, *index[dim + 1 :]))
        position = integers.sub(position, extent)
        if not integers.is_nonnegative(position):
            break
    extents = [shape(tensor)[dim] for tensor in tensors]
    if not pullback.reads_tables or len(tensors) > _MOST_PIECES or any(e is not extents[0] for e in extents):
        return None
    if not extents[0].is_const:
        return None
    number, within = (f(index[dim], extents[0], pullback.bounds) for f in (integers.floordiv, integers.mod))
    return _chosen(number, [pullback.value(tensor, (*index[:dim], within, *index[dim + 1 :])) for tensor in tensors])


def _stack(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    dim = nodes.normalize_dim(args.get("dim", 0), len(index))
    tensors, rest = args["tensors"], (*index[:dim], *index[dim + 1 :])
    if index[dim].is_const:
        return pullback.value(tensors[index[dim].integer], rest)
    if not pullback.reads_tables or len(tensors) > _MOST_PIECES:
        return None
    return _chosen(index[dim], [pullback.value(tensor, rest) for tensor in tensors])


def _chosen(number: Expr, pieces: list[Expr]) -> Expr:
    """Piece of that number."""
    result = pieces[-1]
    for k in reversed(range(len(pieces) - 1)):
        result = where(apply("ieq", number, integers.integer(k)), pieces[k], result)
    return result


def _pad(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    origin, pad = args["self"], args["pad"]
    extents, moved = shape(origin), list(index)
    inside = const(True)
    for k in range(len(pad) // 2):
        dim = len(index) - 1 - k
        low, high = (nodes.size_expr(p) for p in pad[2 * k : 2 * k + 2])
        zero = integers.integer(0)
        if low is zero and high is zero:
            continue
        moved[dim] = integers.sub(index[dim], low)
        inside = apply("and", inside, _is_within(pullback, moved[dim], extents[dim]))
    kind = casts.kind_of(nodes.dtype(here))
    if args.get("mode", "constant") != "constant" or kind in (None, Kind.BOOL):
        return None
    fill = const(args.get("value") or 0, kind)
    if inside is FALSE:
        return fill
    value = pullback.value(origin, tuple(moved))
    value = value if inside is TRUE else _readable(pullback, value, fill)
    return None if value is None else where(inside, value, fill)


def _is_within(pullback: PullBack, position: Expr, extent: Expr) -> Expr:
    """Condition for a position to be within a dimension, as far as the bounds do not decide it."""
    zero, last = integers.integer(0), integers.sub(extent, 1)

    def at_most(low: Expr, high: Expr) -> Expr:
        outcome = integers.always_at_most(low, high, pullback.bounds)
        return apply("ile", low, high) if outcome is None else const(outcome)

    return apply("and", at_most(zero, position), at_most(position, last))


def _read(value: Expr) -> set[Expr]:
    return {part for part in walk(value) if part.op in ("load", "dot")}


def _readable(pullback: PullBack, value: Expr, other: Expr) -> Expr | None:
    """The value with its loads at clamped positions, safe to evaluate where it and `other` are alternatives of a
    selection: an element outside of a tensor is not read even where it is discarded. None where the value has products
    of its own, or where no scores are concerned: the graph's tensor is read faster then."""
    known = _read(other)
    new_ops = {part.op for part in _read(value) - known}
    if "dot" in new_ops or ("load" in new_ops and not depends_on_product(other)):
        return None

    def clamped(position: Expr, extent: Expr) -> Expr:
        last = integers.sub(extent, 1)
        beyond = not integers.never_negative(integers.sub(last, position), pullback.bounds)
        if not integers.never_negative(position, pullback.bounds):
            position = apply("imax", position, integers.integer(0))
        return apply("imin", position, last) if beyond else position

    def leaf(part: Expr) -> Expr | None:
        if part in known:
            return part
        if part.op != "load":
            return None
        index = (rebuild(entry, leaf) for entry in part.args)
        extents = shape(pullback.loaded[part.operand])
        return load(part.operand, tuple(map(clamped, index, extents)), part.kind)

    return rebuild(value, leaf)


def _slice_scatter(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """`x[..., start:end] = y`: y where the index is inside of the slice, else x."""
    dim = nodes.normalize_dim(args["dim"], len(index))
    extent = shape(here)[dim]
    low = integers.integer(0) if args["start"] is None else _clamped(args["start"], extent)
    high = extent if args["end"] is None else _clamped(args["end"], extent)
    if args["step"] != 1 or low is None or high is None:
        return None
    position = integers.sub(index[dim], low)
    inside = _is_within(pullback, position, integers.sub(high, low))
    return _put(pullback, here, args, index, inside, (*index[:dim], position, *index[dim + 1 :]))


def _clamped(bound: Any, extent: Expr) -> Expr | None:
    """Bound of a slice as a position of at most `extent`; None where it may be negative at run time."""
    at = extent if bound == 2**63 - 1 else nodes.size_expr(bound)
    if at.is_const and at.integer < 0:
        at = apply("imax", integers.add(extent, at), integers.integer(0))
    elif not integers.is_nonnegative(at):
        return None
    return at if integers.is_nonnegative(integers.sub(extent, at)) else apply("imin", at, extent)


def _select_scatter(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """`x[:, at] = y`."""
    dim = nodes.normalize_dim(args["dim"], len(index))
    at = nodes.size_expr(args["index"])
    at = integers.add(shape(here)[dim], at) if at.is_const and at.integer < 0 else at
    return _put(pullback, here, args, index, apply("ieq", index[dim], at), (*index[:dim], *index[dim + 1 :]))


def _put(pullback: PullBack, here: Node, args: dict[str, Any], index: Index, inside: Expr, at: Index) -> Expr | None:
    """Element at `at` of the written tensor where `inside` holds, else of the tensor before."""
    before = pullback.value(args["self"], index)
    if inside is FALSE:
        return before
    value = pullback.value(args["src"], at)
    if inside is TRUE:  # a gradient of zero is not none
        lost = marks.requires_grad(here) and not _read(before) <= _read(value)
        return None if lost else value
    if (value := _readable(pullback, value, before)) is None:
        return None
    return pointwise.build(aten.where, casts.Call(args=(inside, value, before), kwargs={}, dtype=nodes.dtype(here)))


def _overwritten(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """Element of the result of `copy` and `fill`: the source in the dtype of the tensor that it is written to."""
    source = args["src"] if packet(here) is aten.copy else args["value"]
    value = pullback.argument(source, index, shape(here))
    return casts.cast(value if isinstance(value, Expr) else const(value), nodes.dtype(here))


def _index_put(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """`scores[mask] = number`, for a mask of whole dimensions."""
    masks = [(k, t) for k, t in enumerate(args["indices"]) if t is not None]
    if len(masks) != 1 or nodes.dtype(masks[0][1]) is not torch.bool or args.get("accumulate"):
        return None
    if len(shape(args["values"])) > 0:
        return None
    first, mask = masks[0]
    chosen = pullback.value(mask, index[first : first + len(shape(mask))])
    arguments = pullback.value(args["self"], index), chosen, pullback.value(args["values"], ())
    return pointwise.build(aten.masked_fill, casts.Call(args=arguments, kwargs={}, dtype=nodes.dtype(here)))


def _indexed(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """Indexing by tensors, as in `mask[batch_idx, kv_idx]` or `cache[table]`."""
    origin, tensors = args["self"], args["indices"]
    tables = [t for t in tensors if t is not None]
    if any(not nodes.is_tensor(t) or nodes.dtype(t) not in (torch.int64, torch.int32) for t in tables):
        return None
    first = next(k for k, t in enumerate(tensors) if t is not None)
    if any(t is None for t in tensors[first : first + len(tables)]):
        return None
    rank = max(len(shape(t)) for t in tables)
    extents = shape(here)
    own, common = index[first : first + rank], extents[first : first + rank]
    positions = []
    for k, tensor in enumerate(tables):
        at = broadcast_index(common, shape(tensor), own)
        position = _position(pullback, here, tensor, at, first + k)
        if position is None:
            return None
        positions.append(position)
    return pullback.value(origin, (*index[:first], *positions, *index[first + rank :]))


def _picked(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """`index_select`, and `gather`, whose positions have the index of the result."""
    dim = nodes.normalize_dim(args["dim"], len(index))
    at = index if packet(here) is aten.gather else (index[dim],)
    if len(shape(args["self"])) != len(index) or len(shape(args["index"])) != len(at):
        return None  # tensors without dimensions
    position = _position(pullback, here, args["index"], at, dim)
    return None if position is None else pullback.value(args["self"], (*index[:dim], position, *index[dim + 1 :]))


def _position(pullback: PullBack, here: Node, tensor: Node, at: Index, dim: int) -> Expr | None:
    """Position that a tensor holds at an index, as an expression that is known to be within dimension `dim` of the
    tensor that `here` reads; None where that cannot be known."""
    origin = arguments(here)["self"]
    extent = shape(origin)[dim]
    position = pullback.value(tensor, at)
    if integers.is_below(position, extent, pullback.bounds):
        return position
    if not pullback.reads_tables or nodes.fake(tensor).device != nodes.fake(origin).device:
        return None
    while packet(tensor) in _WHOLE and (moved := pullback.step(tensor, at, pullback.bounds)) is not None:
        tensor, at = moved
    name = str(here.target).split(".")[1]
    at_call = here if marks.mutations(tensor) else None
    table = Table(positions=tensor, extent=extent, dim=dim, operation=name, at=at_call, call=here)
    return load(pullback.number(tensor, table), at, Kind.INT)


_POSITIONS = (torch.int64, torch.int32)
"""Dtypes that hold every position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySet:
    """A mask `[.., extent]` that is `inside` at the `count` positions `positions[.., :]`, which differ from each other
    and lie within the dimension, and `outside` elsewhere: BOOL constants."""

    positions: Node
    count: Expr
    extent: Expr
    inside: Expr
    outside: Expr


def scattered(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> None:
    """Record the `KeySet` of a mask made by `scatter`. The mask stays a load; `gathered_keys` may replace it later."""
    written, positions = args.get("value"), args["index"]
    if nodes.dtype(here) is not torch.bool or not isinstance(written, (bool, int, float)) or args.get("reduce"):
        return
    rank = len(index)
    if not rank or nodes.normalize_dim(args["dim"], rank) != rank - 1 or len(shape(positions)) != rank:
        return
    if shape(positions)[:-1] != shape(here)[:-1] or not _are_distinct(pullback, positions, shape(here)):
        return
    outside, inside = pullback.value(args["self"], index), const(bool(written))
    count = shape(positions)[-1]
    if not outside.is_const or outside is inside or not count.is_const or not count.integer:
        return  # without any position all keys are dead, which is more than no keys
    pullback.key_sets[here] = KeySet(
        positions=positions, count=count, extent=shape(here)[-1], inside=inside, outside=outside
    )


def _are_distinct(pullback: PullBack, positions: Node, extents: Index) -> bool:
    """Whether positions along the last dimension are results of one `topk` (or sort), and so differ from each other."""
    atoms = tuple(coord(f"r{k}") for k in range(len(extents) - 1))
    bounds = dict(zip((*atoms, J), shape(positions), strict=True))
    node, at = positions, (*atoms, J)
    while not marks.mutations(node):
        if packet(node) in (aten.to, aten._to_copy) and nodes.dtype(node) in _POSITIONS:
            node = arguments(node)["self"]
        elif (moved := pullback.step(node, at, bounds)) is not None:
            node, at = moved
        else:
            break
    origin = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else node
    single = origin is node
    if marks.mutations(node) or not isinstance(origin, Node):
        return False
    if packet(origin) not in ((aten.argsort,) if single else (aten.topk, aten.sort)):
        return False
    args = arguments(origin)
    dim = nodes.normalize_dim(args.get("dim", -1), len(at))
    beyond = integers.sub(extents[-1], shape(args["self"])[dim])
    return _runs_along(at, dim) and integers.never_negative(beyond, {})


def _runs_along(at: Index, dim: int) -> bool:
    """Whether an index goes along a dimension with J, and along no other."""
    parts = integers.linear(at[dim], J)
    if parts is None or not parts[0].is_const or not parts[0].integer or "j" in coordinates(parts[1]):
        return False
    return all("j" not in coordinates(entry) for k, entry in enumerate(at) if k != dim)


OPERATIONS: dict[object, Callable[[PullBack, Node, dict[str, Any], Index], Expr | None]] = {
    aten.tril: _triangle, aten.triu: _triangle, aten.cumsum: _cumsum, aten.diff: _diff,
    aten.cat: _cat, aten.concat: _cat, aten.stack: _stack, aten.constant_pad_nd: _pad, aten.pad: _pad,
    aten.index: _indexed, aten.index_select: _picked, aten.gather: _picked,
    aten.index_put: _index_put,
    aten.slice_scatter: _slice_scatter, aten.select_scatter: _select_scatter,
    aten.copy: _overwritten, aten.fill: _overwritten,
}  # fmt: skip
"""Operation -> the element at an index of its result, from its arguments; None where it is to be loaded."""
