"""The reference interpreter: executes any `AttentionSpec` in plain torch, one obvious step after the other.

It is what every emitter is tested against, and what runs where no emitter can. It materialises the score matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.ir.expr import ROW_MAX, ROW_SUM, SCORE, C, E, Expr, I, J, coord
from fusion.ir.ops import evaluate
from fusion.ir.spec import AttentionSpec, Normalizer


def run(
    spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The attention of `spec` on its operand tensors and the values of `spec.sizes`.

    Returns a tensor with dimensions `spec.output.dims`, laid out in memory as `spec.output.order` says.
    dtype: in which everything is computed; by default float32, or float64 where an operand is float64.
    """
    if dtype is None:
        dtype = torch.float64 if any(o.dtype is torch.float64 for o in operands) else torch.float32
    return _Run(spec, operands, sizes, dtype).result()


class _Run:
    """One execution. Every value is a tensor that broadcasts over the axes [b0, b1, ..., rows, columns]."""

    def __init__(self, spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype):
        self.spec, self.operands, self.dtype = spec, operands, dtype
        self.device = operands[0].device
        self.sizes = dict(zip(spec.sizes, sizes, strict=True))
        self.batch = tuple(self.integer(extent) for extent in spec.batch)
        self.n_q, self.n_k, self.d, self.d_v = (self.integer(e) for e in (spec.n_q, spec.n_k, spec.d, spec.d_v))
        self.axes: dict[Expr, torch.Tensor] = {}
        for axis, extent in enumerate(self.batch):
            self.axes[coord(f"b{axis}")] = self.arange(extent, axis)

    def integer(self, expr: Expr) -> int:
        return int(evaluate(expr, lambda leaf: torch.tensor(self.sizes[str(leaf.attr)])))

    def arange(self, extent: int, axis: int) -> torch.Tensor:
        shape = [1] * (len(self.batch) + 2)
        shape[axis] = extent
        return torch.arange(extent, device=self.device).view(shape)

    def value(self, expr: Expr, extra: dict[Expr, torch.Tensor]) -> torch.Tensor:
        known = self.axes | extra

        def leaf(part: Expr):
            if part.op == "size":
                return torch.tensor(self.sizes[str(part.attr)], device=self.device)
            if part.op == "load":
                return self.loader(part)
            return known[part]

        return evaluate(expr, leaf, self.dtype).to(self.device)

    def loader(self, part: Expr):
        tensor = self.operands[int(part.attr)]  # type: ignore[arg-type]
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        elif tensor.dtype is not torch.bool:
            tensor = tensor.to(torch.int64)
        return (lambda *index: tensor[index]) if part.args else tensor

    def gather(self, operand: int, index: tuple[Expr, ...], rows: Expr, n: int, columns: Expr, width: int):
        axis = len(self.batch)
        positions = {rows: self.arange(n, axis), columns: self.arange(width, axis + 1)}
        shape = (*self.batch, n, width)
        indices = tuple(self.value(e, positions).expand(shape) for e in index)
        return self.operands[operand].to(self.dtype)[indices]

    def result(self) -> torch.Tensor:
        spec, axis = self.spec, len(self.batch)
        q = self.gather(0, spec.q, I, self.n_q, C, self.d)
        k = self.gather(1, spec.k, J, self.n_k, C, self.d)
        v = self.gather(2, spec.v, J, self.n_k, E, self.d_v)
        score = q @ k.transpose(-1, -2)
        positions = {I: self.arange(self.n_q, axis), J: self.arange(self.n_k, axis + 1), SCORE: score}
        x = self.value(spec.score, positions).to(self.dtype).expand(score.shape)
        weight = self.value(spec.weight, positions).to(self.dtype)
        if spec.normalizer is Normalizer.NONE:
            return self.store((x * weight) @ v)
        return self.store(self.softmax(x, positions, weight, v))

    def softmax(self, x: torch.Tensor, positions: dict[Expr, torch.Tensor], weight: torch.Tensor, v: torch.Tensor):
        sinks = [self.value(sink, positions).to(self.dtype).expand(*x.shape[:-1], 1) for sink in self.spec.sinks]
        columns = torch.cat([x, *sinks], -1)
        if columns.shape[-1] == 0:  # no keys: an empty sum
            return x @ v
        row_max = columns.amax(-1, keepdim=True)
        dead = row_max == -torch.inf
        safe = self.spec.normalizer is Normalizer.SAFE_SOFTMAX
        shift = torch.where(dead, 0.0, row_max) if safe else row_max
        p = torch.exp(columns - shift)
        row_sum = p.sum(-1, keepdim=True)
        scale = 1 / row_sum
        if self.spec.row_scale is not None:
            scale = self.value(self.spec.row_scale, positions | {ROW_MAX: row_max, ROW_SUM: row_sum})
        p = p[..., : self.n_k] * scale
        if safe:
            p = torch.where(dead, 0.0, p)
        return (p * weight) @ v

    def store(self, out: torch.Tensor) -> torch.Tensor:
        """From [b.., i, e] to the dimensions and memory order that the spec asks for."""
        names = [*(f"b{axis}" for axis in range(len(self.batch))), "i", "e"]
        dims, order = self.spec.output.dims, self.spec.output.order
        packed = out.to(getattr(torch, self.spec.out_dtype)).permute([names.index(n) for n in order]).contiguous()
        return packed.permute([order.index(n) for n in dims])
