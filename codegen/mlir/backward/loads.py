"""Loads and gradients of [.., row, column] tensors where lanes are keys, which are contiguous in such tensors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fusion.ir import integers
from fusion.ir.expr import I, J
from fusion.lowering.backward_plan import Form, LoadGradient, column_dimension

from ..builder import Value, vector_of
from ..dense import DenseLoad
from ..scope import MEMORY_TYPE, Scope

if TYPE_CHECKING:
    from .kernel import BackwardKernel


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
            start, place = b.row(corner, r, self.row_stride, self.memory), b.row(target, r, lanes)
            with b.when(unit):
                b.store(self._widen(b.masked_load(start, mask, type_, "line")), place, align=4 * lanes)
            with b.otherwise():
                b.store(self._gather(scope, start, self.key_stride), place, align=4 * lanes)


class GradientSink:
    """Destination of the elements of a DENSE or SCATTERED gradient.

    They are added to a buffer of the operand's shape in float32. Of a scattered gradient every share has a copy, of a
    small one (`kernel.SMALL_TABLE`) two, of which the first is added to the second after each tile: short sums lose few
    digits. Where only inner batch elements meet (`BackwardPlan.exclusive`), the first is kept, the next are added, and
    the last writes the sum, in the operand's dtype. Each thread keeps its own, by [block of keys][query][key of block].

    inner: the number of this batch element among the inner ones."""

    def __init__(self, kernel: BackwardKernel, entry: LoadGradient, inner: Value):
        context, plan = kernel.context, kernel.plan
        self.context, self.entry, self.b = context, entry, context.b
        if entry.form not in (Form.DENSE, Form.SCATTERED):
            return
        number, params, b, dims = entry.operand, context.params, self.b, range(len(entry.load.args))
        self.sink, self.memory = params[("ptr", "sink", number)], "f32"
        self.strides = [params[("sink_stride", number, dim)] for dim in dims]
        if entry.form is Form.SCATTERED:
            self.size = params[("sink_elements", number)]
            self.sink = b.row(self.sink, kernel.share, params[("sink_copy_stride", number)], "f32", "copy")
            self.total = b.at(self.sink, self.size, "f32", "total")
        self.exclusive = plan.exclusive(entry)
        if self.exclusive:
            self.memory = MEMORY_TYPE[plan.spec.operands[number].dtype]
            self.kept = b.row(params[("ptr", "kept", number)], kernel.thread, params[("kept_elements", number)])
            self.queries, self.width = kernel.n_q, kernel.side.rows_per_block
            self.first = b.compare("eq", inner, 0, "first")
            self.last = b.compare("eq", b.add(inner, 1), params[("inner",)], "last")

    def begin_span(self) -> None:
        """Add the first copy of a scattered gradient to the second, and clear it."""
        self.b.move_sums(self.sink, self.total, self.b.div(self.size, 16), vector_of("f32", 16))

    def add(self, row: Scope, term: Value) -> None:
        """Add a vector of lanes at row's query."""
        if self.entry.form is Form.DENSE:
            self._add_line(row, term)
        else:
            self._scatter(row, term)

    def prefetch(self, row: Scope) -> None:
        """Ask for the line of a DENSE gradient that `add` will write at row's query."""
        with self.b.when(self.last) if self.exclusive else contextlib.nullcontext():
            self.b.prefetch(self._line(row), write=True)

    def _kept_line(self, row: Scope) -> Value:
        b, lane = self.b, row.lanes.first
        in_block = b.rem(lane, self.width)
        line = b.add(b.mul(b.sub(lane, in_block), self.queries), b.mul(row.integer(I), self.width))
        return b.at(self.kept, b.add(line, in_block), "f32")

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
        return b.at(self.sink, offset, self.memory)

    def _add_line(self, row: Scope, term: Value) -> None:
        b, mask = self.b, row.lanes.valid
        if not self.exclusive:
            at = self._line(row)
            b.masked_store(b.add(b.masked_load(at, mask, term.type, "sum"), term, "sum"), at, mask)
            return
        kept = self._kept_line(row)
        total = b.either(self.first, lambda: term, lambda: b.add(b.load(kept, term.type, "sum"), term), term.type)
        with b.when(self.last):
            result = total if self.memory == "f32" else self.context.math.narrow(total, self.memory)
            b.masked_store(result, self._line(row), mask)
        with b.otherwise():
            b.store(total, kept)

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
            at = b.at(self.sink, place, "f32")
            b.store(b.add(b.load(at, "f32", "held"), part), at)
