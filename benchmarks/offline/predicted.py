"""Times by the cost model alone, for machines that are not there; nothing is run.

    python -m benchmarks.offline.predicted cores [--cores 2 16 64 128] [--dtype float32]
    python -m benchmarks.offline.predicted devices

cores: attention on so many cores like those of this machine: time of the tile that is chosen, and the share of their
time that it uses. Two things are lost: cores wait for the last of them, and each that meets a head packs its keys and
values. Where blocks of rows are fewer than keep the cores busy, keys are in parts.

devices: schedules of a sequence that is sharded over up to 1,024 H200s: a training step of one attention of Llama 3 8B,
and the share of its time that products take at the machine's peak. As NVIDIA publishes them: 450 GB/s to the seven
others of a node (NVLink 4 in one direction), and 400 Gbit/s to other nodes (a ConnectX-7 adapter for each, DGX H200).
Every link of more than eight devices is taken to be of the latter.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from typing import Any

from benchmarks.common import results
from fusion.machine import Machine, machine
from fusion.machine.processors import of_such_cores
from fusion.planning.plan import plan
from fusion.planning.problem import Problem
from fusion.sequences import cost
from fusion.sequences.schedules import across

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
NODE, LINKS = 8, (450e9, 50e9)
DEVICES = (8, 64, 256, 1024)
LENGTHS = tuple(1 << n for n in range(16, 25, 2))
MODEL: dict[str, Any] = {"d": 128, "d_v": 128, "heads": 32, "heads_kv": 8, "dtype": "bf16"}
MASKS: dict[str, dict[str, Any]] = {
    "no mask": {}, "causal": {"causal": True}, "causal, window of 4096": {"causal": True, "window": 4096},
}  # fmt: skip


def of_cores(one: Machine, cores: int) -> Machine:
    """A machine of so many of these cores, with as much bandwidth for each as `Machine.detect` takes for one."""
    levels = (
        replace(level, bandwidth=level.bandwidth * cores / one.cores) if level.shared else level for level in one.levels
    )
    return of_such_cores(replace(one, levels=tuple(levels)), cores)


def on_cores(options: argparse.Namespace) -> None:
    this, lines = Machine.detect(), []
    for name, (n_q, n_k, d, heads, heads_kv, batch, causal) in SIZES.items():
        problem = Problem(n_q=n_q, n_k=n_k, d=d, d_v=d, heads=heads, heads_kv=heads_kv, batch=batch, causal=causal,
                          dtype=options.dtype)  # fmt: skip
        alone = plan(problem, of_such_cores(this, 1))
        lines.append([name, f"{1e3 * alone.time:.2f} ({alone.B_r} x {alone.B_c})"])
        for cores in options.cores:
            chosen = plan(problem, of_cores(this, cores))
            parts = f", {chosen.splits} parts" if chosen.splits > 1 else ""
            share = alone.time / chosen.time / cores
            lines[-1].append(f"{1e3 * chosen.time:.3f} ({chosen.B_r} x {chosen.B_c}{parts}), {share:.0%}")
    header = ["problem", "1 core", *(f"{cores} cores" for cores in options.cores)]
    title = f"Predicted ms (tile) and share of all cores' time, {options.dtype}"
    results.publish(title, results.table(header, lines), None)


def on_devices(options: argparse.Namespace) -> None:
    target, lines = machine("h200"), []
    for mask, devices, length in itertools.product(MASKS, DEVICES, LENGTHS):
        traffic = across(Problem(n_q=length, n_k=length, **MODEL, **MASKS[mask]), devices)
        rows = cost.rows(traffic, target, "bf16", LINKS[devices > NODE])
        times = {row["schedule"]: row["training_seconds"] for row in rows}
        pairs = float(traffic.layouts["ring"].pairs.mean())
        products = sum(cost.PRODUCTS["gather"]) * (traffic.d + traffic.d_v) * traffic.heads * pairs
        best = min((name for name in times if name != "mesh"), key=times.__getitem__)
        cells = [f"{1e3 * times[name]:.3g}" if name in times else "" for name in cost.FORMULAS]
        share = f"{products / target.flops('bf16') / times[best]:.0%}"
        lines.append([f"{mask}, {devices} devices, {length >> 10} Ki", *cells, best, share])
    title = "Predicted milliseconds of a training step of one attention (32 heads of 128, 8 of keys, bf16), H200s"
    results.publish(title, results.table(["", *cost.FORMULAS, "chosen", "products at peak"], lines), None)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("study", choices=["cores", "devices"])
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 16, 64, 128])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    (on_cores if options.study == "cores" else on_devices)(options)


if __name__ == "__main__":
    main()
