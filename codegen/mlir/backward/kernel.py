"""What all backward kernels share: see `fusion.lowering.backward_plan` for what they compute. They have the form

    for each outer batch element, for each inner one (dense gradients are summed over these)
        for each block of lane rows (queries or keys) of this thread
            pack the lane side: A (Q or K), B (dO or V); pack the row side as far as needed: C (K or Q), D (V or dO)
            for each block of rows that may meet the lanes
                tile: see `tile`
            transpose, write

Each thread has a share of the outer batch elements, or of the blocks where there are too few of these. Nothing depends
on which thread takes which share, or in what order, so that results are the same in every run.
"""

from __future__ import annotations

import contextlib
import math

from fusion.ir.expr import E, Expr, I, coord
from fusion.lowering.backward_plan import SUM_OF_DX, SUM_OF_SLOPES, SUM_OF_WEIGHTS, Form, LaneAxis, RowSum

from ..builder import Value
from ..dense import DenseLoad
from ..rows import Access, RowReader
from ..scope import Scope
from ..skeleton import KernelText
from .loads import GradientSink, LaneLoad
from .tile import BackwardTile, Block, GradientProducts, Rows

SMALL_TABLE = 1 << 14  # elements of one that costs little to go through after each tile
OUTPUT_GRADIENT, OUTPUT = -1, -2  # stand for dO and O where the number of an operand is expected


class BackwardKernel(BackwardTile):
    """Writes the function; see the module."""

    def text(self) -> KernelText:
        top = self._top()
        self.n_lanes, self.n_rows = (self.n_q, self.n_k) if self.axis is LaneAxis.QUERIES else (self.n_k, self.n_q)
        with self._watching():
            self.packed.clear()
            self._loops(top)
        return KernelText(
            source=self.function(), slots=self.slots(), rows=self.rows_per_item,
            key_step=self.score_half.products.key_step,
            fixed_bytes=self.workspace_bytes, step_bytes=self.step_bytes, may_flag=self.may_flag,
        )  # fmt: skip

    def _loops(self, top: Scope) -> None:
        """The shares of the work: as many as threads, each of which goes to one, whoever that is."""
        with self.turns(self.threads, "share") as self.share:
            self._share(top)

    def _share(self, top: Scope) -> None:
        """Outer and inner batch elements, and blocks; `split`: all shares have blocks of all outer elements."""
        b, params = self.b, self.params
        outer, inner, blocks, split = (params[(name,)] for name in ("outer", "inner", "blocks", "split"))
        by_block = b.compare("ne", split, 0, "by_block")
        zero, one = b.constant(0, "i64"), b.constant(1, "i64")
        low = b.select(by_block, zero, b.div(b.mul(outer, self.share), self.threads), "outer_lo")
        high = b.select(by_block, outer, b.div(b.mul(outer, b.add(self.share, 1)), self.threads), "outer_hi")
        step = b.select(by_block, self.threads, one, "block_step")
        mine = b.select(by_block, self.share, zero)
        mirrored = b.sub(b.sub(step, 1), mine)
        rounds = b.div(b.add(blocks, b.sub(step, 1)), step)
        with b.loop(low, high, hint="outer") as o, b.loop(0, inner, hint="inner") as n:
            scope = self._element_scope(top, o, n)
            with self._element(scope, blocks), b.loop(0, rounds, hint="round") as turn:
                # There and back, so that under causal masks no share has the longer block of every round. A block of
                # all inner elements stays in one share, which adds up their gradients.
                odd = b.compare("ne", b.rem(b.add(o, turn), 2), 0)
                block = b.add(b.mul(turn, step), b.select(odd, mirrored, mine), "block")
                with b.when(b.compare("slt", block, blocks)), self._one_block(scope, block):
                    self._item(scope.inner(), block)

    def _element(self, scope: Scope, blocks: Value) -> contextlib.AbstractContextManager[None]:
        """Around the blocks of one batch element."""
        return contextlib.nullcontext()

    def _one_block(self, scope: Scope, number: Value) -> contextlib.AbstractContextManager[None]:
        """Around one block."""
        return contextlib.nullcontext()

    def _element_scope(self, top: Scope, outer: Value, inner: Value) -> Scope:
        """The scope of a batch element, with readers of its operands."""
        b, spec = self.b, self.spec
        known: dict[Expr, Value] = {}
        outer_axes = [axis for axis in range(len(spec.batch)) if axis not in self.plan.inner]
        for axes, index in ((outer_axes, outer), (self.plan.inner, inner)):
            rest: Value | int = index
            for axis in reversed(axes):
                extent = b.as_value(top.integer(spec.batch[axis]), "i64")
                known[coord(f"b{axis}")], rest = b.rem(rest, extent, f"b{axis}"), b.div(rest, extent)
        scope = top.inner(known)
        flat: Value | int = 0
        for axis in range(len(spec.batch)):
            extent = b.as_value(top.integer(spec.batch[axis]), "i64")
            flat = b.add(b.mul(flat, extent), known[coord(f"b{axis}")])
        self.flat = flat
        self.flat_query, self.flat_key = b.mul(flat, self.n_q, "row_base"), b.mul(flat, self.n_k, "column_base")
        scope.prepare(*self.read, bound=self.batch_names)
        self.readers = [self._reader(scope, number) for number in self.sides]
        load_of = DenseLoad if self.axis is LaneAxis.QUERIES else LaneLoad
        self.loads = [load_of(self.context, scope, expr) for expr in self.dense]
        self.packed.note(self.readers[2:])
        if self.centred is not None:
            self.centred.begin(self.readers[self.sides.index(1)])
        self.sinks = [
            GradientSink(self.context, entry, self.plan, share=self.share, inner=inner, queries=self.n_q,
                         width=self.rows_per_block)
            for entry in self.collected
        ]  # fmt: skip
        return scope

    def _reader(self, scope: Scope, number: int) -> RowReader:
        spec = self.spec
        if number < 0:
            number = len(spec.operands) if number == OUTPUT_GRADIENT else len(self.context.operands) - 1
            index, row, column = tuple(coord(name) for name in spec.output.dims), I, E
        else:
            index, row, column = spec.access(number)
        return RowReader(self.context, scope, Access(operand=number, index=index, row=row, column=column))

    def _pack_lanes(self, block: Block) -> None:
        b = self.b
        for reader, half in zip(self.readers[:2], self.halves, strict=False):
            with b.loop(0, block.padded, hint="g") as g:
                at = self.part(half.lanes, g, half.products.query_bytes())
                first = b.add(block.first, b.mul(g, self.lanes))
                half.products.pack_queries(reader, first, self.n_lanes, at, self.staging)

    def _pack_step(self, row: Value) -> None:
        n = self.b.div(row, self.score_half.products.key_step)
        for reader, half in zip(self.readers[2:], self.halves, strict=False):
            p, rest = half.products, (row, self.n_rows)
            p.pack_keys(reader, *rest, self.part(half.keys, n, p.key_bytes()), self.staging)
            if half.operand in self.results:
                values = self.centred if half.operand == 0 and self.centred else reader
                p.pack_values(values, *rest, p.values_of(half.values, n), self.staging)

    def _add_up_tables(self) -> None:
        """Add what small tables were given by a tile to what they had before."""
        for sink in self.sinks:
            if sink.entry.form is Form.SCATTERED:
                with self.b.when(self.b.compare("sle", sink.size, SMALL_TABLE)):
                    self._add_partial_sums(sink.sink, sink.total, self.b.mul(sink.size, 4))

    def _item(self, scope: Scope, number: Value) -> None:
        """The rows that a thread takes at a time."""
        self._block(self._block_of(scope, number))

    def _block(self, block: Block) -> None:
        b, keys = self.b, self.tiling.keys
        self._pack_lanes(block)
        for half in (half for half in self.halves if half.operand in self.results):
            size = half.products.weight_bytes(keys)
            self._zero_unused(half.weights, b.mul(block.groups, size), b.mul(block.padded, size))
        zero = b.constant(0.0, self.vector)
        several = b.compare("sgt", self.n_rows, self.span, "several")
        for half in self.halves:
            all_spans = b.constant(2 * half.size, "i64")
            self._zero(half.sums, b.select(several, all_spans, b.constant(half.size, "i64")))
        with b.loop(0, len(self.lane_sums) * self.tiling.groups, hint="n") as n:
            b.store(zero, b.row(self.kept, n, self.lanes))
        low, high = self._row_range(block)
        self.packed.extend(low, high, self.score_half.products.key_step, self._pack_step)
        with b.loop(low, high, keys, hint="r0") as first:
            rows = Rows(first=first, count=b.least(b.sub(high, first), keys, "n_rows"))
            with b.when(self._may_meet(block, rows)):
                self._tile(block, rows)
                self._add_up_tables()
            with b.when(b.and_(several, self._ends_key_span(first, keys, self.span))):
                for half in self.halves:
                    self._add_partial_sums(half.sums, b.at(half.sums, half.size, "i8"), half.size)
        with b.when(several):
            for half in self.halves:
                self._add_partial_sums(b.at(half.sums, half.size, "i8"), half.sums, half.size)
        with b.loop(0, block.groups, hint="g") as g:
            self._finish(block, g)

    def _block_of(self, scope: Scope, number: Value) -> Block:
        b, rows = self.b, self.rows_per_block
        first = b.mul(number, rows, "first")
        count = b.least(b.sub(self.n_lanes, first), rows, "count")
        return self._block_at(scope, first, count, Rows(first=first, count=count))

    def _block_at(self, scope: Scope, first: Value, count: Value, span: Rows) -> Block:
        b, step = self.b, self.score_half.products.group_step
        groups = b.ceil_div(count, self.lanes, "groups")
        padded = b.mul(b.ceil_div(groups, step), step, "padded_groups")
        return Block(scope=scope, first=first, count=count, groups=groups, padded=padded, span=span)

    def _row_range(self, block: Block) -> tuple[Value, Value]:
        raise NotImplementedError

    def _may_meet(self, block: Block, rows: Rows) -> Value:
        """Whether a query of this tile may look at a key of it, or met no live key."""
        raise NotImplementedError

    def _any_dead(self, queries: Rows) -> Value:
        """Whether a query of these met no live key in the forward: its maximum is not above the fill, or its sum is
        nothing."""
        b, mask, lanes = self.b, self.spec.mask, self.lanes
        assert mask is not None
        with b.carry(0, queries.count, lanes, [b.constant(0, "i1")], hint="i") as (loop, i, (dead,)):
            c, shift, factor = (
                b.load(self.statistic(n, b.add(queries.first, i)), self.vector, n) for n in ("unit", "shift", "factor")
            )
            alive = b.compare("olt", b.unary("math.absf", factor), float("inf"))
            if math.isfinite(mask.fill):
                limit = max(mask.fill / 2 / self.programs.scale, -3e38)
                alive = b.and_(alive, b.compare("olt", shift, b.mul(c, -limit)))
            found = b.and_(b.negated(alive), self._valid(b.sub(queries.count, i)))
            any_found = b.reduce("or", found, "dead")
            loop.yields(b.or_(dead, any_found))
        return loop.results[0]

    def _finish(self, block: Block, g: Value) -> None:
        b, lanes = self.b, self.lanes
        offset = b.mul(g, lanes)
        remaining = b.least(b.sub(block.count, offset), lanes)
        row, valid = b.add(block.first, offset), self._valid(b.sub(block.count, offset))
        base = self.flat_query if self.axis is LaneAxis.QUERIES else self.flat_key
        for k, entry in enumerate(self.lane_sums):
            at = b.at(self.params[("ptr", "sums", self.sums.index(entry))], b.add(base, row), "f32")
            b.masked_store(b.load(self.sum_at(k, g), self.vector, "sum"), at, valid)
        for half in self.halves:
            if half.operand in self.results:
                self._write(block.scope, half, g, Rows(first=row, count=remaining))

    def _write(self, scope: Scope, half: GradientProducts, g: Value, rows: Rows) -> None:
        """Transpose the sums of a group's lanes and write them to the rows of the operand's gradient."""
        b, lanes, padded, scale = self.b, self.lanes, half.products.e_padded, half.scale
        source = self.part(half.sums, g, 4 * padded * lanes)
        change = lambda cell: cell if scale == 1.0 else b.mul(cell, scale)
        with self._lines(source, padded, rows.count, change) as (r, line):
            row = b.add(rows.first, r)
            if half.operand == 0:
                self._add_mean(line, row)
            self._write_line(scope, half.operand, line, row, half.width)

    def _add_mean(self, line: Value, query: Value) -> None:
        """To a row of the gradient of Q: what it lacks where keys were centred, see `centring`."""
        if self.centred is None or not self.plan.adds_mean:
            return
        b = self.b

        def total(entry: RowSum) -> Value:
            start = self.params[("ptr", "sums", self.sums.index(entry))]
            return b.load(b.at(start, b.add(self.flat_query, query), "f32"), "f32", "sum")

        slopes, drift, share = map(total, (SUM_OF_SLOPES, SUM_OF_DX, SUM_OF_SLOPES._replace(share=True)))
        lost, delta, off = (b.load(self.statistic(name, query), "f32", name) for name in ("lost", "delta", "off"))
        if self.spec.row_scale is not None:  # weights made anew add up to what differs from the forward's by rounding
            drift = b.sub(b.mul(drift, b.div(b.sub(1.0, lost), total(SUM_OF_WEIGHTS))), b.mul(lost, delta))
        if self.plan.at_log_sum is not None:
            drift = b.sub(drift, off)
        if self.spec.sinks:
            drift = b.sub(drift, delta)
        error = b.mul(drift, share)
        finite = b.compare("olt", b.unary("math.absf", error), float("inf"))
        slopes = b.sub(slopes, b.select(finite, error, b.constant(0.0, "f32")))
        self.centred.add_mean(line, b.mul(slopes, self.programs.scale))

    def _write_line(self, scope: Scope, operand: int, line: Value, row: Value, width: int) -> None:
        """`width` float32 numbers to a row of the operand's gradient."""
        b, memory = self.b, self.results[operand]
        offset = b.mul(row, self.params[("result_stride", operand, "row")])
        for axis in range(len(self.spec.batch)):
            stride = self.params[("result_stride", operand, f"b{axis}")]
            offset = b.add(offset, b.mul(scope.value(coord(f"b{axis}")), stride))
        at = b.at(self.params[("ptr", "result", operand)], offset, memory)
        self._copy_row(line, at, memory, width, self.params[("result_stride", operand, "column")])
