"""Predicted time of the query-stationary CPU kernel.

A thread takes a contiguous run of work items (head, block of B_r queries). For a head it has not met yet it packs K
and V into the layout of its matrix instructions; for an item it packs Q, and for every block of B_c keys forms the
scores of all rows, exponentiates them, and adds to the output. Lanes are queries. Matrix instructions take bf16 tiles
(AMX, float32 as six products of three bf16 planes, float16 as three of two) or are float32 multiply-adds.

What the tile decides: rows and keys that are padded, dead scores under a mask, how often the output is reloaded (each
key block), how often packed K and V stream past (each row block), whether a tile's parts stay in L1, and how evenly
the items fall on the cores. The constants below are in cycles of the stated clock. They were fitted, for least loss of
the chosen tile against the best measured one, to single-thread runs of the kernel (bfloat16, float32 in three planes,
float32 multiply-adds; fastest of many rounds) on a machine with AVX-512 and AMX. Differences between tiles are a few
per cent there, so single constants mean less than their sum; benchmarks/model_fit.py shows what they are worth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fusion.cost.problem import Problem
from fusion.cost.tiles import Tiles
from fusion.cost.timing import Times
from fusion.machine import Machine

_PLANES = {"bfloat16": 1, "float16": 2}
_PLANE_PRODUCTS = {1: 1, 2: 3, 3: 6}

TILE_EFFICIENCY = 0.78  # of the AMX rate, tile loads included
FMA_EFFICIENCY = 1.2  # of the multiply-add rate at the stated clock, which cores exceed
CYCLES_PER_SCORES = {0: 5.0, 1: 5.0, 2: 6.5, 3: 8.0}  # a vector of scores: maximum, exponential, sum; by planes packed
CYCLES_PER_OUTPUT = 0.6  # for one vector of the output, loaded and stored once per key block
CYCLES_PER_PACKED = 8.0  # for one vector of Q, K or V brought into the kernel's layout
CYCLES_PER_OPERATION = 1.0  # for one vector through one more operation of the score program
CYCLES_PER_ITEM = 500.0
CYCLES_PER_BLOCK = 54.0  # a row group meets a key block: loop set-up, statistics; for each plane (3 without)
L2_BYTES_PER_CYCLE = 88.0  # what does not stay in L1; mostly hidden by prefetching
HIDDEN = 0.3  # how far matrix products hide cache traffic: by the power of products per byte
SPILL_FROM, SPILL_OVER = 0.7, 0.77  # a cache begins to lose a tile at this share of its capacity, over this range
L3_BYTES_PER_CYCLE = 8.0  # packed K and V that outgrow L2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """What the kernel does with this problem on this machine: planes (0 is multiply-add), element bytes of its packed
    operands, register tile in keys and rows, padded head dimensions."""

    planes: int
    size: int
    key_step: int
    row_step: int
    d: int
    e: int

    @property
    def products(self) -> int:
        return _PLANE_PRODUCTS[self.planes] if self.planes else 1


def _kernel(problem: Problem, machine: Machine, multiples: tuple[int, int]) -> _Kernel:
    amx = "amx_bf16" in machine.isa and multiples[1] % 32 == 0
    planes = _PLANES.get(problem.dtype, 3) if amx else 0
    d, e = max(1, problem.d), max(1, problem.d_v)
    return _Kernel(
        planes=planes,
        size=2 * planes or 4,
        key_step=32 if amx else multiples[1],
        row_step=multiples[0],
        d=_up(d, 32) if amx else d,
        e=_up(e, 16) if amx else _up(e, multiples[1]),
    )


def cpu_time(machine: Machine, problem: Problem, tiles: Tiles, multiples: tuple[int, int], *, skip: bool) -> Times:
    """Seconds for each tile; `skip`: tiles that the mask hides are left out. multiples: the register tile (rows,
    keys).
    """
    kernel = _kernel(problem, machine, multiples)
    parts = [
        _tile_time(machine, problem, kernel, int(rows), int(keys), skip)
        for rows, keys in zip(tiles["B_r"], tiles["B_c"], strict=True)
    ]
    resources = {name: np.array([part[name] for part in parts]) for name in parts[0]}
    return Times(total=sum(resources.values()), resources=resources)


def predict(
    machine: Machine, problem: Problem, tiles: Iterable[tuple[int, int]], multiples: tuple[int, int]
) -> dict[tuple[int, int], float]:
    """Predicted seconds of each (B_r, B_c)."""
    chosen = list(tiles)
    columns = np.array(chosen)
    times = cpu_time(machine, problem, {"B_r": columns[:, 0], "B_c": columns[:, 1]}, multiples, skip=problem.masked)
    return dict(zip(chosen, times.total.tolist(), strict=True))


def _tile_time(
    machine: Machine, problem: Problem, kernel: _Kernel, rows: int, keys: int, skip: bool
) -> dict[str, float]:
    """Seconds by resource of the busiest thread."""
    n_q, n_k = max(1, problem.n_q), max(1, problem.n_k)
    start, end = problem.key_ranges(rows) if skip else _all_keys(n_q, n_k, rows)
    met = (end - start) * problem.density if skip else end - start
    cost = _item_cycles(machine, problem, kernel, rows, keys, met, n_q, n_k)
    threads = max(1, min(machine.cores, problem.problems * len(start)))
    low, high = _busiest(sum(cost.values()), problem.problems, threads)
    cycles = {name: _run(np.broadcast_to(part, met.shape), low, high) for name, part in cost.items()}
    heads = -(-high // len(start)) - low // len(start)
    cycles["packing"] += (
        heads * n_k * (kernel.d + kernel.e) / machine.lanes() * CYCLES_PER_PACKED * max(1, kernel.planes)
    )
    clock = machine.clock or 2.5e9
    return {name: value / clock for name, value in cycles.items()} | {"launch": machine.launch}


def _item_cycles(
    machine: Machine, problem: Problem, kernel: _Kernel, rows: int, keys: int, met: np.ndarray, n_q: int, n_k: int
) -> dict[str, np.ndarray]:
    """Cycles of every block of rows of one head, by resource. met: keys that the block meets."""
    lanes, clock = machine.lanes(), machine.clock or 2.5e9
    here = np.full(len(met), rows)
    here[-1] = n_q - rows * (len(met) - 1)
    padded, vectors = _up(here, kernel.row_step), _up(here, lanes) / lanes
    taken, blocks = _up(met, kernel.key_step), np.ceil(met / keys)
    width = np.minimum(keys, taken)
    groups = padded / kernel.row_step
    rate = machine.flops("bfloat16" if kernel.planes else "float32") / machine.cores / clock
    rate *= TILE_EFFICIENCY if kernel.planes else FMA_EFFICIENCY
    score_cycles = CYCLES_PER_SCORES[kernel.planes] + problem.score_flops * CYCLES_PER_OPERATION
    query, value, score = padded * kernel.d * kernel.size, width * kernel.e * kernel.size, padded * width * 4
    stream = taken * (kernel.d + kernel.e) * kernel.size
    output, weight = padded * kernel.e * 4, padded * width * kernel.size
    nearest, second = (level.capacity for level in machine.levels[:2])
    outgrown = _spilled(query + score + weight + value + output, nearest)
    again = (groups - 1) * taken * kernel.e * kernel.size + taken / kernel.key_step * query
    again = again + padded * taken * (3 * 4 + 2 * kernel.size) + 2 * output * blocks
    near = stream + again * outgrown  # hidden behind arithmetic in so far as each byte has more of it to wait for
    far = stream * _spilled(n_k * (kernel.d + kernel.e) * kernel.size + query + score + weight, second)
    return {
        "products": 2 * padded * taken * (kernel.d + kernel.e) * kernel.products / rate,
        "softmax": vectors * taken * score_cycles + groups * blocks * CYCLES_PER_BLOCK * (kernel.planes or 3),
        "output": padded * kernel.e / lanes * blocks * CYCLES_PER_OUTPUT,
        "cache": (near / L2_BYTES_PER_CYCLE + far / L3_BYTES_PER_CYCLE) / kernel.products**HIDDEN,
        "packing": padded * (kernel.d + kernel.e) / lanes * CYCLES_PER_PACKED + CYCLES_PER_ITEM,
    }


def _all_keys(n_q: int, n_k: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    count = -(-n_q // rows)
    return np.zeros(count, dtype=np.int64), np.full(count, n_k)


def _spilled(size: np.ndarray, capacity: int) -> np.ndarray:
    """Share of `size` bytes that a cache does not keep."""
    return np.clip((size / capacity - SPILL_FROM) / SPILL_OVER, 0, 1)


def _busiest(cost: np.ndarray, heads: int, threads: int) -> tuple[int, int]:
    """First and end item of the costliest of the contiguous runs that the items are dealt in."""
    items = heads * len(cost)
    edges = [items * thread // threads for thread in range(threads + 1)]
    runs = list(zip(edges[:-1], edges[1:], strict=True))
    return max(runs, key=lambda run: _run(cost, *run))


def _run(cost: np.ndarray, low: int, high: int) -> float:
    """Sum of `cost`, repeated for every head, over the items low..high."""
    total, before = cost.sum(), np.concatenate([[0.0], np.cumsum(cost)])
    count = len(cost)
    return float((high // count - low // count) * total + before[high % count] - before[low % count])


def _up(size: int | np.ndarray, multiple: int):
    """Rounded up to a multiple, numbers or arrays."""
    return -(-size // multiple) * multiple
