"""Ranges of keys that blocks of rows visit, as far as sizes and coordinates alone tell them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fusion.ir.expr import Expr, coord, coordinates, walk
from fusion.ir.ops import apply, evaluate
from fusion.ir.sizes import leaves, size_value
from fusion.ir.spec import AttentionSpec

ARITHMETIC = frozenset({"const", "add", "mul", "floordiv", "mod", "imin", "imax"})
"""Operations of limits that are computed before a call (see `fusion.ir.sizes.size_function`)."""

MOST_HEADS = 1024
"""Batch elements and heads with ranges of their own that are counted one by one at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRanges:
    """Keys that rows i0..i1 of one head visit: low <= j < high, where these depend on sizes and coordinates alone.

    low, high: INT expressions in b.., i0, i1 and sizes; None where unbounded.
    sizes: (name, value) of the sizes.
    batch: (coordinate, extent) of those that low or high depend on.
    """

    low: Expr | None
    high: Expr | None
    sizes: tuple[tuple[str, int], ...]
    batch: tuple[tuple[str, int], ...] = ()

    def of_rows(self, first: np.ndarray, last: np.ndarray, n_k: int) -> tuple[np.ndarray, np.ndarray]:
        """First key and end for each block of rows first..last: [heads, blocks], a line for every combination of the
        batch coordinates that matter."""
        starts, ends = [], []
        rows = {coord("i0"): torch.from_numpy(first), coord("i1"): torch.from_numpy(last)}
        for values in itertools.product(*(range(extent) for _, extent in self.batch)):
            head = {coord(name): torch.tensor(at) for (name, _), at in zip(self.batch, values, strict=True)}
            leaf = leaves(dict(self.sizes), head | rows)
            start = np.zeros_like(first) if self.low is None else evaluate(self.low, leaf).numpy()
            end = np.full_like(first, n_k) if self.high is None else evaluate(self.high, leaf).numpy()
            ends.append(np.broadcast_to(end, first.shape).clip(0, n_k))
            starts.append(np.minimum(np.broadcast_to(start, first.shape).clip(0), ends[-1]))
        return np.stack(starts), np.stack(ends)


def key_ranges(spec: AttentionSpec, sizes: Mapping[str, int]) -> KeyRanges | None:
    """The ranges of a spec's mask at these sizes; None where every row visits all keys, or only data tells."""
    mask = spec.mask
    extents = {f"b{n}": size_value(extent, sizes) for n, extent in enumerate(spec.batch)}
    names = (*spec.sizes, "i0", "i1")
    heads = () if math.prod(extents.values()) > MOST_HEADS else tuple(extents)
    low = None if mask is None else told(mask.key_lo, "imax", (*names, *heads))
    high = None if mask is None else told(mask.key_hi, "imin", (*names, *heads))
    if low is None and high is None:
        return None
    used = set().union(*(coordinates(limit) for limit in (low, high) if limit is not None))
    batch = tuple((name, extent) for name, extent in extents.items() if name in used)
    return KeyRanges(low=low, high=high, sizes=tuple(sizes.items()), batch=batch)


def told(limit: Expr | None, joined: str, names: Sequence[str]) -> Expr | None:
    """The part of a limit that sizes and coordinates of these names tell. joined: how limits that hold together are."""
    if limit is None:
        return None
    if all(part.op in ARITHMETIC or part.op in ("size", "coord") and part.attr in names for part in walk(limit)):
        return limit
    if limit.op == joined:
        parts = [part for arg in limit.args if (part := told(arg, joined, names)) is not None]
        return functools.reduce(functools.partial(apply, joined), parts) if parts else None
    return None
