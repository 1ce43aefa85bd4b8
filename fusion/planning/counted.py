"""Counts of what a mask leaves whose data is known: the values of an example, as `fusion.explain` runs the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fusion.ir.expr import I0, I1, J0, J1, TRUE, Expr, I, J, coord, coordinates, loads, walk
from fusion.ir.mask_facts import MaskFacts
from fusion.ir.ops import evaluate
from fusion.ir.results import leaves, size_value
from fusion.ir.spec import AttentionSpec
from fusion.planning.problem import Counted, Problem

MOST_SCORES = 1 << 23
"""Scores that are looked at one by one, at most; of larger attentions those of some blocks of rows."""


def mask_operands(mask: MaskFacts) -> set[int]:
    """Numbers of the operands that the mask, its key ranges or its map of tiles read."""
    return {part.operand for part in loads(mask.live, *mask.live_conditions())}


def load(values: Mapping[int, Tensor], part: Expr) -> Tensor | Callable[..., Tensor]:
    """The value of a load, as `evaluate` takes it; positions beyond the tensor are those at its edge."""
    tensor = values[part.operand].cpu()
    inside = lambda index: tuple(k.clamp(0, max(0, n - 1)) for k, n in zip(index, tensor.shape, strict=True))
    return (lambda *index: tensor[inside(index)]) if part.args else tensor


def with_counts(
    problem: Problem, spec: AttentionSpec, sizes: Mapping[str, int], values: Mapping[int, Tensor],
    block: tuple[int, int], keys: int,
) -> Problem:  # fmt: skip
    """The problem with what its mask leaves of these values, counted; as it is where they do not tell, or where the
    ranges of keys that it knows are all that the mask leaves.

    values: of the operands of `mask_operands`. block: rows of a tile and the step in which its keys end. keys: of a
    tile, which a map of tiles is asked about.
    """
    mask, n_q, n_k = spec.mask, problem.n_q, problem.n_k
    if mask is None or mask_operands(mask) - values.keys():
        return problem
    programs = (mask.live, *mask.live_conditions())
    extents = {coord(f"b{n}"): size_value(extent, sizes) for n, extent in enumerate(spec.batch)}
    used = [name for name in extents if name.name in set().union(*map(coordinates, programs))]
    heads = math.prod(extents[name] for name in used)
    starts = _sample(torch.arange(0, n_q, block[0]), MOST_SCORES // max(1, heads * n_k * block[0]))
    if any(part.op == "score" for part in walk(*programs)) or not heads * n_k * len(starts):
        return problem
    grid = torch.unravel_index(torch.arange(heads), tuple(extents[name] for name in used))
    batch = {name: axis.reshape(-1, 1, 1) for name, axis in zip(used, grid, strict=True)}
    rows = (starts[:, None] + torch.arange(block[0])).flatten()
    rows = rows[rows < n_q]

    def value(expr: Expr, known: dict[Expr, Tensor], shape: tuple[int, ...]) -> Tensor:
        leaf = leaves(sizes, batch | known, partial(load, values))
        return torch.as_tensor(evaluate(expr, leaf)).broadcast_to((heads, *shape))

    live = value(mask.live, {I: rows[:, None], J: torch.arange(n_k)}, (len(rows), n_k))
    share = live.double().mean().item()
    if not mask_operands(mask) and math.isclose(share, _share_of_ranges(problem, rows), rel_tol=1e-9):
        return problem
    needed_rows, needed_keys = live.any(2).double().mean().item() * n_q, live.any(1).sum().item() / heads
    visited = _visited(mask, value, starts, problem, block, keys).sum().item() / (heads * len(starts) * n_k)
    known = problem.live_share(*block)  # by ranges of positions alone
    return replace(
        problem, counted=Counted(scores=share, rows=needed_rows, keys=needed_keys),
        density=min(1.0, visited / known) if known else 1.0,
    )  # fmt: skip


def _sample(numbers: Tensor, most: int) -> Tensor:
    """At most so many of some numbers, but one, at even distances."""
    if len(numbers) <= most:
        return numbers
    return numbers[torch.linspace(0, len(numbers) - 1, max(1, most), dtype=torch.float64).long()]


def _share_of_ranges(problem: Problem, rows: Tensor) -> float:
    """Share of the scores of some rows that lie in the ranges of keys."""
    if not problem.bounded:
        return 1.0
    start, end = problem.all_key_ranges(1)
    return float((end - start).clip(0)[:, rows.numpy()].mean()) / problem.n_k


def _visited(
    mask: MaskFacts, value: Callable[..., Tensor], starts: Tensor, problem: Problem, block: tuple[int, int], keys: int
) -> Tensor:
    """Keys that are visited in each tile: [heads, blocks of rows, tiles of keys]. value: of an expression at
    coordinates, in a shape. starts: first rows of the blocks."""
    rows, step = block
    first, start = starts[:, None], torch.arange(0, problem.n_k, keys)
    last, end = (first + rows - 1).clamp(max=problem.n_q - 1), (start + keys).clamp(max=problem.n_k)
    tiles, shape = {I0: first, I1: last, J0: start, J1: end - 1}, (len(first), len(start))
    low, high = start, end
    if mask.key_lo is not None:
        low = torch.maximum(low, value(mask.key_lo, tiles, shape) // step * step)
    if mask.key_hi is not None:
        high = torch.minimum(high, -(-value(mask.key_hi, tiles, shape) // step) * step)
    alive = value(TRUE if mask.tile_live is None else mask.tile_live, tiles, shape) != 0
    return (high - low).clamp(min=0) * alive
