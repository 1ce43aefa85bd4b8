"""The tile of each GPU kernel: of fewest predicted clocks (`gpu_clocks`) among the feasible (`gpu_feasible`)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fusion.errors import NoFittingTileError
from fusion.ir.expr import C, I
from fusion.ir.reads import is_strided
from fusion.ir.results import extents_function
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.machine import Machine
from fusion.planning.choice import Choice, Tile
from fusion.planning.cpu import Times
from fusion.planning.gpu_clocks import (
    BACKWARD,
    BY_KEYS,
    FORWARD,
    GROUP_ROWS,
    JOINT,
    KEYS,
    KEYS_ALONE,
    QUERIES,
    VALUES_ALONE,
    Extent,
    Work,
    busy_clocks,
    clock_of,
    redundancy,
    shared_bytes,
    shares_values,
    work_of,
)
from fusion.planning.gpu_feasible import fact_of, facts_of, fits, slowed
from fusion.planning.gpu_layout import power

if TYPE_CHECKING:
    from fusion.planning.gpu import Extents
    from fusion.planning.problem import Problem

PREPARE, DELTA = "attention_backward_prepare", "attention_backward_delta"
LEAST, MOST = 16, 128
"""Rows and keys of a tile."""

TRIP = 64
"""Keys (queries, for dK and dV) of a trip where the model sees no difference: less is mostly the loop's own cost."""

UNKNOWN = 1.3
"""Factor for tiles that were not compiled where others were: loops of wide heads are up to a third longer."""

WAYS = ((QUERIES, KEYS), (QUERIES, KEYS_ALONE, VALUES_ALONE), (JOINT,))
"""The kernels that make all gradients. dK and dV have a kernel each where sums of wide heads leave too few registers
for both in one. One kernel for all computes scores once; additions to memory come in no certain order."""

USUAL = 4096
"""Queries and keys for which the backward's tiles are chosen."""
USUAL_HEADS = 64


class TileModel:
    """The policy that takes the cheapest feasible tile, the same for all n_q and n_k up to the same power of two."""

    def forward(self, spec: AttentionSpec, machine: Machine, extents: Extents) -> Tile:
        """The tile of the forward's kernel."""
        if machine.interpreted:
            return Tile(rows=min(32, max(LEAST, power(extents.n_q))), keys=LEAST, warps=4, stages=1)
        work = work_of(spec, FORWARD, extents.d, extents.d_v)
        extent = extent_of(spec, FORWARD, extents.heads, power(extents.n_q), power(extents.n_k))
        return best(work, machine, extent, may_rotate(spec))

    def backward(self, spec: AttentionSpec, machine: Machine, d: int, d_v: int, joint: bool = False) -> dict[str, Tile]:
        """The tile of each backward kernel by its name, of the way with the fewest kernels of which no tile is
        feasible, and then of fewest clocks. joint: whether all gradients may come from one kernel."""
        tiles: dict[str, Tile]
        if machine.interpreted:
            tiles = dict.fromkeys((QUERIES, KEYS), Tile(rows=32, keys=32, warps=4, stages=1))
        else:
            tiles, clocks, unfit = backward_tiles(spec, machine, d, d_v), {}, {}
            for kernel, tile in tiles.items():
                work, extent = _backward_work(spec, kernel, d, d_v)
                unfit[kernel] = slowed(work, tile, machine) == math.inf
                # A query's gradient that is added up in float32 is filled with zeros, read, and written in Q's dtype.
                rounded = work.added * (2 * 4 + work.size)
                rounding = USUAL_HEADS * USUAL * rounded / machine.main.bandwidth
                clocks[kernel] = expected_clocks(work, tile, machine, extent) + rounding * clock_of(machine)
            ways = WAYS if joint and machine.additions else [way for way in WAYS if JOINT not in way]
            way = min(ways, key=lambda way: (sum(unfit[k] for k in way), sum(clocks[k] for k in way)))
            tiles = {kernel: tiles[kernel] for kernel in way}
        return {PREPARE: Tile(rows=tiles[owner_of_keys(tiles)].rows, keys=LEAST, warps=4, stages=1), **tiles}


def backward_tiles(spec: AttentionSpec, machine: Machine, d: int, d_v: int) -> dict[str, Tile]:
    """The best tile of every backward kernel, by its name, whether or not it is of the way that is taken."""
    tiles = {}
    for kernel in BACKWARD:
        work, extent = _backward_work(spec, kernel, d, d_v)
        tiles[kernel] = best(work, machine, extent, may_rotate(spec, kernel))
    return tiles


def _backward_work(spec: AttentionSpec, kernel: str, d: int, d_v: int) -> tuple[Work, Extent]:
    return work_of(spec, kernel, d, d_v), extent_of(spec, kernel, USUAL_HEADS, USUAL, USUAL)


def delta_tile(tiles: Mapping[str, Tile]) -> Tile:
    """Tile of the kernel that corrects delta, which holds less than others: that of dQ, or of the kernel for all."""
    owner = tiles[owner_of_keys(tiles)]
    return tiles.get(QUERIES, Tile(rows=owner.rows, keys=owner.keys, warps=owner.warps, stages=1))


def owner_of_keys(tiles: Container[str]) -> str:
    """The kernel of dK, of those with a tile."""
    return next(kernel for kernel in BY_KEYS if kernel in tiles)


def may_rotate(spec: AttentionSpec, kernel: str = FORWARD) -> bool:
    """Whether a loop may rotate: there are exponentials, and in the forward V of its own and tiles not from a list."""
    if spec.normalizer is Normalizer.NONE or kernel not in (FORWARD, KEYS, JOINT):
        return False
    listed = spec.mask is not None and spec.mask.tile_live is not None
    return kernel != FORWARD or not listed and not shares_values(spec)


def extent_of(spec: AttentionSpec, kernel: str, heads: int, n_q: int, n_k: int) -> Extent:
    triangle = spec.mask is not None and spec.mask.key_hi is not None
    outer, inner = (n_k, n_q) if kernel in BY_KEYS else (n_q, n_k)
    return Extent(heads=heads, outer=outer, inner=inner, triangle=triangle)


@functools.lru_cache(maxsize=4096)
def best(work: Work, machine: Machine, extent: Extent, rotates: bool = False) -> Tile:
    """The cheapest feasible tile; where there is none the one that needs the least shared memory, which the launch
    makes smaller where it has to, on AMD's devices of those that compute scores least often: all spill alike there."""
    every = list(all_tiles(work, machine, extent, rotates))
    result = [tile for tile in every if slowed(work, tile, machine) < math.inf]
    if not result:
        again = machine.architecture.startswith("gfx") and work.size == 2
        every = [tile for tile in every if fits(work, tile, machine)] or every
        return min(every, key=lambda t: (redundancy(work, t, machine) * again, shared_bytes(work, t)))
    return in_order(work, machine, extent, result)[0]


def in_order(work: Work, machine: Machine, extent: Extent, tiles: Sequence[Tile]) -> list[Tile]:
    """Tiles of fewest clocks first; of equal ones those nearest to `TRIP`, then smaller ones with fewer stages: with
    more, whose loads are in flight beside the products, where memory is what takes the time."""
    clocks = {tile: expected_clocks(work, tile, machine, extent) for tile in tiles}
    units = busy_clocks(work, min(tiles, key=clocks.__getitem__), machine, extent)
    del units["total"]
    loads = -1 if max(units, key=units.__getitem__) in {level.name for level in machine.levels} else 1
    apart = {tile: max((inner := work.inner(tile)) / TRIP, TRIP / inner) for tile in tiles}
    return sorted(tiles, key=lambda t: (clocks[t], apart[t], work.outer(t), loads * t.stages, -t.warps))


def expected_clocks(work: Work, tile: Tile, machine: Machine, extent: Extent) -> float:
    """Clocks of a kernel, spills and what is not known of it counted in, to two digits."""
    known, explored = fact_of(work, tile, machine), facts_of(work, machine)
    clocks = busy_clocks(work, tile, machine, extent, known.instructions if known else 0)["total"]
    clocks *= known.slowed if known else UNKNOWN if explored else 1.0
    return float(f"{clocks:.2g}") if clocks < math.inf else clocks


def forward_time(spec: AttentionSpec, problem: Problem, machine: Machine, choice: Choice) -> Times:
    """Seconds of the forward's kernel, its launch and the merge of parts of the keys included. problem: with the heads
    together that share blocks of rows."""
    tile, work = choice.tile, work_of(spec, FORWARD, problem.d, problem.d_v)
    extent = replace(
        extent_of(spec, FORWARD, problem.problems, max(1, problem.n_q), max(1, problem.n_k)),
        visited=problem.live_share(tile.rows, tile.keys) * max(1, problem.n_k),
        parts=choice.splits,
        key_bytes=problem.key_bytes,
    )
    seconds = _seconds(work, tile, machine, extent)
    total = seconds.pop("total")
    launch = machine.launch
    if choice.splits > 1:  # numbers of float32, written and read once
        partial = 4 * problem.problems * problem.n_q * choice.splits * (problem.d_v + 1)
        launch += machine.launch + 2 * partial / machine.main.bandwidth
    resources = {name: np.array([value]) for name, value in {**seconds, "launch": launch}.items()}
    return Times(total=np.array([total + launch]), resources=resources)


def _seconds(work: Work, tile: Tile, machine: Machine, extent: Extent) -> dict[str, float]:
    """`busy_clocks` in seconds, and the total with what is spilled."""
    fact = fact_of(work, tile, machine)
    busy = busy_clocks(work, tile, machine, extent, fact.instructions if fact else 0)
    busy["total"] *= fact.slowed if fact is not None and fact.slowed < math.inf else 1.0
    return {name: clocks / clock_of(machine) for name, clocks in busy.items()}


def check_fits(spec: AttentionSpec, problem: Problem, machine: Machine, tile: Tile) -> None:
    """Raises NoFittingTileError where the forward's kernel needs more shared memory in a tile than there is."""
    needed = shared_bytes(work_of(spec, FORWARD, problem.d, problem.d_v), tile)
    if needed > machine.shared_memory:
        raise NoFittingTileError(
            f"{problem} on {machine.name}: the smallest tile needs {needed} bytes of {machine.shared_memory} bytes of "
            "shared memory; give narrower heads"
        )


def tile_clocks(spec: AttentionSpec, machine: Machine) -> Callable[[str, Sequence[int], Sequence[Tile]], list[float]]:
    """(kernel, values of `spec.sizes`, tiles) -> clocks in each tile; all the same for kernels without products."""
    extents = extents_function(spec)

    def clocks(kernel: str, sizes: Sequence[int], tiles: Sequence[Tile]) -> list[float]:
        if kernel in (PREPARE, DELTA):
            return [0.0] * len(tiles)
        *batch, n_q, n_k, d, d_v = extents(sizes)
        kernel = kernel if kernel in BACKWARD else FORWARD
        work, extent = work_of(spec, kernel, d, d_v), extent_of(spec, kernel, math.prod(batch), n_q, n_k)
        return [expected_clocks(work, tile, machine, extent) for tile in tiles]

    return clocks


def all_tiles(work: Work, machine: Machine, extent: Extent, rotates: bool) -> Iterator[Tile]:
    sizes = [size for size in (16, 32, 64, 128) if LEAST <= size <= MOST]
    outer, inner = power(extent.outer), power(extent.inner)
    across, along = (inner, outer) if work.kernel in BY_KEYS else (outer, inner)
    for rows, keys, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3)):
        if rows > max(LEAST, across) or keys > max(LEAST, along):
            continue
        tile = Tile(rows=rows, keys=keys, warps=warps, stages=stages)
        yield tile
        asynchronous = "wgmma" in machine.isa and work.size == 2 and work.outer(tile) >= GROUP_ROWS
        if rotates and work.score_bytes == 0 and asynchronous:
            yield replace(tile, rotated=True)
        # Where V is read on its own, the rotated order does as well, without going through shared memory; spread loops
        # spill there (64 x 64), or have their products serialised (64 x 32).
        shared = work.kernel == FORWARD and work.loaded < work.d + work.d_v
        if asynchronous and shared and redundancy(work, tile, machine) > 1:
            yield replace(tile, spread=True)


_OWNERS = {JOINT: ("backward_fused", "dQ, dK and dV"), KEYS: ("backward_split", "dK and dV"),
           KEYS_ALONE: ("backward_apart", "dK")}  # fmt: skip
"""Schedule of a backward, and gradients, by the kernel of dK."""
_BESIDE = {"dV": VALUES_ALONE, "dQ": QUERIES}


def backward_choice(spec: AttentionSpec, problem: Problem, machine: Machine) -> Choice:
    """The choice for a backward that gives the gradients of Q, K and V, and no other."""
    joint = is_strided(spec.q, (*spec.axes, I, C)) and not spec.reproducible
    joint = joint and not torch.are_deterministic_algorithms_enabled()
    tiles = TileModel().backward(spec, machine, problem.d, problem.d_v, joint)
    beside = tuple((name, tiles[kernel]) for name, kernel in _BESIDE.items() if kernel in tiles)
    owner = owner_of_keys(tiles)
    return Choice(schedule=_OWNERS[owner][0], tile=tiles[owner], keys=problem.n_k, beside=beside)


def backward_seconds(spec: AttentionSpec, problem: Problem, machine: Machine, choice: Choice) -> dict[str, float]:
    """Seconds of each kernel of a backward."""
    ((owner, name),) = [(kernel, name) for kernel, (schedule, name) in _OWNERS.items() if schedule == choice.schedule]
    seconds = {}
    for gradient, tile in ((name, choice.tile), *choice.beside):
        kernel = _BESIDE.get(gradient, owner)
        moved = problem.with_heads_together() if kernel in BY_KEYS else problem
        work = work_of(spec, kernel, problem.d, problem.d_v)
        extent = extent_of(spec, kernel, moved.problems, max(1, moved.n_q), max(1, moved.n_k))
        visited = moved.live_share(tile.rows, tile.keys) * extent.inner
        extent = replace(extent, visited=visited, key_bytes=problem.key_bytes)
        added = moved.problems * extent.inner * work.added * (2 * 4 + work.size) / machine.main.bandwidth
        seconds[gradient] = _seconds(work, tile, machine, extent)["total"] + added
    return seconds
