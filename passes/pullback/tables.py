"""Reads of a tensor at positions from another tensor: `cache[table]`, `index_select`, `gather`.

Positions that are known integer expressions are followed in every operand. Unknown ones are followed for keys and
values only (`PullBack.reads_tables`), which are then read through the table: the gathered copy is never made. The
positions come from `fusion::table`, not from the table itself: it returns positions within the tensor, or raises the
error that eager mode would have raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import Expr, Kind, load

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
