"""Calls of the kernel of certified sparse attention on a GPU, or in Triton's interpreter for CPU tensors. See
`sparse_kernel`; `codegen/mlir/sparse_call.py` is its counterpart on CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.caching import OncePerKey
from fusion.ir.spec import AttentionSpec
from fusion.lowering.numbers import LOG2E
from fusion.planning.choice import Tile
from fusion.planning.gpu_layout import padded

from . import module
from .check import report
from .launch import check_sizes
from .sparse_kernel import sparse_module

WIDEST = 256  # columns of Q and K, and of V, up to which the loop does not spill (ahead-of-time compilation shows it)
ROUNDING = 2.0**-20
"""For each tile, more than what a row's sum, and what was left out of it, may be off by, relative to themselves: an
exponential, two products and two sums."""


def supports(spec: AttentionSpec) -> str | None:
    """Reason why there is no such kernel for a spec of plain scaled scores, or None."""
    if not (spec.d.is_const and spec.d_v.is_const):
        return "selective GPU kernels are made for one head dimension, and this one varies"
    if (widest := max(spec.d.integer, spec.d_v.integer)) > WIDEST:
        return f"selective GPU kernels take head dimensions up to {WIDEST}, not {widest}"
    return None


def sparse_tile(d: int, d_v: int, dtype: str) -> Tile:
    """Tile for products of a dtype."""
    widest = max(padded(d), padded(d_v))
    if dtype == "float32":  # multiplied without matrix units: operands lie in registers
        if widest > 128:
            return Tile(rows=32, keys=16, warps=8)
        return Tile(rows=64, keys=32, warps=4 if widest <= 32 else 8)
    return Tile(rows=64, keys=64 if widest <= 128 else 32, warps=4 if widest <= 128 else 8, stages=2)


class SparseKernel:
    """Kernel for plain scores under a softmax. Tiles: `rows` queries, `keys` keys; `sets`: a divisor of their number.
    scale: above 0. causal: key j is live for query i where j <= i. dtype, out_dtype: of products and of the output."""

    sets = 1

    def __init__(
        self, d: int, d_v: int, scale: float, causal: bool, dtype: str = "float32", out_dtype: str = "float32"
    ):
        self.scale, self.causal = scale, causal
        self.dtype, self.out_dtype = (getattr(torch, name) for name in (dtype, out_dtype))
        self.tile, self.source = sparse_tile(d, d_v, dtype), sparse_module(d, d_v)
        self.rows, self.keys = self.tile.rows, self.tile.keys
        self._modules = OncePerKey()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], marks: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(output [h, N_q, d_v], upper bound of the share of the normaliser left out [h], tiles computed [h]), without
        reads by the host.

        q, k, v: [h, N_q, d], [h, N_k, d] and [h, N_k, d_v], with finite scores.
        sizes: of the spec, which follow from the shapes.
        marks: [h, row tiles, key tiles], uint8 or bool: the tiles to compute, one for every row with a key at least.
        share: the weight, relative to its row's sum, below which a key may be left out.
        """
        q, k, v = (_with_dense_rows(x.to(self.dtype)) for x in (q, k, v))
        (heads, n_q, _), (_, n_k, d_v) = q.shape, v.shape
        blocks, tiles = marks.shape[1:]
        check_sizes((heads * blocks, n_q, n_k))
        listed = marks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        counts = marks.sum(-1, dtype=torch.int32)
        out = torch.empty(heads, n_q, d_v, dtype=self.out_dtype, device=q.device)
        left = torch.empty(heads, blocks, dtype=torch.float32, device=q.device)
        computed = torch.empty_like(counts)
        rounding = 1 + tiles * ROUNDING
        self._launch(
            heads * blocks, q, k, v, listed, counts, out, left, computed,
            *(stride for x in (q, k, v) for stride in x.stride()[:2]), n_q, n_k, self.scale * LOG2E, share / rounding,
        )  # fmt: skip
        return out, left.amax(1) * rounding, computed.sum(1)

    def _launch(self, programs: int, *given: Any) -> None:
        device, constants = given[0].device, {"ROWS": self.rows, "KEYS": self.keys, "CAUSAL": self.causal}
        loaded = self._modules.get_or_make(device.type, lambda: module.load(self.source, device.type == "cpu"))
        module.run(loaded.sparse_forward, programs, device, given, constants, self.tile.options())


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def check_module(d: int, d_v: int) -> None:
    """Program behind `python <generated module>`: compare its kernel with attention in float64 on random tensors, in
    the interpreter or on a GPU where there is one. Exits with 1 where they differ by more than the omitted weights, and
    rounding, explain."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 200, width, dtype=torch.float32, device=device) for width in (d, d, d_v))
    for causal in (False, True):
        run = SparseKernel(d, d_v, 16 / d**0.5, causal)
        marks = torch.ones(2, -(-200 // run.rows), -(-200 // run.keys), dtype=torch.uint8, device=device)
        found, left, _ = run(q, k, v, (), marks, 1e-2 / 200)
        scores = q.double() @ k.double().mT * run.scale
        if causal:
            scores.masked_fill_(scores.new_ones(200, 200, dtype=torch.bool).triu(1), -math.inf)
        exact = scores.softmax(-1) @ v.double()
        error, allowed = float((found - exact).abs().max()), (2 * float(left.max()) + 1e-4) * float(v.abs().max())
        report(f"{device}, {'causal' if causal else 'full'}", error, allowed, error <= allowed)
