"""The backward kernels whose lanes are queries: dQ += dS K, and sums over keys of gradients of loads."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fusion.codegen.mlir.backward.kernel import OUTPUT_GRADIENT, BackwardKernel
from fusion.codegen.mlir.backward.plan import STATISTICS, LaneAxis, normalized
from fusion.codegen.mlir.backward.tile import Block, Rows
from fusion.codegen.mlir.builder import Value


class QueriesKernel(BackwardKernel):
    """dQ, and gradients of loads that are free of the key."""

    axis = LaneAxis.QUERIES
    gradients = (0,)
    sides = (0, OUTPUT_GRADIENT, 1, 2)

    def _row_range(self, block: Block) -> tuple[Value, Value]:
        """The keys that the mask leaves for these queries; all where one of them met no live key."""
        b, mask, step = self.b, self.spec.mask, self.score_half.products.key_step
        low, high = b.constant(0, "i64"), self.n_rows
        if mask is None or not self.skips:
            return low, high
        queries = Rows(first=block.first, count=block.count)
        ranged = self._with_queries(block.scope, queries)
        if mask.key_lo is not None:
            low = b.most(b.least(b.as_value(ranged.integer(mask.key_lo), "i64"), self.n_k), 0)
            low = b.mul(b.div(low, step), step, "key_lo")
        if mask.key_hi is not None:
            high = b.most(b.least(b.as_value(ranged.integer(mask.key_hi), "i64"), self.n_k), 0, "key_hi")
        if not normalized(self.spec):
            return low, high
        self.dead = self._any_dead(queries)
        return b.select(self.dead, b.constant(0, "i64"), low, "low"), b.select(self.dead, self.n_k, high, "high")

    def _may_meet(self, block: Block, rows: Rows) -> Value:
        """By the map of live tiles: the range of rows has seen to the keys' closed-form range."""
        b, mask = self.b, self.spec.mask
        if mask is None or not self.skips or mask.tile_live is None:
            return b.constant(1, "i1")
        live = b.as_value(self._tile_scope(block, rows).integer(mask.tile_live), "i64")
        meets = b.compare("ne", live, 0, "meets")
        return b.binary("arith.ori", meets, self.dead, "meets") if normalized(self.spec) else meets

    def lane_statistics(self, first: Value) -> dict[str, Value] | None:
        if not normalized(self.spec):
            return None
        return {name: self.b.load(self.statistic(name, first), self.vector, name) for name in STATISTICS}


class DeltaErrorKernel(QueriesKernel):
    """Sums of dx over the keys, in the blocks that are wanted; see `call.BackwardCall._correct_concentrated`."""

    gradients = ()
    sums_delta_errors = True

    def _count_sums(self, needs: Sequence[bool]) -> int:
        return 1

    @contextlib.contextmanager
    def _one_block(self, block: Value):
        b = self.b
        place = b.add(b.mul(self.flat, self.params[("blocks",)]), block)
        wanted = b.load(b.at(self.params[("ptr", "wanted")], place, "i64"), "i64", "wanted")
        with b.when(b.compare("ne", wanted, 0)):
            yield


class FurtherSumsKernel(QueriesKernel):
    """Sums over the keys of P times what further outputs give: their part of delta."""

    gradients = ()
    sums_further = True

    def _count_sums(self, needs: Sequence[bool]) -> int:
        return 1
