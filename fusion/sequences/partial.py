"""An attention by blocks of keys: the specs of one block, and the sums over blocks.

With x the score program, M the largest score of a row (sinks included) and L the sum of exp(x - M) over all keys (and
sinks), a block of keys contributes to the output, for the raw weight program u,

    o = sum over its keys of u exp(x - m) v,    m its own largest score,    l = sum of exp(x - m)
    O = sum over blocks of exp(m - M) o / L,    L = sum over blocks of exp(m - M) l + sum over sinks of exp(sink - M)

and to the gradient, with w = exp(x - M) / L, the block's share p = sum of w, and its output P = sum of w u v,

    dV = (w u)^T dO,    dx = w (u dP - sum over e of dO * O) = w (u dP - sum of w u dP - sum over e of dO * (O - P))

The first sum of the latter is the block's own, as exact as on one device also where a row has nearly all of its weight
in it. So a block is an attention of an ordinary spec: its rows are scaled by 1 / (l + R exp(M - m)), where R is the
rest of L, and -(sum over e of dO * (O - P)) / (1 - p) arrives at its share, an auxiliary output. The normaliser is that
of safe softmax: a row without a live key in a block contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fusion.codegen.reference import gradients
from fusion.ir import AttentionSpec, AuxOutput, Normalizer, Operand, Output, Reduction
from fusion.ir.expr import ONE, ROW_MAX, ROW_SUM, WEIGHT, Expr, I, J, Kind, load, walk
from fusion.ir.ops import apply
from fusion.ir.parts import dims_along, one_part
from fusion.ir.results import coordinate_extents, result_names

FIRST_KEY = "first_key"


def unsupported(spec: AttentionSpec) -> str | None:
    """Reason why an attention cannot be computed by blocks of keys, or None."""
    if spec.normalizer not in (Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX):
        return f"the normaliser is {spec.normalizer.value}"
    if spec.scales_rows or spec.mixing is not None or spec.aux_outputs:
        return "rows have another scale, heads are mixed, or weights are an output"
    if spec.tables or spec.n_k_total is not None or any(value is not None for value in spec.values):
        return "K and V are read through a table, or converted"
    return None


def wide(spec: AttentionSpec) -> str:
    """Dtype of sums over blocks."""
    return "float64" if any(o.dtype == "float64" for o in spec.operands) else "float32"


@lru_cache(maxsize=1024)
def key_dims(spec: AttentionSpec) -> tuple[int | None, ...]:
    """Per operand, the dimension that is cut along with the keys."""
    return dims_along(spec, J)


@lru_cache(maxsize=1024)
def of_output(spec: AttentionSpec) -> AttentionSpec:
    """Spec of a block's o, m and l."""
    part, rows = _of_keys(spec), _row_names(spec)
    statistics = tuple(AuxOutput(value=value, dims=rows, dtype=wide(spec)) for value in (ROW_MAX, ROW_SUM))
    names = tuple(result_names(spec))
    return replace(
        part, row_scale=ONE, aux_outputs=statistics, out_dtype=wide(spec), output=Output(dims=names, order=names)
    )


@lru_cache(maxsize=1024)
def of_weights(spec: AttentionSpec) -> AttentionSpec:
    """Spec of a block's P and p; its last operands are M and L, [b.., i]."""
    m, l = _row_operands(spec)
    return _with_share(spec, apply("exp", ROW_MAX - m) / l)


@lru_cache(maxsize=1024)
def of_gradient(spec: AttentionSpec) -> AttentionSpec:
    """Spec of a block's gradient; its last operands are M and R, [b.., i]. Its rows have the weights of `of_weights`,
    and so the same statistics."""
    m, rest = _row_operands(spec)
    return _with_share(spec, ONE / (ROW_SUM + rest * apply("exp", m - ROW_MAX)))


def _row_operands(spec: AttentionSpec) -> list[Expr]:
    count = len(spec.operands)
    return [load(number, (*spec.axes, I), Kind.FLOAT) for number in (count, count + 1)]


def _with_share(spec: AttentionSpec, row_scale: Expr) -> AttentionSpec:
    dtype, rank = wide(spec), 1 + len(spec.batch)
    known = tuple(Operand(dtype=dtype, rank=rank, name=name) for name in ("row_max", "row_sum"))
    share = AuxOutput(value=WEIGHT, dims=_row_names(spec), dtype=dtype, reduction=Reduction.SUM, over="j")
    return replace(
        _of_keys(spec), operands=(*spec.operands, *known), row_scale=row_scale, aux_outputs=(share,), out_dtype=dtype
    )


def arriving(delta_of_rest: Tensor, share: Tensor) -> Tensor:
    """Gradient that arrives at a block's share. delta_of_rest: sum over e of dO * (O - P)."""
    rest = 1 - share
    return torch.where(rest > 0, -delta_of_rest / rest, 0.0)


def _of_keys(spec: AttentionSpec) -> AttentionSpec:
    part = one_part(spec, "j", key_dims(spec), FIRST_KEY)
    return replace(part, normalizer=Normalizer.SAFE_SOFTMAX, sinks=())


def _row_names(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(result_names(spec)[:-1])


class Sums:
    """Sums over the blocks that were added: output [b.., i, e] and, per row, M and L, [b.., i]."""

    def __init__(self, spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int]):
        self.spec, self.operands, self.sizes = spec, operands, sizes
        *batch, rows, _, columns = coordinate_extents(spec, sizes).values()
        dtype = getattr(torch, wide(spec))
        self.output = operands[0].new_zeros((*batch, rows, columns), dtype=dtype)
        self.row_max = operands[0].new_full((*batch, rows), -math.inf, dtype=dtype)
        self.row_sum = torch.zeros_like(self.row_max)

    def add(self, output: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
        """Add a block's o, m and l."""
        before, highest = self.row_max, torch.maximum(self.row_max, row_max)
        old, new = _scale(before, highest), _scale(row_max, highest)
        self.output = self.output * old.unsqueeze(-1) + output * new.unsqueeze(-1)
        self.row_sum = _product(self.row_sum, old) + _product(row_sum, new)
        self.row_max = highest

    def finish(self) -> Tensor:
        """The output of all rows; M and L include the sinks from now on."""
        for sink in self.spec.sinks:
            value = gradients.value(self.spec, self.operands, self.sizes, sink, self.row_max.dtype)
            value = value.squeeze(-1).expand(self.row_max.shape)
            self.add(torch.zeros_like(self.output), value, torch.ones_like(value))
        output = self.output / self.row_sum.unsqueeze(-1)
        if self.spec.normalizer is Normalizer.SAFE_SOFTMAX:
            dead = self.row_max == -math.inf
            output = torch.where(dead.unsqueeze(-1), 0.0, output)
        return output

    def ordinary(self) -> bool:
        """Whether each row has a live key, and a finite maximum. Others are computed with all keys at once."""
        mask = self.spec.mask
        fill = -math.inf if mask is None else mask.fill / 2
        return bool(((self.row_max > fill) & (self.row_max < math.inf)).all())

    def stored(self, output: Tensor) -> Tensor:
        """Output in the dimensions, dtype and memory order of the spec."""
        names, order = result_names(self.spec), self.spec.output.order
        packed = output.to(getattr(torch, self.spec.out_dtype)).permute([names.index(n) for n in order]).contiguous()
        return packed.permute([order.index(name) for name in self.spec.output.dims])


def _scale(row_max: Tensor, highest: Tensor) -> Tensor:
    """exp(m - M), 0 where no key has lived yet."""
    return torch.where(row_max == -math.inf, 0.0, torch.exp(row_max - highest))


def _product(total: Tensor, scale: Tensor) -> Tensor:
    """Sum of a row in units of another maximum; that of a row without a live key may be NaN, and is 0."""
    return torch.where(scale == 0, 0.0, total * scale)


def of_sinks(
    spec: AttentionSpec,
    operands: Sequence[Tensor],
    sizes: Sequence[int],
    needs: Sequence[bool],
    delta: Tensor,
    rows: tuple[Tensor, Tensor],
) -> dict[int, Tensor]:
    """Gradients of operands through the sinks, by number: of a sink it is -(its weight) D. rows: M and L."""
    result: dict[int, Tensor] = {}
    for sink in spec.sinks:
        value = gradients.value(spec, operands, sizes, sink, delta.dtype)
        weight = torch.exp(value - rows[0].unsqueeze(-1)) / rows[1].unsqueeze(-1)
        read = {part.operand for part in walk(sink) if part.op == "load" and part.kind is Kind.FLOAT}
        for number in sorted(n for n in read if needs[n]):
            upstream = -weight * delta.unsqueeze(-1)
            part = gradients.of_expression(spec, operands, sizes, sink, upstream, number)
            result[number] = result[number] + part if number in result else part
    return result
