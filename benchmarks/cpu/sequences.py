"""Schedules of a sequence that is sharded over two processes, each pinned to a core: measured and predicted seconds of
a forward and a backward, and the schedule that "auto" takes. Needs two cores and Linux.

    python -m benchmarks.cpu.sequences [--N 2048] [--repeats 3]

The processes exchange data over gloo's sockets on this machine. The time is that of the slower process, the least of
the repeats, in which the schedules take turns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fusion
from benchmarks.common.results import heading, table
from fusion.machine import machine
from fusion.planning.problem import Problem
from fusion.sequences import SCHEDULES, cost, schedules

PROCESSES, HEADS, D = 2, 8, 64


def scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q @ k.mT / D**0.5, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k)[0].softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, i, j = scores(q, k)
    return s.masked_fill(j > i, float("-inf")).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, i, j = scores(q, k)
    return s.masked_fill((j > i) | (i - j >= 256), float("-inf")).softmax(-1) @ v


CASES: dict[str, tuple[Callable[..., Tensor], int, dict[str, Any]]] = {
    "plain": (plain, HEADS, {}),
    "plain, 1 head": (plain, 1, {}),
    "causal": (causal, HEADS, {"causal": True}),
    "causal, 1 head": (causal, 1, {"causal": True}),
    "window of 256, 1 head": (window, 1, {"causal": True, "window": 256}),
}


def step(attend: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Seconds of the slower process."""
    dist.barrier()
    start = time.perf_counter()
    out = attend(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def work(rank: int, folder: str, length: int, repeats: int) -> None:
    """One process: writes the seconds of each schedule and the one that is chosen, by case."""
    os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    mesh, measured = init_device_mesh("cpu", (PROCESSES,)), {}
    for name, (function, heads, mask) in CASES.items():
        local = torch.randn(3, 1, heads, length // PROCESSES, D, generator=torch.Generator().manual_seed(rank))
        inputs = [DTensor.from_local(part, mesh, [Shard(2)]).requires_grad_() for part in local]
        ways = {way: fusion.sequence_parallel(function, options={"sequences": way}) for way in SCHEDULES}
        if heads % PROCESSES:
            del ways["all_to_all"]
        for attend in ways.values():
            step(attend, inputs)
        times = [{way: step(attend, inputs) for way, attend in ways.items()} for _ in range(repeats)]
        least = {way: min(one[way] for one in times) for way in ways}
        problem = Problem(n_q=length, n_k=length, d=D, d_v=D, heads=heads, heads_kv=heads, **mask)
        traffic, target = schedules.across(problem, PROCESSES), machine("cpu")  # of one core
        given = target, "float32", cost.LINKS["cpu"]
        predicted = {way: traffic.seconds(way, *given, trained=True) for way in ways}
        measured[name] = least, predicted, cost.cheapest(traffic, [*ways], target, "float32")
    torch.save(measured, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--N", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (folder, options.N, options.repeats), nprocs=PROCESSES)
        measured, lines = torch.load(f"{folder}/0.pt"), []
    for name, (times, predicted, chosen) in measured.items():
        cells = [f"{1e3 * times[w]:.0f} ({1e3 * predicted[w]:.0f})" if w in times else "" for w in SCHEDULES]
        lines.append([name, *cells, chosen, f"{times[chosen] / min(times.values()):.2f}"])
    print(heading(f"Schedules of {options.N} rows on {PROCESSES} processes, forward and backward, ms (predicted)"))
    print(table(["", *SCHEDULES, "chosen", "of the best"], lines))


if __name__ == "__main__":
    main()
