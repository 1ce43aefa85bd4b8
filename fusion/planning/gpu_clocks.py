"""Clocks that a GPU kernel takes in a tile: a model of matrix units, instruction issue and special functions.

Of one trip of a kernel's loop, one tile of scores, the model knows each product's shape, how Triton lays it out over
warps, and about how many instructions a score costs. Instructions and overlap were read off disassembled kernels, by a
model of their instructions in order (benchmarks/results/2026-11-27-triton-static.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion.ir.expr import C, E, Expr, Kind, coordinates, loads, substitute, walk
from fusion.ir.spec import AttentionSpec
from fusion.planning.gpu_layout import panelled

if TYPE_CHECKING:
    from fusion.machine import Machine, MemoryLevel
    from fusion.planning.choice import Tile

FORWARD, QUERIES, KEYS = "attention_forward", "attention_backward_queries", "attention_backward_keys"
KEYS_ALONE, VALUES_ALONE = "attention_backward_keys_alone", "attention_backward_values_alone"
JOINT = "attention_backward_joint"
BY_KEYS = (KEYS, KEYS_ALONE, VALUES_ALONE, JOINT)
"""Kernels whose programs own keys: dK and dV in one, each in its own, or both with dQ, which is added up in memory."""
BACKWARD = (QUERIES, *BY_KEYS)

SCORE_INSTRUCTIONS = {FORWARD: 4.5, QUERIES: 6.5, KEYS: 9.5, KEYS_ALONE: 9.5, VALUES_ALONE: 5.5, JOINT: 11.0}
"""Instructions of a thread for each of its scores: scale, maximum, exponential, sum, conversion; in the backward also
the product's derivative, and for dK and dV the statistics of each row, which lie along a thread's scores there; of all
three also the way of dQ's part to memory."""

LIVE = {FORWARD: 1.5, QUERIES: 3.0, KEYS: 3.0, KEYS_ALONE: 3.0, VALUES_ALONE: 1.5, JOINT: 3.0}
"""Registers that a thread's score holds at the fullest point: scores, weights, derivatives in the backward."""

EXPOSED = {FORWARD: 1.0, QUERIES: 0.6, KEYS: 0.85, KEYS_ALONE: 0.6, VALUES_ALONE: 0.85, JOINT: 1.2}
"""Share of a loop's instructions beside which no product runs, in the plain order. dP's runs beside exponentials, where
nothing but it follows the scores. Read off compiled kernels: trips, less the products' clocks, over clocks of issue;
d = 64 to 256, two warp groups. A single one is not credited with it: what it saves, its factors' way through shared
memory takes, which the model does not count."""
GROUP_WARPS = 4
"""Warps of a warp group."""
EXPOSED_ROTATED = {KEYS: 0.45, JOINT: 0.9}
"""Share of a loop's instructions beside which no product runs, in the rotated order."""

LOAD_INSTRUCTIONS = 8
"""For 16 bytes that a thread brings to shared memory, addresses included."""

OVERHEAD = 100
"""Instructions of a trip that do not grow with the tile: products, waits, addresses, the loop."""

PROLOGUE = 3000
"""Clocks before the first trip of a program and after the last: launch, Q, the first tiles, the result."""

SPLIT_TRIPS = 4
"""Fewest trips of a part of the keys: that many tiles are worth a program of their own."""

MASK_INSTRUCTIONS = 5.0
"""For each score of a tile in which the mask is evaluated."""

_SPECIAL = frozenset("exp exp2 log tanh sigmoid sin cos erf div sqrt pow log1p expm1 atan".split())
_COSTLY = 8.0  # instructions of such a function
_UNIT = 1.0  # of a tanh that is rounded to bfloat16, which has one
EFFICIENCY = 0.76
"""Share of the modelled rate that is reached. Fitted to published figures of an H100, forward without a mask:
FlexAttention's
template at d = 128, 392-408 Tflop/s, Triton's tutorial at d = 128, 434-477, and at d = 64, 396-403."""
HIDDEN = 0.35
"""Share of what a program leaves idle that a second one beside it fills. Fitted, too."""
WARP_INTERVAL = 2
"""Clocks between two instructions of one warp, on average: results are there after four, and two that are independent
follow each other. An assumption; it matters where a part of a multiprocessor has a single warp."""
WARP_ROWS = 16
"""Rows of a product that one warp holds."""
GROUP_ROWS = 64
"""Rows of an asynchronous product of Hopper."""
SHARED_BYTES = 128
"""Bytes that shared memory hands over in a clock."""
ROTATED = 1.15
"""Issue clocks beside a product, over those after it: half of the instructions go to units of half the width."""
LANES = 128
"""Lanes of instructions that a multiprocessor issues in a clock; half of them where waves have 64 lanes (CDNA)."""
LATENCY = 1500
"""Clocks until a tile is there that was asked for, under load. An assumption."""
SYNCHRONOUS = {"wgmma": 0.62, "tcgen05": 0.25}
"""Share of the matrix rate that synchronous products reach where there are asynchronous ones, which take 64 rows. Of
Hopper: Luo et al., arXiv 2402.13499; of Blackwell's data centre parts nothing is published, a quarter is assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a kernel for each score, as far as its tile depends on it.

    d, d_v: columns that are computed.
    size: bytes of an element of the products.
    score_bytes: bytes loaded for each score (bias and mask matrices).
    instructions, specials: of the score program, for each score of a tile without a mask.
    masked: whether some tiles evaluate a mask.
    program: what kind of program it is (`program_kind`).
    loaded: columns that are loaded for each key (query, for dK and dV).
    """

    kernel: str
    d: int
    d_v: int
    size: int
    score_bytes: int
    instructions: float
    specials: float
    masked: bool
    program: str
    loaded: int

    @property
    def sums(self) -> int:
        """Columns of the sums that a program keeps in registers."""
        columns = {QUERIES: self.d, KEYS: self.d + self.d_v, KEYS_ALONE: self.d, JOINT: self.d + self.d_v}
        return columns.get(self.kernel, self.d_v)

    @property
    def added(self) -> int:
        """Columns that a program adds to memory for each query that it visits."""
        return self.d if self.kernel == JOINT else 0

    @property
    def factors(self) -> int:
        """Columns of the products that give tiles of scores."""
        return self.d if self.kernel in (FORWARD, VALUES_ALONE) else self.d + self.d_v

    def outer(self, tile: Tile) -> int:
        """Rows of the products: queries of a block, or keys for dK and dV."""
        return tile.keys if self.kernel in BY_KEYS else tile.rows

    def inner(self, tile: Tile) -> int:
        """Queries or keys that a trip visits."""
        return tile.rows if self.kernel in BY_KEYS else tile.keys


def work_of(spec: AttentionSpec, kernel: str, d: int, d_v: int) -> Work:
    mask = spec.mask
    score = spec.score if mask is None or mask.full is None else mask.full
    parts = [part for part in walk(score, spec.weight) if part.kind is Kind.FLOAT and part.args]
    special = list(filter(_is_special, parts))
    costs = sum(_UNIT if _is_rounded(part) else _COSTLY for part in special)
    inner = [part for part in parts if {"i", "j"} <= coordinates(part)]
    backward = 1 if kernel == FORWARD else 2  # its derivative, too
    return Work(
        kernel=kernel,
        d=panelled(d),
        d_v=panelled(d_v),
        size=4 if spec.dtype == "float32" else 2,
        score_bytes=score_bytes(spec),
        instructions=backward * (max(0, len(inner) - 1) + costs),
        specials=float(backward * len(special)),
        masked=mask is not None,
        program=program_kind(spec),
        loaded=panelled(d) + (0 if kernel == FORWARD and shares_values(spec) else panelled(d_v)),
    )


def may_share_values(spec: AttentionSpec) -> bool:
    """Whether V is the first columns of K where both are the same tensor (latent attention)."""
    as_stored = spec.k_value is None and spec.v_value is None
    return as_stored and tuple(substitute(index, {E: C}) for index in spec.v) == spec.k


def shares_values(spec: AttentionSpec) -> bool:
    """Whether V may be the first columns of K, and is of such a width that it will be."""
    return spec.d is not spec.d_v and may_share_values(spec)


def score_bytes(spec: AttentionSpec) -> int:
    """Bytes that are loaded for each score: of bias and mask matrices."""
    read = {*loads(spec.score), *loads(spec.weight)}
    numbers = {load.operand for load in read if {"i", "j"} <= coordinates(load)}
    return sum(spec.operands[number].torch_dtype.itemsize for number in numbers)


def _is_special(part: Expr) -> bool:
    return part.op in _SPECIAL and not (part.op == "div" and part.args[1].is_const)


def _is_rounded(part: Expr) -> bool:
    """Whether it is a tanh that is rounded to bfloat16."""
    return part.op == "tanh" and part.attr == "bfloat16"


def program_kind(spec: AttentionSpec) -> str:
    """Kind of a spec's programs by the registers they take beside the products: the first that holds of

    "random": dropout;
    "gather": a load at a place that joins i and j;
    "matrix", "wide matrix": loads for each score, of two bytes at most or of more;
    "listed": tiles of a list;
    "functions": tanh and the like where no mask is evaluated;
    "tanh": of them only tanh that is rounded to bfloat16;
    "terms": more than a scale there;
    "masked", "plain".
    """
    read = [*loads(spec.score), *loads(spec.weight)]
    mask = spec.mask
    full = spec.score if mask is None else spec.score if mask.full is None else mask.full
    if any(part.op == "hash" for part in walk(spec.weight)):
        return "random"
    if any({"i", "j"} <= coordinates(index) for load in read for index in load.args):
        return "gather"
    if any({"i", "j"} <= coordinates(load) for load in read):
        return "matrix" if score_bytes(spec) <= 2 else "wide matrix"
    if mask is not None and mask.tile_live is not None:
        return "listed"
    if special := list(filter(_is_special, walk(full, spec.weight))):
        return "tanh" if all(map(_is_rounded, special)) else "functions"
    if sum(bool(part.args) and part.kind is Kind.FLOAT for part in walk(full, spec.weight)) > 1:
        return "terms"
    return "plain" if mask is None else "masked"


def redundancy(work: Work, tile: Tile, machine: Machine) -> float:
    """Times that each score is computed: by all warps abreast, unless the loop's order, or hardware, hides that."""
    apart = tile.spread or tile.rotated and work.kernel == FORWARD
    return 1.0 if "tcgen05" in machine.isa or apart else _abreast(work, tile)


def _abreast(work: Work, tile: Tile) -> float:
    """Number of warps for each warp's rows."""
    return max(1.0, WARP_ROWS * tile.warps / work.outer(tile))


def trip_clocks(
    work: Work, tile: Tile, machine: Machine, memory: MemoryLevel, instructions: int = 0, key_bytes: float = 0
) -> dict[str, float]:
    """Clocks that one trip of one program's loop keeps each unit of its multiprocessor busy, and those that it takes
    ("total"), with the programs beside it. memory: where keys and values come from. instructions: of the loop, where
    they are known. key_bytes: of an element of keys and values there, where it is not stored as it is multiplied."""
    rows, cols, warps = work.outer(tile), work.inner(tile), tile.warps
    times, clock = redundancy(work, tile, machine), clock_of(machine)
    rate = machine.flops("bfloat16" if work.size == 2 else "float32") / (2 * machine.cores * clock)
    threads, lanes = warps * machine.wave, LANES if machine.wave == 32 else LANES // 2
    own = rows * cols * times / threads  # scores of a thread
    scores = rows * cols * work.factors * times / rate * _slowdown(work, tile, machine)
    sums = rows * cols * work.sums / rate * _synchronous(rows, machine)
    sums += rows * cols * work.added / rate * _synchronous(cols, machine)
    rescaled = rows * work.sums / threads if work.kernel == FORWARD else 0.0
    read = cols * work.loaded * work.size
    count = SCORE_INSTRUCTIONS[work.kernel] + work.instructions
    loaded = LOAD_INSTRUCTIONS * read / (16 * threads)
    issued = instructions or own * count + rescaled + loaded + OVERHEAD
    issue = issued * threads / lanes
    alone = issued * max(threads / lanes, WARP_INTERVAL)
    special = rows * cols * times * (1 + work.specials) / 16
    if tile.rotated and work.kernel == FORWARD:
        beside = max(sums, ROTATED * alone)
    else:
        exposed = (EXPOSED_ROTATED if tile.rotated else EXPOSED)[work.kernel]
        beside = sums + max(alone * (exposed if warps > GROUP_WARPS else 1.0), special)
    waits = scores + beside
    waits += max(0.0, LATENCY - (tile.stages - 1) * waits)
    busiest = max(scores + sums, issue, special, _shared_clocks(work, tile, machine))
    hidden = HIDDEN if residents(work, tile, machine) > 1 else 0.0
    computed = (busiest + max(0.0, waits - busiest) * (1 - hidden)) / EFFICIENCY
    added = 4 * cols * work.added / max(machine.additions, 1.0)  # s, of all multiprocessors together
    moved = cols * work.loaded * (key_bytes or work.size) * machine.cores * clock / memory.bandwidth
    total = max(computed, moved, added * machine.cores * clock)
    busy = {"products": scores + sums, "instructions": issue, "exponentials": special, memory.name: moved}
    return {**busy, "total": total}


def clock_of(machine: Machine) -> float:
    """Hz, from the rate of its special functions: 16 a clock and multiprocessor."""
    return machine.exp_rate / machine.cores / 16


def _synchronous(rows: int, machine: Machine) -> float:
    """By what factor products of so few rows are slower."""
    shares = [share for name, share in SYNCHRONOUS.items() if name in machine.isa]
    return 1 / shares[0] if shares and rows < GROUP_ROWS else 1.0


def _slowdown(work: Work, tile: Tile, machine: Machine) -> float:
    """Slowdown of the products that give scores, whose factors both come from shared memory."""
    if "wgmma" not in machine.isa or work.outer(tile) < GROUP_ROWS:
        return _synchronous(work.outer(tile), machine)
    n = max(8.0, work.inner(tile) / _abreast(work, tile))
    return max(1.0, (GROUP_ROWS + n) / (2 * n))


def _shared_clocks(work: Work, tile: Tile, machine: Machine) -> float:
    """For factors that each warp reads for itself, where products are synchronous."""
    if machine.isa & {"wgmma", "tcgen05"} and work.outer(tile) >= GROUP_ROWS:
        return 0.0
    return tile.warps * work.inner(tile) * (work.factors + work.sums) * work.size / SHARED_BYTES


def shared_bytes(work: Work, tile: Tile) -> int:
    """Bytes of shared memory of a program: what stays there, and the tiles in flight."""
    scores = tile.rows * tile.keys
    stays = work.factors * work.size * work.outer(tile)
    exchanged = scores * work.size if work.kernel in BY_KEYS or work.score_bytes or tile.spread else 0
    exchanged = max(exchanged, 4 * work.inner(tile) * work.added)
    return stays + exchanged + tile.stages * (work.inner(tile) * work.loaded * work.size + scores * work.score_bytes)


def registers(work: Work, tile: Tile, machine: Machine) -> float:
    """Registers of a thread at the fullest point: sums, scores and (of synchronous products) the factor that stays."""
    threads, rows, times = tile.warps * machine.wave, work.outer(tile), redundancy(work, tile, machine)
    own = tile.rows * tile.keys * times / threads
    live = LIVE[work.kernel] + (1.0 if tile.rotated else 0.0) + PRESSURE[work.program]
    asynchronous = machine.isa & SYNCHRONOUS.keys() and rows >= GROUP_ROWS
    staged = 0.0 if asynchronous else HELD * rows * work.factors * work.size * times / (4 * threads)
    return rows * work.sums / threads + staged + own * live * (2 if work.size == 4 else 1)


PRESSURE = {
    "plain": 0.0,
    "masked": 0.25,
    "listed": 0.5,
    "terms": 1.5,
    "tanh": 1.5,
    "functions": 2.0,
    "matrix": 1.5,
    "wide matrix": 2.0,
    "random": 2.0,
    "gather": 5.0,
}
"""More registers that a thread's score holds, by kind of program."""

HELD = 0.5
"""Share of the factor that stays which synchronous products keep in registers, to read the rest. An assumption."""

ADDRESSES = 36
"""Registers of a thread for addresses, counters and row statistics, at least."""


def residents(work: Work, tile: Tile, machine: Machine) -> int:
    """Number of programs that are expected to share a multiprocessor."""
    used = min(255.0, registers(work, tile, machine) + ADDRESSES)
    by_registers = machine.registers / (4 * tile.warps * machine.wave * used)
    return max(1, min(int(machine.shared_memory // max(1, shared_bytes(work, tile))), int(by_registers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Extents that a kernel covers.

    heads: of all batches.
    outer: rows of its blocks.
    inner: queries or keys that a block may visit.
    triangle: whether the mask leaves about half of them.
    visited: how many a block visits in the mean, where that is known.
    parts: that the keys are cut into, where that is settled.
    key_bytes: see `trip_clocks`.
    """

    heads: int
    outer: int
    inner: int
    triangle: bool
    visited: float = 0
    parts: int = 0
    key_bytes: float = 0


def busy_clocks(work: Work, tile: Tile, machine: Machine, extent: Extent, instructions: int = 0) -> dict[str, float]:
    """Clocks of a whole kernel, and those in which each unit of a multiprocessor is busy."""
    rows, cols = work.outer(tile), work.inner(tile)
    half = (extent.inner + rows + cols) / 2
    visited = extent.visited or (half if extent.triangle else math.ceil(extent.inner / cols) * cols)
    shared = extent.outer > rows  # keys and values that another block reads too come from the cache
    memory = machine.level("L2") if shared else machine.main
    trip = trip_clocks(work, tile, machine, memory, instructions, extent.key_bytes)
    trips = max(1.0, visited / cols)
    block = trips * trip["total"]
    if extent.triangle:
        masked = rows * cols * redundancy(work, tile, machine) * (1 + rows / cols)
        block += masked * MASK_INSTRUCTIONS / LANES / EFFICIENCY
    blocks, together = extent.heads * math.ceil(extent.outer / rows), residents(work, tile, machine)
    parts = extent.parts
    if not parts and work.kernel == FORWARD and blocks < machine.cores:  # parts of the keys have programs of their own
        parts = max(1, min(2 * machine.cores // blocks, int(visited / (SPLIT_TRIPS * cols))))
    blocks, block, trips = blocks * max(1, parts), block / max(1, parts), trips / max(1, parts)
    turns = math.ceil(blocks / (machine.cores * together))
    each = min(together, math.ceil(blocks / machine.cores))
    return {name: turns * each * trips * clocks for name, clocks in trip.items()} | {
        "total": turns * (each * block + PROLOGUE)
    }
