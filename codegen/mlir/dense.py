"""Loads of dense [.., row, column] tensors (biases, masks) for a group of queries and a block of keys.

Lanes are queries, but such tensors are row-major in the keys. So a block is staged once per group, in units of a few
keys: four words of each of L rows are read, transposed in registers, converted to float32 (bool: int32) and written as
[key][L]; the score program then reads one vector a row. Blocks at the edges and tensors of other strides go through
gathers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from fusion.ir.expr import Expr, I, J, Kind

from .builder import SIZE, Builder, Value, shape_of, vector_of
from .rows import LINE, linear_strides, widen_pairs
from .scope import MEMORY_TYPE, Context, Lanes, Scope, widen
from .values import is_float
from .vectormath import transpose

PREFETCH_KEYS = 128  # how far ahead, in keys
UNIT = 4  # words of a row in a unit
PER_WORD = {"bool": 4, "bfloat16": 2}  # elements that are moved as one word of 32 bits


class DenseLoad:
    """One such load. Make it in the item's scope (it writes base and strides there), `stage` it for a group and a
    block."""

    def __init__(self, scope: Scope, expr: Expr):
        context = self.context = scope.context
        self.expr, self.b, number = expr, scope.b, expr.operand
        self.dtype = context.operands[number].dtype
        self.memory = MEMORY_TYPE[self.dtype]
        strides = linear_strides(scope, number, expr.args, I, J, "key")
        assert strides is not None
        base, self.row_stride, self.key_stride = strides
        self.origin = self.b.at(context.params[("ptr", number)], base, self.memory, "origin")
        self.scalar = "i32" if expr.kind is Kind.BOOL else "f32"
        self.vector = vector_of(self.scalar, context.lanes)
        self.per_word = PER_WORD.get(self.dtype, 1)
        self.unit_keys = UNIT * self.per_word

    def _widen(self, x: Value) -> Value:
        if self.scalar == "i32":
            return self.b.convert("arith.extui", x, "i32")
        return widen(self.b, x, Kind.FLOAT, self.dtype)

    def stage(self, scope: Scope, first_key: Value, count: Value, target: Value) -> None:
        """Write the block to target [key][L], for `read`."""
        b, lanes, first = self.b, self.context.lanes, scope.lanes.first
        numbers = None if first is not None else scope.value(scope.lanes.coord)
        rows = range(lanes) if numbers is None else [b.extract(numbers, lane, "row") for lane in range(lanes)]
        offset = b.add(b.mul(first or 0, self.row_stride), b.mul(first_key, self.key_stride))
        corner = b.at(self.origin, offset, self.memory, "corner")
        adjacent = b.compare("eq", b.as_value(self.key_stride, "i64"), 1, "adjacent")
        regular = b.and_(b.reduce("and", scope.lanes.valid, "all_valid"), adjacent, "regular")
        end = b.select(regular, b.floor_to(count, self.unit_keys), 0, "end")
        with b.loop(0, end, self.unit_keys, hint="j") as j:
            for r, column in enumerate(self._columns(b.at(corner, j, self.memory), rows)):
                b.store(column, b.row(target, b.add(j, r), lanes, self.scalar), align=4 * lanes)
        with b.loop(end, count, hint="j") as j:
            start = b.row(corner, j, self.key_stride, self.memory)
            b.store(self._gather(scope, start, self.row_stride, numbers), b.row(target, j, lanes))

    def prefetch_tile(self, first: Value, rows: int, key: Value, keys: int, block: int, n_k: Value) -> None:
        """Ask for what lies ahead of `keys` keys, from a multiple of them on, in `rows` rows from `first` on. Where it
        is less than a line of each row, rows take turns. Behind the last of n_k keys that is the beginning of the rows
        of the next item, which mostly comes next: `block` rows further."""
        b, size = self.b, keys * SIZE[self.memory]
        parts = max(1, LINE // size)
        taken = -(-rows // parts)
        here = b.mul(b.rem(b.div(key, keys), parts), taken)
        offset = b.add(b.mul(b.add(first, here), self.row_stride), b.mul(key, self.key_stride))
        following = b.add(b.mul(self.row_stride, block), b.sub(PREFETCH_KEYS, n_k))
        ahead = b.select(b.compare("slt", b.add(key, PREFETCH_KEYS), n_k), PREFETCH_KEYS, following, "ahead")
        start = b.at(b.at(self.origin, offset, self.memory), ahead, self.memory)
        with b.loop(0, taken, hint="r") as r:
            row = b.row(start, r, self.row_stride, self.memory)
            for at in range(0, size, LINE):
                b.prefetch(b.at(row, at, "i8"))

    def _columns(self, start: Value, rows: Sequence[Value | int]) -> list[Value]:
        """Staged values for `unit_keys` adjacent keys of these rows. start: of the keys in row 0. Several elements are
        moved as one word: shuffles are what this costs."""
        b = self.b
        lines = [b.row(start, self.row_stride, r, self.memory, "row") for r in rows]
        words = vector_of("i32" if self.per_word > 1 else self.memory, UNIT)
        parts = [b.load(line, words, "line", align=SIZE[self.memory]) for line in lines]
        while len(parts) > UNIT:  # rows r, r + UNIT, ... behind each other
            firsts = [n for n in range(len(parts)) if n % (2 * UNIT) < UNIT]
            size = shape_of(parts[0].type)[0]
            parts = [b.shuffle(parts[n], parts[n + UNIT], range(2 * size), "lines") for n in firsts]
        if self.per_word == 1:
            return transpose(b, [self._widen(x) for x in parts])
        if self.dtype == "bfloat16":
            return [part for word in transpose(b, parts) for part in widen_pairs(b, word)]
        shifts = range(0, 32, 8)  # of bool
        return [b.and_(b.binary("arith.shrui", word, n), 0xFF) for word in transpose(b, parts) for n in shifts]

    def _gather(self, scope: Scope, start: Value, stride: Value | int, numbers: Value | None = None) -> Value:
        """An element per lane, `numbers` (0, 1, 2, ..) strides from the start."""
        b, lanes = self.b, self.context.lanes
        steps = b.dense(range(lanes), vector_of("i64", lanes), "lane_index") if numbers is None else numbers
        offsets = b.mul(steps, b.broadcast(b.as_value(stride, "i64"), lanes))
        addresses = b.addresses(start, offsets, self.memory)
        return self._widen(b.gather(addresses, scope.lanes.valid, vector_of(self.memory, lanes)))

    def read(self, target: Value, key: Value) -> Value:
        """The value (FLOAT or BOOL) of a key of the block."""
        at = self.b.row(target, key, self.context.lanes, self.scalar)
        return _staged(self.b, at, self.vector, 4 * self.context.lanes)


class DistanceTable:
    """The table of one part. `area` has room for a tile's distances. Make it in the item's scope."""

    def __init__(self, context: Context, part: Expr, area: Value):
        self.context, self.part, self.area, self.b = context, part, area, context.b
        self.scalar = "i32" if part.kind is Kind.BOOL else "f32"

    def fill(self, scope: Scope, first_row: Value, last_row: Value, first_key: Value, last_key: Value) -> None:
        """Write the values of a tile's distances: the last key against rows that go on beyond the last one."""
        b, lanes = self.b, self.context.lanes
        count = b.add(b.sub(b.sub(last_row, first_key), b.sub(first_row, last_key)), 1)
        with b.loop(0, count, lanes, hint="at") as at:
            valid = b.first_lanes(b.sub(count, at), lanes)
            lane = Lanes(coord=I, first=b.add(first_row, at), valid=valid)
            here = scope.inner({J: last_key}, lanes=lane)
            value = here.vector(self.part)
            if self.scalar == "i32":
                value = b.convert("arith.extui", value, "i32")
            b.store(value, b.at(self.area, at, self.scalar))

    def read(self, row: Value, key: Value) -> Value:
        """The values of L rows from `row` on, at a key; `row` counted from the tile's first, `key` from its last."""
        at = self.b.at(self.area, self.b.sub(row, key), self.scalar)
        return _staged(self.b, at, vector_of(self.scalar, self.context.lanes))


def _staged(b: Builder, address: Value, type_: str, align: int | None = None) -> Value:
    """Staged values: float32, or bool in words."""
    value = b.load(address, type_, "staged", align=align)
    return value if is_float(type_) else b.compare("ne", value, 0)


Staged = Sequence[tuple[Expr, Callable[[Value], Value]]]
"""Loads that are staged, and functions that read their values, of a key (or row) of the block."""


def stage_loads(loads: Iterable[tuple[DenseLoad, Value]], scope: Scope, first: Value, count: Value) -> Staged:
    """Stage loads, each in an area, for the lanes of a scope and `count` keys (or rows) from `first` on."""
    staged: list[tuple[Expr, Callable[[Value], Value]]] = []
    for load, area in loads:
        load.stage(scope, first, count, area)
        staged.append((load.expr, functools.partial(load.read, area)))
    return staged
