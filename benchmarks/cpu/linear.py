"""Products of linear layers on a CPU in float32, by oneDNN as fusion calls it, and by MKL.

    python -m benchmarks.cpu.linear products [--seconds 0.4] [--busy]
    python -m benchmarks.cpu.linear deep
    python -m benchmarks.cpu.linear packed [--dtype bfloat16]

products: the forward and both products of the backward, as graphs have them, m x k x n; * where oneDNN is chosen. deep:
sums of 3072 terms, with another weight in every call, as in a model: in parts as fusion computes them, by MKL, in parts
that are dense already, and in one call. packed: products with a bias, another weight in every call,
with weights as they are ("fusion") and packed by either library (oneDNN: for one row, and for 128). Whole models:
`benchmarks.models.runtimes`; training: `benchmarks.models.training`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.common.compare import Case, Function, main
from fusion.linear import products as products_of
from fusion.linear import speeds
from fusion.process import retain_freed_memory
from fusion.torch_private import devices

SIZES = ((512, 768, 768), (512, 768, 3072), (512, 3072, 768), (197, 768, 768), (1024, 768, 3072), (512, 1024, 2816),
         (128, 256, 256), (64, 256, 1024), (16, 768, 3072), (1, 768, 3072), (512, 4096, 4096))  # fmt: skip
"""m, k and n of layers."""


def mkl(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def products(options: argparse.Namespace) -> Iterator[Case]:
    for m, k, n in SIZES:
        x, w, grad = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
        for name, left, right in (("forward", x, w), ("dX", grad, w.t()), ("dW", grad.t(), x.t())):
            functions = {"fusion": lambda x, w: torch.ops.fusion.linear(x, w, None, "", True), "MKL": mkl}
            chosen = speeds.onednn_pays(*left.shape, len(right), 0, torch.get_num_threads())
            title = f"{name} {m} x {k} x {n}{' *' if chosen else ''}"
            yield Case(name=title, tensors=[left, right], functions=functions, plain=mkl)


def in_turn(function: Function, x: object, weights: list) -> Function:
    """Calls with one weight after the other."""
    turns = itertools.cycle(weights)
    return lambda *_: function(x, next(turns))


def by_parts(x: list[Tensor], w: list[Tensor]) -> Tensor:
    out = devices.onednn_product(x[0], w[0], None)
    for left, right in zip(x[1:], w[1:], strict=True):
        out = devices.onednn_product_and(left, right, out)
    return out


def deep(options: argparse.Namespace) -> Iterator[Case]:
    retain_freed_memory()
    for m in options.lengths or (64, 128, 197, 512, 2048):
        x, weights = torch.randn(m, 3072), [torch.randn(768, 3072) for _ in range(6)]
        width = products_of.width(3072)
        left, *dense = [[part.contiguous() for part in matrix.split(width, 1)] for matrix in (x, *weights)]
        yield Case(name=f"{m} rows", tensors=[], functions={
            "fusion": in_turn(lambda x, w: products_of.product(x, w, None), x, weights),
            "MKL": in_turn(mkl, x, weights),
            "dense parts": in_turn(by_parts, left, dense),
            "in one": in_turn(lambda x, w: devices.onednn_product(x, w, None), x, weights),
        })  # fmt: skip


def packed(options: argparse.Namespace) -> Iterator[Case]:
    pairs = itertools.product(options.lengths or (16, 128, 256, 512, 1024), ((768, 768), (768, 3072), (3072, 768)))
    dtype = getattr(torch, options.dtype)
    for m, (k, n) in pairs:
        x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
        weights = [torch.randn(n, k).to(dtype) for _ in range(5)]
        functions = {"fusion": in_turn(lambda x, w, b=bias: torch.addmm(b, x, w.t()), x, weights)}
        for rows in (1, 128):
            forms = [devices.onednn_packed(w, rows) for w in weights]
            functions[f"oneDNN, {rows}"] = in_turn(lambda x, w, b=bias: devices.onednn_product(x, w, b), x, forms)
        if dtype is torch.float32:
            both = [(devices.mkl_packed(w, m), w) for w in weights]
            functions["MKL"] = in_turn(lambda x, ws, b=bias: devices.mkl_product(x, ws[0], ws[1], b), x, both)
        yield Case(name=f"{m} x {k} x {n}", tensors=[], functions=functions)


if __name__ == "__main__":
    raise SystemExit(main(__doc__, {"products": products, "deep": deep, "packed": packed}))
