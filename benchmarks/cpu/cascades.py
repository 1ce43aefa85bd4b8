"""Attention that is no single softmax, on a CPU: weights that are divided by a sum of their own, and cascades of
reductions (docs/cascades.md), against Inductor and eager mode.

    python -m benchmarks.cpu.cascades [--sizes 12x512 12x1024 2x4096] [--dtype float32 bfloat16] [--cases ..]

All run in turns within one process. Sizes are heads x length, of 64 columns; inference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch._inductor.config

from benchmarks.common.measuring import Entry, interleave
from fusion.machine import machine as find_machine

torch._inductor.config.compile_threads = 1
WIDTH = 64


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[1, H, N, N]."""
    return q @ k.mT / WIDTH**0.5


def renormalised(q, k, v):
    """What a mask leaves of a softmax adds up to 1 again; one attention."""
    w = torch.softmax(scores(q, k), -1) * (torch.arange(k.shape[-2]) % 5 > 0).to(q.dtype)
    return w / (w.sum(-1, keepdim=True) + 1e-13) @ v


def of_relu(q, k, v):
    w = torch.relu(scores(q, k)) + 1e-3
    return w / w.sum(-1, keepdim=True) @ v


def of_squares(q, k, v):
    w = torch.relu(scores(q, k)).square()
    return w / (w.sum(-1, keepdim=True) + 1e-6) @ v


def of_a_softmax(q, k, v):
    return torch.softmax(torch.softmax(scores(q, k), -1), -1) @ v


def less_the_largest(q, k, v):
    s = scores(q, k)
    return torch.softmax((s - s.max()).clamp(min=-50000), -1) @ v


def slots(q, k, v):
    w = torch.softmax(scores(q, k), -2) + 1e-8
    return w / w.sum(-1, keepdim=True) @ v


def over_queries(q, k, v):
    return torch.softmax(scores(q, k), -2) @ v


CASES: dict[str, Callable[..., torch.Tensor]] = {
    case.__name__: case
    for case in (renormalised, of_relu, of_squares, of_a_softmax, less_the_largest, slots, over_queries)
}


def measured(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], seconds: float) -> dict[str, float]:
    """Median milliseconds, by name."""
    torch._dynamo.reset()
    calls = {
        "fusion": torch.compile(function, backend="fusion", options={"cascades": "always"}),
        "Inductor": torch.compile(function),
        "eager": function,
    }
    entries = [Entry(name=name, call=lambda call=call: call(*tensors)) for name, call in calls.items()]
    with torch.no_grad():
        for call in calls.values():
            call(*tensors)
        interleave(entries, seconds=seconds)
    return {entry.name: 1e3 * (entry.median or 0.0) for entry in entries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["12x512", "12x1024", "2x4096"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    chosen = parser.parse_args()
    torch.manual_seed(0)
    print(f"{find_machine('cpu').name}, {torch.get_num_threads()} threads, torch {torch.__version__}; medians in ms\n")
    print(f"| case | heads x length | dtype | fusion | Inductor | eager | Inductor / fusion |\n|{'---|' * 7}")
    for dtype in chosen.dtype:
        for size in chosen.sizes:
            heads, length = map(int, size.split("x"))
            tensors = [torch.randn(1, heads, length, WIDTH, dtype=getattr(torch, dtype)) for _ in range(3)]
            for case in chosen.cases:
                ms = measured(CASES[case], tensors, chosen.seconds)
                times = " | ".join(f"{value:.1f}" for value in ms.values())
                print(f"| {case} | {size} | {dtype} | {times} | {ms['Inductor'] / ms['fusion']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
