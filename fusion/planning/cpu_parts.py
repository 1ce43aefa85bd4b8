"""Tiles of the CPU kernel with the keys in parts, for calls with fewer blocks of rows than keep the cores busy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusion.errors import NoFittingTileError
from fusion.machine import Machine
from fusion.planning.cpu_rows import LEAST_PART, part_counts
from fusion.planning.problem import Problem
from fusion.planning.tiles import ROW_COUNTS, Tiles, cpu_tiles, grid

PIECES = 4
"""Pieces of work per core at most."""


def may_cut(cores: int, heads: int, n_q: int, n_k: int, rows: int) -> bool:
    """Whether so many cores could do with more pieces than `heads` have blocks of rows, and keys are enough for it.
    rows: of the register tile."""
    return n_k >= 2 * LEAST_PART and 2 * heads * -(-n_q // (ROW_COUNTS[-1] * rows)) <= PIECES * cores


def part_tiles(
    problem: Problem, machine: Machine, multiples: tuple[int, int], fixed: Mapping[str, int] | None = None
) -> Tiles:
    """Every tile (B_r, B_c) with every number of parts (B_s) that may keep cores busy. multiples: the register tile
    (rows, keys). fixed: sizes that are settled, by name. Raises NoFittingTileError."""
    if problem.training:
        raise NoFittingTileError("CPU kernels cut keys into parts without training")
    fixed = fixed or {}
    tiles = cpu_tiles(problem, machine, *multiples)
    if "B_r" in fixed:
        tiles = grid({"B_r": [fixed["B_r"]], "B_c": [fixed["B_c"]], "stages": [1]})
    if "B_s" in fixed:
        return tiles | {"B_s": np.full_like(tiles["B_r"], fixed["B_s"])}
    if not (counts := part_counts(problem.n_k)[1:]):
        raise NoFittingTileError(f"parts of at least {LEAST_PART} keys: {problem.n_k} keys are too few to be cut")
    index = grid({"tile": range(len(tiles["B_r"])), "count": counts})
    found = {name: column[index["tile"]] for name, column in tiles.items()}
    found["B_s"] = -(-max(1, problem.n_k) // index["count"])
    pieces = problem.problems * -(-max(1, problem.n_q) // found["B_r"]) * index["count"]
    keep = pieces <= PIECES * machine.cores
    if not keep.any():
        raise NoFittingTileError(f"parts of keys: there is work enough for {machine.cores} cores without")
    return {name: column[keep] for name, column in found.items()}
