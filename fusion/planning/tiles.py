"""Legal tiles: which tile sizes a target admits, and whether they fit where the tile must live."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from fusion.errors import NoFittingTileError
from fusion.machine import Machine
from fusion.planning.head_dims import power
from fusion.planning.problem import Problem
from fusion.planning.register_tiles import KEY_SPAN

Tile = dict[str, int]
Tiles = dict[str, np.ndarray]

MOST_BLOCKS = 200
"""Sizes of one tile variable that a search tries at most."""
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12)
"""Register tiles of rows that a CPU kernel's tile may have."""
LEAST_PART = 512
"""Keys of a part at least, where a CPU kernel cuts them."""
MOST_PIECES = 4
"""Pieces of work per core at most, where keys are cut for the sake of idle cores."""
NOTHING_FIXED: Mapping[str, int] = {}
SEARCHED_WHOLE = (MOST_BLOCKS // 2) ** 2
"""Up to so many queries and keys a search tries every balanced block: a size n has at most 2 sqrt(n) of them."""


def balanced(size: int) -> list[int]:
    """The blocks worth trying for `size`: for each number of blocks the smallest block that gives it. I/O depends on a
    block only through the number of blocks, so nothing is lost; above `MOST_BLOCKS` values the list is thinned
    geometrically."""
    size = max(1, size)
    root = math.isqrt(size)
    values = sorted({-(-size // count) for count in range(1, root + 1)} | set(range(1, min(size, root + 1) + 1)))
    if len(values) <= MOST_BLOCKS:
        return values
    keep = np.unique(np.round(np.geomspace(1, len(values), MOST_BLOCKS)).astype(int) - 1)
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


def cpu_tiles(
    problem: Problem, machine: Machine, row_multiple: int, col_multiple: int, fixed: Mapping[str, int] = NOTHING_FIXED
) -> Tiles:
    """(B_r, B_c) for the CPU kernel: multiples of its register tile, no larger than the problem asks for, inside the
    fast level. K and V are read in place, so they do not count against the level. The smallest tile is always legal:
    caches spill, they do not refuse. Sums of float32 begin anew with a tile at the latest. fixed: sizes that are
    settled, by name."""
    if "B_r" in fixed:
        return grid({"B_r": [fixed["B_r"]], "B_c": [fixed["B_c"]], "stages": [1]})
    n_q, n_k = least_multiple(problem.n_q, row_multiple), least_multiple(problem.n_k, col_multiple)
    rows = sorted({min(n_q, row_multiple * count) for count in ROW_COUNTS})
    most = KEY_SPAN if problem.dtype == "float32" else 512
    cols = sorted({min(n_k, least_multiple(count, col_multiple)) for count in (64, 128, 256, 512) if count <= most})
    tiles = grid({"B_r": rows, "B_c": cols, "stages": [1]})
    # Bytes of rows in their dtype, and of their output, scores and statistics in float32.
    near = tiles["B_r"] * (problem.d * problem.element_bytes + 4 * problem.d_v + 4 * tiles["B_c"] + 8)
    keep = (near <= machine.level(machine.fast).capacity * 0.75) | (
        (tiles["B_r"] == rows[0]) & (tiles["B_c"] == cols[0])
    )
    return {name: column[keep] for name, column in tiles.items()}


def may_cut(cores: int, heads: int, n_q: int, n_k: int, rows: int) -> bool:
    """Whether so many cores could do with more pieces than `heads` have blocks of rows, and keys are enough for it.
    rows: of the register tile."""
    return n_k >= 2 * LEAST_PART and 2 * heads * -(-n_q // (ROW_COUNTS[-1] * rows)) <= MOST_PIECES * cores


def part_counts(n_k: int) -> list[int]:
    """The numbers of parts that are weighed: powers of two."""
    return [1 << power for power in range(max(1, n_k // LEAST_PART).bit_length())]


def part_tiles(
    problem: Problem, machine: Machine, multiples: tuple[int, int], fixed: Mapping[str, int] = NOTHING_FIXED
) -> Tiles:
    """Every tile (B_r, B_c) of the CPU kernel with every number of parts (B_s) that may keep cores busy. multiples: the
    register tile (rows, keys). fixed: sizes that are settled, by name. Raises NoFittingTileError."""
    counts, sizes = _parts(problem, fixed)
    tiles = cpu_tiles(problem, machine, *multiples, fixed)
    index = grid({"tile": range(len(tiles["B_r"])), "part": range(len(sizes))})
    found = {name: column[index["tile"]] for name, column in tiles.items()} | {"B_s": sizes[index["part"]]}
    pieces = problem.problems * -(-max(1, problem.n_q) // found["B_r"]) * counts[index["part"]]
    keep = (pieces <= MOST_PIECES * machine.cores) | ("B_s" in fixed)
    if not keep.any():
        raise NoFittingTileError(f"parts of keys: there is work enough for {machine.cores} cores without")
    return {name: column[keep] for name, column in found.items()}


def row_tiles(problem: Problem, machine: Machine, fixed: Mapping[str, int] = NOTHING_FIXED) -> Tiles:
    """A row against a vector of keys, in every number of parts, or parts of a size. Raises NoFittingTileError."""
    sizes = _parts(problem, fixed)[1]
    return grid({"B_r": [1], "B_c": [machine.lanes()], "stages": [1], "B_s": sizes})


def _parts(problem: Problem, fixed: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Into how many parts the keys may be cut, and how many keys each part has then."""
    if problem.training:
        raise NoFittingTileError("CPU kernels cut keys into parts without training")
    if "B_s" in fixed:
        return np.ones(1, dtype=np.int64), np.array([fixed["B_s"]])
    if not (counts := part_counts(problem.n_k)[1:]):
        raise NoFittingTileError(f"parts of at least {LEAST_PART} keys: {problem.n_k} keys are too few to be cut")
    return np.array(counts), -(-max(1, problem.n_k) // np.array(counts))


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
