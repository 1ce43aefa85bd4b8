"""The worth of understanding a mask: attention under masks of many kinds on a CPU, beside peers in one process.

    python -m benchmarks.cpu.masks [--lengths 4096] [--heads 4] [--cases window packed] [--train]

Peers get what they want, made outside the time: FlexAttention its block mask, SDPA its flags or masks. fusion gets
eager code and what a model passes; "without map" looks for no dead tiles in mask tensors; "full" is attention without a
mask. FlexAttention has no gradients on CPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.compare import Case, Function, compiled, draw, main
from benchmarks.common.rows import ROWS, Problem, flex_call, full, sdpa_call

Peers = dict[str, Function | None]


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


def of_positions(name: str, operands: list[Tensor]) -> tuple[Function, list[Tensor], Peers]:
    """A variant of `rows`: its function, what it takes besides q, k and v, and its peers."""
    q, row = operands[0], ROWS[name]
    problem = Problem(H=q.shape[1], N=q.shape[2], d=q.shape[3], dtype=q.dtype)
    extras = row.extras(problem, torch.Generator().manual_seed(0))
    sdpa, flex = sdpa_call(row, (*operands, *extras)), flex_call(row, (*operands, *extras))
    peers: Peers = {"SDPA": sdpa and (lambda *_: sdpa()), "FlexAttention": lambda *_: flex()}
    return row.plain, extras, peers | {"Inductor": compiled(row.plain, "inductor")}


def of_data(name: str, operands: list[Tensor]) -> tuple[Function, list[Tensor], Peers]:
    """A mask that is data. Four documents of equal length; a third of the tokens is padding, on the left."""
    q, n = operands[0], operands[0].shape[2]
    documents = (torch.arange(n) // -(-n // 4))[None]
    tokens = (torch.arange(n) >= n // 3).long()[None]
    causal = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    plain, extra = {
        "packed": (packed, documents),
        "packed mask": (masked, (documents[0][:, None] == documents[0])[None, None]),
        "causal mask": (biased, torch.zeros(1, 1, n, n, dtype=q.dtype).masked_fill(~causal, torch.finfo(q.dtype).min)),
        "random": (masked, torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(1)) > 0.5),
        "padded": (padded, tokens),
        "padded call": (padded_call, tokens),
    }[name]
    blind = compiled(lambda *x: plain(*x), tile_maps="never")
    sdpa = F.scaled_dot_product_attention if plain in (masked, biased) else None
    return plain, [extra], {"without map": blind, "SDPA": sdpa}


POSITIONS = ("causal", "alibi", "window")
DATA = ("packed", "packed mask", "causal mask", "random", "padded", "padded call")
PEERS = ("without map", "full", "SDPA", "FlexAttention", "Inductor")


def masks(options: argparse.Namespace) -> Iterator[Case]:
    for n in options.lengths or [4096]:
        operands = draw(options, *[(1, options.heads or 4, n, 64)] * 3)
        for name in options.cases or (*POSITIONS, *DATA):
            plain, extras, peers = (of_positions if name in POSITIONS else of_data)(name, operands)
            peers["full"] = compiled(lambda q, k, v, *_: full(q, k, v))
            if options.train:
                peers["FlexAttention"] = None
            functions = {"fusion": compiled(plain, strict=True)} | {peer: peers.get(peer) for peer in PEERS}
            yield Case(name=f"{name}, N = {n}", tensors=[*operands, *extras], functions=functions, plain=plain)


if __name__ == "__main__":
    raise SystemExit(main(__doc__, {"masks": masks}))
