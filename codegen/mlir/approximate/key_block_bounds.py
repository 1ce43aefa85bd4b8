"""A kernel that tells, from a few rows, whether boxes about blocks of keys could rule any out.

For each head, up to 16 queries at equal distances, as many keys as wanted, and some whole blocks of `size` keys:

    found     float32 [head][2]      of the pairs of a query and a block that it sees, how many are ruled out, and all

A block is ruled out where the bound of its scores, by the largest and the smallest of each coordinate (the sum over c
of max(q_c high_c, q_c low_c)), is below the query's highest score with one of the keys that it sees by `gap`, or more.
"""

from __future__ import annotations

import dataclasses

import torch

from ..builder import Value
from ..calling import float_bits
from ..vectormath import sum_rows
from ..x86 import F32, LANES
from .row_statistics import Rows, RowStatisticsCall, RowStatisticsKernel, code

WORDS = f"vector<{LANES}xi64>"


class KeyBlockBounds(RowStatisticsKernel):
    name = "boxes"

    def __init__(self, d: int, scalar: str, size: int):
        super().__init__(d, scalar)
        self.size = size

    def _item(self, item: Value, q: Value, k: Value) -> None:
        b, p = self.b, self.params
        self._stage(q, p[("q_stride",)], p[("n_q",)], None)
        row = b.dense([*range(LANES)], WORDS, "row")
        places = b.mul(row, b.broadcast(p[("q_step",)], LANES), "places")
        limit = b.sub(self._highest(k, places), b.broadcast(p.float32("gap"), LANES), "limit")
        reached = b.compare("sge", row, b.broadcast(p[("first",)], LANES))
        rows = b.and_(reached, b.compare("slt", row, b.broadcast(p[("n_q",)], LANES)), "rows")
        none = b.constant(0.0, F32)
        with b.carry(0, p[("blocks",)], 1, [none, none], hint="block") as (loop, block, (out, all_)):
            upper = self._bounds(b.row(k, block, p[("block_stride",)], self.scalar))
            seen = b.compare("sge", places, b.broadcast(b.mul(block, p[("block_step",)]), LANES), "seen")
            seen = b.and_(seen, rows, "seen")
            ruled_out = b.and_(seen, b.compare("ole", upper, limit), "ruled_out")
            one = b.constant(1.0, F32)
            loop.yields(*(b.add(x, b.select(c, one, none)) for x, c in ((out, ruled_out), (all_, seen))))
        result = b.row(p[("ptr", "found")], item, 2, "f32", "found")
        for number, x in enumerate(loop.results):
            b.store(b.reduce("add", x, "count"), b.at(result, number, "f32"))

    def _queries(self):
        """The staged queries, vector by vector."""
        for r in range(LANES):
            yield [self.b.at(self.stage, r * self.width + LANES * v, "f32") for v in range(self.vectors)]

    def _highest(self, k: Value, places: Value) -> Value:
        b, p = self.b, self.params
        lowest = b.constant(float("-inf"), F32)
        with b.carry(0, p[("n_k",)], 1, [lowest], hint="key") as (loop, key, (highest,)):
            row, products = self._row(b.row(k, key, p[("k_stride",)], self.scalar)), []
            for query in self._queries():
                products.append(self._product(row, (b.load(x, F32, "q", align=64) for x in query)))
            seen = b.compare("sge", places, b.broadcast(b.mul(key, p[("k_step",)]), LANES), "seen")
            score = b.select(seen, sum_rows(b, products), lowest)
            loop.yields(b.binary("arith.maximumf", highest, score, "highest"))
        return loop.results[0]

    def _bounds(self, first: Value) -> Value:
        b, stride = self.b, self.params[("key_stride",)]
        start = self._row(first) * 2
        with b.carry(1, self.size, 1, start, hint="key") as (loop, key, sides):
            row = self._row(b.row(first, key, stride, self.scalar))
            names = ["arith.maximumf"] * self.vectors + ["arith.minimumf"] * self.vectors
            loop.yields(*(b.binary(op, x, y, "side") for op, x, y in zip(names, sides, row * 2, strict=True)))
        high, low, sums = loop.results[: self.vectors], loop.results[self.vectors :], []
        for query in self._queries():
            total = b.constant(0.0, F32)
            for address, above, below in zip(query, high, low, strict=True):
                x = b.load(address, F32, "q", align=64)
                total = b.add(total, b.binary("arith.maximumf", b.mul(x, above), b.mul(x, below), "most"))
            sums.append(total)
        return sum_rows(b, sums)


class KeyBlockBoundsCall(RowStatisticsCall):
    """About `rows` queries, `keys` keys and `blocks` blocks of `size` keys, of the queries and keys given, which
    are at least `size`. gap: in scores before any scale."""

    def __init__(
        self, d: int, dtype: torch.dtype, q: Rows, k: Rows, sample: tuple[int, int, int, int], gap: float, causal: bool
    ):
        rows, keys, blocks, size = sample
        whole = k.count // size
        k_step, block_step = -(-k.count // keys), -(-whole // blocks)
        q_step = max(k_step, -(-q.count // rows) // k_step * k_step)  # queries at places where keys are, too
        some = q.every(q_step)
        some = dataclasses.replace(some, count=min(some.count, LANES))
        # Queries of causal attention that see enough: the second half.
        super().__init__(
            code(KeyBlockBounds, d, dtype, size), some, k.every(k_step), 2, q_step=q_step * causal,
            k_step=k_step * causal, first=some.count // 2 * causal, blocks=-(-whole // block_step),
            block_step=block_step * size * causal, block_stride=k.stride * size * block_step, key_stride=k.stride,
            gap=float_bits(gap),
        )  # fmt: skip
