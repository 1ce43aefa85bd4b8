"""An attention by blocks of keys: the specs of one block, and the sums over blocks.

With x the score program, M the largest score of a row (sinks included) and L the sum of exp(x - M) over all keys (and
sinks), a block of keys contributes to the output, for the raw weight program u,

    o = sum over its keys of u exp(x - m) v,    m its own largest score,    l = sum of exp(x - m)
    O = sum over blocks of exp(m - M) o / L,    L = sum over blocks of exp(m - M) l + sum over sinks of exp(sink - M)

(kernels compute o / l: a row that is not divided by its sum has no backward kernel, and so no kernel with statistics),
and to the gradient, with p = exp(m - M) l / L the block's share of the weights and w = exp(x - m) / l those within it,

    dV = (w u)^T (p dO),    dx = w (u p dP - p sum over e of dO * O)

So the backward of a block is that of an ordinary attention, with p dO arriving at its output o / l. Its own delta is
D = sum of w u p dP; the row's is p D + p sum over e of dO * (O - P), with the block's part P = p o / l of the output.
The difference,

    G = (1 - p) D - p sum over e of dO * (O - P)

arrives at its log-sum-exp, an auxiliary output. D itself is the kernel's, as exact as on one device also where a row
has nearly all of its weight in the block, and 1 - p and O - P are kept apart there. The normaliser is that of safe
softmax: a row without a live key in a block contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fusion.codegen.reference import gradients
from fusion.ir import AttentionSpec, AuxOutput, Normalizer, Output
from fusion.ir.expr import ROW_MAX, ROW_SUM, I, J, Kind, walk
from fusion.ir.parts import dims_along, one_part
from fusion.ir.results import coordinate_extents, result_names
from fusion.lowering.rows import LIVE_LOG_SUM

FIRST_KEY = "first_key"


def unsupported(spec: AttentionSpec) -> str | None:
    """Reason why an attention cannot be computed by blocks of keys, or None."""
    if spec.normalizer not in (Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX):
        return f"the normaliser is {spec.normalizer.value}"
    if spec.reproducible:
        return "sums over blocks have other bits than those of one process"
    if spec.scales_rows or spec.mixing is not None or spec.aux_outputs:
        return "rows have another scale, heads are mixed, or weights are an output"
    if spec.tables or spec.n_k_total is not None or any(value is not None for value in spec.values):
        return "K and V are read through a table, or converted"
    return None


def wide(spec: AttentionSpec) -> str:
    """Dtype of sums over blocks."""
    return "float64" if any(o.dtype == "float64" for o in spec.operands) else "float32"


def is_narrow(spec: AttentionSpec) -> bool:
    """Whether the output is rounded to a narrower dtype than that of sums."""
    return spec.out_dtype != wide(spec)


@lru_cache(maxsize=1024)
def key_dims(spec: AttentionSpec) -> tuple[int | None, ...]:
    """Per operand, the dimension that is cut along with the keys."""
    return dims_along(spec, J)


@lru_cache(maxsize=1024)
def row_dims(spec: AttentionSpec) -> tuple[int | None, ...]:
    """Per operand, the dimension that is cut along with the query rows. spec: of a process's rows."""
    return dims_along(spec, I)


def shard_dims(spec: AttentionSpec) -> tuple[int | None, ...]:
    """Per operand, the dimension that is sharded: along the keys of K and V, along the query rows of all others."""
    return (*row_dims(spec)[:1], *key_dims(spec)[1:3], *row_dims(spec)[3:])


@lru_cache(maxsize=1024)
def of_output(spec: AttentionSpec) -> AttentionSpec:
    """Spec of a block's o / l, m and l."""
    part, rows = one_part(spec, "j", key_dims(spec), FIRST_KEY), _row_names(spec)
    statistics = tuple(AuxOutput(value=value, dims=rows, dtype=wide(spec)) for value in (ROW_MAX, ROW_SUM))
    names = tuple(result_names(spec))
    return replace(
        part, normalizer=Normalizer.SAFE_SOFTMAX, sinks=(), aux_outputs=statistics, out_dtype=wide(spec),
        output=Output(dims=names, order=names),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def of_gradient(spec: AttentionSpec) -> AttentionSpec:
    """Spec of a block's gradient, with a row's log-sum-exp as an auxiliary output; statistics as of `of_output`."""
    log_sum = AuxOutput(value=LIVE_LOG_SUM, dims=_row_names(spec), dtype=wide(spec))
    return replace(of_output(spec), aux_outputs=(log_sum,))


def _row_names(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(result_names(spec)[:-1])


class Partial(NamedTuple):
    """Sums over some keys: output [b.., i, e], not yet divided; per row, [b.., i], the largest score and the sum."""

    output: Tensor
    row_max: Tensor
    row_sum: Tensor

    @staticmethod
    def of_block(output: Tensor, row_max: Tensor, row_sum: Tensor) -> Partial:
        """From the results of `of_output`'s spec."""
        row_sum = torch.where(row_max == -math.inf, 0.0, row_sum)  # which may be NaN without a live key
        return Partial(output * row_sum.unsqueeze(-1), row_max, row_sum)

    def packed(self) -> Tensor:
        """One tensor, [b.., i, e + 2]."""
        return torch.cat([self.output, *(number.unsqueeze(-1) for number in self[1:])], -1)

    @staticmethod
    def unpacked(sums: Tensor) -> Partial:
        return Partial(sums[..., :-2], sums[..., -2], sums[..., -1])

    def in_units_of(self, row_max: Tensor) -> tuple[Tensor, Tensor]:
        """(output, sum) for weights exp(x - row_max), with 0 for no live key."""
        scale = torch.where(self.row_max == -math.inf, 0.0, torch.exp(self.row_max - row_max))
        return self.output * scale.unsqueeze(-1), torch.where(scale == 0, 0.0, self.row_sum * scale)

    def merged(self, other: Partial) -> Partial:
        """Sums over the keys of both."""
        highest = torch.maximum(self.row_max, other.row_max)
        pairs = zip(self.in_units_of(highest), other.in_units_of(highest), strict=True)
        output, row_sum = (mine + theirs for mine, theirs in pairs)
        return Partial(output, highest, row_sum)

    def where(self, rows: Tensor, other: Partial) -> Partial:
        """These in the rows that are marked, `other` elsewhere."""
        output = torch.where(rows.unsqueeze(-1), self.output, other.output)
        pairs = zip(self[1:], other[1:], strict=True)
        return Partial(output, *(torch.where(rows, mine, theirs) for mine, theirs in pairs))

    def size(self) -> Tensor:
        """Logarithm of the sum of exp(x)."""
        return self.row_max + self.row_sum.log()


class Merged(NamedTuple):
    """Sums over all blocks and sinks, M and L, [b.., i], and what the blocks' backward reads beside them.

    peak: number of the block with most of a row's weight; rest: R of that block; output: its O - P. So nothing is lost
    by cancellation where nearly all weight of a row is in one block. Where results are narrower than sums the output is
    O itself, and no block is a peak.
    """

    row_max: Tensor
    row_sum: Tensor
    peak: Tensor
    rest: Tensor
    output: Tensor

    def packed(self) -> Tensor:
        """One tensor [4 + e, b.., i]."""
        return torch.cat([torch.stack(self[:4]), self.output.movedim(-1, 0)])

    @staticmethod
    def unpacked(statistics: Tensor) -> Merged:
        row_max, row_sum, peak, rest = statistics[:4]
        return Merged(row_max, row_sum, peak, rest, statistics[4:].movedim(0, -1))

    def ordinary(self, spec: AttentionSpec) -> bool:
        """Whether each row has a live key, and a finite maximum. Others are computed with all keys at once."""
        fill = -math.inf if spec.mask is None else spec.mask.fill / 2
        return bool(((self.row_max > fill) & (self.row_max < math.inf)).all())


class Arriving(NamedTuple):
    """Gradient of the output of some rows, dO [b.., i, e], its products with the output O and with `Merged.output`,
    summed over e, and the sums of the rows."""

    grad: Tensor
    delta: Tensor
    of_others: Tensor
    rows: Merged

    @staticmethod
    def of(spec: AttentionSpec, grad: Tensor, out: Tensor, rows: Merged) -> Arriving:
        """grad, out: of the output, as the spec has it."""
        grad = computed(spec, grad)
        of_others = (grad * rows.output).sum(-1)
        delta = of_others if is_narrow(spec) else (grad * computed(spec, out)).sum(-1)
        return Arriving(grad, delta, of_others, rows)

    def at(self, number: int) -> Tensor:
        """Numbers of a row that the backward of a block needs, [4, b.., i]: M, L, q and t of `at_block`."""
        is_peak, rows = self.rows.peak == number, self.rows
        rest = torch.where(is_peak, rows.rest / rows.row_sum, 1.0)
        return torch.stack([rows.row_max, rows.row_sum, rest, torch.where(is_peak, self.of_others, self.delta)])


def at_block(block: Partial, grad: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """p dO and G of a block. block: its o / l, m and l; known: see `Arriving.at`.

    G = p (q own - t), own = sum over e of dO * o / l: with q = 1 - p and t = sum over e of dO * (O - P) in the block
    that has most of a row's weight; in all others, where nothing is lost, with q = 1 and t = sum over e of dO * O.
    """
    row_max, row_sum, rest, of_others = known
    share = block.row_sum * torch.exp(block.row_max - row_max) / row_sum
    share = torch.where(block.row_max == -math.inf, 0.0, share)
    own = (grad * block.output).sum(-1)
    return grad * share.unsqueeze(-1), share * (rest * own - of_others)


class Sums:
    """Sums over the blocks that were added, apart for the block with most of a row's weight and for the others."""

    def __init__(self, spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int]):
        self.spec, self.operands, self.sizes = spec, operands, sizes
        *batch, rows, _, columns = coordinate_extents(spec, sizes).values()
        empty = operands[0].new_zeros((*batch, rows), dtype=getattr(torch, wide(spec)))
        self.peak = self.rest = Partial(empty.unsqueeze(-1).expand(*empty.shape, columns), empty - math.inf, empty)
        self.number = torch.zeros_like(empty)

    def add(self, number: int, block: Partial) -> None:
        """Add the o, m and l of a block with a number."""
        larger = block.size() > self.peak.size()
        self.rest = self.rest.merged(self.peak.where(larger, block))
        self.peak = block.where(larger, self.peak)
        self.number = torch.where(larger, float(number), self.number)

    def finish(self) -> tuple[Tensor, Merged]:
        """Output, [b.., i, e], and the statistics for the backward."""
        for sink in self.spec.sinks:
            value = gradients.value(self.spec, self.operands, self.sizes, sink, self.number.dtype)
            value = value.squeeze(-1).expand(self.number.shape)
            self.rest = self.rest.merged(Partial(torch.zeros_like(self.rest.output), value, torch.ones_like(value)))
        _, row_max, row_sum = self.rest.merged(self.peak)
        others, rest = self.rest.in_units_of(row_max)
        of_peak, _ = self.peak.in_units_of(row_max)
        others, output = others / row_sum.unsqueeze(-1), (others + of_peak) / row_sum.unsqueeze(-1)
        if self.spec.normalizer is Normalizer.SAFE_SOFTMAX:
            output = torch.where((row_max == -math.inf).unsqueeze(-1), 0.0, output)
        if is_narrow(self.spec):
            return output, Merged(row_max, row_sum, torch.full_like(self.number, -1.0), rest, output)
        return output, Merged(row_max, row_sum, self.number, rest, others)


def computed(spec: AttentionSpec, tensor: Tensor) -> Tensor:
    """Output or its gradient as [b.., i, e], in the dtype of sums."""
    order = [spec.output.dims.index(name) for name in result_names(spec)]
    return tensor.to(getattr(torch, wide(spec))).permute(order)


def stored(spec: AttentionSpec, output: Tensor) -> Tensor:
    """Output, [b.., i, e], in the dimensions and memory order of the spec."""
    names, order = result_names(spec), spec.output.order
    packed = output.permute([names.index(name) for name in order]).contiguous()
    return packed.permute([order.index(name) for name in spec.output.dims])


def of_sinks(
    spec: AttentionSpec,
    operands: Sequence[Tensor],
    sizes: Sequence[int],
    needs: Sequence[bool],
    delta: Tensor,
    rows: Merged,
) -> dict[int, Tensor]:
    """Gradients of operands through the sinks, by number: of a sink it is -(its weight) D."""
    result: dict[int, Tensor] = {}
    for sink in spec.sinks:
        value = gradients.value(spec, operands, sizes, sink, delta.dtype)
        weight = torch.exp(value - rows.row_max.unsqueeze(-1)) / rows.row_sum.unsqueeze(-1)
        read = {part.operand for part in walk(sink) if part.op == "load" and part.kind is Kind.FLOAT}
        for number in sorted(n for n in read if needs[n]):
            upstream = -weight * delta.unsqueeze(-1)
            part = gradients.of_expression(spec, operands, sizes, sink, upstream, number)
            result[number] = result[number] + part if number in result else part
    return result
