"""Attention under masks that are data on a CPU, beside peers in one process. (Masks of positions:
`benchmarks.cpu.attention`.)

    python -m benchmarks.cpu.masks [--lengths 4096] [--heads 4] [--cases packed] [--train]

SDPA gets its mask, made outside the time; fusion gets eager code and what a model passes. "without map" looks for no
dead tiles in mask tensors; "full" is attention without a mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.compare import Case, Function, compiled, draw, main
from benchmarks.common.rows import full


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~keep, -torch.inf), -1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5 + bias, -1) @ v


def packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return masked(q, k, v, documents[:, None, :, None] == documents[:, None, None, :])


def real_and_past(q: Tensor, k: Tensor, tokens: Tensor) -> Tensor:
    """[B, 1, N, N]: keys that are no padding, up to each query."""
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    return (j <= i) & (tokens[:, None, None, :] != 0)


def padded(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    keep = real_and_past(q, k, tokens)
    return torch.softmax(scores.masked_fill(~keep, torch.finfo(q.dtype).min), -1) @ v


def padded_call(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, real_and_past(q, k, tokens))


def variants(n: int, dtype: torch.dtype) -> dict[str, tuple[Function, Tensor]]:
    """Functions, and the data that each takes. Four documents of equal length; a third of the tokens is padding, on the
    left."""
    documents = (torch.arange(n) // -(-n // 4))[None]
    tokens = (torch.arange(n) >= n // 3).long()[None]
    causal = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    return {
        "packed": (packed, documents),
        "packed mask": (masked, (documents[0][:, None] == documents[0])[None, None]),
        "causal mask": (biased, torch.zeros(1, 1, n, n, dtype=dtype).masked_fill(~causal, torch.finfo(dtype).min)),
        "random": (masked, torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(1)) > 0.5),
        "padded": (padded, tokens),
        "padded call": (padded_call, tokens),
    }


def masks(options: argparse.Namespace) -> Iterator[Case]:
    for n in options.lengths or [4096]:
        operands = draw(options, *[(1, options.heads or 4, n, 64)] * 3)
        known = variants(n, operands[0].dtype)
        for name in options.cases or known:
            plain, data = known[name]
            functions: dict[str, Function | None] = {
                "fusion": compiled(plain, strict=True),
                "without map": compiled(lambda *x, plain=plain: plain(*x), tile_maps="never"),
                "full": compiled(lambda q, k, v, _: full(q, k, v)),
                "SDPA": F.scaled_dot_product_attention if plain in (masked, biased) else None,
            }
            yield Case(name=f"{name}, N = {n}", tensors=[*operands, data], functions=functions, plain=plain)


if __name__ == "__main__":
    raise SystemExit(main(__doc__, {"masks": masks}))
