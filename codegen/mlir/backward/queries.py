"""The backward kernels whose lanes are queries: dQ += dS K, and sums over keys of gradients of loads."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.ir.expr import I0, I1
from fusion.lowering.backward_plan import STATISTICS, SUM_OF_DX, Form, LaneAxis, RowSum, normalized

from ..builder import Value
from ..scope import Scope
from .kernel import OUTPUT_GRADIENT, BackwardKernel
from .tile import Block, Rows


class QueriesKernel(BackwardKernel):
    """dQ, and gradients of loads that are free of the key."""

    axis = LaneAxis.QUERIES
    forms = (Form.PER_QUERY,)
    gradients = (0,)
    sides = (0, OUTPUT_GRADIENT, 1, 2)

    def _row_range(self, block: Block) -> tuple[Value, Value]:
        """The keys that the mask leaves for these queries; all where one of them met no live key."""
        b = self.b
        if not self.skips:
            return b.constant(0, "i64"), self.n_rows
        first, count = block.span.first, block.span.count
        ranged = block.scope.inner({I0: first, I1: b.sub(b.add(first, count), 1)})
        low, high = self._key_range(ranged, self.score_half.products.key_step)
        low = b.as_value(low, "i64")
        if not normalized(self.spec):
            return low, high
        self.dead = self._any_dead(block.span)
        return b.select(self.dead, b.constant(0, "i64"), low, "low"), b.select(self.dead, self.n_k, high, "high")

    def _may_meet(self, block: Block, rows: Rows) -> Value:
        """By the map of live tiles: the range of rows has seen to the keys' closed-form range."""
        b, mask = self.b, self.spec.mask
        if mask is None or not self.skips or mask.tile_live is None:
            return b.constant(1, "i1")
        live = b.as_value(self._tile_scope(block, rows).integer(mask.tile_live), "i64")
        meets = b.compare("ne", live, 0, "meets")
        return b.or_(meets, self.dead, "meets") if normalized(self.spec) else meets

    def _prefetch(self, block: Block, rows: Rows) -> None:
        """Dense tensors that are read."""
        size, keys = self.rows_per_block, self.score_half.products.key_step
        for load in self.loads:
            load.ask_ahead(block.first, size, rows.first, keys, size, self.n_k)

    def lane_statistics(self, scope: Scope) -> dict[str, Value] | None:
        first = scope.lanes.first
        if first is None or not normalized(self.spec):
            return None
        return {name: self.b.load(self.statistic(name, first), self.vector, name) for name in STATISTICS}


class RowSumsKernel(QueriesKernel):
    """One sum over the keys for each row, and no gradients."""

    gradients = ()

    def _sums(self, needs: Sequence[bool]) -> tuple[RowSum, ...]:
        return (SUM_OF_DX,)


class FurtherSumsKernel(RowSumsKernel):
    """Sums over the keys of P times what further outputs give: their part of delta."""

    sums_further = True
