"""Legal tiles: which tile sizes a target admits, and whether they fit where the tile must live."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from fusion.errors import NoFittingTileError
from fusion.machine import Machine
from fusion.planning.head_dims import power
from fusion.planning.problem import Problem

Tile = dict[str, int]
Tiles = dict[str, np.ndarray]


MOST_BLOCKS = 200
"""Sizes of one tile variable that a search tries at most."""
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12)
"""Register tiles of rows that a CPU kernel's tile may have."""
SEARCHED_WHOLE = (MOST_BLOCKS // 2) ** 2
"""Up to so many queries and keys a search tries every balanced block: a size n has at most 2 sqrt(n) of them."""


def balanced(size: int, limit: int = MOST_BLOCKS) -> list[int]:
    """The blocks worth trying for `size`: for each number of blocks the smallest block that gives it. I/O depends on a
    block only through the number of blocks, so nothing is lost; above `limit` values the list is thinned
    geometrically."""
    size = max(1, size)
    root = math.isqrt(size)
    values = sorted({-(-size // count) for count in range(1, root + 1)} | set(range(1, min(size, root + 1) + 1)))
    if len(values) <= limit:
        return values
    keep = np.unique(np.round(np.geomspace(1, len(values), limit)).astype(int) - 1)
    return [values[index] for index in keep]


def grid(values: Mapping[str, Iterable[int]]) -> Tiles:
    """All combinations, as flat arrays by name."""
    axes = np.meshgrid(*(np.array(list(column), dtype=np.int64) for column in values.values()), indexing="ij")
    return {name: axis.ravel() for name, axis in zip(values, axes, strict=True)}


def pick(tiles: Tiles, index: int) -> Tile:
    """One combination."""
    return {name: int(column[index]) for name, column in tiles.items()}


def sizes_of(problem: Problem, capacity: float, share: float = 1.0, features: int = 1) -> dict[str, float]:
    """Values of the formulas' symbols. Sizes of 0 count as 1."""
    values = {"N_q": problem.n_q, "N_k": problem.n_k, "d": problem.d, "d_v": problem.d_v, "r": features}
    return {name: max(1, value) for name, value in values.items()} | {"M": capacity, "s": share}


def least_multiple(size: int, multiple: int) -> int:
    """The least multiple that is not smaller, and not 0."""
    return -(-max(1, size) // multiple) * multiple


def footprint_bytes(problem: Problem, rows: np.ndarray, cols: np.ndarray, stages: np.ndarray | int = 1) -> np.ndarray:
    """Bytes a query-stationary kernel keeps near: inputs in their dtype, scores, output and statistics in float32."""
    dims, size = problem.d + problem.d_v, problem.element_bytes
    return rows * (problem.d * size + problem.d_v * 4) + stages * cols * dims * size + rows * cols * 4 + 8 * rows


def cpu_tiles(problem: Problem, machine: Machine, row_multiple: int, col_multiple: int) -> Tiles:
    """(B_r, B_c) for the CPU kernel: multiples of its register tile, no larger than the problem asks for, inside the
    fast level. K and V are read in place, so they do not count against the level. The smallest tile is always legal:
    caches spill, they do not refuse."""
    n_q, n_k = least_multiple(problem.n_q, row_multiple), least_multiple(problem.n_k, col_multiple)
    rows = sorted({min(n_q, row_multiple * count) for count in ROW_COUNTS})
    cols = sorted({min(n_k, least_multiple(count, col_multiple)) for count in (64, 128, 256, 512)})
    tiles = grid({"B_r": rows, "B_c": cols, "stages": [1]})
    near = footprint_bytes(problem, tiles["B_r"], tiles["B_c"], 0)
    keep = (near <= machine.level(machine.fast).capacity * 0.75) | (
        (tiles["B_r"] == rows[0]) & (tiles["B_c"] == cols[0])
    )
    return {name: column[keep] for name, column in tiles.items()}


def gpu_tiles(problem: Problem, machine: Machine) -> Tiles:
    """(B_r, B_c, stages) for the Triton kernel: powers of two that fit shared memory and registers."""
    powers = [16, 32, 64, 128, 256]
    rows = [block for block in powers if block <= max(16, power(problem.n_q))]
    cols = [block for block in powers if block <= max(16, power(problem.n_k))]
    tiles = grid({"B_r": rows, "B_c": cols, "stages": [1, 2, 3, 4]})
    width, size = power(problem.d) + power(problem.d_v), problem.element_bytes
    shared = tiles["B_r"] * power(problem.d) * size + tiles["stages"] * tiles["B_c"] * width * size
    accumulators = 4 * tiles["B_r"] * (power(problem.d_v) + tiles["B_c"]) + size * tiles["B_r"] * tiles["B_c"]
    keep = (shared <= machine.shared_memory) & (accumulators <= 0.75 * machine.registers)
    if not keep.any():
        raise NoFittingTileError(
            f"flash for {problem} on {machine.name}: the smallest tile needs {shared.min()} bytes of "
            f"{machine.shared_memory} shared memory and {accumulators.min()} of {machine.registers} register bytes; "
            f"use schedule='small_cache' or 'materialized'"
        )
    return {name: column[keep] for name, column in tiles.items()}
