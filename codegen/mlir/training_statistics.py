"""What the forward kernel of training writes with the output: the statistics of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion.ir.expr import ROW_MAX, ROW_SUM, coord
from fusion.ir.results import keeps_ends
from fusion.ir.spec import AttentionSpec
from fusion.lowering.numbers import LOG2E

from .builder import Value
from .scope import Scope
from .softmax import GroupSoftmax

if TYPE_CHECKING:
    from .skeleton import KernelFunction


def concentrated(spec: AttentionSpec) -> float:
    """Largest weight of a row from which on its delta is summed over the keys, see `backward.call`. Errors of delta go
    into the gradients times weights, and average out where these are small. Narrow results are off by more than most
    of them."""
    return 1 / 4 if spec.out_dtype == "float32" else 3 / 4


class TrainingStatistics:
    """Each row's `unit`, `shift` and `factor` (`lowering.backward_plan.STATISTICS`), and its maximum and sum where
    asked for. A unit is negative where a weight of the row is above `concentrated`. groups: of lanes in a work item."""

    def __init__(self, kernel: KernelFunction, groups: int):
        self.kernel, self.b = kernel, kernel.b
        self.peaks = kernel.area(groups * 4 * kernel.lanes, "peaks")

    def _peak_of(self, g: Value) -> Value:
        return self.b.row(self.peaks, g, self.kernel.lanes)

    def clear(self, groups: Value) -> None:
        """Before the first key of an item."""
        b = self.b
        with b.loop(0, groups, hint="g") as g:
            b.store(b.constant(float("-inf"), self.kernel.vector), self._peak_of(g))

    def note_maximum(self, softmax: GroupSoftmax, g: Value, highest: Value) -> None:
        """Of a group's scores in one block of keys."""
        at = self._peak_of(g)
        self.b.store(softmax.largest(highest, self.b.load(at, self.kernel.vector, "peak")), at)

    def note_exponents(self, g: Value, first: Value, second: Value) -> None:
        """Of a group's scores of two keys, relative to a centre, in powers of 2."""
        b, at = self.b, self._peak_of(g)
        peak = b.load(at, self.kernel.vector, "peak")
        for x in (first, second):
            peak = b.select(b.compare("ogt", x, peak), x, peak, "peak")
        b.store(peak, at)

    def end_exponents(self, groups: Value, centre: float) -> None:
        """After the last of these: peaks in the programs' units."""
        b, vector = self.b, self.kernel.vector
        with b.loop(0, groups, hint="g") as g:
            at = self._peak_of(g)
            unit = b.constant(1 / (self.kernel.programs.scale * LOG2E), vector)
            b.store(b.fma(b.load(at, vector, "peak"), unit, b.constant(centre, vector)), at)

    def write(self, rows: Scope, g: Value, raw: Value, factor: Value) -> None:
        """After the last key: of a group whose lanes and end (`lowering.rows`) `rows` knows, with the running maximum,
        and the factor of its output."""
        b, kernel = self.b, self.kernel
        unit, shift = kernel.exponent.coefficients(raw)
        flat: Value | int = 0
        for axis, extent in enumerate(kernel.spec.batch):
            flat = b.add(b.mul(flat, b.as_value(rows.integer(extent), "i64")), rows.value(coord(f"b{axis}")))
        at = b.add(b.mul(flat, kernel.n_q), rows.lanes.first, "row")
        highest = b.load(self._peak_of(g), kernel.vector, "peak")
        largest = b.mul(kernel.context.math.exp2(b.fma(highest, unit, shift), 5), factor, "largest_weight")
        marked = b.select(
            b.compare("ogt", largest, concentrated(kernel.spec)),
            b.unary("arith.negf", unit),
            unit,
            "marked",
        )
        ends = (rows.known[ROW_MAX], rows.known[ROW_SUM]) if keeps_ends(kernel.spec) else ()
        for plane, value in enumerate((marked, shift, factor, *ends)):
            start = b.add(at, b.mul(kernel.params[("statistics_rows",)], plane))
            place = b.at(kernel.params[("ptr", "statistics")], start, "f32")
            b.masked_store(b.as_value(value, kernel.vector), place, rows.lanes.valid)
