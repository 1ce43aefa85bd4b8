"""Predicted time: the maximum over resources, plus launch and tail effects.

Per core a block of queries costs matrix products at the tile's efficiency, exponentials and passes over the scores,
and a fixed overhead per block and per key tile. Blocks are dealt out in rounds (waves) over the cores, so a ragged
last round counts whole. Each memory level is a resource of its own. All figures in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion.machine import Machine
from fusion.planning.compiled import Counts
from fusion.planning.problem import Problem
from fusion.planning.tiles import Tiles


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
    """A schedule as a sequence of kernels that keep every resource busy: used where there is no kernel model of our
    own.
    """
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
    cache: dict[tuple[int, int], float] = {}
    pairs = list(zip(tiles["B_r"].tolist(), tiles["B_c"].tolist(), strict=True))
    for pair in set(pairs):
        cache[pair] = problem.live_share(*pair)
    return np.array([cache[pair] for pair in pairs])


def gpu_time(
    machine: Machine, problem: Problem, tiles: Tiles, shares: np.ndarray, splits: np.ndarray | int = 1
) -> Times:
    """The query-stationary GPU kernel, with the keys cut into `splits` where that is more than 1.

    Small tiles run the matrix units below peak (their fill shows below 128 rows or 64 columns); one stage exposes the
    memory latency. Re-reads of K and V by other query blocks are served by L2 as long as one wave's keys fit it.
    """
    rows, cols, stages = (tiles[name].astype(float) for name in ("B_r", "B_c", "stages"))
    d, d_v, size = max(1, problem.d), max(1, problem.d_v), problem.element_bytes
    keys = np.ceil(shares * max(1, problem.n_k) / splits)
    blocks = problem.problems * np.ceil(max(1, problem.n_q) / rows) * splits
    shared = rows * d * size + stages * cols * (d + d_v) * size
    registers = 4 * rows * (d_v + cols) + size * rows * cols
    resident = np.clip(np.floor(np.minimum(machine.shared_memory / shared, 0.9 * machine.registers / registers)), 1, 4)
    wave = np.ceil(blocks / (machine.cores * resident)) * resident
    busy = np.where(blocks < machine.cores * resident, np.ceil(blocks / machine.cores), wave)
    efficiency = np.minimum(1, rows / 128) ** 0.5 * np.minimum(1, cols / 64) ** 0.3 * np.where(stages > 1, 1, 0.7) * 0.8
    scores = rows * np.ceil(keys / cols) * cols
    products = busy * 2 * scores * (d + d_v) / (machine.flops(problem.dtype) / machine.cores * efficiency)
    exponentials = busy * scores * (1 + problem.score_flops / 16) / (machine.exp_rate / machine.cores)
    moved = blocks * (rows * (d + d_v) * size + keys * (d + d_v) * problem.key_bytes)
    heads_kv = max(1, problem.batch) * max(1, problem.heads_kv)
    compulsory = (d + d_v) * (problem.problems * problem.n_q * size + heads_kv * problem.n_k * problem.key_bytes)
    in_flight = (
        np.minimum(blocks, machine.cores * resident)
        / np.ceil(max(1, problem.n_q) / rows)
        * problem.n_k
        * (d + d_v)
        * problem.key_bytes
    )
    l2 = machine.level("L2")
    dram = np.where(in_flight <= l2.capacity, np.minimum(compulsory, moved), moved)
    used = np.minimum(1, blocks / machine.cores)
    resources = {
        "products": products,
        "exponentials": exponentials,
        "L2": moved / (l2.bandwidth * used),
        "HBM": dram / (machine.main.bandwidth * np.minimum(1, used * 2)),
    }
    merge = np.where(
        np.asarray(splits) > 1, machine.launch + 2 * blocks * rows * (d_v + 1) * 4 / machine.main.bandwidth, 0
    )
    overhead = machine.launch + merge + busy * (1.5e-6 + 1e-7 * np.ceil(keys / cols))
    total = (
        np.maximum.reduce(np.broadcast_arrays(*resources.values()))
        + 0.3 * np.minimum(products, exponentials)
        + overhead
    )
    return Times(total=total, resources=resources | {"overhead": overhead})


__all__ = ["Times", "gpu_time", "shares_of", "streaming_time"]
