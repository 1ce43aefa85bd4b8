"""Sets of keys that an indexer leaves to each row: a constant scattered at the positions that `topk` chose.

`ones(bool).scatter(-1, scores.topk(k).indices, False)` is a mask of N_q x N_k whose live keys are known without it: row
i has those at `indices[.., i, :]`. This module recognises such a mask; `gathered_keys` rewrites the attention.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import Expr, J, const, coord, coordinates

from .. import marks, nodes
from ..nodes import arguments, packet, shape
from ..pullback.views import Index

if TYPE_CHECKING:
    from ..pullback.pullback import PullBack

aten = torch.ops.aten
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
