"""Loads and gradients of [.., row, column] tensors where lanes are keys, which are contiguous in such tensors."""

from __future__ import annotations

from fusion.codegen.mlir.backward.plan import BackwardPlan, Form, LoadGradient, column_dimension
from fusion.codegen.mlir.builder import Value, vector_of
from fusion.codegen.mlir.dense import DenseLoad
from fusion.codegen.mlir.scope import MEMORY_TYPE, Context, Scope
from fusion.ir import integers
from fusion.ir.expr import I, J


class LaneLoad(DenseLoad):
    """A dense load where the rows of a block are queries, and lanes are keys."""

    def prefetch(self, row: Scope) -> None:
        """Ask for the lanes of a row: rows lie too far apart for the hardware to foresee them."""
        b = self.b
        offset = b.add(b.mul(row.lanes.first, self.key_stride), b.mul(row.integer(I), self.row_stride))
        b.prefetch(b.at(self.origin, offset, self.memory))

    def stage(self, scope: Scope, first: Value, count: Value, target: Value) -> None:
        """Write rows first..first+count-1 to target [row][L]; `read` reads a row of the block."""
        b, lanes = self.b, self.context.lanes
        offset = b.add(b.mul(scope.lanes.first, self.key_stride), b.mul(first, self.row_stride))
        corner = b.at(self.origin, offset, self.memory, "corner")
        unit = b.compare("eq", b.as_value(self.key_stride, "i64"), 1, "unit")
        type_, mask = vector_of(self.memory, lanes), scope.lanes.valid
        with b.loop(0, count, hint="r") as r:
            start, place = b.at(corner, b.mul(r, self.row_stride), self.memory), b.at(target, b.mul(r, lanes), "f32")
            with b.when(unit):
                b.store(self._widen(b.masked_load(start, mask, type_, "line")), place, align=4 * lanes)
            with b.otherwise():
                b.store(self._gather(scope, start, self.key_stride), place, align=4 * lanes)


class GradientSink:
    """Where the elements of a DENSE or SCATTERED gradient go: a buffer of the operand's shape, with strides of its own;
    of a scattered one every thread has a copy. Where no two scores meet in an element it is written, else added to."""

    def __init__(self, context: Context, entry: LoadGradient, thread: Value, plan: BackwardPlan):
        self.context, self.entry, self.b = context, entry, context.b
        self.once, self.memory = plan.written_once(entry), MEMORY_TYPE[plan.sink_dtype(entry)]
        if entry.form not in (Form.DENSE, Form.SCATTERED):
            return
        number, params, b = entry.operand, context.params, self.b
        self.pointer = params[("ptr", "sink", number)]
        self.strides = [params[("sink_stride", number, dim)] for dim in range(len(entry.load.args))]
        if entry.form is Form.SCATTERED:
            self.pointer = b.at(self.pointer, b.mul(thread, params[("sink_elements", number)]), "f32", "copy")

    def add(self, row: Scope, term: Value) -> None:
        """Add a vector of lanes at row's query."""
        if self.entry.form is Form.DENSE:
            self._add_line(row, term)
        else:
            self._scatter(row, term)

    def prefetch(self, row: Scope) -> None:
        """Ask for the line of a DENSE gradient that `add` will write at row's query."""
        self.b.prefetch(self._line(row), write=True)

    def _line(self, row: Scope) -> Value:
        b, column = self.b, column_dimension(self.entry.load)
        offset: Value | int = 0
        for dim, (index, stride) in enumerate(zip(self.entry.load.args, self.strides, strict=True)):
            if dim == column:  # its stride is 1: the launcher sees to that
                rest = integers.linear(index, J)
                assert rest is not None
                offset = b.add(offset, b.add(row.lanes.first, row.integer(rest[1])))
            else:
                offset = b.add(offset, b.mul(row.integer(index), stride))
        return b.at(self.pointer, offset, self.memory)

    def _add_line(self, row: Scope, term: Value) -> None:
        b, at = self.b, self._line(row)
        mask = row.lanes.valid
        if not self.once:
            term = b.add(b.masked_load(at, mask, term.type, "sum"), term, "sum")
        elif self.memory != "f32":
            term = self.context.math.narrow(term, self.memory)
        b.masked_store(term, at, mask)

    def _scatter(self, row: Scope, term: Value) -> None:
        """One lane after the other: two of them may meet in an element."""
        b, lanes = self.b, self.context.lanes
        wide = vector_of("i64", lanes)
        total: Value = b.constant(0, wide)
        for index, stride in zip(self.entry.load.args, self.strides, strict=True):
            value = b.as_value(row.value(index) if index.op != "const" else row.integer(index), wide)
            value = value if value.type == wide else b.convert("arith.extsi", value, "i64")
            total = b.add(total, b.mul(value, b.broadcast(stride, lanes)), "place")
        mask = row.lanes.valid
        total, term = b.select(mask, total, b.constant(0, wide)), b.select(mask, term, b.constant(0.0, term.type))
        for lane in range(lanes):
            place, part = b.extract(total, lane, "place"), b.extract(term, lane, "part")
            at = b.at(self.pointer, place, "f32")
            b.store(b.add(b.load(at, "f32", "held"), part), at)
