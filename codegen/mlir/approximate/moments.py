"""A kernel that bounds the scores of heads from their queries and keys: largest norms, and second moments.

For each head, with keys k_j minus their mean, and the sums G = sum of k_j k_j^T and s = sum of k_j over the keys
*before* a query (all of them, or those of earlier segments where attention is causal):

    found     float32 [head][4]        the largest |k_j|^2 with the mean and without it, |q_i|^2, and of `squares`
    means     float32 [head][width]    the mean of the keys
    squares   float32 [head][rows]     q_i^T G q_i / keys before, rows up to a multiple of BLOCK
    slants    float32 [head][rows]     q_i . s / keys before

Moments of a head end where it turns out that |k_j|^2 |q_i|^2 is above `limit`: its largest square is then infinite.

NaN and infinities stay what they are. Sums are taken block by block, so that rounding grows with BLOCK + N / BLOCK. The
same kernel looks at all rows or, by larger strides, at a few.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ..builder import Value
from ..micro_kernel import FmaVectors, MatrixOperand
from ..thread_function import KernelText, ThreadFunction
from ..values import round_up
from ..vectormath import sum_rows
from ..x86 import F32, LANES

BLOCK = 64
SUMS = 16  # vectors of sums that stay in registers
GIVEN = (*(("ptr", name) for name in ("q", "k", "found", "means", "squares", "slants")), ("keep",))
"""The parameters that change from call to call. keep: 1 to write means, 2 squares and slants, too."""


class Moments(ThreadFunction):
    """The text for rows of d elements of one scalar type."""

    name = "moments"

    def __init__(self, d: int, scalar: str):
        super().__init__()
        self.d, self.scalar, self.width = d, scalar, round_up(d, LANES)
        self.vectors = self.width // LANES
        self.mr = 1 << max(0, (SUMS // self.vectors).bit_length() - 1)  # divides BLOCK, and the width
        self.kernel, self.zero = FmaVectors(self.b, LANES), self.b.constant(0.0, F32)
        self.stage = self.area(4 * BLOCK * self.width, "stage")
        self.partial = self.area(4 * BLOCK * LANES, "partial")  # of a row, 16 numbers to be added up
        self.gram = self.area(4 * self.width * self.width, "gram")
        self.sums = self.area(4 * self.width, "sums")
        self.largest = self.area(4 * 4 * LANES, "largest")
        self.mean = self.area(4 * self.width, "mean")

    def text(self) -> KernelText:
        b, p = self.b, self.params
        with self.dynamic_loop(p[("items",)], "item") as item:
            places = (b.load(b.at(p[("ptr", f"{x}_offsets")], item, "i64"), "i64", "offset") for x in "qk")
            q, k = (b.at(p[("ptr", x)], place, self.scalar, x) for x, place in zip("qk", places, strict=True))
            b.fill(self.gram, self.width * (self.vectors + 1) + 4, self.zero)  # all that lies behind it, but the mean
            self._mean(k)
            with self._blocks(q, "q", 0, p[("n_q",)]):
                self._raise(2)
            with b.loop(0, p[("segments",)], hint="segment") as segment:
                self._segment(item, q, k, segment)
            self._finish(item)
        return self.kernel_text()

    def _mean(self, k: Value) -> None:
        """The mean of all keys, and the largest of their norms."""
        b, n = self.b, self.params[("n_k",)]
        with self._blocks(k, "k", 0, n):
            self._raise(0)
            self._add_rows()
        inverse = b.broadcast(b.div(1.0, self._float(n), "inverse"), LANES)
        for place, mean in zip(self._places(self.sums), self._places(self.mean), strict=True):
            b.store(b.mul(b.load(place, F32), inverse), mean)
            b.store(self.zero, place)

    def _segment(self, item: Value, q: Value, k: Value, segment: Value) -> None:
        b, p = self.b, self.params
        before = b.mul(segment, p[("k_segment",)])
        first = b.mul(b.sub(segment, p[("lag",)]), p[("q_segment",)])
        last = b.least(b.add(first, p[("q_segment",)]), p[("n_q",)])
        inverse = b.div(1.0, self._float(b.most(b.least(before, p[("n_k",)]), 1)), "inverse")
        wanted = b.negated(self._is_beyond(), "wanted")
        with b.when(wanted), self._blocks(q, "q", b.most(first, 0), last) as block:
            self._queries(b.add(b.mul(item, p[("q_rows",)]), block), b.broadcast(inverse, LANES))
        last = b.least(b.add(before, p[("k_segment",)]), p[("n_k",)])
        with self._blocks(k, "k", before, last, self._vectors_at(self.mean)):
            self._raise(1)
            with b.when(wanted):
                self._accumulate()

    def _queries(self, place: Value, inverse: Value) -> None:
        """Second and first moments of the staged queries, number `place` and on of all."""
        b, p = self.b, self.params
        self._squares()
        self._raise(3, inverse)
        with b.when(b.compare("eq", p[("keep",)], 2, "kept")):
            self._write(b.at(p[("ptr", "squares")], place, "f32"), inverse)
            self._slants()
            self._write(b.at(p[("ptr", "slants")], place, "f32"), inverse)

    def _finish(self, item: Value) -> None:
        b, p = self.b, self.params
        result = b.row(p[("ptr", "found")], item, 4, "f32", "found")
        square = b.select(self._is_beyond(), float("inf"), self._most(3), "square")
        for number, figure in enumerate([*map(self._most, range(3)), square]):
            b.store(figure, b.at(result, number, "f32"))
        with b.when(b.compare("ne", p[("keep",)], 0, "kept")):
            means = b.row(p[("ptr", "means")], item, self.width, "f32", "means")
            for place, x in zip(self._places(means), self._vectors_at(self.mean), strict=True):
                b.store(x, place)

    def _float(self, x: Value) -> Value:
        return self.b.convert("arith.uitofp", x, "f32", "count")

    def _most(self, number: int) -> Value:
        x = self.b.load(self.b.at(self.largest, LANES * number, "f32"), F32, "x")
        return self.b.reduce("maximumf", x, "most")

    def _is_beyond(self) -> Value:
        """Whether keys make the bound of the scores larger than anything that is asked for."""
        b, limit = self.b, self.params.float32("limit")
        return b.compare("ogt", b.mul(self._most(1), self._most(2)), limit, "beyond")

    def _raise(self, number: int, factor: Value | None = None) -> None:
        """Raise 16 of the largest numbers to what lies in `partial`, times a factor; NaN stays."""
        b, target = self.b, self.b.at(self.largest, LANES * number, "f32")
        with self._row_sums(factor) as (_, x):
            b.store(b.binary("arith.maximumf", b.load(target, F32), x, "largest"), target)

    def _write(self, target: Value, factor: Value) -> None:
        with self._row_sums(factor) as (first, x):
            self.b.store(x, self.b.at(target, first, "f32"))

    @contextlib.contextmanager
    def _row_sums(self, factor: Value | None) -> Iterator[tuple[Value, Value]]:
        """A loop over 16 rows of a block at a time: the first, and the sums over `partial`, times a factor."""
        b = self.b
        with b.loop(0, BLOCK, LANES, hint="first") as first:
            rows = b.row(self.partial, first, LANES)
            x = sum_rows(b, [b.load(b.at(rows, LANES * r, "f32"), F32, align=64) for r in range(LANES)])
            yield first, x if factor is None else b.mul(x, factor)

    @contextlib.contextmanager
    def _blocks(
        self, rows: Value, name: str, first: Value | int, last: Value, mean: Iterable[Value] = ()
    ) -> Iterator[Value]:
        """A loop over blocks of the rows of Q or K (`name`) in float32, minus the mean where one is given: the first
        row. The squares of each are in `partial`, zeros where a row does not exist."""
        b, stride, mean = self.b, self.params[(f"{name}_stride",)], [*mean]
        with b.loop(first, last, BLOCK, hint="block") as block:
            count = b.least(b.sub(last, block), BLOCK)
            with b.loop(0, count, hint="r") as r:
                row = self._row(b.row(rows, b.add(block, r), stride, self.scalar))
                row = [b.sub(x, y) for x, y in zip(row, mean, strict=True)] if mean else row
                for x, place in zip(row, self._places(b.row(self.stage, r, self.width)), strict=True):
                    b.store(x, place, align=64)
                self._write_product(r, row, row)
            for area, vectors in (self.partial, 1), (self.stage, self.vectors):
                b.fill(area, BLOCK * vectors, self.zero, b.mul(count, vectors), hint="beyond")
            yield block

    def _row(self, address: Value) -> list[Value]:
        """A row in memory as vectors of float32, with zeros behind its end."""
        b, results = self.b, []
        type_ = f"vector<{LANES}x{self.scalar}>"
        for column in range(0, self.width, LANES):
            at = b.at(address, column, self.scalar)
            if column + LANES <= self.d:
                x = b.load(at, type_, "x")
            else:
                inside = [float(column + lane < self.d) for lane in range(LANES)]
                x = b.masked_load(at, b.dense(inside, f"vector<{LANES}xi1>", "valid"), type_, "x")
            results.append(b.convert("arith.extf", x, "f32"))
        return results

    def _places(self, address: Value) -> list[Value]:
        return [self.b.at(address, LANES * v, "f32") for v in range(self.vectors)]

    def _vectors_at(self, address: Value) -> list[Value]:
        """The vectors of a row of this thread."""
        return [self.b.load(place, F32, align=64) for place in self._places(address)]

    def _operand(self, rows: Value) -> MatrixOperand:
        """The rows of `width` elements from an address on, as right operand."""
        return MatrixOperand(bases=[rows], step=self.width, count=self.vectors, part=LANES)

    def _write_product(self, r: Value, left: Iterable[Value], right: Iterable[Value]) -> None:
        """Into `partial` of row r, 16 numbers that add up to the product of two rows."""
        total = None
        for x, y in zip(left, right, strict=True):
            total = self.b.mul(x, y) if total is None else self.b.fma(x, y, total)
        assert total is not None
        self.b.store(total, self.b.row(self.partial, r, LANES), align=64)

    def _accumulate(self) -> None:
        """Add a staged block to G and s: some rows of G at a time, in registers over the block."""
        b, kernel, right = self.b, self.kernel, self._operand(self.stage)
        with b.loop(0, self.d, self.mr, hint="c") as c:
            left = MatrixOperand(bases=[b.at(self.stage, c, "f32")], step=self.width, count=self.mr, part=1)
            sums = kernel.gemm(kernel.zeros(self.mr * self.vectors), left, right, 0, BLOCK)
            corner = b.row(self.gram, c, self.width)
            kernel.add(sums, [b.at(corner, LANES * n, "f32") for n in range(len(sums))])
        self._add_rows()

    def _add_rows(self) -> None:
        """Add the rows of a staged block to s."""
        b = self.b
        with b.carry(0, BLOCK, 1, [self.zero] * self.vectors, hint="r") as (loop, r, sums):
            row = self._vectors_at(b.row(self.stage, r, self.width))
            loop.yields(*(b.add(x, y) for x, y in zip(sums, row, strict=True)))
        self.kernel.add(loop.results, self._places(self.sums))

    def _squares(self) -> None:
        """Into `partial`, 16 numbers for each row of the staged block that add up to q^T G q."""
        b, mr, kernel, right = self.b, self.mr, self.kernel, self._operand(self.gram)
        with b.loop(0, BLOCK, mr, hint="r") as r:
            rows = b.row(self.stage, r, self.width)
            left = MatrixOperand(bases=[rows], step=1, count=mr, part=self.width)
            sums = kernel.gemm(kernel.zeros(mr * self.vectors), left, right, 0, self.d)
            for k in range(mr):
                products = sums[k * self.vectors : (k + 1) * self.vectors]
                self._write_product(b.add(r, k), self._vectors_at(b.at(rows, k * self.width, "f32")), products)

    def _slants(self) -> None:
        """Into `partial`, 16 numbers for each row of the staged block that add up to q . s."""
        b, sums = self.b, self._vectors_at(self.sums)
        with b.loop(0, BLOCK, hint="r") as r:
            self._write_product(r, self._vectors_at(b.row(self.stage, r, self.width)), sums)
