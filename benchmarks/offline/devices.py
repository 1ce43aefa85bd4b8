"""Schedules of a sequence that is sharded over up to 1,024 devices, by the cost model: predicted seconds of a training
step of one attention, the share of its time that products take at the machine's peak, and where schedules cross.
Nothing is run.

    python -m benchmarks.offline.devices

H200s as NVIDIA publishes them: 450 GB/s to the seven others of a node (NVLink 4 in one direction), and 400 Gbit/s to
other nodes (a ConnectX-7 adapter for each, DGX H200). Every link of more than eight devices is taken to be of the
latter.
"""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.common import results
from fusion.machine import machine
from fusion.planning.problem import Problem
from fusion.sequences import cost
from fusion.sequences.schedules import across

NODE, LINKS = 8, (450e9, 50e9)
DEVICES = (8, 64, 256, 1024)
LENGTHS = tuple(1 << n for n in range(16, 25, 2))
MODEL: dict[str, Any] = {"d": 128, "d_v": 128, "heads": 32, "heads_kv": 8, "dtype": "bf16"}
"""An attention of Llama 3 8B."""
MASKS: dict[str, dict[str, Any]] = {
    "no mask": {}, "causal": {"causal": True}, "causal, window of 4096": {"causal": True, "window": 4096},
}  # fmt: skip


def predicted(mask: dict[str, Any], length: int, devices: int) -> tuple[dict[str, float], float]:
    """Seconds by schedule, and of the products alone at the machine's peak, if devices share them evenly."""
    target, problem = machine("h200"), Problem(n_q=length, n_k=length, **MODEL, **mask)
    traffic = across(problem, devices)
    rows = cost.rows(traffic, target, "bf16", LINKS[devices > NODE])
    work = sum(cost.PRODUCTS["gather"]) * (traffic.d + traffic.d_v) * traffic.heads
    return {row["schedule"]: row["training_seconds"] for row in rows}, work * float(
        traffic.layouts["ring"].pairs.mean()
    ) / target.flops("bf16")


def main() -> None:
    results.parser(__doc__).parse_args()
    lines = []
    for mask, devices, length in itertools.product(MASKS, DEVICES, LENGTHS):
        times, least = predicted(MASKS[mask], length, devices)
        best = min(times, key=times.__getitem__)
        cells = [f"{1e3 * times[name]:.3g}" if name in times else "" for name in cost.FORMULAS]
        lines.append([f"{mask}, {devices} devices, {length >> 10} Ki", *cells, best, f"{least / times[best]:.0%}"])
    title = "Predicted milliseconds of a training step of one attention (32 heads of 128, 8 of keys, bf16), H200s"
    results.publish(title, results.table(["", *cost.FORMULAS, "chosen", "products at peak"], lines), None)


if __name__ == "__main__":
    main()
