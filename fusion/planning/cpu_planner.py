"""Choices on CPUs: `CpuPlanner.choose` takes row by row for few queries, else the tile of least predicted time, or row
by row where that is predicted to take less. Keys are cut into parts where that fills the cores.

The time of the kernel that goes row by row, with keys in lanes, is predicted here. Threads take pieces of work (rows
that read the same keys; a part of these keys) from a common counter. A piece costs the larger of its vector work and of
its share of the reading; whoever ends last decides. Where all keys count, pieces are equal, and what is lost beside
whole rounds is that threads do not begin together; where a mask leaves keys out that are known only at run time, up to
a whole piece is lost (Graham's bound on list scheduling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusion.ir.results import extents_function
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine, with_cores
from fusion.planning.choice import Choice, Tile, query_stationary
from fusion.planning.cpu import Times, cpu_time, predict
from fusion.planning.problem import Problem, problem_of
from fusion.planning.register_tiles import (
    KEY_SPAN,
    REPRODUCIBLE_KEYS,
    REPRODUCIBLE_PART,
    Target,
    planes_of,
    target_for,
    target_of,
)

WORTH_COMPILING = 2e-4
"""Predicted seconds that another tile has to save per call: some 2000 calls pay for compiling it."""

WORTH_CUTTING = 0.9
"""Share of the time with whole keys that parts have to stay below."""

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12)
"""Register tiles of rows that a tile may have."""
MOST_PIECES = 4
"""Pieces of work per core at most, where keys are cut for the sake of idle cores."""

Pair = tuple[int, int]
TileTimes = Callable[[Sequence[int], Collection[Pair]], Mapping[Pair, float]]
"""(values of the spec's sizes, tiles) -> predicted seconds of these (B_r, B_c) and other good ones."""


class CpuPlanner:
    """Choices of a spec on a CPU. times: in place of the cost model. register_tile: (rows, keys) of which tiles are."""

    def __init__(
        self, spec: AttentionSpec, machine: Machine, times: TileTimes | None = None, register_tile: Pair | None = None
    ):
        unit = target_for(spec, machine)
        self.spec, self.machine, self.lanes = spec, machine, unit.lanes
        self.times = times or self.tile_times
        self.register_tile = register_tile or unit.register_tile(planes_of(spec, unit))
        self.schedule = query_stationary(spec)
        self._extents = extents_function(spec)
        self._parts: dict[tuple[int, ...], int] = {}

    def choose(self, sizes: Sequence[int], existing: Sequence[Choice] = ()) -> Choice:
        """The choice for a call with these sizes: one whose kernel exists unless another saves WORTH_COMPILING."""
        *batch, n_q, n_k, d, d_v = self._extents(sizes)
        if self.spec.mixing is not None:
            return all_heads_choice(target_of(self.machine), n_k)
        if self.spec.reproducible:
            return self._reproducible(sizes, existing)
        by_rows = self._by_rows((*batch, n_q, n_k, d, d_v), sizes) if n_q <= WEIGHED else None
        if by_rows is not None and n_q <= FEW_QUERIES:
            return by_rows
        compiled = {(choice.tile.rows, choice.tile.keys) for choice in existing if choice.splits == 1}
        seconds = dict(self.times(sizes, [tile for tile in compiled if tile[0] > 1]))
        if by_rows is not None:
            seconds[1, self.lanes] = self._seconds(by_rows, sizes)
        rows, keys = _cheapest(seconds, compiled)
        if by_rows is not None and rows == 1:
            return by_rows
        cut = {(choice.tile.rows, choice.tile.keys) for choice in existing if choice.splits > 1}
        (rows, keys), parts = self._cut((rows, keys), sizes, compiled, cut)
        schedule = self.schedule if parts == 1 else "split_k"
        return Choice(schedule=schedule, tile=Tile(rows=rows, keys=keys), keys=n_k, splits=parts)

    def _reproducible(self, sizes: Sequence[int], existing: Sequence[Choice]) -> Choice:
        """The choice for a spec of that kind: the rows of a tile, and whether parts of the keys are pieces of work of
        their own, neither of which changes a bit."""
        *batch, n_q, n_k, _, _ = self._extents(sizes)
        rows, keys = -(-n_q // self.lanes) * self.lanes, REPRODUCIBLE_KEYS
        if rows >= self.register_tile[0]:
            tiles = {(legal, keys) for legal, _ in self.times(sizes, [])}
            seconds = {tile: time for tile, time in self.times(sizes, tiles).items() if tile in tiles}
            rows, _ = _cheapest(seconds, [(choice.tile.rows, choice.tile.keys) for choice in existing])
        parts = -(-n_k // REPRODUCIBLE_PART) if math.prod(batch) * -(-n_q // rows) < 2 * self.machine.cores else 1
        schedule = self.schedule if parts == 1 or self.spec.aux_outputs else "split_k"
        splits = 1 if schedule != "split_k" else parts
        return Choice(schedule=schedule, tile=Tile(rows=rows, keys=keys), keys=n_k, splits=splits)

    def best(self, sizes: Sequence[int], count: int) -> list[Choice]:
        """At most `count` choices for a call: that of `choose`, and other tiles with whole keys by predicted time.
        There are no others where rows go one by one, or all heads are mixed."""
        *_, n_q, n_k, _, _ = extents = self._extents(sizes)
        first = self.choose(sizes)
        if self.spec.mixing is not None or n_q <= FEW_QUERIES:
            return [first]
        seconds = self.times(sizes, [])
        choices = {
            tile: Choice(schedule=self.schedule, tile=Tile(rows=tile[0], keys=tile[1]), keys=n_k) for tile in seconds
        }
        others = [choices[tile] for tile in sorted(seconds, key=seconds.__getitem__)]
        if n_q <= WEIGHED:
            others.insert(1, self._by_rows(tuple(extents), sizes))
        return list(dict.fromkeys([first, *others]))[:count]

    def _cut(
        self, whole: Pair, sizes: Sequence[int], compiled: Collection[Pair], cut: Collection[Pair]
    ) -> tuple[Pair, int]:
        """The tile of whole keys and 1, or a tile with keys in parts and how many, where that is faster. compiled, cut:
        tiles whose kernels exist, with whole keys and with parts. By the machine's cores, whatever the number of
        threads, since results depend on the parts."""
        *batch, n_q, n_k, _, _ = self._extents(sizes)
        heads, most = math.prod(batch), MOST_PIECES * self.machine.cores
        largest = ROW_COUNTS[-1] * self.register_tile[0]
        if self.spec.aux_outputs or n_k < 2 * LEAST_PART or 2 * heads * -(-n_q // largest) > most:
            return whole, 1
        problem = problem_of(self.spec, sizes)
        tiles = [
            (rows, keys, -(-n_k // count))
            for rows, keys in legal_tiles(problem, self.machine, self.register_tile)
            for count in part_counts(n_k)[1:]
            if keys == whole[1] and heads * -(-n_q // rows) * count <= most
        ]
        if not tiles:  # the largest tile may not fit the cache
            return whole, 1
        columns = dict(zip(("B_r", "B_c", "B_s"), np.array(tiles).T, strict=True))
        times = cpu_time(self.machine, problem, columns, self.register_tile, skip=problem.masked).total
        pieces = [((rows, keys), -(-n_k // size)) for rows, keys, size in tiles]
        seconds = dict(zip(pieces, times.tolist(), strict=True))
        alone = predict(self.machine, problem, [whole], self.register_tile)[whole]
        seconds[whole, 1] = alone * WORTH_CUTTING
        existing = {(tile, parts) for tile, parts in seconds if tile in (compiled if parts == 1 else cut)}
        return _cheapest(seconds, existing)

    def tile_times(self, sizes: Sequence[int], more: Collection[Pair] = ()) -> dict[Pair, float]:
        """The predicted seconds of these and of every legal tile (B_r, B_c), on as many threads as torch uses."""
        problem, here = problem_of(self.spec, sizes), with_cores(self.machine, torch.get_num_threads())
        legal = legal_tiles(problem, here, self.register_tile)
        return predict(here, problem, dict.fromkeys([*more, *legal]), self.register_tile)

    def _by_rows(self, extents: tuple[int, ...], sizes: Sequence[int]) -> Choice:
        """The choice row by row. Keys are cut by the machine's cores: results do not depend on the number of threads.
        Parts are looked at once for all lengths of a kind: a cache that grows is not planned anew with every token."""
        *others, n_k, d, d_v = extents
        key = (*others, n_k // LEAST_PART, d, d_v)
        if (parts := self._parts.get(key)) is None:
            ragged = self.spec.mask is not None and self.spec.mask.skips
            parts = self._parts[key] = best_parts(self.machine, problem_of(self.spec, sizes), ragged=ragged)
        return rows_choice(self.schedule if parts == 1 else "split_k", self.lanes, n_k, parts)

    def _seconds(self, by_rows: Choice, sizes: Sequence[int]) -> float:
        """Predicted seconds row by row."""
        machine, parts = with_cores(self.machine, torch.get_num_threads()), np.array([by_rows.splits])
        return float(row_time(machine, problem_of(self.spec, sizes), parts, ragged=False).total[0])


def legal_tiles(problem: Problem, machine: Machine, register_tile: Pair) -> list[Pair]:
    """Every (B_r, B_c): multiples of the register tile, no larger than the problem asks for, inside the fast level. K
    and V are read in place, so they do not count against it. The smallest tile is always legal: caches spill, they do
    not refuse. Sums of float32 begin anew with a tile at the latest."""
    up = lambda size, multiple: -(-max(1, size) // multiple) * multiple
    n_q, n_k = map(up, (problem.n_q, problem.n_k), register_tile)
    most = KEY_SPAN if problem.dtype == "float32" else 512
    rows = sorted({min(n_q, register_tile[0] * count) for count in ROW_COUNTS})
    keys = sorted({min(n_k, up(count, register_tile[1])) for count in (64, 128, 256, 512) if count <= most})
    room = machine.level(machine.fast).capacity * 0.75
    # Bytes of rows in their dtype, and of their output, scores and statistics in float32.
    near = lambda r, c: r * (problem.d * problem.element_bytes + 4 * problem.d_v + 4 * c + 8)
    return [(r, c) for r in rows for c in keys if near(r, c) <= room or (r, c) == (rows[0], keys[0])]


def choice_time(spec: AttentionSpec, problem: Problem, machine: Machine, choice: Choice) -> Times:
    """Seconds of a call in a choice, as arrays of one element."""
    tiling, target = choice.tiling, target_for(spec, machine)
    if choice.tile.rows == 1:
        parts = np.array([-(-max(1, problem.n_k) // tiling.get("B_s", max(1, problem.n_k)))])
        return row_time(machine, problem, parts, ragged=problem.masked)
    tiles = {name: np.array([tiling[name]]) for name in ("B_r", "B_c", "B_s") if name in tiling}
    skips = choice.schedule == "block_sparse" or choice.schedule == "split_k" and problem.masked
    return cpu_time(machine, problem, tiles, target.register_tile(planes_of(spec, target)), skip=skips)


def _cheapest(seconds: Mapping[Any, float], compiled: Collection) -> Any:
    """Tile that takes the least time, or the best compiled one where that is not worth compiling it."""
    best = min(seconds, key=seconds.__getitem__)
    if known := [each for each in compiled if each in seconds]:
        kept = min(known, key=seconds.__getitem__)
        best = best if seconds[kept] - seconds[best] > WORTH_COMPILING else kept
    return best


def all_heads_choice(target: Target, n_k: int) -> Choice:
    """Rows of all heads, which are mixed, with all keys."""
    rows, keys = target.register_tile(0)
    return Choice(schedule="whole_rows", tile=Tile(rows=rows, keys=-(-n_k // keys) * keys), keys=n_k)


def rows_choice(schedule: str, lanes: int, n_k: int, parts: int = 1) -> Choice:
    """Row by row, with keys in lanes."""
    return Choice(schedule=schedule, tile=Tile(rows=1, keys=lanes), keys=n_k, splits=parts)


LEAST_PART = 512
"""Keys of a part at least, where keys are cut."""

FEW_QUERIES = 8
"""Queries up to which a row at a time is faster than a tile that is mostly empty."""

WEIGHED = 32
"""Queries up to which it may be."""

MOST_ROWS = 8
"""Rows that share keys in a piece of work."""

VECTOR, PAIR_VECTOR = 1.1, 0.55
"""Cycles of the stated clock for a vector of K or V and a row; the second where rows share keys and bfloat16 is
multiplied in pairs. Such that 9 to 32 queries go row by row where that is faster: over 512 to 4096 keys, d = 64 and
128, up to some 22 queries in both dtypes (Zen 5; benchmarks/results/2026-11-27-zen5.md)."""

PAIRED = 32
"""Columns of a line of bfloat16: widths that are multiples of it are multiplied in pairs, on AMX tiles or without."""

TILED, TILED_SCORES = 1.6, 25.0
"""Cycles on AMX tiles, for a vector of K or V, whatever the rows that share it, and for a vector of scores of a row.
Measured over 512 to 2560 keys with 2 to 8 rows, d = 64 (Xeon)."""

WORTH_WAKING = 1 << 17
"""Multiply-adds that are worth waking a thread for (some 10 us): what SDPA's threads do, too."""

STAGED = 1.5e-7
"""Seconds of a row for keys that do not fill a vector: copied to where zeros follow them."""

MERGED = 1.5e-7
"""Seconds for what a row of a part leaves behind, written and merged."""

BEGUN_APART = 0.03
"""Share of a piece by which threads begin apart."""

PIECES = {False: 8, True: 32}
"""Pieces of work per core at most; True: where a mask makes them unequal. Heads in many short parts are read in as many
places at a time: eight heads over 16384 keys in bfloat16 took 0.27 ms whole and 0.59 ms in 16 parts each."""


def row_time(machine: Machine, problem: Problem, splits: np.ndarray, *, ragged: bool) -> Times:
    """Seconds with the keys cut into so many parts. ragged: a mask leaves out keys that are known at run time only."""
    kv_heads, rows, items = _items(problem)
    elements = max(1, problem.n_k) * (problem.d + problem.d_v) * problem.live_share(1)
    cores = max(1, min(machine.cores, int(kv_heads * rows * elements) // WORTH_WAKING + 1))
    pieces = items * splits
    rounds = np.ceil(pieces / cores)
    lost = 0.0 if cores == 1 else 1 - 1 / cores if ragged else BEGUN_APART
    share = (pieces / cores if ragged else rounds) / pieces + lost / pieces
    moved = items * elements * problem.key_bytes
    # Rows take turns at a head's keys.
    reach = problem.n_k_total * (problem.d + problem.d_v) * problem.key_bytes or moved
    level = next((level for level in machine.levels if reach <= level.capacity), machine.levels[-1])
    resources = {
        "vectors": _cycles(machine, problem) / (machine.clock or 2.5e9) * share,
        "keys": moved / (level.bandwidth / max(1, machine.cores)) * share,
        "merge": np.where(splits > 1, rounds * min(rows, MOST_ROWS) * MERGED, 0.0),
        "staging": np.full(len(splits), STAGED * kv_heads * rows / cores if problem.n_k % machine.lanes() else 0.0),
        "launch": np.full(len(splits), machine.launch),
    }
    total = np.maximum(resources["vectors"], resources["keys"])
    total = total + resources["merge"] + resources["staging"] + resources["launch"]
    return Times(total=total, resources=resources)


def _cycles(machine: Machine, problem: Problem) -> float:
    """Cycles of the vector work, of all cores together, by the way that `row_products` of codegen/mlir takes."""
    kv_heads, rows, items = _items(problem)
    keys = max(1, problem.n_k) * problem.live_share(1) / machine.lanes()
    width = problem.d + problem.d_v
    stored = problem.dtype == "bfloat16" and problem.key_bytes == problem.element_bytes and not problem.n_k_total
    target, paired = target_of(machine), stored and problem.d % PAIRED == problem.d_v % PAIRED == 0
    if paired and target.amx:
        return keys * (items * width * TILED + kv_heads * rows * TILED_SCORES)
    return keys * kv_heads * rows * width * (PAIR_VECTOR if paired and target.groups_rows and rows > 1 else VECTOR)


def _items(problem: Problem) -> tuple[int, int, int]:
    """Key heads of the whole batch, rows that share the keys of one, and groups of rows that go over them together."""
    kv_heads = max(1, problem.batch) * max(1, problem.heads_kv)
    rows = max(1, problem.problems * problem.n_q // kv_heads)
    return kv_heads, rows, kv_heads * -(-rows // MOST_ROWS)


def part_counts(n_k: int) -> list[int]:
    """The numbers of parts that are weighed: powers of two."""
    return [1 << power for power in range(max(1, n_k // LEAST_PART).bit_length())]


def best_parts(machine: Machine, problem: Problem, *, ragged: bool) -> int:
    """Into how many parts the keys are cut: 1 where that gains nothing."""
    most = PIECES[ragged] * machine.cores // _items(problem)[2]
    counts = np.array([count for count in part_counts(problem.n_k) if count == 1 or count <= most])
    return int(counts[np.argmin(row_time(machine, problem, counts, ragged=ragged).total)])
