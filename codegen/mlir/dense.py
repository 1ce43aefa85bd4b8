"""Loads of dense [.., row, column] tensors (biases, masks) for a group of queries and a block of keys.

Lanes are queries, but such tensors are row-major in the keys. So a block is staged once per group: L rows of L keys are
read as vectors, transposed in registers, converted to float32 (bool: int32) and written as [key][L]; the score program
then reads one vector a row. Blocks at the edges and tensors of other strides go through gathers, except where lanes are
contiguous.
"""

from __future__ import annotations

from fusion.codegen.mlir.builder import SIZE, Value, vector_of
from fusion.codegen.mlir.scope import MEMORY_TYPE, Context, Scope, widen
from fusion.codegen.mlir.transpose import transpose
from fusion.ir import integers
from fusion.ir.expr import Expr, I, J, Kind, coordinates, loads

PREFETCH_KEYS = 128  # how far ahead, in keys
PER_WORD = {"bool": 4, "bfloat16": 2}  # elements that are moved as one word of 32 bits


def dense_loads(*programs: Expr | None) -> list[Expr]:
    """Loads at indices linear in both row and key, which depend on both. Integers are left out: they are gathered."""
    found = {e: None for p in programs if p is not None for e in loads(p)}
    return [e for e in found if {"i", "j"} <= coordinates(e) and e.kind is not Kind.INT and _is_dense(e)]


def _is_dense(expr: Expr) -> bool:
    for index in expr.args:
        row = integers.linear(index, I)
        column = integers.linear(row[1], J) if row else None
        if row is None or column is None or coordinates(row[0]) & {"i", "j"} or coordinates(column[0]) & {"i", "j"}:
            return False
        if any(part.op == "load" for part in (row[0], column[0])):
            return False
    return True


class DenseLoad:
    """One such load. Make it in the item's scope (it writes base and strides there), `stage` it for a group and a
    block."""

    def __init__(self, context: Context, scope: Scope, expr: Expr):
        self.context, self.expr, self.b = context, expr, context.b
        number = expr.operand
        self.dtype = context.operands[number].dtype
        self.memory = MEMORY_TYPE[self.dtype]
        b = self.b
        base: Value | int = 0
        self.row_stride: Value | int = 0
        self.key_stride: Value | int = 0
        for dim, index in enumerate(expr.args):
            stride = context.params[("stride", number, dim)]
            row = integers.linear(index, I)
            assert row is not None
            column = integers.linear(row[1], J)
            assert column is not None
            base = b.add(base, b.mul(scope.integer(column[1]), stride), "base")
            self.row_stride = b.add(self.row_stride, b.mul(scope.integer(row[0]), stride), "row_stride")
            self.key_stride = b.add(self.key_stride, b.mul(scope.integer(column[0]), stride), "key_stride")
        self.origin = b.at(context.params[("ptr", number)], base, self.memory, "origin")
        self.scalar = "i32" if expr.kind is Kind.BOOL else "f32"
        self.vector = vector_of(self.scalar, context.lanes)

    def _widen(self, x: Value) -> Value:
        if self.scalar == "i32":
            return self.b.convert("arith.extui", x, "i32")
        return widen(self.b, x, Kind.FLOAT, self.dtype)

    def stage(self, scope: Scope, first_key: Value, count: Value, target: Value) -> None:
        """Write the block to target [key][L], for `read`."""
        b, lanes = self.b, self.context.lanes
        assert scope.lanes is not None
        offset = b.add(b.mul(scope.lanes.first, self.row_stride), b.mul(first_key, self.key_stride))
        corner = b.at(self.origin, offset, self.memory, "corner")
        all_valid = b.reduce("and", scope.lanes.valid, "all_valid")
        unit = b.compare("eq", b.as_value(self.key_stride, "i64"), 1, "unit")
        square = b.binary("arith.andi", all_valid, unit)
        done, none = b.constant(0, "i64"), b.constant(0, "i64")
        for per_word in dict.fromkeys((PER_WORD.get(self.dtype, 1), 1)):
            step = per_word * lanes
            end = b.select(square, b.mul(b.div(count, step), step), none, "end")
            with b.loop(done, end, step, hint="j") as j:
                columns = self._columns(b.at(corner, j, self.memory), per_word)
                for r, column in enumerate(columns):
                    b.store(column, b.at(target, b.mul(b.add(j, r), lanes), self.scalar), align=4 * lanes)
            done = end
        with b.loop(done, count, hint="j") as j:
            b.store(
                self._gather(scope, b.at(corner, b.mul(j, self.key_stride), self.memory)),
                b.at(target, b.mul(j, lanes), "f32"),
            )

    def _columns(self, start: Value, per_word: int) -> list[Value]:
        """The columns, widened, of a block of L rows and per_word * L keys. Several elements are moved as one word:
        shuffles are what this costs."""
        b, lanes = self.b, self.context.lanes
        type_ = vector_of("i32" if per_word > 1 else self.memory, lanes)
        rows = [b.at(start, b.mul(self.row_stride, r), self.memory, "row") for r in range(lanes)]
        for row in rows:  # many short runs of many rows are too much for the hardware to foresee
            b.prefetch(b.at(row, PREFETCH_KEYS, self.memory))
        lines = [b.load(row, type_, "line", align=SIZE[self.memory]) for row in rows]
        if per_word == 1:
            return transpose(b, [self._widen(x) for x in lines])
        return [part for word in transpose(b, lines) for part in self._parts(word)]

    def _parts(self, word: Value) -> list[Value]:
        """The elements of words, widened."""
        b = self.b
        if self.dtype == "bfloat16":
            halves = b.binary("arith.shli", word, 16), b.binary("arith.andi", word, -0x10000)
            return [b.bitcast(half, self.vector) for half in halves]
        return [b.binary("arith.andi", b.binary("arith.shrui", word, 8 * k), 0xFF) for k in range(PER_WORD["bool"])]

    def _gather(self, scope: Scope, start: Value) -> Value:
        b, lanes = self.b, self.context.lanes
        assert scope.lanes is not None
        steps = b.dense(range(lanes), vector_of("i64", lanes), "lane_index")
        offsets = b.mul(steps, b.broadcast(b.as_value(self.row_stride, "i64"), lanes))
        addresses = b.addresses(start, offsets, self.memory)
        return self._widen(b.gather(addresses, scope.lanes.valid, vector_of(self.memory, lanes)))

    def read(self, target: Value, key: Value) -> Value:
        """The value (FLOAT or BOOL) of a key of the block."""
        b = self.b
        value = b.load(
            b.at(target, b.mul(key, self.context.lanes), self.scalar), self.vector, "bias", align=4 * self.context.lanes
        )
        return b.compare("ne", value, 0) if self.scalar == "i32" else value
