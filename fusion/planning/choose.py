"""The best tile of one schedule on one machine, and the lower bound it is compared with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping

import numpy as np

from fusion.errors import NoFittingTileError
from fusion.machine import Machine
from fusion.planning import bounds
from fusion.planning.candidate import Candidate, Given
from fusion.planning.compiled import Counts, counts
from fusion.planning.cpu import cpu_time
from fusion.planning.cpu_rows import FEW_QUERIES, MOST_ROWS, row_time
from fusion.planning.least_io import least_io
from fusion.planning.optimum import snapped_tile
from fusion.planning.packed_rows import ROWS_FROM
from fusion.planning.problem import Problem
from fusion.planning.schedules import schedule
from fusion.planning.tiles import (
    SEARCHED_WHOLE,
    Tile,
    Tiles,
    cpu_tiles,
    gpu_tiles,
    grid,
    part_tiles,
    pick,
    row_tiles,
    sizes_of,
)
from fusion.planning.timing import Times, gpu_time, shares_of, streaming_time


def lower_bound(problem: Problem, capacity: float, *, backward: bool = False) -> float:
    """Elements that any schedule moves for all heads: the larger of the trivial bound and the one that M = `capacity`
    imposes. The trivial bound reads each key head once however many query heads share it, and no key that the mask
    hides from all queries."""
    sizes = {name: max(1, getattr(problem, name)) for name in ("n_q", "n_k", "d", "d_v")}
    if problem.among:
        return _bound_of_sets(problem, sizes, capacity)
    share, (rows, keys) = problem.live_share(1, 1), problem.needed()
    heads_kv = max(1, problem.batch) * max(1, problem.heads_kv)
    trivial = problem.problems * (rows * problem.d + sizes["n_q"] * problem.d_v)
    trivial += heads_kv * keys * (problem.d + problem.d_v)
    if backward:  # also dO, and the three gradients
        trivial *= 2
    name = "backward" if backward else "sparse"
    imposed = bounds.evaluate(name, **sizes, capacity=capacity, share=share)
    return max(trivial, problem.problems * imposed * (share if backward else 1.0))


def _bound_of_sets(problem: Problem, sizes: Mapping[str, int], capacity: float) -> float:
    """The same where every query has keys of its own: all queries and the keys of all sets are one problem, of whose
    scores a share is wanted. Each key is read once at least, and a set holds no key twice."""
    queries, batch = problem.heads * sizes["n_q"], max(1, problem.batch)
    keys = min(problem.among, problem.heads * sizes["n_k"])
    trivial = (queries + keys) * (problem.d + problem.d_v)
    share = min(1.0, sizes["n_k"] / problem.among)
    rest = {name: sizes[name] for name in ("d", "d_v")}
    imposed = bounds.evaluate("sparse", n_q=queries, n_k=problem.among, capacity=capacity, share=share, **rest)
    return batch * max(trivial, imposed)


def candidate(
    problem: Problem, machine: Machine, name: str, multiples: tuple[int, int], features: int, given: Given = ()
) -> Candidate:
    """The schedule with its best tile on that machine (as far as it is not given), or the reason why it has none."""
    try:
        tiles, times = _tiles_and_times(problem, machine, name, multiples, features, given)
    except NoFittingTileError as error:
        return Candidate(schedule=name, reason=str(error), needed=error.needed)
    best = int(np.argmin(times.total))
    tile = pick(tiles, best)
    moved, moving = _as_read(problem, machine, name, tile, dict(given))
    share = _share(moved, machine, name, moving, multiples)
    result = _counts(name, moved, machine, moving, share, features)
    return Candidate(
        schedule=name,
        tile=tuple(sorted((key, size) for key, size in tile.items() if key in schedule(name).tile)),
        io=float(result.io) * moved.problems,
        time=float(times.total[best]),
        footprint=float(result.footprint),
        resources=tuple(times.at(best).items()),
        ideal=times.ideal,
        share=share,
    )


def _as_read(
    problem: Problem, machine: Machine, name: str, tile: Tile, fixed: Mapping[str, int]
) -> tuple[Problem, Tile]:
    """The problem and the tile by which a kernel reads keys: once for the rows of all heads that share them, where
    their blocks are shared as well."""
    if machine.kind == "cpu" and tile.get("B_r") == 1 and schedule(name).runs_on("cpu"):
        shared = problem.with_heads_together()
        return shared, tile | {"B_r": min(MOST_ROWS, shared.n_q)}
    if _packs(problem, machine, name, fixed):
        return problem.with_heads_together(), tile
    return problem, tile


def _packs(problem: Problem, machine: Machine, name: str, fixed: Mapping[str, int]) -> bool:
    """Whether a GPU kernel takes the heads that share keys in one block of rows (`fusion.planning.packed_rows`)."""
    chosen = schedule(name)
    modelled = machine.kind == "gpu" and chosen.query_stationary and chosen.runs_on("gpu")
    if "packed" in fixed:
        return modelled and fixed["packed"] > 1
    return modelled and 0 < problem.n_q < ROWS_FROM and not problem.training


def _share(problem: Problem, machine: Machine, name: str, tile: Tile, multiples: tuple[int, int]) -> float:
    """s of the chosen tile. The CPU kernel ends a row block's keys on its register tile, others on whole key blocks."""
    if not schedule(name).skips:
        return 1.0
    return problem.live_share(tile.get("B_r", 1), multiples[1] if machine.kind == "cpu" else tile.get("B_c", 1))


def _counts(name: str, problem: Problem, machine: Machine, tile: Tile | Tiles, share: float, features: int) -> Counts:
    return counts(name, sizes_of(problem, machine.fast_elements(problem.dtype), share, features), tile)


def _tiles_and_times(
    problem: Problem, machine: Machine, name: str, multiples: tuple[int, int], features: int, given: Given
) -> tuple[Tiles, Times]:
    fixed, chosen = dict(given), schedule(name)
    cut, modelled = "B_s" in chosen.tile, chosen.query_stationary and chosen.runs_on(machine.kind)
    if machine.kind == "cpu" and modelled:
        by_rows = fixed["B_r"] == 1 if "B_r" in fixed else cut and problem.n_q <= FEW_QUERIES
        if cut:
            tiles = row_tiles(problem, machine, fixed) if by_rows else part_tiles(problem, machine, multiples, fixed)
        else:
            tiles = cpu_tiles(problem, machine, *multiples, fixed)
        if by_rows:
            return tiles, row_time(machine, problem, _splits(problem, tiles), ragged=problem.masked)
        return tiles, cpu_time(machine, problem, tiles, multiples, skip=problem.masked if cut else chosen.skips)
    if machine.kind == "gpu" and modelled:
        problem = problem.with_heads_together() if _packs(problem, machine, name, fixed) else problem
        tiles = _of_size(problem, machine, fixed) if fixed else gpu_tiles(problem, machine)
        tiles = _with_splits(tiles, problem, machine, fixed.get("B_s")) if cut else tiles
        shares = shares_of(problem, tiles) if chosen.skips else np.ones(len(tiles["B_r"]))
        return tiles, gpu_time(machine, problem, tiles, shares, _splits(problem, tiles))
    if machine.kind == "gpu" and chosen.direction == "backward" and chosen.runs_on("gpu"):
        tile = _backward_tile(problem, machine, name)
    else:
        tile = _least_io(name, problem, machine.fast_elements(problem.dtype), features)
    tiles = {key: np.array([size]) for key, size in tile.items()}
    share = problem.live_share(tile["B_r"], tile["B_c"]) if chosen.skips else 1.0
    result = _counts(name, problem, machine, tile, share, features)
    return tiles, streaming_time(machine, problem, result, len(chosen.phases))


def _splits(problem: Problem, tiles: Tiles) -> np.ndarray:
    """Into how many parts tiles cut the keys."""
    n_k = max(1, problem.n_k)
    return np.ceil(n_k / tiles.get("B_s", np.array([n_k])))


@functools.lru_cache(maxsize=4096)
def _backward_tile(problem: Problem, machine: Machine, name: str) -> Tile:
    """The tiles that GPU kernels of a backward schedule run in: B_r x B_c of those at rest on keys, B_o x B_p of the
    one at rest on queries."""
    from fusion.planning.from_sizes import attention_of
    from fusion.planning.gpu_model import JOINT, KEYS, KEYS_ALONE, QUERIES, backward_tiles

    tiles = backward_tiles(attention_of(problem), machine, problem.d, problem.d_v)
    on_keys = tiles[{"backward_fused": JOINT, "backward_split": KEYS, "backward_apart": KEYS_ALONE}[name]]
    on_queries = tiles[QUERIES]
    every = {"B_r": on_keys.rows, "B_c": on_keys.keys, "B_o": on_queries.rows, "B_p": on_queries.keys}
    return {key: size for key, size in every.items() if key in schedule(name).tile}


@functools.lru_cache(maxsize=4096)
def _least_io(name: str, problem: Problem, capacity: int, features: int) -> Tile:
    chosen = schedule(name)
    if chosen.closed_form and max(problem.n_q, problem.n_k) > SEARCHED_WHOLE:
        with contextlib.suppress(NoFittingTileError):  # the derivation leaves out phases that bind only where d_v >> d
            return snapped_tile(name, problem, capacity)
    share = problem.live_share(64, 1) if chosen.skips else 1.0
    return least_io(chosen, problem, capacity, share, features)


def _of_size(problem: Problem, machine: Machine, fixed: Mapping[str, int]) -> Tiles:
    """The legal tiles with these sizes, or the one that they name where there is none: a kernel runs in it."""
    names = [name for name in ("B_r", "B_c", "stages") if name in fixed]
    single = grid({"stages": [1]} | {name: [fixed[name]] for name in names})
    with contextlib.suppress(NoFittingTileError):
        tiles = gpu_tiles(problem, machine)
        keep = np.logical_and.reduce([tiles[name] == fixed[name] for name in names])
        return {name: column[keep] for name, column in tiles.items()} if keep.any() else single
    return single


def _with_splits(tiles: Tiles, problem: Problem, machine: Machine, size: int | None) -> Tiles:
    """Every tile with every sensible number of splits, each a whole number of key tiles; or with splits of a size."""
    if size is not None:
        return tiles | {"B_s": np.full_like(tiles["B_r"], size)}
    most = max(2, min(2 * machine.cores, -(-problem.n_k // 64)))
    counts = sorted({2**power for power in range(1, most.bit_length())} | {most})
    index = grid({"tile": range(len(tiles["B_r"])), "count": counts})
    chosen = {name: column[index["tile"]] for name, column in tiles.items()}
    keys = -(-max(1, problem.n_k) // index["count"])
    chosen["B_s"] = -(-keys // chosen["B_c"]) * chosen["B_c"]
    return chosen
