"""Sizes at which a kernel is tried: small ones, off the edges of its blocks, that the spec admits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusion.codegen.emitter import Edges
from fusion.ir.sizes import extents_function
from fusion.ir.spec import AttentionSpec

MOST_SCORES = 1 << 22
FEW = 2
"""Extent of the batch, where nothing depends on how many there are."""
MOST_HEADS = 16


def sizes_of_trials(spec: AttentionSpec, example: Sequence[int], edges: Edges) -> list[dict[str, int]]:
    """Values of `spec.sizes`, by name. example: those of the call that the kernel is built for, which hold for sizes
    other than those of the batch, the queries and the keys."""
    known = dict(zip(spec.sizes, example, strict=True))
    *batch, n_q, n_k, _, _ = extents_function(spec)(example)
    for axis, (extent, size) in enumerate(zip(spec.batch, batch, strict=True)):
        if extent.op == "size":
            known[extent.name] = min(size, _heads(spec, size) if axis == len(batch) - 1 else FEW)
    trials = []
    for rows, keys in ((edges.rows, 2 * edges.keys + 5), (edges.rows and min(edges.rows, 5), 13)):
        rows = n_q if rows is None else rows + 3 if rows > 5 else rows
        trials.append(_with_lengths(spec, known, rows, max(rows, keys)))
    calls = map(extents_function(spec), ([trial[name] for name in spec.sizes] for trial in trials))
    return [trial for trial, extents in zip(trials, calls, strict=True) if 0 < math.prod(extents[:-2]) <= MOST_SCORES]


def _with_lengths(spec: AttentionSpec, known: Mapping[str, int], rows: int, keys: int) -> dict[str, int]:
    """Sizes with so many queries and keys, where these are sizes without other uses."""
    sizes = dict(known)
    for extent, length in ((spec.n_q, rows), (spec.n_k, keys)):
        if extent.op == "size" and not any(extent in (other, *other.args) for other in spec.batch):
            sizes[extent.name] = length
    return sizes


def _heads(spec: AttentionSpec, heads: int) -> int:
    """Two groups of heads that share keys, or a few heads that all do."""
    group = spec.heads_per_key(heads)
    if group == heads:
        return 4
    return 2 * group if 2 * group <= MOST_HEADS else heads
