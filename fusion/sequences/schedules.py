"""Division of an attention whose sequence is sharded over a dimension of the mesh.

Q has its query rows sharded, K and V their keys or nothing. The schedules:

    gather      a process computes its own rows; K and V are gathered first
    ring        a process computes its own rows; blocks of K and V arrive one by one (`fusion.sequences.ring`)
    all_to_all  a process computes some heads of all rows; Q, K, V and the output change hands (Ulysses, 2309.14509)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.ir import AttentionSpec
from fusion.ir.expr import I, J
from fusion.ir.parts import LENGTHS, Extent, Split, dims_along, one_part, size_of_batch, split_dims
from fusion.ir.request import Request
from fusion.ir.results import extents_function
from fusion.runtime import kernels
from fusion.sequences import cost, partial
from fusion.sequences.transfers import Ring

SCHEDULES = ("gather", "ring", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call on a mesh. sizes: of the spec, by name. sharded: per operand the dimension that is sharded over the
    dimension of the mesh in question. shapes, batch: extents of operands and batch coordinates on that dimension, None
    where one cannot be split. device: its type."""

    spec: AttentionSpec
    sizes: Mapping[str, int]
    parts: int
    sharded: tuple[int | None, ...]
    shapes: Sequence[Sequence[Extent]]
    batch: Sequence[Extent]
    taken: Sequence[Split | None]
    device: str
    request: Request

    def extents(self) -> tuple[int, ...]:
        """(batch coordinates.., n_q, n_k, d, d_v)."""
        return extents_function(self.spec)([self.sizes[name] for name in self.spec.sizes])


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Split of a call by a schedule, and the coordinate by which its output is sharded in the end. keys: dimensions of
    K and V that stay sharded, for the ring; None elsewhere."""

    schedule: str
    split: Split
    output: str = "i"
    keys: tuple[int, int] | None = None


def is_sharded(spec: AttentionSpec, dims: Sequence[int | None]) -> bool:
    """Whether Q, sharded along these dimensions, is sharded along its rows."""
    rows = dims_along(spec, I)[0]
    return rows is not None and rows in dims


def divide(call: Call) -> Division | None:
    """Division of a call by the schedule that is requested, or by the one that is predicted to be fastest. Where it
    cannot run, the gather; None where Q is not sharded along its rows."""
    rows = dims_along(call.spec, I)
    if rows[0] is None or call.sharded[0] != rows[0] or any(s is not None and s.coordinate == "i" for s in call.taken):
        return None
    gather = Division(schedule="gather", split=_of_rows(call, rows))
    candidates = {"gather": gather, "ring": _ring(call, gather), "all_to_all": _all_to_all(call)}
    possible = {name: division for name, division in candidates.items() if division is not None}
    asked = call.request.across
    if asked == "auto":
        exact = replace(call.request, approximation=None)
        machine = kernels.machine_of(call.device, exact)
        asked = cost.cheapest(traffic(call), [*possible], machine, call.spec.dtype)
    return possible.get(asked, gather)


def traffic(call: Call) -> cost.Traffic:
    """Sizes of a call that decide what processes send and compute."""
    *batch, n_q, n_k, d, d_v = call.extents()
    rows = one_part(call.spec, "i", dims_along(call.spec, I), "first_row")
    ring = Ring(group="", parts=call.parts, offset="first_row", rows=n_q, keys=n_k, dims=(0, 0))
    known = dict(call.sizes) | {"first_row": 0, LENGTHS["i"]: 0}
    heads, pairs = math.prod(batch), ring.pairs(rows, known)
    group = call.spec.heads_per_key(batch[-1]) if batch else 1
    return cost.Traffic(
        parts=call.parts, n_q=n_q, n_k=n_k, heads=heads, key_heads=heads // group, d=d, d_v=d_v,
        live=tuple(map(tuple, ring.live(rows, known))), pairs=tuple(pairs),
        element_bytes=call.spec.operands[1].torch_dtype.itemsize,
    )  # fmt: skip


def _of_rows(call: Call, dims: tuple[int | None, ...]) -> Split:
    n_q = call.extents()[-4]
    length = -(-n_q // call.parts)
    cut = tuple(d if d not in _cut(call, n) else None for n, d in enumerate(dims))
    return Split(coordinate="i", count=n_q, length=length, size=LENGTHS["i"], dims=cut)


def _cut(call: Call, operand: int) -> set[int | None]:
    """Dimensions of an operand that are cut along another dimension of the mesh."""
    return {split.dims[operand] for split in call.taken if split is not None}


def _ring(call: Call, gather: Division) -> Division | None:
    keys = dims_along(call.spec, J)
    k, v = keys[1:3]
    if k is None or v is None or call.sharded[1:3] != (k, v) or partial.unsupported(call.spec) is not None:
        return None
    return Division(schedule="ring", split=gather.split, keys=(k, v))


def _all_to_all(call: Call) -> Division | None:
    for axis, extent in reversed(list(enumerate(call.batch))):
        name = size_of_batch(call.spec, axis)
        if extent is None or name is None or extent % call.parts:
            continue
        length = extent // call.parts
        dims = split_dims(call.spec, axis, length, call.parts, call.shapes)
        if None not in dims[:3] and not any(d is not None and d in _cut(call, n) for n, d in enumerate(dims)):
            split = Split(coordinate=f"b{axis}", count=extent, length=length, size=name, dims=dims)
            return Division(schedule="all_to_all", split=split)
    return None
