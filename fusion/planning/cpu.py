"""Predicted time of the query-stationary CPU kernel.

Threads take work items (head, block of B_r queries). A thread packs K and V of a head that it has not met, and Q of an
item; for every block of B_c keys it forms the scores of one register tile of rows after the other, exponentiates them,
and adds to the output. Lanes are queries. Matrix instructions take bf16 tiles (AMX; float32 as six products of three
bf16 planes, float16 as three of two, as four for scores) or are multiply-adds of vectors, float32 or bf16 pairs. Each
register tile visits only the keys that its rows need, so masks cost the same for every B_r.

Where there are fewer items than cores, keys can be cut into parts (B_s): each part of an item is a piece of work, which
packs its own keys, and whose sums are merged.

The tile decides how often packed K and V stream past (each row block) and from which cache, how often the output is
taken up again (each key block), whether scores stay in the first cache, what the ends of items cost (products and
softmax do not overlap across items), and how evenly items fall on the cores.

`COSTS` is fitted to single-thread runs on a machine with AVX-512 and AMX, by non-negative least squares on relative
errors: `python -m benchmarks.cpu.model_fit [--fit]`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

from fusion.machine import Machine
from fusion.planning.problem import Problem

_PLANES = {"bfloat16": 1, "float16": 2}
PLANE_PRODUCTS = {0: 1, 1: 1, 2: 3.5, 3: 6}  # of two planes in the mean: scores take four, others three
HIDDEN_FROM = 64  # multiply-adds a score
LINE = 64  # bytes of a cache line
MOST_PACKED = 1 << 30  # bytes of packed keys and values of all threads, beyond which they are packed window by window
#: Operations for a vector of a dense bias or mask, and more where its rows lie in too many pages: what kernels on AMX
#: took longer than without one, by tile. And for beginning a row of a block, on vectors (AMD EPYC, family 26).
STAGING, WALK, BEGIN_ROW = 5, 5, 12
PAGE, PAGES = 4096, 64  # bytes of a page, and how many the first-level TLB has at least
MERGED = 4  # cycles for a vector of output or sums that a part leaves and that is merged
SPILL_FROM, SPILL_OVER = 0.5, 1.0  # a cache begins to lose a tile at this share of its capacity, over this range


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Cycles of the stated clock, each for one: `product`, a register tile's multiply-adds at the peak rate (1 is the
    peak); `softmax`, a vector of scores (maximum, exponential, sum, packing); `operation`, a vector through one more
    operation of the score program; `output`, a vector of output that is taken up and put back for one more key block;
    `near`, 64 bytes of scores or weights that the first cache did not keep; `stream`, of K or V, which are fetched
    ahead; `turn`, of Q or output that other rows of the item pushed out of it; `far`, 64 bytes of packed K and V from
    beyond the second; `end`, a vector of scores that has nothing to overlap with; `item`, a work item; `packed`, a
    vector of Q, K, V or the result between memory and the kernel's layout."""

    product: float
    softmax: float
    operation: float
    output: float
    near: float
    stream: float
    turn: float
    far: float
    end: float
    item: float
    packed: float


#: By planes of AMX tiles, 0 for float32 multiply-adds; "pairs" of bf16 were fitted on an AMD EPYC (family 26). Those of
#: one plane were moved from a fit to where the tiles that they choose are the best (times are 7.7 % off in the mean).
#: Those of 3 planes are a fit times 1.25, since later runs took 1.13 to 1.35 times what it said: a factor moves no
#: choice of a tile, but the choice between exact and approximate attention.
#: "float16" (AMX-FP16) is derived, not measured: Intel's manuals give `tdpfp16ps` the rate of `tdpbf16ps`, so that all
#: is as with one plane but the softmax. That has no bounds of scores, without which bfloat16 takes 1.16 times as long
#: (N = 1024, d = 64), and 18.0 instructions for 16 scores where bfloat16 has 15.6
#: (benchmarks/results/2026-11-30-amx-float16.md): (6.88 + 2.09) * 1.16 * 1.154 - 6.88.
COSTS: dict[int | str, Costs] = {
    0: Costs(
        product=0.826, softmax=1.45, operation=1, output=0,
        near=0.441, stream=0.441, turn=0, far=3.86, end=0, item=0, packed=5.58,
    ),
    1: Costs(
        product=1.72, softmax=2.09, operation=1, output=0,
        near=0.785, stream=0.118, turn=0.498, far=1.01, end=1.34, item=0, packed=5.39,
    ),
    2: Costs(
        product=0.476, softmax=8.63, operation=1, output=2.46,
        near=0.707, stream=0.707, turn=0, far=2.08, end=7.17, item=0, packed=7.86,
    ),
    3: Costs(
        product=0.783, softmax=15.3, operation=1.25, output=2.15,
        near=1.08, stream=1.08, turn=0, far=2.98, end=8.55, item=285, packed=14.4,
    ),
    "pairs": Costs(
        product=0.76, softmax=2.91, operation=1, output=0.379,
        near=0, stream=0, turn=0, far=0, end=0, item=0, packed=2.77,
    ),
}  # fmt: skip
COSTS["float16"] = replace(COSTS[1], softmax=5.13)

#: What is reported: resource -> the costs that belong to it
RESOURCES = {
    "products": ("product",),
    "softmax": ("softmax", "operation", "end"),
    "output": ("output",),
    "cache": ("near", "stream", "turn", "far"),
    "packing": ("packed", "item"),
    "merge": ("merged",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """Facts of the kernel for this problem on this machine: planes (0 is multiply-add), whether on AMX tiles, and those
    of float16, element bytes of its packed operands, register tile in keys and rows, padded head dimensions, bytes of a
    score and its weight, and of what is staged for it."""

    planes: int
    on_tiles: bool
    float16: bool
    size: int
    key_step: int
    row_step: int
    d: int
    e: int
    score: int
    staged: int

    @property
    def products(self) -> float:
        return PLANE_PRODUCTS[self.planes]

    @property
    def unit(self) -> int | str:
        """Its entry of `COSTS`."""
        if self.float16:
            return "float16"
        return self.planes if self.on_tiles or not self.planes else "pairs"


def _kernel(problem: Problem, machine: Machine, multiples: tuple[int, int]) -> _Kernel:
    amx = "amx_bf16" in machine.isa and multiples[1] % 32 == 0
    pairs = "avx512_bf16" in machine.isa and problem.dtype == "bfloat16"
    float16 = amx and problem.dtype == "float16" and "amx_fp16" in machine.isa
    planes = 1 if float16 else _PLANES.get(problem.dtype, 3) if amx else int(pairs)
    d, e = max(1, problem.d), max(1, problem.d_v)
    return _Kernel(
        planes=planes,
        on_tiles=amx,
        float16=float16,
        size=2 * planes or 4,
        key_step=32 if amx else multiples[1],
        row_step=multiples[0],
        d=_up(d, 32) if amx else d,
        e=_up(e, 16) if amx else _up(e, multiples[1]),
        score=4 + (2 * planes or 4),
        staged=4 * problem.dense // (1 if amx else max(1, multiples[0] // machine.lanes())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds by resource, arrays over tiles; `total` combines them."""

    total: np.ndarray
    resources: dict[str, np.ndarray]

    def at(self, index: int) -> dict[str, float]:
        """The resources' seconds for one tile."""
        return {name: float(np.broadcast_to(value, self.total.shape)[index]) for name, value in self.resources.items()}


def cpu_time(
    machine: Machine, problem: Problem, tiles: Mapping[str, np.ndarray], multiples: tuple[int, int], *, skip: bool
) -> Times:
    """Seconds for each tile, with keys in parts of B_s where tiles have that. skip: keys that the mask hides are left
    out. multiples: the register tile (rows, keys)."""
    costs = asdict(COSTS[_kernel(problem, machine, multiples).unit]) | {"merged": MERGED}
    clock = machine.clock or 2.5e9
    n_k, per_length = max(1, problem.n_k), []
    for rows, keys, size in zip(tiles["B_r"], tiles["B_c"], tiles.get("B_s", [n_k] * len(tiles["B_r"])), strict=True):
        parts = -(-n_k // int(size))
        counts = cpu_counts(machine, problem, (int(rows), int(keys)), multiples, skip=skip, parts=parts)
        cycles = {name: count * costs[name] for name, count in counts.items()}
        per_length.append({name: sum(cycles[cost] for cost in group) / clock for name, group in RESOURCES.items()})
    resources = {name: np.array([each[name] for each in per_length]) for name in RESOURCES}
    resources["launch"] = np.full(len(per_length), machine.launch)
    return Times(total=sum(resources.values()), resources=resources)


def predict(
    machine: Machine, problem: Problem, tiles: Iterable[tuple[int, int]], multiples: tuple[int, int]
) -> dict[tuple[int, int], float]:
    """Predicted seconds of each (B_r, B_c)."""
    chosen = list(tiles)
    columns = np.array(chosen)
    times = cpu_time(machine, problem, {"B_r": columns[:, 0], "B_c": columns[:, 1]}, multiples, skip=problem.masked)
    return dict(zip(chosen, times.total.tolist(), strict=True))


def cpu_counts(
    machine: Machine, problem: Problem, tile: tuple[int, int], multiples: tuple[int, int], *, skip: bool, parts: int = 1
) -> dict[str, float]:
    """Counts of how often the busiest thread pays each of the `Costs`, and for a vector that is `merged`; products and
    bytes in the units stated there. parts: of the keys of an item."""
    kernel = _kernel(problem, machine, multiples)
    per_item = _item_counts(machine, problem, kernel, tile, skip, parts)
    pieces = np.repeat((per_item["softmax"] + 1e-9) / parts, parts)
    threads = max(1, min(machine.cores, problem.problems * len(pieces)))
    # Threads pack the keys of a head that they meet, or of a piece, or window by window of each.
    together = parts == 1 and threads * problem.n_k * (kernel.d + kernel.e) * kernel.size <= MOST_PACKED
    packs = max(1, problem.heads // max(1, problem.heads_kv)) * len(pieces) if together else 1
    share, packs_met = _busiest(pieces, problem.problems, packs, threads, alone=parts > 1)
    totals = {name: float(count.sum()) * problem.problems * share for name, count in per_item.items()}
    for name in ("packed", "item", "end"):  # what every piece of an item pays
        totals[name] *= parts
    totals["packed"] += packs_met * max(1, problem.n_k) / parts * (kernel.d + kernel.e) / machine.lanes()
    rows = max(1, problem.n_q) / machine.lanes()
    totals["merged"] = (parts > 1) * 2 * parts * rows * (kernel.e + 2) * problem.problems * share
    return totals


def _item_counts(
    machine: Machine, problem: Problem, kernel: _Kernel, tile: tuple[int, int], skip: bool, parts: int
) -> dict[str, np.ndarray]:
    """The counts of every block of rows of one head. A `set` is a register tile of rows."""
    (rows, keys), lanes, clock = tile, machine.lanes(), machine.clock or 2.5e9
    n_q, n_k, step, dims = max(1, problem.n_q), max(1, problem.n_k), kernel.row_step, kernel.d + kernel.e
    visited = problem if skip else replace(problem, causal=False, window=None)
    start, end = visited.key_ranges(step)
    visible = (end - start) * (problem.density if skip else 1.0)
    sets = len(visible)
    item = np.arange(sets) // max(1, rows // step)
    taken, blocks = _up(visible, kernel.key_step), np.ceil(visible / keys)
    here = np.full(sets, step)
    here[-1] = n_q - step * (sets - 1)
    widest = np.zeros(item[-1] + 1)
    np.maximum.at(widest, item, visible)

    def per_item(values: np.ndarray) -> np.ndarray:
        return np.bincount(item, np.broadcast_to(values, visible.shape))

    vectors = _up(here, lanes) / lanes * taken
    # With one plane a tile that is partly masked has its products and its softmax one after the other.
    masked = np.minimum(keys, visible) * (skip and kernel.planes == 1 and kernel.on_tiles)
    near, streamed, turned, beyond_share = _cache_traffic(machine, kernel, tile, taken, n_k / parts)
    rate = machine.flops("bfloat16" if kernel.planes else "float32") / machine.cores / clock
    return {
        "product": per_item(2 * step * taken * dims * kernel.products / rate),
        "softmax": per_item(vectors),
        "operation": per_item(vectors * (problem.score_flops + problem.dense * _staging(problem, kernel, tile, lanes))),
        "output": per_item(blocks * step / lanes * kernel.e),
        "near": per_item(near / LINE),
        "stream": per_item(streamed / LINE),
        "turn": per_item(blocks * turned / LINE),
        "far": widest * dims * kernel.size * beyond_share / LINE,
        "end": np.minimum(keys, widest) * step / lanes + per_item(masked * step / lanes),
        "item": np.ones(len(widest)),
        "packed": per_item(here * dims / lanes),
    }


def _staging(problem: Problem, kernel: _Kernel, tile: tuple[int, int], lanes: int) -> float:
    """Operations for a vector of a dense operand."""
    rows, keys = tile
    pages = rows * min(1.0, problem.n_k * problem.element_bytes / PAGE)
    begin = 0.0 if kernel.on_tiles else BEGIN_ROW * lanes / keys
    return STAGING + WALK * (pages > PAGES) + begin


def _cache_traffic(
    machine: Machine, kernel: _Kernel, tile: tuple[int, int], taken: np.ndarray, n_k: float
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """(bytes of scores and weights that each set moves between the first and the second cache, those of K and V, those
    of its Q and output for each block of keys; share of K and V that comes from beyond). n_k: keys of a head, or
    of a part."""
    (rows, keys), step, dims = tile, kernel.row_step, kernel.d + kernel.e
    nearest, second = (level.capacity for level in machine.levels[:2])
    scores, block = step * keys * (kernel.score + kernel.staged), keys * dims * kernel.size
    own = rows * (kernel.d * kernel.size + 4 * kernel.e)
    again = _spilled(block + scores, nearest)  # of K and V, by all sets of an item but the first
    first = np.arange(len(taken)) % max(1, rows // step) == 0
    streamed = np.where(first, 1.0, again) * taken * dims * kernel.size
    # Products hide that scores come from the second cache, the better the more of them there are to a score. Between
    # those of AMX tiles dense operands are staged.
    exposed = min(1.0, HIDDEN_FROM / (dims * kernel.products)) ** 2
    beside = kernel.on_tiles and kernel.staged
    lost = _spilled(block + scores + own, nearest) if beside else _spilled(scores, nearest) * exposed
    rewritten = taken * step * (12 + 2 * kernel.size + 2 * kernel.staged) * lost
    turned = step * (kernel.d * kernel.size + 8 * kernel.e) * _spilled(block + scores + own, nearest)
    return rewritten, streamed, turned, _spilled(n_k * dims * kernel.size + own + scores, second)


def _spilled(size: float, capacity: int) -> float:
    """Share of `size` bytes that a cache does not keep."""
    return min(1.0, max(0.0, (size / capacity - SPILL_FROM) / SPILL_OVER))


def _busiest(cost: np.ndarray, heads: int, per_pack: int, threads: int, *, alone: bool) -> tuple[float, int]:
    """(The share that the busiest thread has of all work, how often it packs keys), when threads take portions in
    turns. cost: of one head's items, the same for every head. per_pack: items that follow each other and read the same
    keys. alone: no portion has two."""
    count, unit = one_by_one(heads * len(cost)) if alone else portions(heads, len(cost), threads)
    units = heads * len(cost) // unit
    total, ends = float(cost.sum()), np.concatenate([[0.0], np.cumsum(cost)])
    loads = [(0.0, thread) for thread in range(threads)]  # a heap
    packed, last = [0] * threads, [-1] * threads
    edges = [unit * before(number, units, count) for number in range(count + 1)]
    done = [item // len(cost) * total + float(ends[item % len(cost)]) for item in edges]
    for number in range(count):
        low, high = edges[number], edges[number + 1]
        if low == high:
            continue
        load, thread = loads[0]
        heapq.heapreplace(loads, (load + done[number + 1] - done[number], thread))
        packed[thread] += (high - 1) // per_pack - low // per_pack + (low // per_pack != last[thread])
        last[thread] = (high - 1) // per_pack
    load, busiest = max(loads)
    return load / (total * heads), packed[busiest]


def _up(size: int | np.ndarray, multiple: int):
    """Rounded up to a multiple, numbers or arrays."""
    return -(-size // multiple) * multiple


# How threads share the work items of a call: each takes the next portion from a common counter when it is free.
# Portions become smaller, so that threads end at about the same time although items are unequal (causal masks) and
# cores have other work, too (guided self-scheduling, Polychronopoulos and Kuck 1987).

PER_THREAD = 4
"""Portions. The first has the 2 / (PER_THREAD * threads)-th part of the work, the last is an item."""

FEW_BLOCKS = 4
"""Items of a head up to which they stay together if that is fair: each thread that meets a head packs its keys."""

ENOUGH_HEADS = 8
"""Heads per thread from which whole heads are fair, whatever their number."""


class Portions(NamedTuple):
    """count: of portions. unit: how many items that follow each other stay together."""

    count: int
    unit: int


def portions(heads: int, blocks: int, threads: int) -> Portions:
    """Division among so many threads of the `blocks` items of each of `heads` heads."""
    if threads == 1:
        return Portions(1, heads * blocks)
    whole = blocks <= FEW_BLOCKS and (heads % threads == 0 or heads >= ENOUGH_HEADS * threads)
    unit = blocks if whole else 1
    return Portions(min(PER_THREAD * threads, one_by_one(heads * blocks // unit).count), unit)


def one_by_one(items: int) -> Portions:
    """Portions of at most one item."""
    return Portions(2 * items, 1)


def before(number: int, units: int, count: int) -> int:
    """Number of `units` in the portions before one. Kernels compute the same."""
    return units - units * (count - number) ** 2 // count**2
