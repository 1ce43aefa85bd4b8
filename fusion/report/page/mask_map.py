"""The mask of a spec as a map of tiles: dead, full or mixed, at the sizes of the example."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusion.ir import AttentionSpec
from fusion.ir.expr import FALSE, TRUE, Expr, I, J, Kind, coordinates, walk
from fusion.ir.ops import evaluate
from fusion.ir.sizes import leaves

DEAD, MIXED, FULL, DATA = 0, 1, 2, 3
NAMES = {DEAD: "dead", MIXED: "mixed", FULL: "full", DATA: "decided by data"}
MOST_CELLS = 48
"""Cells along the longer side; where there are more tiles, a cell stands for several."""
MOST_SCORES = 1 << 24
"""Scores that are looked at one by one. Of larger masks, evenly spaced rows and columns of every cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskMap:
    """cells[r][c] is DEAD, MIXED, FULL or DATA (depends on tensors that the mask reads). rows, columns: size of a cell
    in queries and keys. sampled: whether not every score was looked at."""

    cells: tuple[tuple[int, ...], ...]
    rows: int
    columns: int
    n_q: int
    n_k: int
    shares: Mapping[int, float]
    sampled: bool


def mask_map(spec: AttentionSpec, sizes: Mapping[str, int], tile: tuple[int, int]) -> MaskMap | None:
    """The map for batch element 0, from the mask's predicate; None where there is no mask or no score."""
    if spec.mask is None:
        return None
    n_q, n_k = (int(_evaluate(extent, sizes, {})) for extent in (spec.n_q, spec.n_k))
    if not n_q or not n_k:
        return None
    rows, columns = (_cell(n, t) for n, t in ((n_q, tile[0]), (n_k, tile[1])))
    possible, certain = (_decided(spec.mask.live, optimistic) for optimistic in (True, False))
    sampled = n_q * n_k > MOST_SCORES
    i, j = _positions(n_q, rows, sampled), _positions(n_k, columns, sampled)
    may = _tiles(possible, sizes, i, j, rows, columns)
    must = _tiles(certain, sizes, i, j, rows, columns)
    kinds = torch.full_like(may[0], MIXED, dtype=torch.int64)
    kinds[may[1] & ~must[1]] = DATA
    kinds[must[1]] = FULL
    kinds[~may[0]] = DEAD
    shares = {kind: float((kinds == kind).double().mean()) for kind in NAMES}
    return MaskMap(
        cells=tuple(map(tuple, kinds.tolist())),
        rows=rows,
        columns=columns,
        n_q=n_q,
        n_k=n_k,
        shares=shares,
        sampled=sampled,
    )


def _cell(extent: int, tile: int) -> int:
    """Extent of a cell: a whole number of tiles, such that there are few enough; smaller where that leaves one cell."""
    tiles = math.ceil(extent / tile)
    if tiles < 8:  # a map of one cell shows nothing
        return max(1, math.ceil(extent / 16))
    return tile * math.ceil(tiles / MOST_CELLS)


def _positions(extent: int, cell: int, sampled: bool) -> torch.Tensor:
    every = torch.arange(extent)
    if not sampled:
        return every
    within = every % cell
    step = max(1, cell // 8)
    return every[(within % step == 0) | (within == cell - 1) | (every == extent - 1)]


def _decided(expr: Expr, optimistic: bool) -> Expr:
    """The predicate with what depends on data replaced by true (optimistic) or false."""
    from fusion.ir import ops

    if not any(part.op == "load" for part in walk(expr)):
        return expr
    if expr.op in ("and", "or"):
        return ops.apply(expr.op, *(_decided(arg, optimistic) for arg in expr.args))
    if expr.op == "not":
        return ops.apply("not", _decided(expr.args[0], not optimistic))
    return TRUE if optimistic else FALSE


def _evaluate(expr: Expr, sizes: Mapping[str, int], positions: Mapping[Expr, torch.Tensor]) -> torch.Tensor:
    known = defaultdict(lambda: torch.tensor(0), positions)  # batch coordinates: element 0
    return torch.as_tensor(evaluate(expr, leaves(sizes, known)))


def _tiles(expr: Expr, sizes: Mapping[str, int], i: torch.Tensor, j: torch.Tensor, rows: int, columns: int):
    """(whether any score of a cell is live, whether all are), as matrices of cells."""
    height, width = int(i[-1]) // rows + 1, int(j[-1]) // columns + 1
    some, all_ = torch.zeros(height, width, dtype=torch.bool), torch.ones(height, width, dtype=torch.bool)
    columns_of = j // columns
    for row in range(height):
        own = i[i // rows == row]
        live = _evaluate(expr, sizes, {I: own[:, None], J: j[None, :]}).to(torch.bool).expand(len(own), len(j))
        counts = torch.zeros(2, width, dtype=torch.int64)
        counts[0].index_add_(0, columns_of, live.sum(0))
        counts[1].index_add_(0, columns_of, torch.full_like(columns_of, len(own)))
        some[row], all_[row] = counts[0] > 0, counts[0] == counts[1]
    return some, all_


def is_positional(spec: AttentionSpec) -> bool:
    """Whether the mask differs between batch elements by position alone (the map shows element 0)."""
    mask = spec.mask
    return mask is not None and mask.live.kind is Kind.BOOL and any(n.startswith("b") for n in coordinates(mask.live))


def to_svg(shown: MaskMap) -> str:
    """The map as a drawing: rows are queries from top to bottom, columns keys from left to right."""
    height, width = len(shown.cells), len(shown.cells[0])
    size = max(4, min(18, 360 // max(height, width)))
    parts = []
    for r, row in enumerate(shown.cells):
        c = 0
        for kind, alike in itertools.groupby(row):  # equal neighbours are one rectangle
            count = len(list(alike))
            x, y, w = c * size, r * size, count * size
            parts.append(f'<rect class="m{kind}" x="{x}" y="{y}" width="{w}" height="{size}"/>')
            c += count
    lines = "".join(f"M{c * size} 0V{height * size}" for c in range(width + 1))
    lines += "".join(f"M0 {r * size}H{width * size}" for r in range(height + 1))
    live = 1 - shown.shares[DEAD]
    label = f"Mask of {shown.n_q} queries by {shown.n_k} keys: {live:.0%} of the tiles hold live scores"
    return (
        f'<svg class="mask" role="img" aria-label="{label}" width="{width * size + 1}" height="{height * size + 1}" '
        f'viewBox="-.5 -.5 {width * size + 1} {height * size + 1}">{"".join(parts)}'
        f'<path class="grid" d="{lines}"/></svg>'
    )
