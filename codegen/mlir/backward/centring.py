"""Keys less a vector that is near their mean, for the gradient of Q.

dQ_i = sum_j dS_ij K_j, where the sum of dS_ij over the keys is 0 in exact arithmetic: any vector may be taken off all
keys. Rounding makes it 0 only nearly, and what is left is multiplied with what keys have in common, which in trained
models is often more than how they differ. SageAttention (arXiv:2410.02367) takes the mean of K off in the forward,
where softmax does not see it.

Where the sum is not 0 (a soft-cap, sinks), it is made beside dQ, and the vector times the sum is added in the end. What
the rounding of delta did to the sum is taken off before: the sum of dx tells how much that was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..builder import Value, vector_of
from ..rows import RowReader, Rows, load_f32
from ..values import round_up

if TYPE_CHECKING:
    from .kernel import BackwardKernel

SAMPLE = 32  # keys at the start whose mean it is
LARGEST = 2.0**60  # of a mean; so that nothing overflows, and infinities and NaN stay where they are


class CentredKeys(RowReader):
    """Rows of K in float32, less the vector: columns of which the mean is larger than the deviation have it, as a
    number of bfloat16, so that most differences are exact."""

    def __init__(self, kernel: BackwardKernel):
        """Make it outside of all loops, `begin` with each batch element."""
        self.b, self.kernel = kernel.b, kernel
        self.padded = round_up(kernel.d, 32)
        self.mean = kernel.area(4 * self.padded, "mean")
        self.centred = kernel.area(4 * SAMPLE * self.padded, "centred")
        self.dtype, self.memory = "float32", "f32"

    def begin(self, reader: RowReader) -> None:
        b, kernel, vector = self.b, self.kernel, self.kernel.vector
        self.reader, zero = reader, b.constant(0.0, vector)
        first, n_k = b.constant(0, "i64"), kernel.n_k
        rows = reader.rows(first, SAMPLE, self.padded, self.centred)
        count = b.convert("arith.sitofp", b.least(n_k, SAMPLE), "f32", "count")
        share = b.broadcast(b.div(1.0, count), kernel.lanes)
        with b.loop(0, self.padded, kernel.lanes, hint="c") as c:
            with b.carry(0, SAMPLE, 1, [zero, zero], hint="j") as (loop, j, (total, squares)):
                x = load_f32(b, rows, j, c, kernel.lanes)
                loop.yields(b.add(total, x), b.fma(x, x, squares))
            mean, square = (b.mul(x, share) for x in loop.results)
            most = b.compare("ogt", b.mul(b.mul(mean, mean), 2.0), square, "most")
            usual = b.compare("olt", b.unary("math.absf", mean), LARGEST, "usual")
            bits = b.bitcast(mean, vector_of("i32", kernel.lanes))
            short = b.bitcast(b.and_(bits, b.constant(-65536, bits.type)), vector, "short")
            taken = b.select(b.and_(most, usual), short, zero, "mean")
            b.store(taken, b.at(self.mean, c, "f32"))

    def add_mean(self, line: Value, factor: Value) -> None:
        """To `padded` float32 numbers: the vector times a factor. Where it is 0, an infinite factor adds nothing."""
        b, vector = self.b, self.kernel.vector
        factors, zero = b.broadcast(factor, self.kernel.lanes), b.constant(0.0, vector)
        with b.loop(0, self.padded, self.kernel.lanes, hint="c") as c:
            mean, place = b.load(b.at(self.mean, c, "f32"), vector, "mean"), b.at(line, c, "f32")
            x = b.load(place, vector, "x")
            b.store(b.select(b.compare("oeq", mean, zero), x, b.fma(factors, mean, x)), place)

    def rows(self, first: Value, count: int, padded: int, staging: Value, limit: Value | None = None) -> Rows:
        """Rows as `RowReader.rows` gives them; those from `limit` on are anything finite."""
        b, lanes = self.b, self.kernel.lanes
        rows = self.reader.rows(first, count, padded, staging, limit)
        with b.loop(0, padded, lanes, hint="c") as c:
            mean = b.load(b.at(self.mean, c, "f32"), self.kernel.vector, "mean")
            with b.loop(0, count, hint="r") as r:
                x = b.sub(load_f32(b, rows, r, c, lanes), mean)
                b.store(x, b.at(self.centred, b.add(c, b.mul(r, padded)), "f32"))
        return Rows(pointer=self.centred, stride=padded, memory=self.memory, dtype=self.dtype)
