"""How attention scales with cores, by the cost model of CPU kernels: predicted time of the tile that is chosen for so
many cores, and the share of these cores' time that it uses (one core's predicted time over that of all).

    python benchmarks/many_cores.py [--cores 2 16 64 128] [--dtype float32]

The cores are like those of this machine. Nothing is run. Two things are lost: cores wait for the last of them, and each
that meets a head packs its keys and values. Where blocks of rows are fewer than keep the cores busy, keys are in parts.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from fusion.machine import Machine
from fusion.machine.processors import of_such_cores
from fusion.planning.plan import plan
from fusion.planning.problem import Problem

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


def fastest(problem: Problem, machine: Machine) -> tuple[str, float]:
    """The tile of least predicted time, with the parts of the keys where they are cut, and that time in seconds."""
    chosen = plan(problem, machine, allow=("flash", "block_sparse", "split_k"))
    parts = f", {chosen.splits} parts" if chosen.splits > 1 else ""
    return f"{chosen.B_r} x {chosen.B_c}{parts}", chosen.time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 16, 64, 128])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    here = Machine.detect()
    print(f"Cores like those of {here.name}, {options.dtype}; predicted ms (tile), share of all cores' time\n")
    print(f"| problem | 1 core | {' | '.join(f'{cores} cores' for cores in options.cores)} |")
    print(f"| --- | ---: |{' ---: |' * len(options.cores)}")
    for name, problem in PROBLEMS.items():
        problem = replace(problem, dtype=options.dtype)
        tile, alone = fastest(problem, of_such_cores(here, 1))
        cells = [f"{1e3 * alone:.2f} ({tile})"]
        for cores in options.cores:
            tile, seconds = fastest(problem, of_such_cores(here, cores))
            cells.append(f"{1e3 * seconds:.3f} ({tile}), {alone / seconds / cores:.0%}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
