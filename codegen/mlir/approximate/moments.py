"""A kernel that bounds the scores of heads from their queries and keys: largest norms, and second moments.

For each head, with keys k_j minus their mean, and the sums G = sum of k_j k_j^T and s = sum of k_j over the keys
*before* a query (all of them, or those of earlier segments where attention is causal):

    found     float32 [head][4]        the largest |k_j|^2 with the mean and without it, |q_i|^2, and of `squares`
    means     float32 [head][width]    the mean of the keys
    squares   float32 [head][rows]     q_i^T G q_i / keys before, rows up to a multiple of BLOCK
    slants    float32 [head][rows]     q_i . s / keys before

A head ends early where it turns out that |k_j|^2 |q_i|^2 is above `limit`: its largest square is then infinite, the
norm of its keys what it is at most, that of its queries infinite where the first of them were enough.

NaN and infinities stay what they are. Sums are taken block by block, so that rounding grows with BLOCK + N / BLOCK. The
same kernel looks at all rows or, by larger strides, at a few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..builder import Value
from ..calling import float_bits
from ..micro_kernel import FmaVectors, MatrixOperand
from ..values import round_up
from ..x86 import F32, LANES
from .row_statistics import BLOCK, Rows, RowStatisticsCall, RowStatisticsKernel, code


class Moments(RowStatisticsKernel):
    name = "moments"

    def __init__(self, d: int, scalar: str):
        super().__init__(d, scalar)
        self.kernel = FmaVectors(self.b, LANES)
        self.gram = self.area(4 * self.width * self.width, "gram")
        self.sums = self.area(4 * self.width, "sums")
        self.largest = self.area(4 * 4 * LANES, "largest")
        self.mean = self.area(4 * self.width, "mean")

    def _item(self, item: Value, q: Value, k: Value) -> None:
        b, p = self.b, self.params
        zero = b.constant(0.0, F32)
        with b.loop(0, self.width * (self.width + 1) + 4 * LANES, LANES, hint="clear") as place:
            b.store(zero, b.at(self.gram, place, "f32"), align=64)
        self._mean(k)
        self._query_norms(q, b.least(p[("n_q",)], BLOCK))
        with b.when(self._beyond_by_mean()):
            b.store(b.constant(float("inf"), F32), b.at(self.largest, 2 * LANES, "f32"))
            self._give_up()
        with b.otherwise():
            self._query_norms(q, p[("n_q",)])
            with b.when(self._beyond_by_mean()):
                self._give_up()
            with b.otherwise(), b.loop(0, p[("segments",)], hint="segment") as segment:
                self._segment(item, q, k, segment)
        self._finish(item)

    def _segment(self, item: Value, q: Value, k: Value, segment: Value) -> None:
        b, p = self.b, self.params
        n_q, n_k = p[("n_q",)], p[("n_k",)]
        before = b.mul(segment, p[("k_segment",)])
        first = b.mul(b.sub(segment, p[("lag",)]), p[("q_segment",)])
        last = b.least(b.add(first, p[("q_segment",)]), n_q)
        inverse = b.div(1.0, self._float(b.most(b.least(before, n_k), 1)), "inverse")
        wanted = b.compare("ne", p[("second",)], 0, "wanted")
        wanted = b.select(self._is_beyond(self._most(1)), b.constant(0, "i1"), wanted)
        with b.when(wanted), b.loop(b.most(first, 0), last, BLOCK, hint="block") as block:
            count = b.least(b.sub(last, block), BLOCK)
            self._stage(b.row(q, block, p[("q_stride",)], self.scalar), p[("q_stride",)], count, None)
            self._queries(b.add(b.mul(item, p[("q_rows",)]), block), inverse)
        last = b.least(b.add(before, p[("k_segment",)]), n_k)
        with b.loop(before, last, BLOCK, hint="block") as block:
            count = b.least(b.sub(last, block), BLOCK)
            self._stage(b.row(k, block, p[("k_stride",)], self.scalar), p[("k_stride",)], count, self.mean)
            self._raise(1)
            with b.when(wanted):
                self._accumulate()

    def _most(self, number: int) -> Value:
        b = self.b
        x = b.load(b.at(self.largest, LANES * number, "f32"), F32, "x")
        return b.reduce("maximumf", x, "most")

    def _is_beyond(self, keys: Value) -> Value:
        """Whether keys of this norm (squared) make the bound of the scores larger than anything that is asked for."""
        b = self.b
        bits = b.convert("arith.trunci", self.params[("limit",)], "i32", "limit_bits")
        return b.compare("ogt", b.mul(keys, self._most(2)), b.bitcast(bits, "f32", "limit"), "beyond")

    def _sides(self) -> tuple[Value, Value]:
        """The norms of the largest key, and of the mean."""
        b, total = self.b, self.b.constant(0.0, F32)
        for column in range(0, self.width, LANES):
            x = b.load(b.at(self.mean, column, "f32"), F32, "mean")
            total = b.fma(x, x, total)
        mean = b.reduce("add", total, "square")
        return b.unary("math.sqrt", self._most(0), "raw"), b.unary("math.sqrt", mean, "mean")

    def _beyond_by_mean(self) -> Value:
        """`_is_beyond` of what the largest key keeps at least when the mean is taken away."""
        b, (raw, mean) = self.b, self._sides()
        least = b.most(b.sub(raw, mean), 0.0)
        return self._is_beyond(b.mul(least, least))

    def _give_up(self) -> None:
        """Norms of keys without the mean: what they are at most."""
        b, (raw, mean) = self.b, self._sides()
        most = b.add(raw, mean)
        b.store(b.broadcast(b.mul(most, most), LANES), b.at(self.largest, LANES, "f32"))

    def _queries(self, place: Value, inverse: Value) -> None:
        """Second and first moments of the staged queries, number `place` and on of all."""
        b, p = self.b, self.params
        kept = b.compare("eq", p[("keep",)], 2, "kept")
        self._squares()
        self._raise(3, inverse)
        with b.when(kept):
            self._put(b.at(p[("ptr", "squares")], place, "f32"), inverse)
            self._slants()
            self._put(b.at(p[("ptr", "slants")], place, "f32"), inverse)

    def _finish(self, item: Value) -> None:
        b, p = self.b, self.params
        result = b.row(p[("ptr", "found")], item, 4, "f32", "found")
        for number in range(3):
            b.store(self._most(number), b.at(result, number, "f32"))
        square = b.select(self._is_beyond(self._most(1)), float("inf"), self._most(3), "square")
        b.store(square, b.at(result, 3, "f32"))
        with b.when(b.compare("ne", p[("keep",)], 0, "kept")):
            means = b.row(p[("ptr", "means")], item, self.width, "f32", "means")
            for column in range(0, self.width, LANES):
                b.store(b.load(b.at(self.mean, column, "f32"), F32), b.at(means, column, "f32"))

    def _mean(self, k: Value) -> None:
        """The mean of all keys, and the largest of their norms."""
        b, n, stride = self.b, self.params[("n_k",)], self.params[("k_stride",)]
        zero = b.constant(0.0, F32)
        with b.carry(0, n, BLOCK, [zero] * self.vectors, hint="block") as (blocks, block, totals):
            count = b.least(b.sub(n, block), BLOCK)
            with b.carry(0, count, 1, [zero] * self.vectors, hint="r") as (rows, r, sums):
                row = self._row(b.row(k, b.add(block, r), stride, self.scalar))
                self._write_product(r, row, row)
                rows.yields(*(b.add(x, y) for x, y in zip(sums, row, strict=True)))
            self._clear(self.partial, LANES, count)
            self._raise(0)
            blocks.yields(*(b.add(x, y) for x, y in zip(totals, rows.results, strict=True)))
        inverse = b.broadcast(b.div(1.0, self._float(n), "inverse"), LANES)
        for column, total in enumerate(blocks.results):
            b.store(b.mul(total, inverse), b.at(self.mean, column * LANES, "f32"))

    def _query_norms(self, q: Value, n: Value) -> None:
        b, stride = self.b, self.params[("q_stride",)]
        with b.loop(0, n, BLOCK, hint="block") as block:
            count = b.least(b.sub(n, block), BLOCK)
            with b.loop(0, count, hint="r") as r:
                row = self._row(b.row(q, b.add(block, r), stride, self.scalar))
                self._write_product(r, row, row)
            self._clear(self.partial, LANES, count)
            self._raise(2)

    def _raise(self, number: int, factor: Value | None = None) -> None:
        """Raise 16 of the largest numbers to what lies in `partial`, times a factor; NaN stays."""
        b, target = self.b, self.b.at(self.largest, LANES * number, "f32")
        with b.loop(0, BLOCK, LANES, hint="first") as first:
            x = self._sums(first) if factor is None else b.mul(self._sums(first), b.broadcast(factor, LANES))
            b.store(b.binary("arith.maximumf", b.load(target, F32), x, "largest"), target)

    def _accumulate(self) -> None:
        """Add a staged block to G and s: some rows of G at a time, in registers over the block."""
        b, zero, kernel, right = self.b, self.b.constant(0.0, F32), self.kernel, self._vectors(self.stage)
        with b.loop(0, self.d, self.mr, hint="c") as c:
            corner = b.at(self.stage, c, "f32")
            left = MatrixOperand(bases=[corner], step=self.width, count=self.mr, part=1)
            sums = kernel.gemm(kernel.zeros(self.mr * self.vectors), left, right, 0, BLOCK)
            self._add(b.row(self.gram, c, self.width), sums)
        with b.carry(0, BLOCK, 1, [zero] * self.vectors, hint="r") as (loop, r, sums):
            row = b.row(self.stage, r, self.width)
            loop.yields(*(b.add(x, b.load(b.at(row, LANES * v, "f32"), F32)) for v, x in enumerate(sums)))
        self._add(self.sums, loop.results)

    def _vectors(self, rows: Value) -> MatrixOperand:
        """The rows of `width` elements from an address on, as right operand."""
        return MatrixOperand(bases=[rows], step=self.width, count=self.vectors, part=LANES)

    def _add(self, target: Value, values: Sequence[Value]) -> None:
        self.kernel.add(values, [self.b.at(target, LANES * number, "f32") for number in range(len(values))])

    def _squares(self) -> None:
        """Into `partial`, 16 numbers for each row of the staged block that add up to q^T G q."""
        b, mr, kernel, right = self.b, self.mr, self.kernel, self._vectors(self.gram)
        with b.loop(0, BLOCK, mr, hint="r") as r:
            rows = b.row(self.stage, r, self.width)
            left = MatrixOperand(bases=[rows], step=1, count=mr, part=self.width)
            sums = kernel.gemm(kernel.zeros(mr * self.vectors), left, right, 0, self.d)
            for k in range(mr):
                products = sums[k * self.vectors : (k + 1) * self.vectors]
                row = b.add(r, k)
                self._write_product(row, self._line(b.at(rows, k * self.width, "f32")), products)

    def _slants(self) -> None:
        """Into `partial`, 16 numbers for each row of the staged block that add up to q . s."""
        b = self.b
        sums = [*self._line(self.sums)]
        with b.loop(0, BLOCK, hint="r") as r:
            self._write_product(r, self._line(b.row(self.stage, r, self.width)), sums)

    def _put(self, target: Value, inverse: Value) -> None:
        b, factor = self.b, self.b.broadcast(inverse, LANES)
        with b.loop(0, BLOCK, LANES, hint="first") as first:
            b.store(b.mul(self._sums(first), factor), b.at(target, first, "f32"))


class LargestCall(RowStatisticsCall):
    """The figures of some rows of each head: `found`, without squares if not `second`."""

    def __init__(self, d: int, dtype: torch.dtype, q: Rows, k: Rows, second: bool):
        super().__init__(
            code(Moments, d, dtype), q, k, 4, lag=1, segments=2, q_segment=q.count, k_segment=k.count,
            second=int(second), keep=0, limit=float_bits(math.inf), q_rows=0,
        )  # fmt: skip


class MomentsCall(RowStatisticsCall):
    """A call that looks at all rows; see `whole` for what it returns. segment: keys that become visible together, a
    multiple of BLOCK, where attention is causal; else 0. second: whether squares and slants are asked for (zeros
    otherwise). limit: as above."""

    def __init__(
        self, d: int, dtype: torch.dtype, q: Rows, k: Rows, segment: int, second: bool, limit: float
    ):  # fmt: skip
        self.d, self.n_q, self.width = d, q.count, round_up(d, LANES)
        self.rows = round_up(max(q.count, 1), BLOCK) if segment and second else 0
        super().__init__(
            code(Moments, d, dtype), q, k, 4, lag=int(not segment), segments=-(-q.count // segment) if segment else 2,
            q_segment=segment or q.count, k_segment=segment or k.count, second=int(second), keep=1 + bool(self.rows),
            q_rows=self.rows, limit=float_bits(limit),
        )  # fmt: skip

    def whole(self, q: int, k: int, threads: int) -> tuple[tuple[float, ...], Tensor, Tensor, Tensor]:
        """(figures, four for each head; the means of the keys, [heads, d]; squares and slants, [heads, rows], where
        attention is causal)."""
        means = torch.empty(self.heads, self.width, dtype=torch.float32)
        squares, slants = torch.empty(2, self.heads, self.rows, dtype=torch.float32) if self.rows else (means, means)
        figures = self(q, k, threads, means, squares, slants)
        return figures, means[:, : self.d], squares[:, : self.n_q], slants[:, : self.n_q]
