"""Schedules of a sequence that is sharded over two processes, each pinned to a core: measured and predicted seconds of
a forward and a backward, and the schedule that "auto" takes. Needs two cores and Linux.

    python -m benchmarks.cpu.sequences [--N 2048] [--repeats 15] [--starts 4]

The processes exchange data over gloo's sockets on this machine, and are started several times, since a start may be
slower than the next one throughout. The time is that of the slower process, the median of the repeats of all starts, in
which the schedules take turns.
"""

from __future__ import annotations

import os
import statistics
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
from benchmarks.common import results, rows
from fusion.machine import machine
from fusion.planning.problem import Problem
from fusion.sequences import SCHEDULES, cost, schedules

PROCESSES, HEADS, D = 2, 8, 64


CASES: dict[str, tuple[Callable[..., Tensor], int, dict[str, Any]]] = {
    "plain": (rows.full, HEADS, {}),
    "plain, 1 head": (rows.full, 1, {}),
    "causal": (rows.causal, HEADS, {"causal": True}),
    "causal, 1 head": (rows.causal, 1, {"causal": True}),
    f"window of {rows.WINDOW}, 1 head": (rows.window, 1, {"causal": True, "window": rows.WINDOW}),
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
    """One process: writes the seconds of each repeat by schedule, those predicted and the schedule that is chosen, by
    case."""
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
        problem = Problem(n_q=length, n_k=length, d=D, d_v=D, heads=heads, heads_kv=heads, **mask)
        traffic, target = schedules.across(problem, PROCESSES), machine("cpu")  # of one core
        given = target, "float32", cost.LINKS["cpu"]
        predicted = {way: traffic.seconds(way, *given, trained=True) for way in ways}
        measured[name] = times, predicted, cost.cheapest(traffic, [*ways], target, "float32")
    torch.save(measured, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _start(length: int, repeats: int) -> dict[str, Any]:
    """Results of the first process, by case, after a new start of all processes."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (folder, length, repeats), nprocs=PROCESSES)
        return torch.load(f"{folder}/0.pt")


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--N", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--starts", type=int, default=4)
    options = parser.parse_args()
    starts, lines = [_start(options.N, options.repeats) for _ in range(options.starts)], []
    for name, (_, predicted, chosen) in starts[0].items():
        times = [one for start in starts for one in start[name][0]]
        medians = {way: statistics.median(one[way] for one in times) for way in predicted}
        cells = [f"{1e3 * medians[w]:.0f} ({1e3 * predicted[w]:.0f})" if w in medians else "" for w in SCHEDULES]
        lines.append([name, *cells, chosen, f"{medians[chosen] / min(medians.values()):.2f}"])
    title = f"Schedules of {options.N} rows on {PROCESSES} processes, forward and backward, ms (predicted)"
    results.publish(title, results.table(["", *SCHEDULES, "chosen", "of the best"], lines), None)


if __name__ == "__main__":
    main()
