"""Division of an attention whose sequence is sharded over a dimension of the mesh.

Q has its query rows sharded, K and V their keys or nothing. The schedules:

    gather      a process computes its own rows; K and V are gathered first
    ring        a process computes its own rows; blocks of K and V arrive one by one (`fusion.sequences.ring`)
    zigzag      the same with the n-th and the n-th last of twice as many runs, which change hands before and after
    mesh        a process computes tiles of other processes' rows and keys, and sums return (`fusion.sequences.mesh`)
    all_to_all  a process computes some heads of all rows; Q, K, V and the output change hands (Ulysses, 2309.14509)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion.ir import AttentionSpec
from fusion.ir.expr import I, J
from fusion.ir.parts import LENGTHS, Call, Split, dims_along, one_part
from fusion.ir.results import extents_function
from fusion.planning.problem import Problem, attention_of
from fusion.runtime import kernels
from fusion.sequences import cost, partial
from fusion.sequences.transfers import Ring

SCHEDULES = ("gather", "ring", "zigzag", "mesh", "all_to_all")


def sizes_of(spec: AttentionSpec, dims: Sequence[int | None], sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of a call whose Q, sharded along these dimensions, is sharded along its rows; () of any other."""
    rows = dims_along(spec, I)[0]
    return tuple(map(int, sizes)) if rows is not None and rows in dims else ()


def split(call: Call) -> Split | None:
    """Split by the schedule that is requested, or by the one that is predicted to be fastest. Where it cannot run, the
    gather; None where Q is not sharded along its rows."""
    rows = dims_along(call.spec, I)
    if rows[0] is None or call.sharded[0] != rows[0] or any(s is not None and s.coordinate == "i" for s in call.taken):
        return None
    gather = _of_rows(call, rows)
    ring, known = _ring(call, gather), traffic(call.spec, call.sizes, call.parts)
    candidates = {
        "gather": gather,
        "ring": ring,
        "zigzag": _zigzag(call, ring),
        "mesh": _mesh(ring, known.groups),
        "all_to_all": _all_to_all(call),
    }
    possible = {name: split for name, split in candidates.items() if split is not None}
    asked = call.request.across
    if asked == "auto":
        machine = kernels.machine_of(call.device, call.request)
        asked = cost.cheapest(known, [*possible], machine, call.spec.dtype)
    return possible.get(asked, gather)


def split_of_keys(call: Call) -> Split | None:
    """Split of a call without a gradient whose K and V are sharded along their keys, and Q is not: a step of decoding
    over a cache that is too large for one process. None for any other."""
    k, v = partial.key_dims(call.spec)[1:3]
    taken = any(split is not None and split.keys is not None for split in call.taken)
    if taken or k is None or v is None or tuple(call.sharded[1:3]) != (k, v) or partial.unsupported(call.spec):
        return None
    return Split(coordinate="j", count=0, length=0, size="", dims=(None,) * len(call.sharded), keys=(k, v))


def traffic(spec: AttentionSpec, sizes: Mapping[str, int], parts: int) -> cost.Traffic:
    """Sizes of a call that decide what processes send and compute. sizes: of the spec, by name."""
    *batch, n_q, n_k, d, d_v = _extents(spec, sizes)
    rows = one_part(spec, "i", dims_along(spec, I), "first_row")
    known = dict(sizes) | {"first_row": 0, LENGTHS["i"]: 0}
    heads, group = math.prod(batch), spec.heads_per_key(batch[-1]) if batch else 1

    def layout(runs: int) -> cost.Layout:
        dims = (0, 0)
        ring = Ring(group="", parts=parts, offset="first_row", rows=n_q, keys=n_k, dims=dims, runs=runs)
        return cost.Layout.of(ring, rows, known)

    return cost.Traffic(
        parts=parts, n_q=n_q, n_k=n_k, heads=heads, key_heads=heads // group, d=d, d_v=d_v,
        layouts={"ring": layout(1), "zigzag": layout(2)}, narrow=partial.is_narrow(spec),
        element_bytes=spec.operands[1].torch_dtype.itemsize,
    )  # fmt: skip


def across(problem: Problem, devices: int) -> cost.Traffic:
    """Traffic of a problem whose sequence is sharded over devices."""
    return traffic(attention_of(problem), {}, devices)


def _extents(spec: AttentionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """(batch coordinates.., n_q, n_k, d, d_v)."""
    return extents_function(spec)([sizes[name] for name in spec.sizes])


def _of_rows(call: Call, dims: Sequence[int | None]) -> Split:
    n_q = _extents(call.spec, call.sizes)[-4]
    cut = tuple(dim if call.free([*[None] * n, dim]) else None for n, dim in enumerate(dims))
    return Split(coordinate="i", count=n_q, length=-(-n_q // call.parts), size=LENGTHS["i"], dims=cut)


def _ring(call: Call, gather: Split) -> Split | None:
    k, v = dims_along(call.spec, J)[1:3]
    if k is None or v is None or tuple(call.sharded[1:3]) != (k, v) or partial.unsupported(call.spec) is not None:
        return None
    return replace(gather, keys=(k, v))


def _zigzag(call: Call, ring: Split | None) -> Split | None:
    n_q, n_k = _extents(call.spec, call.sizes)[-4:-2]
    return None if ring is None or n_q % (2 * call.parts) or n_k % (2 * call.parts) else replace(ring, runs=2)


def _mesh(ring: Split | None, groups: int) -> Split | None:
    """Every process needs what all rows read beside Q, K and V."""
    return None if ring is None else replace(ring, dims=(ring.dims[0], *[None for _ in ring.dims[1:]]), groups=groups)


def _all_to_all(call: Call) -> Split | None:
    for axis in reversed(range(len(call.lengths))):
        split = call.split_of_batch(axis)
        if split is not None and None not in split.dims[:3]:
            return replace(split, output="i")
    return None


def ring_of(group: str, parts: int, offset: str, split: Split, n_k: int) -> str:
    """Ring of a group of processes with this split, as text."""
    assert split.keys is not None
    shards = Ring(
        group=group, parts=parts, offset=offset, rows=split.count, keys=n_k, dims=split.keys, runs=split.runs,
        groups=split.groups,
    )  # fmt: skip
    return shards.to_json()
