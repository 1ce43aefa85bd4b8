"""Exact against approximate attention on a CPU, in turns in one process, with errors against float64.

    python -m benchmarks.cpu.approximate polynomial [--lengths 4096 8192 16384] [--dtype bfloat16]

A case has the measured and the certified error of the last 256 rows, and what ran. polynomial: queries and keys on the
unit sphere (bounded: scores within 1), plain and causal. unhelpful: inputs that it cannot help, and some where that
turns out late.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import fusion
from benchmarks.common.compare import Case, Function, compiled, main

attend: Function = functools.partial(F.scaled_dot_product_attention, scale=1.0)
causal: Function = functools.partial(attend, is_causal=True)


def bounded(n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries and keys on the unit sphere, values standard normal; 4 heads."""
    q, k, v = torch.randn(3, 1, 4, n, d)
    return tuple(x.to(dtype) for x in (0.98 * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))


def normal(n: int, d: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Standard normal, scores divided by sqrt(d)."""
    q, k, v = scale * torch.randn(3, 1, 4, n, d)
    return tuple(x.to(dtype) for x in (q / math.sqrt(d), k, v))


def last_rows(inputs: tuple[Tensor, ...], is_causal: bool) -> Tensor:
    """The last 256 rows in float64 (a float64 product of everything would take longer than all else)."""
    q, k, v = (x.double() for x in inputs)
    scores, n = q[:, :, -256:] @ k.transpose(-1, -2), k.shape[-2]
    if is_causal:
        scores.masked_fill_(torch.arange(n - 256, n)[:, None] < torch.arange(n), -math.inf)
    return torch.softmax(scores, -1) @ v


def case_of(title: str, inputs: tuple[Tensor, ...], function: Function = attend) -> Case:
    """Approximate and exact attention on the same inputs; its name has the errors and what ran."""
    ours = compiled(lambda *x: function(*x), inner="eager", approximate="polynomial", epsilon=1e-2)
    result, certificates = ours(*inputs), fusion.last_certificates()
    error = (result[:, :, -256:].double() - last_rows(inputs, function is causal)).norm(dim=-1).max()
    ran = sum(len(c.heads) for c in certificates if c.ran != "exact")
    what = "".join(f", degree {c.degree} ({c.features} features)" for c in certificates[:1] if c.degree)
    allowed = max(c.output_error for c in certificates)
    name = f"{title}: error {error:.1e} <= {allowed:.1e}, {ran} heads approximate{what}"
    return Case(name=name, tensors=[*inputs], functions={"fusion": ours, "exact": compiled(function, inner="eager")})


def polynomial(options: argparse.Namespace) -> Iterator[Case]:
    dtype = getattr(torch, options.dtype)
    for n in options.lengths or [4096, 8192, 16384]:
        for d in (16, 32):
            yield case_of(f"bounded, d={d}, N={n}", bounded(n, d, dtype))
        yield case_of(f"causal, bounded, d=32, N={n}", bounded(n, 32, dtype), causal)


def unhelpful(options: argparse.Namespace) -> Iterator[Case]:
    """Scores that are too large; a single huge key that no sample meets; causal lengths just below the crossing."""
    dtype = getattr(torch, options.dtype)
    for d in (16, 32):
        for n in options.lengths or [4096, 8192]:
            yield case_of(f"nothing helps, d={d}, N={n}", normal(n, d, dtype, 6.0))
        inputs = bounded(4096, d, dtype)
        inputs[1][:, :, 1366] *= 300
        yield case_of(f"one huge key, d={d}, N=4096", inputs)
    for n in (3072, 3584) if dtype == torch.float32 else (8192, 10240):
        yield case_of(f"causal, bounded, d=32, N={n}", bounded(n, 32, dtype), causal)


if __name__ == "__main__":
    raise SystemExit(main(__doc__, {f.__name__: f for f in (polynomial, unhelpful)}))
