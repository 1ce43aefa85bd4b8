"""Rows without a live key among the keys that a kernel visited."""

from __future__ import annotations

import math

from fusion.ir import integers
from fusion.ir.expr import TRUE, I, J, substitute
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import is_tame


def dead_rows_matter(spec: AttentionSpec) -> bool:
    """Whether a row may be without a live key, and then need the keys that its mask lets a kernel skip."""
    return spec.mask is not None and spec.mask.skips and dead_rows_need_keys(spec) and not rows_live(spec)


def dead_rows_need_keys(spec: AttentionSpec) -> bool:
    """Whether a row without a live key needs its dead ones.

    With a fill of -inf it does not: whether it sees them or not, its maximum is -inf and its sum 0. With a finite fill
    eager averages over all keys.
    """
    return spec.mask is not None and spec.mask.fill != -math.inf and spec.normalizer is not Normalizer.NONE


def rows_live(spec: AttentionSpec) -> bool:
    """Whether each row is known to have a live key (key 0, or key i where there are as many queries as keys), with an
    ordinary score, and the fill is far below all such scores: dead keys have no weight in any row."""
    mask = spec.mask
    if mask is None or mask.full is None or not mask.fill < -1e30:
        return False
    keys = [integers.integer(0)] + [I] * (spec.n_q is spec.n_k)
    return is_tame(mask.full) and any(substitute(mask.live, {J: key}) is TRUE for key in keys)


def first_key_lives(spec: AttentionSpec) -> bool:
    """Whether each row has key 0, with an ordinary score, among the keys that a kernel visits first."""
    mask = spec.mask
    if mask is None or mask.full is None or mask.key_lo is not None or mask.tile_live is not None:
        return False
    return substitute(mask.live, {J: integers.integer(0)}) is TRUE and mask.fill == -math.inf and is_tame(mask.full)
