"""How attention scales with cores, by the cost model of CPU kernels: predicted time of the tile that is chosen for so
many cores, and the share of these cores' time that it uses (one core's predicted time over that of all).

    python -m benchmarks.cpu.many_cores [--cores 2 16 64 128] [--dtype float32]
    python -m benchmarks.cpu.many_cores --backward [--cores 2 16 32 64 128] [--dtype float32]
    python -m benchmarks.cpu.many_cores --here [--dtype float32]

The cores are like those of this machine. Two things are lost: cores wait for the last of them, and each that meets a
head packs its keys and values. Where blocks of rows are fewer than keep the cores busy, keys are in parts.

With --backward: the backward by two kernels (seven products) and by one (five), whose dQ is summed up over parts of the
keys, with the memory of all threads together.

Nothing is run, but with --here: calls with few blocks of rows, whose keys the planner cuts into parts, in turns with
whole keys on all cores of this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common.rows import full
from fusion.codegen.mlir.launch import Kernel
from fusion.codegen.mlir.training import backward_tiling
from fusion.machine import Machine
from fusion.machine.processors import of_such_cores
from fusion.planning.choice import Choice, query_stationary
from fusion.planning.cpu_backward import FUSED, KEYS, QUERIES, Backward
from fusion.planning.cpu_planner import CpuPlanner
from fusion.planning.plan import plan
from fusion.planning.problem import Problem, attention_of
from fusion.planning.register_tiles import target_of, tilings_for
from fusion.runtime import kernels

PROBLEMS = {
    "BERT-base, N = 512": Problem(n_q=512, n_k=512, d=64, d_v=64, heads=12, heads_kv=12),
    "the same, batch 8": Problem(n_q=512, n_k=512, d=64, d_v=64, heads=12, heads_kv=12, batch=8),
    "ViT-B/16, N = 197": Problem(n_q=197, n_k=197, d=64, d_v=64, heads=12, heads_kv=12),
    "GPT-2, N = 1024, causal": Problem(n_q=1024, n_k=1024, d=64, d_v=64, heads=12, heads_kv=12, causal=True),
    "the same, N = 4096": Problem(n_q=4096, n_k=4096, d=64, d_v=64, heads=12, heads_kv=12, causal=True),
    "Llama-3 8B, N = 4096, causal": Problem(n_q=4096, n_k=4096, d=128, d_v=128, heads=32, heads_kv=8, causal=True),
    "64 queries over 16384 keys": Problem(n_q=64, n_k=16384, d=128, d_v=128, heads=32, heads_kv=8),
    "Whisper small encoder": Problem(n_q=1500, n_k=1500, d=64, d_v=64, heads=12, heads_kv=12),
    "Stable Diffusion, 64 x 64": Problem(n_q=4096, n_k=4096, d=40, d_v=40, heads=8, heads_kv=8),
    "one head, 256 queries over 50176 keys": Problem(n_q=256, n_k=50176, d=64, d_v=64),
}

SECONDS = 1.0
CELLS = [  # heads, queries, keys, d
    (1, 40, 1024, 64), (1, 48, 4096, 64), (1, 40, 16384, 64), (1, 48, 50176, 64), (3, 33, 3000, 64),
    (3, 48, 8192, 128), (1, 144, 8192, 64), (1, 24, 8192, 128),
]  # fmt: skip


def fastest(problem: Problem, machine: Machine) -> tuple[str, float]:
    """The tile of least predicted time, with the parts of the keys where they are cut, and that time in seconds."""
    chosen = plan(problem, machine)
    parts = f", {chosen.splits} parts" if chosen.splits > 1 else ""
    return f"{chosen.B_r} x {chosen.B_c}{parts}", chosen.time


def of_cores(machine: Machine, cores: int) -> Machine:
    """A machine of so many of these cores, with as much bandwidth for each as `Machine.detect` takes for one."""
    levels = tuple(
        replace(level, bandwidth=level.bandwidth * cores / machine.cores) if level.shared else level
        for level in machine.levels
    )
    return of_such_cores(replace(machine, levels=levels), cores)


def backward(problem: Problem, machine: Machine) -> Backward:
    """The backward as a training kernel plans it."""
    target, spec = target_of(machine), attention_of(problem)
    tiling = backward_tiling(tilings_for(spec, target)[0], target)
    return Backward(
        problem=problem, machine=machine, outer=problem.problems, inner=1, block=tiling.groups * target.lanes,
        tile=tiling.keys, planes=tiling.planes, amx=target.amx,
    )  # fmt: skip


def backward_cell(problem: Problem, machine: Machine) -> str:
    """Predicted ms of two kernels and of one, which of them is chosen, and the memory of all threads."""
    work = backward(problem, machine)
    one, two = work.division(FUSED), [work.division(form) for form in (QUERIES, KEYS)]
    memory = machine.cores * work.workspace(FUSED) + one.shared
    seconds = sum(division.seconds for division in two)
    parts = f"{one.parts} parts" if one.parts > 1 else "whole"
    chosen = f"{seconds / one.seconds:.2f}x" if work.fuses else "two kernels"
    return f"{1e3 * seconds:.2f}, {1e3 * one.seconds:.2f} ({parts}), {chosen}; {memory / 2**20:.0f} MiB"


class Chosen:
    """A planner of one choice."""

    def __init__(self, choice: Choice):
        self.choice = choice

    def choose(self, sizes: Sequence[int], existing: Sequence[Choice] = ()) -> Choice:
        return self.choice


def measure(heads: int, n_q: int, n_k: int, d: int, dtype: str) -> str:
    """A line of the table: medians with whole keys and in parts, and what was predicted."""
    torch._dynamo.reset()
    kernels.forget()
    operands = [torch.randn(1, heads, n, d).to(getattr(torch, dtype)) for n in (n_q, n_k, n_k)]
    torch.compile(full, backend="fusion", dynamic=False)(*operands)
    (run,) = kernels._forward.values()
    spec, machine = run.spec, Machine.detect()
    sizes = list(next(reversed(run.kernel._calls))[1 : 1 + len(spec.sizes)])
    cut = CpuPlanner(spec, machine).choose(sizes)
    choices = [replace(cut, schedule=query_stationary(spec), splits=1), cut]
    target = target_of(machine)
    calls = [Kernel(spec, tilings_for(spec, target), target, Chosen(choice)) for choice in choices]
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call(operands, sizes)
            found.append(1e6 * (time.perf_counter() - start))
    whole, parts = map(statistics.median, times)
    expected = [
        1e6 * plan(spec, machine, sizes=dict(zip(spec.sizes, sizes, strict=True)), choice=choice).time
        for choice in choices
    ]
    cells = f"{whole:.0f} | {parts:.0f} | {whole / parts:.2f} | {expected[0] / expected[1]:.2f} |"
    return f"| {heads} | {n_q} | {n_k} | {d} | {cut.tile.rows} x {cut.tile.keys}, {cut.splits} parts | {cells}"


@torch.inference_mode()
def here(dtype: str) -> None:
    """Measure on all cores of this machine."""
    print(f"{Machine.detect()}; {torch.get_num_threads()} threads, {dtype}; medians in us\n")
    print("| heads | queries | keys | d | tile | whole keys | parts | gain | predicted |")
    print(f"|{' ---: |' * 9}")
    for cell in CELLS:
        print(measure(*cell, dtype), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--here", action="store_true", help="measure calls with few blocks of rows on this machine")
    options = parser.parse_args()
    if options.here:
        here(options.dtype)
        return
    machine = Machine.detect()
    if options.backward:
        cores = options.cores or [2, 16, 32, 64, 128]
        print(f"Cores like those of {machine.name}, {options.dtype}; ms of two kernels, of one; memory\n")
        print(f"| problem | {' | '.join(f'{count} cores' for count in cores)} |")
        print(f"| --- |{' ---: |' * len(cores)}")
        for name, problem in PROBLEMS.items():
            problem = replace(problem, dtype=options.dtype, heads_kv=problem.heads)
            cells = [backward_cell(problem, of_cores(machine, count)) for count in cores]
            print(f"| {name} | {' | '.join(cells)} |")
        return
    options.cores = options.cores or [2, 16, 64, 128]
    print(f"Cores like those of {machine.name}, {options.dtype}; predicted ms (tile), share of all cores' time\n")
    print(f"| problem | 1 core | {' | '.join(f'{cores} cores' for cores in options.cores)} |")
    print(f"| --- | ---: |{' ---: |' * len(options.cores)}")
    for name, problem in PROBLEMS.items():
        problem = replace(problem, dtype=options.dtype)
        tile, alone = fastest(problem, of_such_cores(machine, 1))
        cells = [f"{1e3 * alone:.2f} ({tile})"]
        for cores in options.cores:
            tile, seconds = fastest(problem, of_such_cores(machine, cores))
            cells.append(f"{1e3 * seconds:.3f} ({tile}), {alone / seconds / cores:.0%}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
