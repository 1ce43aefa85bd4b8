"""Rows of K and V that are made from stored elements: unpacked, widened, less a zero point, times a scale.

What is multiplied is an expression in row and column (`AttentionSpec.k_value`). A row is made a vector of columns at a
time, as float32, in the thread's memory. A column is written as L * u + t, with t the lane: a division of it by what
divides L is then known for every lane, and one by a multiple of L is the same for all lanes. So packed elements are
read by one load and spread over the lanes, and scales of groups are read once per vector.
"""

from __future__ import annotations

from fusion.ir import integers
from fusion.ir.expr import Expr, Kind, coordinates, loads
from fusion.ir.ranges import interval
from fusion.lowering.addresses import BLOCK, LANE, along_lanes, by_blocks, lane_pattern, lane_values

from .builder import Value, vector_of
from .scope import MEMORY_TYPE, Lanes, Scope, widen

_WORD = (-(2**31), 2**31 - 1)


class Elements:
    """An operand's rows in one scope (of a work item: strides are looked at there)."""

    def __init__(self, scope: Scope, value: Expr, row: Expr, column: Expr):
        self.context, self.scope, self.row = scope.context, scope, row
        self.b, self.lanes = scope.b, scope.context.lanes
        self.value = by_blocks(value, column, self.lanes)
        self.unit = self._unit_strides()

    def _unit_strides(self) -> Value:
        """Whether what is read by several lanes lies side by side."""
        b, unit = self.b, self.b.constant(1, "i1")
        for part in loads(self.value):
            for dim in along_lanes(part):
                stride = b.as_value(self.context.params[("stride", part.operand, dim)], "i64")
                unit = b.and_(unit, b.compare("eq", stride, 1), "unit")
        return unit

    def fill(self, position: Value, width: int, padded: int, target: Value, memory: str = "f32") -> None:
        """Write row `position`, float32 or bfloat16 (`memory`), `width` columns and zeros up to `padded`."""
        b, lanes = self.b, self.lanes

        def store(x: Value, column: Value) -> None:
            b.store(x if memory == "f32" else self.context.math.narrow(x, memory), b.at(target, column, memory))

        row = self.scope.inner({self.row: position})
        whole = b.select(self.unit, b.constant(width // lanes * lanes, "i64"), b.constant(0, "i64"))
        every = b.compare("eq", self._numbers(), self._numbers())
        with b.loop(0, whole, lanes, hint="c") as c:
            store(self._vector(row, c, every, True), c)
        with b.loop(whole, padded, lanes, hint="c") as c:
            left = b.convert("arith.trunci", b.sub(b.constant(width, "i64"), c), "i32", "left")
            valid = b.compare("slt", self._numbers(), b.broadcast(left, lanes), "valid")
            store(b.select(valid, self._vector(row, c, valid, False), 0.0), c)

    def _numbers(self) -> Value:
        return self.b.dense(range(self.lanes), vector_of("i32", self.lanes), "lane")

    def _vector(self, row: Scope, first: Value, valid: Value, contiguous: bool) -> Value:
        """The elements of the columns from `first` on. contiguous: strides are such that lanes read side by side."""
        lanes = Lanes(coord=LANE, first=0, valid=valid)
        here = row.inner({BLOCK: self.b.div(first, self.lanes, "block")}, lanes=lanes)

        def leaf(expr: Expr) -> Value | None:
            if LANE.name not in coordinates(expr):
                return None
            if expr.op == "load":
                return self._load(here, expr) if contiguous else None
            if expr.op == "to_float" and self._is_word(expr.args[0]):
                return self.b.convert("arith.sitofp", self._word(here, expr.args[0]), "f32")
            return None

        here.leaf = leaf
        return here.vector(self.value)

    def _load(self, here: Scope, expr: Expr) -> Value | None:
        """Elements that lie side by side in memory, each spread over the lanes that read it; None where they do not."""
        b, dims = self.b, along_lanes(expr)
        pattern = lane_pattern(expr.args[dims[0]], self.lanes) if len(dims) == 1 else None
        if pattern is None or (span := max(pattern[1]) - min(pattern[1]) + 1) > self.lanes:
            return None
        dtype = self.context.operands[expr.operand].dtype
        memory, low, offset = MEMORY_TYPE[dtype], min(pattern[1]), b.constant(min(pattern[1]), "i64")
        index = [pattern[0] if dim == dims[0] else part for dim, part in enumerate(expr.args)]
        offset = here.offset(index, self.context.strides(expr.operand, len(index)), offset)
        address = b.at(self.context.params[("ptr", expr.operand)], offset, memory)
        result = b.load(address, vector_of(memory, span), "x", align=1)
        places = [place - low for place in pattern[1]]
        if places != list(range(self.lanes)):
            result = b.shuffle(result, result, places, "spread")
        if expr.kind is Kind.INT and memory in ("i8", "i16"):
            return b.convert("arith.extui" if dtype == "uint8" else "arith.extsi", result, "i32")
        return result if memory == "i32" else widen(b, result, expr.kind, dtype)

    def _is_word(self, expr: Expr) -> bool:
        """Whether an integer, and all that it is made of, has 32 bits."""

        def of_load(part: Expr) -> tuple[int, int]:
            state = self.context.operands[part.operand]
            bits = 8 * state.torch_dtype.itemsize
            return (0, 2**bits - 1) if state.dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

        bounds = {LANE: integers.integer(self.lanes)}
        inner = [arg for arg in expr.args if arg.kind is Kind.INT] if expr.op != "load" else []
        low, high = interval(expr, bounds, of_load)
        known = expr.op in ("load", "const", "add", "mul", "floordiv", "mod", "iwhere", "coord")
        return known and _WORD[0] <= low and high <= _WORD[1] and all(map(self._is_word, inner))

    def _word(self, here: Scope, expr: Expr) -> Value:
        """An integer as a vector of 32 bits."""
        b, type_ = self.b, vector_of("i32", self.lanes)
        if coordinates(expr) <= {LANE.name} and not loads(expr):
            return b.dense(lane_values(expr, self.lanes), type_, "known")
        if expr.op == "load" or LANE.name not in coordinates(expr):
            return b.convert("arith.trunci", here.vector(expr), "i32")
        if expr.op == "iwhere":
            return b.select(here.vector(expr.args[0]), *(self._word(here, arg) for arg in expr.args[1:]))
        values = [self._word(here, arg) for arg in expr.args]
        if expr.op in ("floordiv", "mod"):
            divisor = expr.args[1].integer if expr.args[1].is_const else 0
            if divisor > 0 and divisor & (divisor - 1) == 0:
                if expr.op == "mod":
                    return b.and_(values[0], divisor - 1)
                return b.binary("arith.shrsi", values[0], divisor.bit_length() - 1)
        return here.integer_operation(expr.op, values)
