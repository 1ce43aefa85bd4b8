"""Predicted time: the maximum over resources, plus launch and tail effects.

Per core a block of queries costs matrix products at the tile's efficiency, exponentials and passes over the scores,
and a fixed overhead per block and per key tile. Blocks are dealt out in rounds (waves) over the cores, so a ragged
last round counts whole. Each memory level is a resource of its own. All figures in seconds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fusion.machine import Machine
from fusion.planning.problem import Problem
from fusion.planning.tiles import Tiles

if TYPE_CHECKING:
    from fusion.planning.compiled import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds by resource, arrays over tiles; `total` combines them. ideal: no kernel model, a lower limit."""

    total: np.ndarray
    resources: dict[str, np.ndarray]
    ideal: bool = False

    def at(self, index: int) -> dict[str, float]:
        """The resources' seconds for one tile."""
        return {name: float(np.broadcast_to(value, self.total.shape)[index]) for name, value in self.resources.items()}


def streaming_time(machine: Machine, problem: Problem, counts: Counts, kernels: int) -> Times:
    """A schedule as kernels that keep every resource busy: where there is no kernel model of our own."""
    scale = problem.problems
    resources = {
        "memory": counts.io * scale * problem.element_bytes / machine.main.bandwidth,
        "products": counts.flops * scale / machine.flops(problem.dtype),
        "exponentials": counts.exps * scale / machine.exp_rate,
    }
    total = np.maximum.reduce(np.broadcast_arrays(*resources.values())) + kernels * machine.launch
    return Times(total=np.atleast_1d(total), resources=resources, ideal=True)


def shares_of(problem: Problem, tiles: Tiles) -> np.ndarray:
    """The live share s of every tile in `tiles`."""
    share = functools.cache(problem.live_share)
    return np.array([share(*pair) for pair in zip(tiles["B_r"].tolist(), tiles["B_c"].tolist(), strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCosts:
    """What the GPU model assumes of a kernel beyond the machine's own rates.

    Where no source is named a value is an assumption: no GPU has been measured with it. The tiles of kernels are not
    chosen by it (`fusion.planning.gpu_model` does that) but schedules are.

    peak: share of the data sheet's matrix rate that whole tiles reach at best; FlashAttention-3 (2407.08608) reports
        0.75 on an H100, FlashAttention-2 (2307.08691) 0.73 on an A100, their softmax included.
    whole_rows, whole_keys: tiles of fewer rows or keys do not fill the matrix units.
    row_power, key_power: their efficiency falls with that power of what is missing.
    one_stage: share of the rate that is left where loads are not made ahead.
    usable_registers: share of the register file that accumulators may take.
    most_resident: programs that a processor runs side by side at most.
    operations: operations on a score in the time of one exponential; 256 flop against 16 special functions per clock
        (CUDA C++ Programming Guide, arithmetic throughput, compute capability 8.0 and 9.0).
    exposed: share of the shorter of products and exponentials that does not run beside the longer.
    saturating: share of the processors that together saturate the main memory.
    partial_bytes: bytes of an element of a split's partial result (float32), which is written and read once.
    block, tile: seconds to begin and end a block of rows, and a tile of keys.
    """

    peak: float = 0.8
    whole_rows: int = 128
    row_power: float = 0.5
    whole_keys: int = 64
    key_power: float = 0.3
    one_stage: float = 0.7
    usable_registers: float = 0.9
    most_resident: int = 4
    operations: float = 16.0
    exposed: float = 0.3
    saturating: float = 0.5
    partial_bytes: int = 4
    block: float = 1.5e-6
    tile: float = 1e-7


GPU_COSTS = GpuCosts()


def gpu_time(
    machine: Machine, problem: Problem, tiles: Tiles, shares: np.ndarray, splits: np.ndarray | int = 1
) -> Times:
    """The query-stationary GPU kernel, with the keys cut into `splits` where that is more than 1. Small tiles run the
    matrix units below peak; one stage exposes the memory latency. Re-reads of K and V by other query blocks are served
    by L2 as long as one wave's keys fit it."""
    rows, cols, stages = (tiles[name].astype(float) for name in ("B_r", "B_c", "stages"))
    d, d_v = max(1, problem.d), max(1, problem.d_v)
    keys = np.ceil(shares * max(1, problem.n_k) / splits)
    blocks = problem.problems * np.ceil(max(1, problem.n_q) / rows) * splits
    slots = machine.cores * _resident(machine, problem, rows, cols, stages)
    wave = np.ceil(blocks / slots) * (slots / machine.cores)
    busy = np.where(blocks < slots, np.ceil(blocks / machine.cores), wave)
    fill = np.minimum(1, rows / GPU_COSTS.whole_rows) ** GPU_COSTS.row_power
    fill *= np.minimum(1, cols / GPU_COSTS.whole_keys) ** GPU_COSTS.key_power
    efficiency = fill * np.where(stages > 1, 1, GPU_COSTS.one_stage) * GPU_COSTS.peak
    scores = rows * np.ceil(keys / cols) * cols
    products = busy * 2 * scores * (d + d_v) / (machine.flops(problem.dtype) / machine.cores * efficiency)
    operations = 1 + problem.score_flops / GPU_COSTS.operations
    exponentials = busy * scores * operations / (machine.exp_rate / machine.cores)
    memory = _memory_time(machine, problem, rows, keys, blocks, np.minimum(blocks, slots))
    resources = {"products": products, "exponentials": exponentials, **memory}
    partial = 2 * blocks * rows * (d_v + 1) * GPU_COSTS.partial_bytes / machine.main.bandwidth
    merge = np.where(np.asarray(splits) > 1, machine.launch + partial, 0)
    overhead = machine.launch + merge + busy * (GPU_COSTS.block + GPU_COSTS.tile * np.ceil(keys / cols))
    busiest = np.maximum.reduce(np.broadcast_arrays(*resources.values()))
    total = busiest + GPU_COSTS.exposed * np.minimum(products, exponentials) + overhead
    return Times(total=total, resources=resources | {"overhead": overhead})


def _resident(machine: Machine, problem: Problem, rows: np.ndarray, cols: np.ndarray, stages: np.ndarray) -> np.ndarray:
    """How many programs a processor runs side by side."""
    d, d_v, size = max(1, problem.d), max(1, problem.d_v), problem.element_bytes
    shared = rows * d * size + stages * cols * (d + d_v) * size
    registers = 4 * rows * (d_v + cols) + size * rows * cols
    fitting = np.minimum(machine.shared_memory / shared, GPU_COSTS.usable_registers * machine.registers / registers)
    return np.clip(np.floor(fitting), 1, GPU_COSTS.most_resident)


def _memory_time(
    machine: Machine, problem: Problem, rows: np.ndarray, keys: np.ndarray, blocks: np.ndarray, together: np.ndarray
) -> dict[str, np.ndarray]:
    """Seconds of L2 and main memory. keys: that a block meets. together: blocks that run at the same time."""
    dims, size = max(1, problem.d) + max(1, problem.d_v), problem.element_bytes
    moved = blocks * (rows * dims * size + keys * dims * problem.key_bytes)
    heads_kv = max(1, problem.batch) * max(1, problem.heads_kv)
    compulsory = dims * (problem.problems * problem.n_q * size + heads_kv * problem.n_k * problem.key_bytes)
    heads_together = together / np.ceil(max(1, problem.n_q) / rows)
    in_flight = heads_together * problem.n_k * dims * problem.key_bytes
    l2 = machine.level("L2")
    main = np.where(in_flight <= l2.capacity, np.minimum(compulsory, moved), moved)
    used = np.minimum(1, blocks / machine.cores)
    return {
        "L2": moved / (l2.bandwidth * used),
        "HBM": main / (machine.main.bandwidth * np.minimum(1, used / GPU_COSTS.saturating)),
    }
