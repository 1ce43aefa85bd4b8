"""Layout of a head's columns and rows in GPU kernels.

Columns: tiles are powers of two wide, so that a head of 80, 96, 192 or 576 columns is two of them (64 + 16, 64 + 32,
128 + 64, 512 + 64) instead of one that is mostly zeros.

Rows: where there are few queries (decoding), the query heads that share keys lie side by side in one block of rows;
tiles would be mostly empty, and would read the same keys once per head. The kernel does not know of it: it is written
for another spec, in which the G heads of a group are one and query row i of head h is row i * G + h % G.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fusion.ir import integers
from fusion.ir.expr import Expr, I, contains, coord, substitute
from fusion.ir.mask_facts import MASK_EXPRESSIONS, MaskFacts
from fusion.ir.spec import AttentionSpec

ROWS_FROM = 64
"""Queries of one head that fill a tile by themselves."""
NARROWEST = 16  # products take at least so many columns


def power(extent: int) -> int:
    """The power of two that holds an extent."""
    return 1 << max(0, (max(1, extent) - 1).bit_length())


def padded(extent: int) -> int:
    """The power of two that holds a head dimension."""
    return max(NARROWEST, power(extent))


def panel_widths(extent: int) -> tuple[int, ...]:
    """Widths of the tiles that cover a head dimension: one, or two where these are narrower together."""
    whole = padded(extent)
    first = whole // 2
    rest = padded(extent - first) if extent > first else whole
    return (whole,) if first < NARROWEST or rest >= first else (first, rest)


def panelled(extent: int) -> int:
    """Columns of all tiles of a head dimension."""
    return sum(panel_widths(extent))


def heads_to_pack(spec: AttentionSpec, batch: Sequence[int], n_q: int) -> int:
    """Number of heads that share a block of rows."""
    return spec.heads_per_key(batch[-1]) if batch and 0 < n_q < ROWS_FROM else 1


def packed(spec: AttentionSpec, group: int) -> AttentionSpec:
    """The spec in which `group` consecutive values of the last batch coordinate, which read the same keys, are rows.
    Its output is still described in the coordinates of `spec` (see `Forward`, which stores it)."""
    last = coord(f"b{len(spec.batch) - 1}")
    head = integers.mul(last, group)
    rows = {last: integers.add(head, integers.mod(I, group)), I: integers.floordiv(I, group)}
    return spec.mapped(
        lambda expr: substitute(expr, rows),
        lambda expr: substitute(expr, {last: head}),
        batch=(*spec.batch[:-1], integers.floordiv(spec.batch[-1], group)),
        n_q=integers.mul(spec.n_q, group),
        mask=spec.mask and _mask(spec.mask, last, rows, group),
    )


def _mask(mask: MaskFacts, last: Expr, rows: dict[Expr, Expr], group: int) -> MaskFacts | None:
    """Facts of the mask of a block of rows, unless heads of a group differ in it."""
    about_scores = ("live", "full")
    facts = {name: fact for name in MASK_EXPRESSIONS if (fact := getattr(mask, name)) is not None}
    if any(contains(fact, last) for name, fact in facts.items() if name not in about_scores):
        return None
    ends = {coord(name): integers.floordiv(coord(name), group) for name in ("i0", "i1")}
    changed = {name: substitute(fact, rows if name in about_scores else ends) for name, fact in facts.items()}
    return dataclasses.replace(mask, **changed)
