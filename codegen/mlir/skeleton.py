"""Base of every kernel function: parameters, the thread's memory and share of the work, the batch
coordinates of a work item, the range of keys, and writing rows of the result."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from fusion.ir.expr import J0, J1, C, Expr, I, const, coord
from fusion.ir.results import keeps_ends
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.ir.tile_map import CELL_KEYS
from fusion.lowering.numbers import feeding_comparisons, shares
from fusion.lowering.rows import FACTOR, KEY_MAX, KEY_SUM, row_epilogue
from fusion.lowering.score_programs import ScorePrograms, score_programs
from fusion.planning.register_tiles import Target

from .amx import OPERANDS
from .builder import Value, vector_of
from .rows import Access, RowReader
from .scope import MEMORY_TYPE, Context, Scope
from .softmax import Exponent
from .thread_function import KernelText, ThreadFunction
from .values import Array
from .vectormath import LIBM, VectorMath, transpose
from .x86 import LANES, LARGE_BITS, WORDS, flush_denormals, restore_mode

HEADER = "module {\n" + "".join(f"llvm.func @{name}(f32) -> f32\n" for name in LIBM.values())


class KernelFunction(ThreadFunction):
    """Base of the attention kernels: see `kernel`, `by_rows` and `backward`. degree: of the exponential's
    polynomial. flush: results below 2**-126 become 0 while the kernel runs. Weights far below their row's largest come
    out there, and the processor takes some hundred cycles for each vector with one. For products that take such inputs
    for 0 anyway (AMX). may_flag: its products split numbers into planes, which very large ones do not have."""

    header = HEADER
    least_exponent: ClassVar[int] = -90
    """Power of 2 that some element of each operand reaches, unless all are 0, where products split numbers."""
    out_rows: Value  # memory of L rows of the result

    def __init__(
        self, spec: AttentionSpec, target: Target, d: int, d_v: int, degree: int, flush: bool = False,
        may_flag: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.spec, self.target, self.d, self.d_v = spec, target, d, d_v
        self.lanes = target.lanes
        self.vector = vector_of("f32", self.lanes)
        flush = flush and target.avx512  # by the control register of x86
        self.context = Context(
            b=self.b,
            params=self.params,
            math=VectorMath(
                self.b, target.avx512, degree, flushes=flush, bfloat16=target.bfloat16, denormals=bool(spec.aux_outputs)
            ),
            operands=spec.operands,
            lanes=self.lanes,
            ranges=shares(spec),
            uncontracted=feeding_comparisons(*spec.expressions()),
        )
        self.programs: ScorePrograms = score_programs(spec, folded=True)
        self.exponent = Exponent(self.context, self.programs.scale, spec.normalizer is Normalizer.NONE)
        self.weight: Expr | None = None if spec.weight is const(1.0) else spec.weight
        self.batch_names = frozenset(f"b{axis}" for axis in range(len(spec.batch)))
        self.modes = self.area(64, "modes") if flush else None
        if self.modes is not None:
            with self.b.at_entry():
                flush_denormals(self.b, self.modes)
        self.may_flag, self._watched = may_flag, list[Value]()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Around the work: products on tiles collect the largest magnitudes that they split into planes, and the
        launcher is told where one was too large, or all of an operand too small."""
        b = self.b
        for place in self._watched:
            b.store(b.constant(0, WORDS), place)
        yield
        least = (127 + self.least_exponent) << 23
        for place in self._watched:
            largest = b.reduce("maxsi", b.load(place, WORDS, "seen"), "largest")
            small = b.and_(b.compare("sgt", largest, 0), b.compare("slt", largest, least))
            with b.when(b.or_(small, b.compare("sge", largest, LARGE_BITS))):
                b.store(b.constant(1, "i64"), self.params[("ptr", "flag")])

    def watch(self) -> Value | None:
        """Memory for the largest magnitudes of operands, where products split these into planes: see `Amx`."""
        if not self.may_flag:
            return None
        places = [self.area(4 * LANES, "max_abs") for _ in OPERANDS]
        self._watched += places
        return places[0]

    def kernel_text(self, beyond: int = 0, **known: Any) -> KernelText:
        if self.modes is not None:
            restore_mode(self.b, self.modes)
        return super().kernel_text(beyond, **known, may_flag=self.may_flag)

    def packed_areas(self, sizes: Sequence[int]) -> list[Array]:
        """Arrays behind the fixed areas, which have a part of so many bytes for each key step of a window."""
        b, packed = self.b, []
        with b.at_entry():
            here = b.at(self.base, self.workspace_bytes, "i8", "packed")
            for size in sizes:
                packed.append(Array(b, here, size))
                here = b.row(here, self.params[("key_steps",)], size, "i8", "packed")
        return packed

    def zero(self, area: Value, size: Value | int, start: Value | int = 0) -> None:
        """Zeros from byte `start` to byte `size`, both multiples of 64."""
        b = self.b
        with b.loop(start, size, 64, hint="at") as at:
            b.store(b.constant(0.0, vector_of("f32", 16)), b.at(area, at, "i8"))

    def zero_unused(self, weights: Value, used: Value, size: Value) -> None:
        """Zeros behind the weights of the groups that there are, for products that take more: what lies there may be
        denormal, and processors take some hundred cycles for each product with such a number. Tiles take them for 0."""
        if self.modes is None:
            self.zero(weights, size, used)

    def _top(self) -> Scope:
        """The scope of the function, with the numbers of queries and keys."""
        top = Scope(context=self.context)
        with self.b.at_entry():
            sizes = [top.integer(n) for n in (self.spec.n_q, self.spec.n_k)]
        self.n_q, self.n_k = (self.b.as_value(n, "i64") for n in sizes)
        return top

    @contextlib.contextmanager
    def _items(self) -> Iterator[Value]:
        """The loop over this thread's work items, which it takes in portions: see `fusion.planning.cpu`."""
        b, (items, count, unit) = self.b, (self.params[(name,)] for name in ("items", "portions", "unit"))
        units, square = b.div(items, unit), b.mul(count, count)
        with self.dynamic_loop(count, "portion") as mine:
            rest = [b.sub(count, b.add(mine, k)) for k in (0, 1)]
            low, high = (b.sub(units, b.div(b.mul(units, b.mul(n, n)), square)) for n in rest)
            with b.loop(b.mul(low, unit), b.mul(high, unit), hint="item") as item:
                yield item

    def _batch_scope(self, top: Scope, rest: Value, but: int = -1) -> Scope:
        """The scope of a work item: batch coordinates from its linear index, and what depends on nothing else. but: one
        that it has all values of."""
        scope = top.inner(self._coordinates(top, [axis for axis in range(len(self.spec.batch)) if axis != but], rest))
        bound = self.batch_names - {f"b{but}"}
        scope.prepare(self.programs.masked, self.programs.full, self.weight, *self.spec.sinks, bound=bound)
        return scope

    def _coordinates(self, top: Scope, axes: Sequence[int], rest: Value) -> dict[Expr, Value]:
        """Coordinates along these batch axes from their linear index."""
        b, known = self.b, {}
        for axis in reversed(axes):
            extent = b.as_value(top.integer(self.spec.batch[axis]), "i64")
            known[coord(f"b{axis}")], rest = b.rem(rest, extent, f"b{axis}"), b.div(rest, extent)
        return known

    def flat_number(self, scope: Scope) -> Value | int:
        """The linear index of the batch element of a scope."""
        b, flat = self.b, 0
        for axis, extent in zip(self.spec.axes, self.spec.batch, strict=True):
            flat = b.add(b.mul(flat, b.as_value(scope.integer(extent), "i64")), scope.value(axis))
        return flat

    def _readers(self, scope: Scope) -> list[RowReader]:
        return [self.reader(scope, number) for number in (0, 1, 2)]

    def reader(self, scope: Scope, number: int) -> RowReader:
        """Reader of Q, K or V (0, 1 or 2)."""
        return self.rows_of(scope, number, *self.spec.access(number), self.spec.values[number])

    def rows_of(
        self, scope: Scope, number: int, index: tuple[Expr, ...], row: Expr, column: Expr, value: Expr | None = None
    ) -> RowReader:
        """Reader of an operand; the others: see `Access`."""
        count, width = self.n_q if row is I else self.n_k, self.d if column is C else self.d_v
        access = Access(operand=number, index=index, row=row, column=column, count=count, width=width, value=value)
        return RowReader(scope, access)

    def key_range(self, scope: Scope, step: int) -> tuple[Value | int, Value]:
        """The keys that the mask leaves, in a scope that knows i0 and i1, clamped; the start on a key step."""
        b, mask = self.b, self.spec.mask
        start: Value | int = 0
        end = self.n_k
        if mask is not None and mask.key_lo is not None:
            start = b.most(b.least(b.as_value(scope.integer(mask.key_lo), "i64"), self.n_k), 0)
            start = b.floor_to(start, step, "key_lo")
        if mask is not None and mask.key_hi is not None:
            end = b.most(b.least(b.as_value(scope.integer(mask.key_hi), "i64"), self.n_k), 0, "key_hi")
        return start, end

    def _live_range(
        self, rows: Scope, live: Expr, low: Value | int, high: Value, step: int
    ) -> tuple[Value | int, Value]:
        """The key range of an item without the dead cells at its ends, by the map of live tiles."""
        b = self.b
        cells = b.ceil_div(self.n_k, CELL_KEYS, "cells")
        zero, last = b.constant(0, "i64"), b.sub(self.n_k, 1)

        def dead(first: Value, end: Value) -> Value:
            tile = rows.inner({J0: first, J1: b.least(end, last)})
            none = b.compare("eq", b.as_value(tile.integer(live), "i64"), 0)
            return b.convert("arith.extui", none, "i64", "dead")

        with b.carry(0, cells, 1, [zero, zero], hint="cell") as (loop, cell, (before, behind)):
            first = b.mul(cell, CELL_KEYS)
            until = dead(zero, b.add(first, CELL_KEYS - 1))
            loop.yields(b.add(before, until, "before"), b.add(behind, dead(first, last), "behind"))
        start = b.mul(loop.results[0], CELL_KEYS)
        stop = b.mul(b.sub(cells, loop.results[1]), CELL_KEYS)
        start = b.floor_to(b.least(start, self.n_k), step)
        return b.most(low, start, "key_lo"), b.least(high, stop, "key_hi")

    def with_keys(self, tile: Scope, first: Value, count: Value) -> Scope:
        """A scope of rows that also knows the first and last key of a tile: some key, where the tile has none."""
        b = self.b
        j0 = b.least(first, b.sub(self.n_k, 1), "j_first")
        j1 = b.most(j0, b.least(b.sub(b.add(first, count), 1), b.sub(self.n_k, 1)), "j_last")
        return tile.inner({J0: j0, J1: j1})

    def whole(self, tile: Scope) -> Value | None:
        """Whether the program for full tiles may stand for a whole tile, in a scope that knows its i0, i1, j0 and j1;
        None where there is no such program."""
        mask = self.spec.mask
        return None if self.programs.full is None or mask is None else self.all_of(tile, mask.whole())

    def all_of(self, scope: Scope, conditions: Sequence[Expr]) -> Value:
        b = self.b
        return functools.reduce(lambda x, e: b.and_(x, scope.value(e)), conditions, b.constant(1, "i1"))

    def _alive(self, m: Value, fill: float) -> Value:
        """Whether a maximum, in units of the programs' scale, is that of a live key."""
        # In these units a finite fill was clamped to the largest float32: the limit must stay above that.
        limit = max(fill / 2 / self.programs.scale, -3e38) if math.isfinite(fill) else fill
        return self.b.compare("ogt", m, limit, "alive")

    def batch_offset(self, scope: Scope, stride: tuple, offset: Value) -> Value | int:
        """An offset and, by strides whose parameters begin so, that of a batch element."""
        axes = self.spec.axes
        return scope.offset(axes, [self.params[(*stride, axis.name)] for axis in axes], offset)

    def _row_address(self, scope: Scope, row: Value) -> Value:
        offset = self.batch_offset(scope, ("out_stride",), self.b.mul(row, self.params[("out_stride", "i")]))
        return self.b.at(self.params[("ptr", "out")], offset, MEMORY_TYPE[self.spec.out_dtype])

    def _write_row(self, source: Value, target: Value) -> None:
        """d_v elements of the result."""
        stride = self.params[("out_stride", "e")]
        self._copy_row(source, target, MEMORY_TYPE[self.spec.out_dtype], self.d_v, stride)

    def _copy_row(self, source: Value, target: Value, memory: str, width: int, stride: Value) -> None:
        """`width` elements, by vectors where they are contiguous in the target."""
        b, lanes = self.b, self.lanes
        unit = b.compare("eq", stride, 1)
        whole = b.select(unit, b.constant(width // lanes * lanes, "i64"), b.constant(0, "i64"))
        with b.loop(0, whole, lanes, hint="e") as e:
            b.store(self.narrow(b.load(b.at(source, e, "f32"), self.vector), memory), b.at(target, e, memory))
        with b.loop(whole, width, hint="e") as e:
            b.store(self.narrow(b.load(b.at(source, e, "f32"), "f32"), memory), b.row(target, e, stride, memory))

    @contextlib.contextmanager
    def _lines(
        self, source: Value, padded: int, count: Value, change: Callable[[Value], Value] = lambda x: x
    ) -> Iterator[tuple[Value, Value]]:
        """A loop over `count` rows of [`padded` columns][L], each vector changed: its number and where it lies."""
        b, lanes = self.b, self.lanes
        with b.loop(0, padded, lanes, hint="e") as e:
            cells = [b.load(b.row(source, b.add(e, r), lanes), self.vector, "o") for r in range(lanes)]
            for r, line in enumerate(transpose(b, [change(cell) for cell in cells])):
                b.store(line, b.at(self.out_rows, b.add(e, r * padded), "f32"))
        with b.loop(0, count, hint="r") as r:
            yield r, b.row(self.out_rows, r, padded)

    def narrow(self, x: Value, memory: str) -> Value:
        if memory == "f32":
            return x
        return self.b.convert("arith.extf", x, memory) if memory == "f64" else self.context.math.narrow(x, memory)

    def _row_factor(self, rows: Scope, raw: Value, total: Value) -> Value:
        """Factor of each lane's output. raw: the running maximum in units of the programs' scale. total:
        the sum."""
        b, spec = self.b, self.spec
        m = self.in_own_units(raw)
        shift: Value | None = None
        if spec.sinks or keeps_ends(spec):
            shift = b.div(1.0, self.exponent.excess(raw))
            total = b.mul(total, shift)
        rows.known |= {KEY_MAX: m, KEY_SUM: total}
        for _, leaf, value in row_epilogue(spec):
            rows.known[leaf] = rows.vector(value)
        factor = rows.known[FACTOR]
        return factor if shift is None else b.mul(factor, shift)

    def in_own_units(self, raw: Value) -> Value:
        """The score program's value from that in units of the programs' scale."""
        b = self.b
        value = b.mul(raw, self.programs.scale)
        for unit, fill in self.programs.fills:
            value = b.select(b.compare("oeq", raw, unit), fill, value, "x_row")
        return value

    def scaled(self, output: Value, factor: Value) -> Value:
        """Elements of the output times the factors of their rows, which are NaN where the weights are."""
        scaled = self.b.mul(output, factor)
        if self.spec.normalizer is not Normalizer.ZERO_SOFTMAX:
            return scaled
        return self.b.select(self.b.compare("uno", factor, factor, "nothing"), 0.0, scaled)
