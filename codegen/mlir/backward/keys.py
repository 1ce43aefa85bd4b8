"""The backward kernel whose lanes are keys: dK += dS^T Q, dV += P^T dO, and gradients of loads that depend on a key."""

from __future__ import annotations

from fusion.lowering.backward_plan import Form, LaneAxis, normalized

from ..builder import SIZE, Value
from ..rows import LINE
from ..scope import Lanes
from .kernel import OUTPUT_GRADIENT, BackwardKernel
from .loads import GradientSink, LaneLoad
from .tile import Block, Rows


class KeysKernel(BackwardKernel):
    """dK, dV and gradients of loads."""

    axis = LaneAxis.KEYS
    forms = (Form.PER_KEY, Form.DENSE, Form.SCATTERED)
    gradients = (1, 2)
    sides = (1, 2, 0, OUTPUT_GRADIENT)

    def _row_range(self, block: Block) -> tuple[Value, Value]:
        """All queries: `_may_meet` has the mask's ranges, which are of keys."""
        return self.b.constant(0, "i64"), self.n_rows

    def _may_meet(self, block: Block, rows: Rows) -> Value:
        b, mask = self.b, self.spec.mask
        if mask is None or not self.skips:
            return b.constant(1, "i1")
        meets = self._all(self._tile_scope(block, rows), mask.visits())
        return b.or_(meets, self._any_dead(rows), "meets") if normalized(self.spec) else meets

    def _prefetch(self, block: Block, rows: Rows) -> None:
        """Dense tensors that are read, and their gradients that are written."""
        b, lanes = self.b, self.lanes
        for tensor in (*self.loads, *(sink for sink in self.sinks if sink.entry.form is Form.DENSE)):
            assert isinstance(tensor, LaneLoad | GradientSink)
            per_line = max(1, LINE // (lanes * SIZE[tensor.memory]))
            with b.loop(0, block.groups, per_line, hint="g") as g, b.loop(0, rows.count, hint="r") as r:
                start, valid = b.add(block.first, b.mul(g, lanes)), self._valid(b.constant(lanes, "i64"))
                held = Lanes(coord=self.axis.lane, first=start, count=lanes, valid=valid)
                known = {self.axis.row: b.add(rows.first, r)}
                tensor.prefetch(block.scope.inner(known, lanes=held))
