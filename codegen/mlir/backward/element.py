"""Backward of one score: from S and dP to P and dS, for the products, and to gradients of loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusion.ir.derivative import AUX_UPSTREAM, UPSTREAM, WEIGHT_UPSTREAM
from fusion.ir.expr import SCORE, WEIGHT
from fusion.ir.reads import dense_loads
from fusion.lowering.backward_plan import SUM_OF_DX, Form, TileProgram

from ..builder import Value
from ..dense import stage_loads
from ..scope import Scope, staged_leaf

if TYPE_CHECKING:
    from .tile import BackwardTiles, Block, RowRange

PAIR = 2  # rows that are worked on at a time: the second products take weights in pairs

Pair = Sequence[Value]  # vectors of two rows


class GroupElements:
    """Rows of one tile for one group of lanes; what they read of dense tensors is staged."""

    def __init__(self, tiles: BackwardTiles, block: Block, rows: RowRange, g: Value, member: int, variant: TileProgram):
        """member: of those worked on together."""
        self.kernel, self.b, self.g, self.first, self.variant = tiles.kernel, tiles.b, g, rows.first, variant
        kernel = tiles.kernel
        self.scope = kernel.side.scope(block, g)
        collected = (variant.gradients[target] for target in (SCORE, *(entry.load for entry in kernel.collected)))
        exprs = (variant.program, kernel.weight, kernel.plan.at_weight, *collected)
        self.scope.prepare(*exprs, bound=kernel.batch_names | {kernel.axis.lane.name})
        wanted, areas = dense_loads(*exprs), zip(kernel.side.loads, tiles.staged, strict=True)
        loads = ((load, area[member]) for load, area in areas if load.expr in wanted)
        self.staged = stage_loads(loads, self.scope, rows.first, rows.count)
        self.statistics = kernel.side.statistics(self.scope)
        self.scores, *dp = (gemm.tile[g] for gemm in tiles.gemms)
        self.dp = dp[0] if dp else None
        self.weights = [gemm.weights[g] for gemm in tiles.gemms]

    def pair(self, r: Value, sums: Sequence[Value], both: bool) -> tuple[Pair, Pair, list[Value]]:
        """(weights for V, dS, sums) of rows r and r + 1, or of r alone."""
        zero = self.b.constant(0.0, self.kernel.vector)
        first = self._row(r, sums)
        second = self._row(self.b.add(r, 1), first[2]) if both else (zero, zero, first[2])
        return (first[0], second[0]), (first[1], second[1]), second[2]

    def _row(self, r: Value, sums: Sequence[Value]) -> tuple[Value, Value, list[Value]]:
        """(weight for V, dS, sums) of one row."""
        b, kernel, plan = self.b, self.kernel, self.kernel.plan
        at = b.mul(r, kernel.lanes)
        align = 4 * kernel.lanes
        score = b.load(b.at(self.scores, at, "f32"), kernel.vector, "s", align=align)
        position = b.add(self.first, r, "row")
        row = self.scope.inner({SCORE: score, kernel.axis.row: position}, leaf=staged_leaf(self.staged, r))
        x = row.vector(self.variant.program)
        known, weight = self.statistics or kernel.row_statistics(position), x
        if known is not None:
            weight = b.mul(kernel.context.math.exp2(b.fma(x, known["unit"], known["shift"])), known["factor"], "p")
        row.known[WEIGHT] = weight
        aux = None if plan.at_weight is None else row.vector(plan.at_weight)
        if self.dp is None:
            assert aux is not None
            return weight, weight, [b.fma(weight, aux, sums[0], "sum")]
        dp = b.load(b.at(self.dp, at, "f32"), kernel.vector, "dp", align=align)
        factor = None if kernel.weight is None else row.vector(kernel.weight)
        scaled = dp if factor is None else b.mul(dp, factor)
        if aux is not None:
            scaled = b.add(scaled, aux, "dw")
        upstream = scaled if known is None else b.mul(weight, b.sub(scaled, known["delta"]), "dx")
        weight_upstream = None if factor is None else b.mul(dp, weight, "dw")
        gradients = self._scope(row, upstream, weight_upstream)
        for entry, sink in zip(kernel.collected, kernel.sinks, strict=True):
            if entry.form in (Form.DENSE, Form.SCATTERED):
                sink.add(gradients, gradients.vector(self.variant.gradients[entry.load]))
        no_upstream = None if weight_upstream is None else b.constant(0.0, kernel.vector)
        shares = self._scope(row, weight, no_upstream, aux=0)
        dx = b.mul(weight, scaled) if kernel.spec.sinks else upstream
        collected = self._add_up(sums, gradients, shares, dx)
        ds = gradients.vector(self.variant.gradients[SCORE]) if kernel.wants_ds else upstream
        if kernel.reduces_lanes:
            ds = b.select(self.scope.lanes.valid, ds, b.constant(0.0, kernel.vector), "ds")
        return weight if factor is None else b.mul(weight, factor), ds, collected

    def _scope(self, row: Scope, upstream: Value, weight_upstream: Value | None, aux: int = 1) -> Scope:
        known = {UPSTREAM: upstream}
        if self.kernel.spec.aux_outputs:
            known[AUX_UPSTREAM] = self.b.constant(float(aux), self.kernel.vector)
        if weight_upstream is not None:
            known[WEIGHT_UPSTREAM] = weight_upstream
        return row.inner(known)

    def _add_up(self, sums: Sequence[Value], gradients: Scope, shares: Scope, dx: Value) -> list[Value]:
        """`sums` of lanes with what this row adds, `dx` to `SUM_OF_DX`; sums of the row itself are added to in
        memory."""
        b, kernel, result = self.b, self.kernel, list(sums)
        for number, entry in enumerate(kernel.sums):
            scope = shares if entry.share else gradients
            term = dx if entry == SUM_OF_DX else scope.vector(self.variant.gradients[entry.of])
            if entry in kernel.lane_sums:
                place = kernel.lane_sums.index(entry)
                result[place] = b.add(result[place], term, "sum")
            else:
                assert kernel.query_gradients is not None
                kernel.query_gradients.add_to_row(number, gradients, term)
        return result
