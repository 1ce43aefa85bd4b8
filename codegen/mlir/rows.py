"""Reading blocks of rows of an operand, whatever its strides.

Q, K and V reach the kernel as `operand[index expressions in (b.., row, column)]`. Where every index is linear in row
and column, a row is a strided run; where the column stride is 1 as well (the usual case, known only at run time), the
packing loops read the tensor in place. Everything else - other strides, index maps with divisions, rows beyond the end,
widths that are no multiple of a vector - goes through a small staging area that a scalar loop fills, padded with zeros,
or is put in order once for all that read it (`SharedRows`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fusion.errors import KernelCompilationError
from fusion.ir import integers
from fusion.ir.expr import Expr, Kind, coordinates, load
from fusion.lowering.addresses import runs

from .builder import SIZE, Builder, Value, vector_of
from .elements import Elements
from .scope import MEMORY_TYPE, Scope, widen

LINE = 64  # bytes of a line of the caches
SLOTS = 64  # numbers that tell which rows are packed
STATE_BYTES = 8 * SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Element (row, column) of an operand: its number, its index expressions, the two coordinates, and what is
    multiplied where that is not the element. count, width: how many rows and columns there are."""

    operand: int
    index: tuple[Expr, ...]
    row: Expr
    column: Expr
    count: Value
    width: int
    value: Expr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A block of rows in memory: element (r, c) is at pointer + r * stride + c, or at lines[r] + c, all padded columns
    readable."""

    pointer: Value
    stride: Value | int
    memory: str  # MLIR's type of an element
    dtype: str  # torch's
    lines: tuple[Value, ...] = ()


Strides = tuple[Value | int, Value | int, Value | int]


def linear_strides(
    scope: Scope, operand: int, index: tuple[Expr, ...], row: Expr, column: Expr, name: str = "column"
) -> Strides | None:
    """(offset of element (0, 0), row stride, column stride); None where the map is not linear with scalar strides.
    name: of the columns."""
    b, positions = scope.b, {row.name, column.name}
    base: Value | int = 0
    rows: Value | int = 0
    columns: Value | int = 0
    for dim, part in enumerate(index):
        stride = scope.context.params[("stride", operand, dim)]
        along = integers.linear(part, row)
        across = integers.linear(along[1], column) if along else None
        if along is None or across is None or (coordinates(along[0]) | coordinates(across[0])) & positions:
            return None
        base = b.add(base, b.mul(scope.integer(across[1]), stride), "base")
        rows = b.add(rows, b.mul(scope.integer(along[0]), stride), "row_stride")
        columns = b.add(columns, b.mul(scope.integer(across[0]), stride), f"{name}_stride")
    return base, rows, columns


class RowReader:
    """Reads rows of one operand within one work item. Make it in the item's scope: it writes the strides there."""

    run_stride: Value | int = 0

    def __init__(self, scope: Scope, access: Access):
        context = self.context = scope.context
        self.scope, self.access = scope, access
        self.source = context.params[("ptr", access.operand)]
        self.made = access.value and Elements(scope, access.value, access.row, access.column)
        self.dtype = context.operands[access.operand].dtype if self.made is None else "float32"
        self.memory = MEMORY_TYPE[self.dtype]
        strides = linear_strides(scope, access.operand, access.index, access.row, access.column)
        self.base, self.row_stride, self.column_stride = strides or (None, None, None)
        self.run, steps = runs(access.index, access.row)
        if steps:
            self.run_stride = scope.offset(steps, self._strides)

    def identity(self) -> list[Value | int]:
        """Integers that are equal for two work items that read the same rows: the offset, or the batch coordinates
        themselves."""
        if self.base is not None and self.access.value is None:
            return [self.base]
        element = load(self.access.operand, self.access.index, Kind.FLOAT)
        names = sorted(n for n in coordinates(self.access.value or element) if n.startswith("b"))
        known = {e.name: v for e, v in self.scope.known.items() if e.op == "coord"}
        return [known[n] for n in names]

    def rows(self, first: Value, count: int, padded: int, staging: Value, limit: Value | None = None) -> Rows:
        """Rows first..first+count-1, columns padded with zeros to `padded`. Rows from `limit` on, by default those that
        do not exist, are zeros. staging: room for count * padded elements of the operand's type, or of float32."""
        b, limit = self.context.b, limit or self.access.count
        staged = Rows(pointer=staging, stride=padded, memory=self.memory, dtype=self.dtype)
        if self.base is None or self.made is not None:
            self._stage(first, count, limit, padded, staging)
            return staged
        start = b.at(self.source, b.add(self.base, b.mul(first, self.row_stride)), self.memory, "rows")
        direct = self._stage_unless_direct(first, count, limit, padded, staging, self.column_stride)
        pointer = b.select(direct, start, staging, "rows")
        stride = b.select(direct, b.as_value(self.row_stride, "i64"), b.constant(padded, "i64"), "stride")
        return Rows(pointer=pointer, stride=stride, memory=self.memory, dtype=self.dtype)

    def _stage_unless_direct(
        self, first: Value, count: int, limit: Value, padded: int, staging: Value, column_stride: Value | int | None
    ) -> Value:
        """Stage rows that cannot be read in place; returns whether they can."""
        b = self.context.b
        direct = b.compare("sle", b.add(first, count), limit, "whole")
        direct = b.and_(direct, b.compare("eq", b.as_value(column_stride, "i64"), 1, "unit"))
        if padded != self.access.width:
            direct = b.constant(0, "i1")
        with b.when(b.negated(direct, "staged")):
            self._stage(first, count, limit, padded, staging)
        return direct

    def prefetch(self, first: Value, count: Value | int) -> None:
        """Ask for rows that will be read soon; first: as in `gather_rows`. They need not exist."""
        if self.made is not None:
            return
        b, unroll = self.context.b, count if isinstance(count, int) else 1
        run = math.gcd(self.run, unroll)
        with b.loop(first, b.add(first, count), unroll, hint="row") as row:
            for r in range(0, unroll, run):
                position = b.add(row, r)
                line = self._line(position if self.base is not None else self._existing(position))[0]
                lines = [b.row(line, self.run_stride, n, self.memory) for n in range(run)]
                for line, column in itertools.product(lines, range(0, self.access.width, LINE // SIZE[self.memory])):
                    b.prefetch(b.at(line, column, self.memory))

    def _existing(self, position: Value) -> Value:
        """A row, or the last one in place of those behind it."""
        return self.context.b.least(position, self.context.b.sub(self.access.count, 1))

    def gather_rows(self, first: Value, count: int, padded: int, staging: Value, limit: Value | None = None) -> Rows:
        """Rows as `rows` gives them that may lie anywhere: a table says where. They are read in place, too. Where rows
        come in runs, the number of the first is a multiple of `count`."""
        b, run = self.context.b, math.gcd(self.run, count)
        positions = [self._existing(b.add(first, r)) for r in range(0, count, run)]
        places = [self._line(position) for position in positions] if self.base is None and self.made is None else []
        stride = places[0][1] if places else None
        if stride is None or padded != self.access.width:
            return self.rows(first, count, padded, staging, limit)
        direct = self._stage_unless_direct(first, count, limit or self.access.count, padded, staging, stride)
        lines = [
            b.select(direct, line, b.at(staging, r * run * padded, self.memory), "line")
            for r, (line, _) in enumerate(places)
        ]
        stride = b.select(direct, b.as_value(self.run_stride, "i64"), b.constant(padded, "i64"), "stride")
        lines = [b.row(line, stride, r, self.memory) for line in lines for r in range(run)]
        return Rows(pointer=lines[0], stride=stride, memory=self.memory, dtype=self.dtype, lines=tuple(lines))

    def _stage(self, first: Value, count: int, limit: Value, padded: int, staging: Value) -> None:
        """Write what is there, and zeros."""
        b = self.context.b
        step = self.context.lanes  # padded widths are multiples of it
        valid = b.most(b.least(b.sub(limit, first), count), 0)
        with b.loop(b.mul(valid, padded), b.mul(padded, count), step, hint="c") as c:
            b.store(b.constant(0.0, vector_of(self.memory, step)), b.at(staging, c, self.memory))
        with b.loop(0, valid, hint="r") as r:
            self.put(b.add(first, r), padded, b.row(staging, r, padded, self.memory), self.memory)

    def put(self, position: Value, padded: int, target: Value, memory: str) -> None:
        """Write a row, padded with zeros, in its own type, or one in which its elements are exact. memory: MLIR's."""
        b, step, width = self.context.b, self.context.lanes, self.access.width
        if self.made is not None:
            self.made.fill(position, width, padded, target, memory)
            return
        for column in range(width // step * step, padded, step):
            b.store(b.constant(0.0, vector_of(memory, step)), b.at(target, column, memory))
        self._copy(position, target, memory)

    def _copy(self, position: Value, target: Value, memory: str) -> None:
        """Copy a row; by vectors where columns are contiguous."""
        b, step, width = self.context.b, self.context.lanes, self.access.width

        def move(source: Value, column: Value, type_: str) -> None:
            x = b.load(source, type_)
            if memory != self.memory:
                x = self.context.math.narrow(widen(b, x, Kind.FLOAT, self.dtype), memory)
            b.store(x, b.at(target, column, memory))

        whole: Value | int = 0
        line, stride = self._line(position)
        if stride is not None:
            unit = b.compare("eq", b.as_value(stride, "i64"), 1, "unit")
            whole = b.select(unit, b.constant(width // step * step, "i64"), b.constant(0, "i64"))
            with b.loop(0, whole, step, hint="c") as c:
                move(b.at(line, c, self.memory), c, vector_of(self.memory, step))
        with b.loop(whole, width, hint="c") as c:
            if stride is None:
                inner = self.scope.inner({self.access.row: position, self.access.column: c})
                address = b.at(self.source, inner.offset(self.access.index, self._strides), self.memory)
            else:
                address = b.row(line, c, stride, self.memory)
            move(address, c, self.memory)

    def _line(self, position: Value) -> tuple[Value, Value | int | None]:
        """(address of the first element of a row, distance of its columns); no distance where they are not in line."""
        b = self.context.b
        if self.base is not None:
            offset = b.add(self.base, b.mul(position, self.row_stride))
            return b.at(self.source, offset, self.memory, "line"), self.column_stride
        parts = [integers.linear(index, self.access.column) for index in self.access.index]
        position_names = {self.access.row.name, self.access.column.name}
        if any(part is None or coordinates(part[0]) & position_names for part in parts):
            return self.source, None
        inner = self.scope.inner({self.access.row: position})
        steps, rests = zip(*(part for part in parts if part is not None), strict=True)
        line = b.at(self.source, inner.offset(rests, self._strides), self.memory, "line")
        return line, inner.offset(steps, self._strides)

    @property
    def _strides(self) -> list[Value]:
        return self.context.strides(self.access.operand, len(self.access.index))


class SharedRows:
    """The rows of a reader that are not read in place, a chunk of them at a time: put in order once for all that read
    them. area: room for a chunk. padded: columns with those that are padded. memory: MLIR's type of an element."""

    def __init__(self, reader: RowReader, area: Value, padded: int, memory: str):
        self.reader, self.area, self.padded, self.memory = reader, area, padded, memory
        self.dtype = "bfloat16" if memory == "bf16" else reader.dtype

    def fill(self, start: Value, first: Value, low: Value, high: Value, stop: Value) -> None:
        """Rows [low, high) of the chunk from `start` on, and zeros from row `first` on and up to row `stop`."""
        b, self.start, lanes = self.reader.context.b, start, self.reader.context.lanes
        with b.loop(low, high, hint="position") as position:
            self.reader.put(position, self.padded, self._row(position), self.memory)
        zero = b.constant(0.0, vector_of(self.memory, lanes))
        for ends in (first, low), (high, stop):
            with b.loop(*ends, hint="row") as row:
                b.fill(self._row(row), self.padded // lanes, zero, hint="c")

    def prefetch(self, first: Value, count: Value | int) -> None:
        self.reader.prefetch(first, count)

    def _row(self, position: Value) -> Value:
        b = self.reader.context.b
        return b.row(self.area, b.sub(position, self.start), self.padded, self.memory, "rows")

    def rows(self, first: Value, count: int, padded: int, staging: Value, limit: Value | None = None) -> Rows:
        """Rows as `RowReader.rows` gives them, of the chunk that `fill` was called for last."""
        return Rows(pointer=self._row(first), stride=padded, memory=self.memory, dtype=self.dtype)

    gather_rows = rows


class PackedRows:
    """Rows [low, high) of what some readers read are packed, `step` rows at a time. state: `STATE_BYTES` of the
    thread's memory, which hold low, high and the identity of what is read. start: the first row of the window that is
    packed."""

    def __init__(self, b: Builder, state: Value, step: int):
        self.b, self.low, self.state, self.step = b, state, state, step
        self.high, self.start = b.at(state, 1, "i64"), b.constant(0, "i64")

    def number(self, row: Value) -> Value:
        """The number of a row's step among those of the window."""
        return self.b.div(self.b.sub(row, self.start), self.step)

    @contextlib.contextmanager
    def windows(
        self, readers: Sequence[RowReader], low: Value | int, high: Value, size: Value, pack: Callable[[Value], None],
        own: Sequence[Value] = (),
    ) -> Iterator[tuple[Value, Value]]:  # fmt: skip
        """A loop over the windows of `size` rows that have some of rows [low, high): those, which are packed. readers,
        own: see `note`; pack: see `extend`."""
        b, low = self.b, self.b.as_value(low, "i64")
        with b.loop(b.floor_to(low, size), high, size, hint="window") as self.start:
            first, last = b.most(low, self.start), b.least(high, b.add(self.start, size))
            self.note(readers, [*own, self.start])
            self.extend(first, last, pack)
            yield first, last

    def clear(self) -> None:
        """At the start of the kernel: nothing is packed."""
        self.b.store(self.b.constant(-1, "i64"), self.low)

    def note(self, readers: Sequence[RowReader], own: Sequence[Value] = ()) -> None:
        """Forget what is packed where other rows are read from here on than before, or another part of them, by these
        numbers."""
        b = self.b
        values = [*(b.as_value(v, "i64") for reader in readers for v in reader.identity()), *own]
        if len(values) + 2 > SLOTS:
            raise KernelCompilationError(
                f"keys and values that {len(values)} numbers tell apart; a kernel has room for {SLOTS - 2}: give them "
                "fewer batch dimensions"
            )
        changed: Value = b.compare("slt", b.load(self.low, "i64"), 0, "nothing")
        for slot, value in enumerate(values, start=2):
            old = b.load(b.at(self.state, slot, "i64"), "i64", "seen")
            changed = b.or_(changed, b.compare("ne", old, value), "changed")
        zero = b.constant(0, "i64")
        with b.when(changed):
            for slot, value in enumerate([zero, zero, *values]):
                b.store(value, b.at(self.state, slot, "i64"))

    def extend(self, low: Value | int, high: Value, pack: Callable[[Value], None]) -> None:
        """Make sure that rows [low, high) are packed (low on a step), and what lies between them and those that are:
        `pack(row)` packs a step from that row on."""
        b, step = self.b, self.step
        have_low, have_high = b.load(self.low, "i64", "have_lo"), b.load(self.high, "i64", "have_hi")
        end = b.mul(b.ceil_div(high, step), step, "end")
        low = b.as_value(low, "i64")
        empty = b.compare("sge", have_low, have_high, "empty")
        have_low, have_high = b.select(empty, low, have_low), b.select(empty, low, have_high)
        before, behind = b.most(b.sub(have_low, low), 0, "before"), b.most(b.sub(end, have_high), 0, "behind")
        with b.loop(0, b.add(before, behind), step, hint="r") as r:
            start = b.select(b.compare("slt", r, before), low, b.sub(have_high, before), "start")
            pack(b.add(start, r, "row"))
        b.store(b.least(low, have_low), self.low)
        b.store(b.most(end, have_high), self.high)


def widen_pairs(b: Builder, words: Value) -> tuple[Value, Value]:
    """The bfloat16 in the lower and in the upper halves of a vector's words, as float32."""
    low, high = b.binary("arith.shli", words, 16, "low"), b.and_(words, -0x10000, "high")
    return b.convert("arith.bitcast", low, "f32"), b.convert("arith.bitcast", high, "f32")


def load_line(b: Builder, rows: Rows, row: Value | int, column: Value | int, type_: str) -> Value:
    """Consecutive elements of a row as they are, as many as the vector type has."""
    return b.load(_address(b, rows, row, column), type_, "x")


def _address(b: Builder, rows: Rows, row: Value | int, column: Value | int) -> Value:
    if rows.lines and isinstance(row, int):
        return b.at(rows.lines[row], column, rows.memory)
    return b.at(rows.pointer, b.add(b.mul(row, rows.stride), column), rows.memory)


def load_f32(b: Builder, rows: Rows, row: Value | int, column: Value | int, lanes: int) -> Value:
    """`lanes` consecutive elements of a row as float32."""
    return widen(b, load_line(b, rows, row, column, f"vector<{lanes}x{rows.memory}>"), Kind.FLOAT, rows.dtype)
