"""Positions in a tensor that are data: reads at them, and masks made of them.

Reads (`cache[table]`, `index_select`, `gather`) at positions that are known integer expressions are followed in every
operand. Unknown ones are followed for keys and values only (`PullBack.reads_tables`), which are then read through the
table: the gathered copy is never made. The positions come from `fusion::table`, not from the table itself: it returns
positions within the tensor, or raises the error that eager mode would have raised.

Masks: `ones(bool).scatter(-1, scores.topk(k).indices, False)` is a mask of N_q x N_k whose live keys are known without
it: row i has those at `indices[.., i, :]`, the set of keys that an indexer leaves to it (a `KeySet`). The attention may
be rewritten to read these alone (`specify.gathered_keys`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import Expr, J, Kind, const, coord, coordinates, load

from .. import marks, nodes
from ..nodes import arguments, packet, shape
from .views import Index, broadcast_index

if TYPE_CHECKING:
    from .pullback import PullBack

aten = torch.ops.aten
OPERATIONS = (aten.index, aten.index_select, aten.gather)
_WHOLE = (aten.expand, aten.expand_as, aten.unsqueeze, aten.squeeze, aten.view, aten.reshape, aten.permute, aten.clone,
          aten.transpose, aten.contiguous, aten.alias, aten.detach, aten.flatten, aten.unflatten)  # fmt: skip
"""Views that show every element of what they are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Positions along a dimension of a tensor.

    positions: the tensor that holds them.
    extent, dim: the size and the number of the dimension.
    operation: "index", "index_select" or "gather", which differ in their arguments and in their errors.
    at: a node of the operation, where the positions change in place, so that another call may read others.
    call: a node of the operation.
    """

    positions: Node
    extent: Expr
    dim: int
    operation: str
    at: Node | None
    call: Node = field(compare=False)


class Numbers:
    """Numbers of the tensors in a list, to which new tensors are added. A tensor that is read as a table counts as
    another tensor; its `Table` is recorded by number."""

    def __init__(self, tensors: list[Node]):
        self.tensors, self.tables = tensors, dict[int, Table]()
        self.known: dict[tuple[Node, Table | None], int] = {}

    def __call__(self, tensor: Node, table: Table | None = None) -> int:
        if (tensor, table) not in self.known:
            self.known[tensor, table] = len(self.tensors)
            self.tensors.append(tensor)
            self.tables |= {} if table is None else {self.known[tensor, table]: table}
        return self.known[tensor, table]


def indexed(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
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


def picked(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
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
