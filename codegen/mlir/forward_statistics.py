"""The forward kernel of training: the statistics of each row are written with the output."""

from __future__ import annotations

from fusion.codegen.mlir.builder import Value
from fusion.codegen.mlir.kernel import AttentionKernel
from fusion.codegen.mlir.scope import Scope
from fusion.codegen.mlir.softmax import GroupSoftmax
from fusion.ir.expr import coord

#: Largest weight of a row from which on its delta is summed over the keys, see `backward.call`. Errors of delta go into
#: the gradients times weights: with small ones they average out. Rows of a thousand keys and random scores stay below.
CONCENTRATED = 1 / 8


class ForwardWithStatistics(AttentionKernel):
    """Each row's `unit`, `shift` and `factor` (see `backward.plan.STATISTICS`) are written with the output. A factor is
    written negative where a weight of the row is above CONCENTRATED."""

    def _tile_areas(self) -> None:
        self.peaks = self._area(self.tiling.groups * 4 * self.lanes, "peaks")
        super()._tile_areas()

    def _visit(self, scope, readers, first, count, groups, padded_groups, low, high, skipping=None) -> None:
        b = self.b
        with b.loop(0, padded_groups, hint="g") as g:
            b.store(b.constant(float("-inf"), self.vector), self._peak_of(g))
        super()._visit(scope, readers, first, count, groups, padded_groups, low, high, skipping)

    def _peak_of(self, g: Value) -> Value:
        return self.b.at(self.peaks, self.b.mul(g, self.lanes), "f32")

    def _take_maximum(self, softmax: GroupSoftmax, g: Value, highest: Value) -> None:
        at = self._peak_of(g)
        self.b.store(softmax.largest(highest, self.b.load(at, self.vector, "peak")), at)
        super()._take_maximum(softmax, g, highest)

    def _finish(self, scope: Scope, first: Value, count: Value, g: Value) -> None:
        self.finishing = g
        super()._finish(scope, first, count, g)

    def _row_factor(self, rows: Scope, raw: Value, total: Value) -> Value:
        factor = super()._row_factor(rows, raw, total)
        b = self.b
        unit, shift = self.exponent.coefficients(raw)
        flat: Value | int = 0
        for axis, extent in enumerate(self.spec.batch):
            flat = b.add(b.mul(flat, b.as_value(rows.integer(extent), "i64")), rows.value(coord(f"b{axis}")))
        assert rows.lanes is not None
        at = b.add(b.mul(flat, self.n_q), rows.lanes.first, "row")
        highest = b.load(self._peak_of(self.finishing), self.vector, "peak")
        largest = b.mul(self.context.math.exp2(b.fma(highest, unit, shift), 5), factor, "largest_weight")
        marked = b.select(b.compare("ogt", largest, CONCENTRATED), b.unary("arith.negf", factor), factor, "marked")
        for plane, value in enumerate((unit, shift, marked)):
            value = b.as_value(value, self.vector)
            start = b.add(at, b.mul(self.params[("statistics_rows",)], plane))
            place = b.at(self.params[("ptr", "statistics")], start, "f32")
            b.masked_store(value, place, rows.lanes.valid)
        return factor
