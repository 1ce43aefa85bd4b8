"""Attention on many cores, by the cost model of CPU kernels: predicted time of the tile that is chosen for so many
cores like those of this machine, and the share of their time that it uses. Nothing is run.

    python -m benchmarks.cpu.many_cores [--cores 2 16 64 128] [--dtype float32]
    python -m benchmarks.cpu.many_cores --packing

Two things are lost: cores wait for the last of them, and each that meets a head packs its keys and values. Where blocks
of rows are fewer than keep the cores busy, keys are in parts. packing: processor time of one thread, as what is left of
a call when that of more blocks of rows over the same keys is taken off; and how often threads that are equally fast
pack a head.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import math
import time
from dataclasses import replace

import torch

from benchmarks.common.results import heading, table
from fusion.codegen.cpu.launch import Kernel
from fusion.ir import AttentionSpec, Operand
from fusion.ir.expr import SCORE, C, E, I, J, const, coord, size
from fusion.ir.integers import integer
from fusion.ir.ops import apply
from fusion.ir.spec import Normalizer, Output
from fusion.machine import Machine
from fusion.machine.processors import of_such_cores
from fusion.planning.cpu import before, portions
from fusion.planning.plan import plan
from fusion.planning.problem import Problem
from fusion.planning.register_tiles import Tiling, planes_of, target_of

SIZES = {  # queries, keys, d, heads of Q and of K and V, batch, causal
    "BERT-base, N = 512": (512, 512, 64, 12, 12, 1, False),
    "the same, batch 8": (512, 512, 64, 12, 12, 8, False),
    "ViT-B/16, N = 197": (197, 197, 64, 12, 12, 1, False),
    "GPT-2, N = 1024, causal": (1024, 1024, 64, 12, 12, 1, True),
    "the same, N = 4096": (4096, 4096, 64, 12, 12, 1, True),
    "Llama-3 8B, N = 4096, causal": (4096, 4096, 128, 32, 8, 1, True),
    "64 queries over 16384 keys": (64, 16384, 128, 32, 8, 1, False),
    "Whisper small encoder": (1500, 1500, 64, 12, 12, 1, False),
    "Stable Diffusion, 64 x 64": (4096, 4096, 40, 8, 8, 1, False),
    "one head, 256 queries over 50176 keys": (256, 50176, 64, 1, 1, 1, False),
}


def fastest(problem: Problem, machine: Machine) -> tuple[str, float]:
    """The tile of least predicted time, with the parts of the keys where they are cut, and that time in seconds."""
    choice = plan(problem, machine)
    parts = f", {choice.splits} parts" if choice.splits > 1 else ""
    return f"{choice.B_r} x {choice.B_c}{parts}", choice.time


def of_cores(machine: Machine, cores: int) -> Machine:
    """A machine of so many of these cores, with as much bandwidth for each as `Machine.detect` takes for one."""
    levels = tuple(
        replace(level, bandwidth=level.bandwidth * cores / machine.cores) if level.shared else level
        for level in machine.levels
    )
    return of_such_cores(replace(machine, levels=levels), cores)


def plain_spec(dtype: str, d: int) -> AttentionSpec:
    """Softmax attention of one head."""
    names = ("b0", "i", "e")
    return AttentionSpec(
        sizes=("Nq", "Nk"), batch=(integer(1),), n_q=size("Nq"), n_k=size("Nk"), d=integer(d), d_v=integer(d),
        operands=tuple(Operand(dtype=dtype, rank=3, name=name) for name in "qkv"), q=(coord("b0"), I, C),
        k=(coord("b0"), J, C), v=(coord("b0"), J, E), score=apply("fmul", SCORE, const(d**-0.5)), dtype=dtype,
        normalizer=Normalizer.SOFTMAX, out_dtype=dtype, output=Output(dims=names, order=names),
    )  # fmt: skip


def packings(heads: int, blocks: int, cores: int) -> tuple[int, int]:
    """How often cores that are equally fast pack the keys of a head, and how often one of them does at most."""
    items = heads * blocks
    count, unit = portions(heads, blocks, min(cores, items))
    edges = [unit * before(number, items // unit, count) for number in range(count + 1)]
    free, of_core = [(0, core, -1) for core in range(cores)], [0] * cores
    for low, high in zip(edges, edges[1:], strict=False):
        end, core, packed = heapq.heappop(free)
        for item in range(low, high):
            of_core[core] += item // blocks != packed
            packed = item // blocks
        heapq.heappush(free, (end + high - low, core, packed))
    return sum(of_core), max(of_core)


def packing_seconds(dtype: str, d: int, n_k: int) -> tuple[float, float]:
    """Least processor seconds of one thread to pack K and V, and for a block of 48 rows when they are."""
    spec, target = plain_spec(dtype, d), target_of(Machine.detect())
    rows, planes = target.tile_groups * target.lanes, planes_of(spec, target)
    kernel = Kernel(spec, [Tiling(groups=target.tile_groups, keys=256, planes=planes)], target)
    calls, least = [], [math.inf, math.inf]
    for blocks in (1, 4):
        operands = [torch.randn(1, n, d).to(getattr(torch, dtype)) for n in (blocks * rows, n_k, n_k)]
        calls.append(functools.partial(kernel, operands, [blocks * rows, n_k]))
    for _ in range(200):
        for n, call in enumerate(calls):
            start = time.thread_time()
            call()
            least[n] = min(least[n], time.thread_time() - start)
    block = (least[1] - least[0]) / 3
    return least[0] - block, block


def show_packing(cores: list[int]) -> None:
    torch.set_num_threads(1)
    lines = []
    for dtype, d, n_k in itertools.product(("float32", "bfloat16"), (64, 128), (512, 1024, 4096)):
        packing, block = packing_seconds(dtype, d, n_k)
        shares = (f"{packing / (packing + rows / 48 * block):.1%}" for rows in (96, 576))
        lines.append([f"{dtype}, d = {d}, {n_k} keys", f"{1e6 * packing:.0f}", f"{1e6 * block:.0f}", *shares])
    print(table(["us", "packing K and V", "48 rows", "share, 96 rows", "share, 576 rows"], lines))
    lines = [
        [f"{n} queries in blocks of {rows}", *("{}, {}".format(*packings(12, -(-n // rows), count)) for count in cores)]
        for n, rows in itertools.product((1024, 4096), (96, 192, 384, 576))
    ]
    print(table(["packings of 12 heads, of one core", *(f"{count} cores" for count in cores)], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 16, 64, 128])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--packing", action="store_true")
    options = parser.parse_args()
    if options.packing:
        show_packing(options.cores)
        return
    machine, lines = Machine.detect(), []
    for name, (n_q, n_k, d, heads, heads_kv, batch, causal) in SIZES.items():
        problem = Problem(n_q=n_q, n_k=n_k, d=d, d_v=d, heads=heads, heads_kv=heads_kv, batch=batch, causal=causal,
                          dtype=options.dtype)  # fmt: skip
        tile, alone = fastest(problem, of_such_cores(machine, 1))
        lines.append([name, f"{1e3 * alone:.2f} ({tile})"])
        for cores in options.cores:
            tile, seconds = fastest(problem, of_cores(machine, cores))
            lines[-1].append(f"{1e3 * seconds:.3f} ({tile}), {alone / seconds / cores:.0%}")
    print(heading(f"Predicted ms (tile) and share of all cores' time, {options.dtype}"), end="")
    print(table(["problem", "1 core", *(f"{cores} cores" for cores in options.cores)], lines))


if __name__ == "__main__":
    main()
