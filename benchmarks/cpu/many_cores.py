"""Attention on many cores, by the cost model of CPU kernels: predicted time of the tile that is chosen for so many
cores like those of this machine, and the share of their time that it uses. Nothing is run.

    python -m benchmarks.cpu.many_cores [--cores 2 16 64 128] [--dtype float32]

Two things are lost: cores wait for the last of them, and each that meets a head packs its keys and values. Where blocks
of rows are fewer than keep the cores busy, keys are in parts.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common import results
from fusion.machine import Machine
from fusion.machine.processors import of_such_cores
from fusion.planning.plan import plan
from fusion.planning.problem import Problem

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


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 16, 64, 128])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    machine, lines = Machine.detect(), []
    for name, (n_q, n_k, d, heads, heads_kv, batch, causal) in SIZES.items():
        problem = Problem(n_q=n_q, n_k=n_k, d=d, d_v=d, heads=heads, heads_kv=heads_kv, batch=batch, causal=causal,
                          dtype=options.dtype)  # fmt: skip
        tile, alone = fastest(problem, of_such_cores(machine, 1))
        lines.append([name, f"{1e3 * alone:.2f} ({tile})"])
        for cores in options.cores:
            tile, seconds = fastest(problem, of_cores(machine, cores))
            lines[-1].append(f"{1e3 * seconds:.3f} ({tile}), {alone / seconds / cores:.0%}")
    table = results.table(["problem", "1 core", *(f"{cores} cores" for cores in options.cores)], lines)
    results.publish(f"Predicted ms (tile) and share of all cores' time, {options.dtype}", table, None)


if __name__ == "__main__":
    main()
