"""Tangents and second derivatives of attention on a CPU: time against Inductor and eager mode.

    python -m benchmarks.cpu.derivatives [--lengths 512 1024 2048] [--heads 4] [--dtype float32] [--seconds 6]
        [--cases tangent penalty]

All run in turns within one process. tangent: the output and its tangent, by `torch.func.jvp`, without gradients.
tangent_trained: a loss of both, and its gradients. mean_flow: the tangent is part of the target, through which no
gradient flows. penalty: the square of a gradient, and the gradients of that. first_gradient: a gradient alone, which
kernels compute. fusion has `transforms="always"`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch._inductor.config
from torch.func import grad, jvp

from benchmarks.common.measuring import Entry, interleave
from benchmarks.common.results import heading

torch._inductor.config.compile_threads = 1
WIDTH = 64


def attend(q, k, v):
    return torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v


def tangent(q, k, v):
    return jvp(attend, (q, k, v), (v, q, k))


def tangent_trained(q, k, v):
    return sum(part.square().mean() for part in tangent(q, k, v))


def mean_flow(q, k, v):
    out, moved, *_ = tangent(q, k, v)
    return (out - (v - moved).detach()).square().mean()


def penalty(q, k, v):
    return grad(lambda x: attend(x, k, v).sin().sum())(q).square().mean()


def first_gradient(q, k, v):
    return (grad(lambda x: attend(x, k, v).sin().sum())(q),)


CASES = {case.__name__: case for case in (tangent, tangent_trained, mean_flow, penalty, first_gradient)}
TRAINED = (tangent_trained, mean_flow, penalty)


def contestants(case: Callable, tensors: list[torch.Tensor]) -> list[Entry]:
    """What is timed for one case, each run once."""
    compiled = {
        "fusion": torch.compile(case, backend="fusion", options={"transforms": "always"}),
        "inductor": torch.compile(case, backend="inductor"),
        "eager": case,
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, run in compiled.items():
        if case in TRAINED:
            calls[name] = lambda run=run: torch.autograd.grad(run(*tensors), tensors)
        else:
            calls[name] = lambda run=run: run(*tensors)
        calls[name]()
    return [Entry(name=name, call=call) for name, call in calls.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    chosen = parser.parse_args()
    print(heading("Tangents and second derivatives"))
    print(f"{chosen.heads} heads of {WIDTH}, {chosen.dtype}; medians in ms\n")
    print("| case | N | fusion | Inductor | eager | Inductor / fusion |\n|---|---|---|---|---|---|")
    for name in chosen.cases:
        case = CASES[name]
        for length in chosen.lengths:
            torch._dynamo.reset()
            torch.manual_seed(0)
            shape = (1, chosen.heads, length, WIDTH)
            options = {"dtype": getattr(torch, chosen.dtype), "requires_grad": case in TRAINED}
            tensors = [torch.randn(shape, **options) for _ in range(3)]
            entries = contestants(case, tensors)
            interleave(entries, seconds=chosen.seconds)
            ms = [1e3 * (entry.median or 0.0) for entry in entries]
            print(f"| {name} | {length} | {' | '.join(f'{t:.1f}' for t in ms)} | {ms[1] / ms[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
