"""The backward of score programs on a CPU, against that of plain attention and Inductor's.

    python -m benchmarks.cpu.backward [--length 1024] [--heads 4] [--dtype float32 bfloat16] [--only NAME ..]

All run in turns in one process; medians. A backward is timed by itself, of gradients for Q, K, V and what the program
trains. The last column divides Inductor's time by ours.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor

torch._dynamo.config.recompile_limit = 1000  # programs made by one function share its code

WIDTH = 64
FARTHEST = 128
Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def programs(n: int, heads: int, dtype: torch.dtype) -> tuple[dict[str, Program], list[Tensor]]:
    """The programs by name, and what they train besides Q, K and V."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    slopes = -(0.5 ** torch.arange(1, heads + 1)).view(heads, 1, 1).to(dtype)
    positions = (i - j).clamp(-FARTHEST, FARTHEST) + FARTHEST  # an input: nothing says what it is made of
    hidden, padded = torch.rand(n, n) < 0.3, torch.arange(n) > 0.9 * n
    table, bias = torch.randn(2 * FARTHEST + 1, heads, dtype=dtype), torch.randn(heads, n, n, dtype=dtype)
    sink, factor = torch.randn(heads, 1, 1, dtype=dtype), 1 + torch.rand(heads, 1, 1).to(dtype)
    trained = [x.clone().requires_grad_() for x in (table, bias, sink, factor)]
    own_table, own_bias, sink, factor = trained

    def normalized(score: Callable[[Tensor], Tensor]) -> Program:
        return lambda q, k, v: torch.softmax(score(q @ k.mT / WIDTH**0.5), -1) @ v

    def alibi(s: Tensor) -> Tensor:
        return s + slopes * (j - i).abs()

    def capped(s: Tensor) -> Tensor:
        return 20 * torch.tanh(s / 20)

    def cosine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * (2 * factor).exp(), -1) @ v

    def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT / WIDTH**0.5
        return torch.softmax(torch.cat([s, sink.expand(1, heads, n, 1)], -1), -1)[..., :-1] @ v

    found = {
        "plain": normalized(lambda s: s),
        "soft-cap": normalized(capped),
        "ALiBi": normalized(alibi),
        "soft-cap, ALiBi": normalized(lambda s: alibi(capped(s))),
        "bias": normalized(lambda s: s + bias),
        "bias, trained": normalized(lambda s: s + own_bias),
        "positions as data": normalized(lambda s: s + table[positions].permute(2, 0, 1)),
        "the same, trained": normalized(lambda s: s + own_table[positions].permute(2, 0, 1)),
        "mask": normalized(lambda s: s.masked_fill(hidden, -1e9)),
        "padding": normalized(lambda s: s.masked_fill(padded, float("-inf"))),
        "factor per head": normalized(lambda s: s * factor),
        "cosine": cosine,
        "sink": with_sink,
        "sigmoid": lambda q, k, v: torch.sigmoid(q @ k.mT / WIDTH**0.5 - 6) @ v,
        "relu squared": lambda q, k, v: torch.relu(q @ k.mT / WIDTH**0.5).square() / n @ v,
        "dropout": lambda q, k, v: F.dropout(torch.softmax(q @ k.mT / WIDTH**0.5, -1), 0.1) @ v,
    }
    return found, trained


def backward(run: Program, tensors: list[Tensor], trained: list[Tensor], upstream: Tensor) -> float:
    """Seconds of one backward."""
    for x in (*tensors, *trained):
        x.grad = None
    out = run(*tensors)
    begun = time.perf_counter()
    out.backward(upstream)
    return time.perf_counter() - begun


def measure(n: int, heads: int, dtype: torch.dtype, seconds: float, only: list[str]) -> dict[str, tuple[float, float]]:
    """Median seconds by program: ours, Inductor's."""
    torch.manual_seed(0)
    found, trained = programs(n, heads, dtype)
    tensors = [torch.randn(1, heads, n, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(1, heads, n, WIDTH, dtype=dtype)
    runs: dict[tuple[str, str], Program] = {}
    for name, program in found.items():
        if name == "plain" or name in only or not only:
            runs[name, "fusion"] = torch.compile(program, backend="fusion")
            runs[name, "inductor"] = torch.compile(program, dynamic=True)  # its fused pattern fails for fixed lengths
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for run in runs.values():
        for _ in range(3):
            backward(run, tensors, trained, upstream)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for key in random.sample(list(runs), len(runs)):  # what ran before left the caches as they are
            times[key].append(backward(runs[key], tensors, trained, upstream))
    medians = {key: statistics.median(taken) for key, taken in times.items()}
    return {name: (medians[name, "fusion"], medians[name, "inductor"]) for name, _ in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=12.0, help="for each dtype")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {arguments.heads} heads of {WIDTH}, N = {arguments.length}")
    for dtype in arguments.dtype:
        found = measure(arguments.length, arguments.heads, getattr(torch, dtype), arguments.seconds, arguments.only)
        plain = found["plain"][0]
        print(f"{dtype}: plain {plain * 1e3:.2f} ms\n{'':20}  of plain  Inductor / ours")
        for name, (ours, theirs) in found.items():
            print(f"{name:20} {ours / plain:9.2f} {theirs / ours:16.2f}")


if __name__ == "__main__":
    main()
