"""Loads and gradients of [.., row, column] tensors where vector lanes are keys, which are contiguous in such
tensors."""

from __future__ import annotations

from fusion.codegen.mlir.backward.plan import Form, LoadGradient, column_dimension
from fusion.codegen.mlir.builder import PTR, SIZE, Value, vector_of
from fusion.codegen.mlir.scope import MEMORY_TYPE, Context, Lanes, Scope
from fusion.ir import integers
from fusion.ir.expr import Expr, I, J, Kind


class LaneLoad:
    """The counterpart of `dense.DenseLoad`: rows of the block are queries, lanes are keys."""

    def __init__(self, context: Context, scope: Scope, expr: Expr):
        self.context, self.expr, self.b = context, expr, context.b
        b, number = self.b, int(expr.attr)  # type: ignore[arg-type]
        self.memory = MEMORY_TYPE[context.operands[number].dtype]
        base: Value | int = 0
        self.row_stride: Value | int = 0
        self.lane_stride: Value | int = 0
        for dim, index in enumerate(expr.args):
            stride = context.params[("stride", number, dim)]
            row = integers.linear(index, I)
            assert row is not None
            column = integers.linear(row[1], J)
            assert column is not None
            base = b.add(base, b.mul(scope.integer(column[1]), stride), "base")
            self.row_stride = b.add(self.row_stride, b.mul(scope.integer(row[0]), stride), "row_stride")
            self.lane_stride = b.add(self.lane_stride, b.mul(scope.integer(column[0]), stride), "lane_stride")
        self.origin = b.at(context.params[("ptr", number)], base, self.memory, "origin")
        self.scalar = "i32" if expr.kind is Kind.BOOL else "f32"
        self.vector = vector_of(self.scalar, context.lanes)

    def prefetch(self, lanes: Lanes, row: Value) -> None:
        """Ask for the lanes of a row: rows lie too far apart for the hardware to foresee them."""
        b = self.b
        offset = b.add(b.mul(lanes.first, self.lane_stride), b.mul(row, self.row_stride))
        b.prefetch(b.at(self.origin, offset, self.memory))

    def stage(self, scope: Scope, first: Value, count: Value, target: Value) -> None:
        """Write rows first..first+count-1 to target [row][L]; `read` reads a row of the block."""
        b, lanes = self.b, self.context.lanes
        assert scope.lanes is not None
        offset = b.add(b.mul(scope.lanes.first, self.lane_stride), b.mul(first, self.row_stride))
        corner = b.at(self.origin, offset, self.memory, "corner")
        unit = b.compare("eq", b.as_value(self.lane_stride, "i64"), 1, "unit")
        type_, mask = vector_of(self.memory, lanes), scope.lanes.valid
        zero = b.constant(0, type_)
        attributes = f"{{alignment = {SIZE[self.memory]} : i32}}"
        with b.loop(0, count, hint="r") as r:
            start, place = b.at(corner, b.mul(r, self.row_stride), self.memory), b.at(target, b.mul(r, lanes), "f32")
            with b.when(unit):
                text = f"llvm.intr.masked.load {start}, {mask}, {zero} {attributes}"
                b.store(
                    self._widen(b.op(f"{text} : ({PTR}, {mask.type}, {type_}) -> {type_}", type_, "line")),
                    place,
                    align=4 * lanes,
                )
            with b.otherwise():
                steps = b.dense(range(lanes), vector_of("i64", lanes), "lane_index")
                offsets = b.mul(steps, b.broadcast(b.as_value(self.lane_stride, "i64"), lanes))
                many = f"vector<{lanes}x{PTR}>"
                at = b.op(
                    f"llvm.getelementptr {start}[{offsets}] : ({PTR}, {offsets.type}) -> {many}, {self.memory}",
                    many,
                    "at",
                )
                text = f"llvm.intr.masked.gather {at}, {mask}, {zero} {attributes}"
                b.store(
                    self._widen(b.op(f"{text} : ({many}, {mask.type}, {type_}) -> {type_}", type_, "gathered")),
                    place,
                    align=4 * lanes,
                )

    def _widen(self, x: Value) -> Value:
        if self.scalar == "i32":
            return self.b.convert("arith.extui", x, "i32")
        return (
            x
            if self.memory == "f32"
            else self.b.convert("arith.truncf" if self.memory == "f64" else "arith.extf", x, "f32")
        )

    def read(self, target: Value, row: Value) -> Value:
        b, lanes = self.b, self.context.lanes
        value = b.load(b.at(target, b.mul(row, lanes), self.scalar), self.vector, "bias", align=4 * lanes)
        return b.compare("ne", value, 0) if self.scalar == "i32" else value


class GradientSink:
    """Where the elements of a DENSE or SCATTERED gradient go: a float32 buffer of the operand's shape, with strides
    of its own.

    Of a scattered gradient every thread has a copy, `sink_bytes` apart. Where no two scores meet in an element (`once`)
    it is written; otherwise it is added to what is there.
    """

    def __init__(self, context: Context, scope: Scope, entry: LoadGradient, thread: Value, once: bool):
        self.context, self.entry, self.once, self.b = context, entry, once, context.b
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
        """Ask for the line that `add` will write at row's query."""
        if self.entry.form is Form.DENSE:
            self.b.prefetch(self._line(row), write=True)

    def _line(self, row: Scope) -> Value:
        b, column = self.b, column_dimension(self.entry.load)
        assert row.lanes is not None
        offset: Value | int = 0
        for dim, (index, stride) in enumerate(zip(self.entry.load.args, self.strides, strict=True)):
            if dim == column:  # its stride is 1: the launcher sees to that
                rest = integers.linear(index, J)
                assert rest is not None
                offset = b.add(offset, b.add(row.lanes.first, row.integer(rest[1])))
            else:
                offset = b.add(offset, b.mul(row.integer(index), stride))
        return b.at(self.pointer, offset, "f32")

    def _add_line(self, row: Scope, term: Value) -> None:
        b, at = self.b, self._line(row)
        assert row.lanes is not None
        total, mask = term, row.lanes.valid
        if not self.once:
            zero = b.constant(0.0, term.type)
            types = f"({PTR}, {mask.type}, {term.type}) -> {term.type}"
            text = f"llvm.intr.masked.load {at}, {mask}, {zero} {{alignment = 4 : i32}} : {types}"
            total = b.add(b.op(text, term.type, "sum"), term, "sum")
        b.line(
            f"llvm.intr.masked.store {total}, {at}, {mask} {{alignment = 4 : i32}} : "
            f"{term.type}, {mask.type} into {PTR}"
        )

    def _scatter(self, row: Scope, term: Value) -> None:
        """One lane after the other: two of them may meet in an element."""
        b, lanes = self.b, self.context.lanes
        assert row.lanes is not None
        wide = vector_of("i64", lanes)
        total: Value = b.constant(0, wide)
        for index, stride in zip(self.entry.load.args, self.strides, strict=True):
            value = b.as_value(row.value(index) if index.op != "const" else row.integer(index), wide)
            value = value if value.type == wide else b.convert("arith.extsi", value, "i64")
            total = b.add(total, b.mul(value, b.broadcast(stride, lanes)), "place")
        mask = row.lanes.valid
        total, term = b.select(mask, total, b.constant(0, wide)), b.select(mask, term, b.constant(0.0, term.type))
        for lane in range(lanes):
            place = b.op(f"vector.extract {total}[{lane}] : i64 from {wide}", "i64", "place")
            part = b.op(f"vector.extract {term}[{lane}] : f32 from {term.type}", "f32", "part")
            at = b.at(self.pointer, place, "f32")
            b.store(b.add(b.load(at, "f32", "held"), part), at)
