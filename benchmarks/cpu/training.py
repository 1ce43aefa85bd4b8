"""Training one attention on a CPU: steps of forward and backward, the backward alone, and derivatives of derivatives.

    python -m benchmarks.cpu.training steps [--lengths 512 1024 2048] [--heads 4] [--dtype bfloat16] [--cases bias]
    python -m benchmarks.cpu.training backward [--cases plain sigmoid]
    python -m benchmarks.cpu.training derivatives [--lengths 512 1024 2048]

steps: "kernels" fuses the steps of short sequences, too, which fusion leaves to Inductor by itself; "eager" is
`scaled_dot_product_attention` where that can express the case. backward: score programs, with what they train; compare
with the line of "plain". derivatives: tangents by `torch.func.jvp`, alone, in a loss, and as a part of the target
(mean_flow); the gradient of a squared gradient (penalty); and a gradient alone, which kernels compute. Memory:
`benchmarks.cpu.memory`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp

from benchmarks.common.compare import Case, Function, chosen, compiled, contestants, draw, main
from benchmarks.common.rows import full

FARTHEST = 128  # distance from which all entries of a table are the same
GROUP = 4  # query heads per key head


def written_out(score: Callable[..., Tensor]) -> Function:
    """Attention whose scores a function changes."""
    return lambda q, k, v, *trained: torch.softmax(score(q @ k.mT / q.shape[-1] ** 0.5, *trained), -1) @ v


def distances(n: int) -> Tensor:
    """[n, n]: j - i, bounded, from 0 on."""
    return (torch.arange(n) - torch.arange(n)[:, None]).clamp(-FARTHEST, FARTHEST) + FARTHEST


STEPS: dict[str, Function] = {
    "full": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "bias": written_out(lambda s, bias: s + bias),
    "relative": written_out(lambda s, table: s + table[distances(s.shape[-1])].permute(2, 0, 1)),
}


def steps(options: argparse.Namespace) -> Iterator[Case]:
    """Q, K and V are transposed, as layers make them."""
    heads = options.heads or 4
    for name, function in chosen(options, STEPS):
        for n in options.lengths or [512, 1024, 2048]:
            shared = heads // GROUP if name == "grouped" else heads
            further = {"bias": [(1, heads, n, n)], "relative": [(2 * FARTHEST + 1, heads)]}.get(name, [])
            q, k, v, *trained = draw(options, *[(1, n, h, options.d) for h in (heads, shared, shared)], *further)
            tensors = [*(x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)), *trained]
            functions = contestants(function, eager=True)
            functions["kernels"] = compiled(lambda *x, run=function: run(*x), training="always")
            yield Case(name=f"{name}, N = {n}", tensors=tensors, functions=functions, plain=function)


def programs(n: int, heads: int, dtype: torch.dtype) -> dict[str, tuple[Function, list[tuple[int, ...]]]]:
    """Score programs by name, with the shapes of what they train besides Q, K and V."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    slopes = -(0.5 ** torch.arange(1, heads + 1)).view(heads, 1, 1).to(dtype)
    positions = distances(n)  # an input: nothing says what it is made of
    hidden, padded = torch.rand(n, n) < 0.3, torch.arange(n) > 0.9 * n
    table, bias = torch.randn(2 * FARTHEST + 1, heads, dtype=dtype), torch.randn(heads, n, n, dtype=dtype)

    def alibi(s: Tensor) -> Tensor:
        return s + slopes * (j - i).abs()

    def capped(s: Tensor) -> Tensor:
        return 20 * torch.tanh(s / 20)

    def cosine(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        return torch.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * (2 * factor).exp(), -1) @ v

    def sink(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
        s = torch.cat([q @ k.mT / q.shape[-1] ** 0.5, logits.expand(1, heads, n, 1)], -1)
        return torch.softmax(s, -1)[..., :-1] @ v

    return {
        "plain": (written_out(lambda s: s), []),
        "soft-cap": (written_out(capped), []),
        "ALiBi": (written_out(alibi), []),
        "soft-cap, ALiBi": (written_out(lambda s: alibi(capped(s))), []),
        "bias": (written_out(lambda s: s + bias), []),
        "bias, trained": (written_out(lambda s, own: s + own), [(heads, n, n)]),
        "positions as data": (written_out(lambda s: s + table[positions].permute(2, 0, 1)), []),
        "the same, trained": (
            written_out(lambda s, own: s + own[positions].permute(2, 0, 1)), [(2 * FARTHEST + 1, heads)],
        ),
        "mask": (written_out(lambda s: s.masked_fill(hidden, -1e9)), []),
        "padding": (written_out(lambda s: s.masked_fill(padded, float("-inf"))), []),
        "factor per head": (written_out(lambda s, factor: s * factor), [(heads, 1, 1)]),
        "cosine": (cosine, [(heads, 1, 1)]),
        "sink": (sink, [(heads, 1, 1)]),
        "sigmoid": (lambda q, k, v: torch.sigmoid(q @ k.mT / q.shape[-1] ** 0.5 - 6) @ v, []),
        "relu squared": (lambda q, k, v: torch.relu(q @ k.mT / q.shape[-1] ** 0.5).square() / n @ v, []),
        "dropout": (lambda q, k, v: F.dropout(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1), 0.1) @ v, []),
    }  # fmt: skip


def backward(options: argparse.Namespace) -> Iterator[Case]:
    heads = options.heads or 4
    for n in options.lengths or [1024]:
        whole = {name: (STEPS[name], []) for name in ("full", "causal")}
        known = whole | programs(n, heads, getattr(torch, options.dtype))
        for name in options.cases or known:
            function, trained = known[name]
            tensors = draw(options, *[(1, heads, n, options.d)] * 3, *trained)
            functions = {
                "fusion": compiled(function, dynamic=None),
                "Inductor": compiled(function, "inductor", dynamic=True),  # its pattern fails for fixed ones
                "SDPA": function if name in whole else None,
            }
            yield Case(name=f"{name}, N = {n}", tensors=tensors, functions=functions,
                       plain=None if name == "dropout" else function)  # fmt: skip


def tangent(q, k, v):
    return jvp(full, (q, k, v), (v, q, k))


def mean_flow(q, k, v):
    out, moved, *_ = tangent(q, k, v)
    return (out - (v - moved).detach()).square().mean()


DERIVATIVES = {
    "tangent": tangent,
    "tangent_trained": lambda q, k, v: sum(part.square().mean() for part in tangent(q, k, v)),
    "mean_flow": mean_flow,
    "penalty": lambda q, k, v: grad(lambda x: full(x, k, v).sin().sum())(q).square().mean(),
    "first_gradient": lambda q, k, v: (grad(lambda x: full(x, k, v).sin().sum())(q),),
}


def derivatives(options: argparse.Namespace) -> Iterator[Case]:
    for name, function in chosen(options, DERIVATIVES):
        for n in options.lengths or [512, 1024, 2048]:
            trained = name not in ("tangent", "first_gradient")
            tensors = draw(options, *[(1, options.heads or 4, n, options.d)] * 3, train=trained)
            functions = contestants(function, eager=True, transforms="always")
            yield Case(name=f"{name}, N = {n}", tensors=tensors, functions=functions, plain=function)


STUDIES = {f.__name__: f for f in (steps, backward, derivatives)}

if __name__ == "__main__":
    raise SystemExit(main(__doc__, STUDIES, backward=("backward",), train=True))
