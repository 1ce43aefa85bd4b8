"""Division of an attention whose sequence is sharded over a dimension of the mesh.

Q has its query rows sharded, K and V their keys or nothing. The schedules:

    gather      a process computes its own rows; K and V are gathered first
    ring        a process computes its own rows; blocks of K and V arrive one by one (`fusion.sequences.ring`)
    all_to_all  a process computes some heads of all rows; Q, K, V and the output change hands (Ulysses, 2309.14509)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.ir import AttentionSpec
from fusion.ir.expr import I, J
from fusion.ir.parts import LENGTHS, Extent, Split, dims_along, size_of_batch, split_dims
from fusion.sequences import partial

SCHEDULES = ("gather", "ring", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call on a mesh. sharded: per operand the dimension that is sharded over the dimension of the mesh in question.
    shapes, batch: extents of operands and batch coordinates on that dimension, None where one cannot be split."""

    spec: AttentionSpec
    n_q: int
    parts: int
    sharded: tuple[int | None, ...]
    shapes: Sequence[Sequence[Extent]]
    batch: Sequence[Extent]
    taken: Sequence[Split | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Split of a call, and the coordinate by which its output is sharded in the end. keys: dimensions of K and V that
    stay sharded, for the ring; None elsewhere."""

    split: Split
    output: str = "i"
    keys: tuple[int, int] | None = None


def divide(call: Call, asked: str) -> Division | None:
    """Division of a call by the schedule that is asked for, "auto" for the one that is predicted to be fastest. Where
    it cannot run, the gather; None where Q is not sharded along its rows."""
    rows = dims_along(call.spec, I)
    if rows[0] is None or call.sharded[0] != rows[0] or any(s is not None and s.coordinate == "i" for s in call.taken):
        return None
    gather = Division(split=_of_rows(call, rows))
    possible = {"gather": gather, "ring": _ring(call, gather), "all_to_all": _all_to_all(call)}
    return possible.get(asked) or gather


def _of_rows(call: Call, dims: tuple[int | None, ...]) -> Split:
    length = -(-call.n_q // call.parts)
    cut = tuple(d if d not in _cut(call, n) else None for n, d in enumerate(dims))
    return Split(coordinate="i", count=call.n_q, length=length, size=LENGTHS["i"], dims=cut)


def _cut(call: Call, operand: int) -> set[int | None]:
    """Dimensions of an operand that are cut along another dimension of the mesh."""
    return {split.dims[operand] for split in call.taken if split is not None}


def _ring(call: Call, gather: Division) -> Division | None:
    keys = dims_along(call.spec, J)
    k, v = keys[1:3]
    if k is None or v is None or call.sharded[1:3] != (k, v) or partial.unsupported(call.spec) is not None:
        return None
    return Division(split=gather.split, keys=(k, v))


def _all_to_all(call: Call) -> Division | None:
    for axis, extent in reversed(list(enumerate(call.batch))):
        name = size_of_batch(call.spec, axis)
        if extent is None or name is None or extent % call.parts:
            continue
        length = extent // call.parts
        dims = split_dims(call.spec, axis, length, call.parts, call.shapes)
        if None not in dims[:3] and not any(d is not None and d in _cut(call, n) for n, d in enumerate(dims)):
            return Division(split=Split(coordinate=f"b{axis}", count=extent, length=length, size=name, dims=dims))
    return None
