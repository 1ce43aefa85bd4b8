"""Base of all backward kernels: see `fusion.lowering.backward_plan` for what they compute. They have the form

    for each piece of work that this thread takes: a part of the blocks of an outer batch element
        for each inner batch element (dense gradients are summed over these)
            for each block of lane rows (queries or keys) of the part
                pack the lane side: A (Q or K), B (dO or V)
                for each window of rows: all of them, unless packed rows would take too much memory
                    pack the row side as far as needed: C (K or Q), D (V or dO)
                    for each block of rows that may meet the lanes
                        tile: see `tile`
                transpose, write

`fusion.planning.cpu_backward` cuts the work into pieces, by sizes and the machine's cores. Results do not depend on
which thread takes which piece, or in what order, so that they are the same in every run and for any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusion.ir.expr import E, I, coord
from fusion.ir.reads import dense_loads
from fusion.ir.spec import Operand
from fusion.lowering.backward_plan import (
    ROW_VALUES,
    STATISTICS,
    SUM_OF_DX,
    SUM_OF_SLOPES,
    SUM_OF_WEIGHTS,
    Form,
    LaneAxis,
    RowSum,
    normalized,
)
from fusion.planning.register_tiles import in_float16

from ..builder import Value
from ..rows import RowReader
from ..scope import MEMORY_TYPE, Scope
from ..skeleton import KernelFunction
from ..thread_function import KernelText
from .fused import QueryGradients
from .lanes import OUTPUT_GRADIENT
from .loads import GradientSink
from .tile import BackwardTiles, Block, Kind, Problem, RowRange

UNIT = 2.0**15
"""Unit of weights in float16, where they are at most 1."""
SMALL_TABLE = 1 << 14  # elements of one that costs little to go through after each tile


class BackwardKernel(KernelFunction):
    """Writes the function; see the module. needs: which operands' gradients are wanted."""

    least_exponent = -35  # of dS, about P dO V, it is -90 then
    flat_query: Value
    """The number of a batch element's first query among those of all."""

    def __init__(self, kind: Kind, problem: Problem, needs: Sequence[bool]):
        spec, tiling, planes = problem.spec, problem.tiling, problem.tiling.planes
        half = in_float16(spec, planes)
        degree = 5 if spec.out_dtype == "float32" else {1: 3 + half, 2: 4}.get(planes, 5)
        splits = planes > 1 or half  # half: dS, and what it is multiplied with
        super().__init__(spec, problem.target, problem.d, problem.d_v, degree, flush=planes > 0, may_flag=splits)
        self.unit = UNIT if half else 1
        self.kind, self.axis, self.plan, self.tiling = kind, kind.axis, problem.plan, tiling
        wanted = [n for n in kind.gradients if needs[n]]
        dtypes = {n: spec.operands[n].dtype if self.plan.writes(n) else "float32" for n in wanted}
        self.results = {n: MEMORY_TYPE[dtype] for n, dtype in dtypes.items()}
        self.collected = self.plan.of(kind.forms, needs)
        # What is added up besides the products.
        self.sums = self.plan.sums(kind.forms, needs) if kind.gradients else (SUM_OF_DX,)
        self.lane_sums = tuple(entry for entry in self.sums if entry.axis is self.axis)
        grad = Operand(dtype=spec.out_dtype, rank=len(spec.output.dims), name="grad")
        arriving = (Operand(dtype=f.dtype, rank=len(f.dims), name="arriving") for f in spec.aux_outputs)
        self.context.operands = (*spec.operands, grad, *arriving, replace(grad, name="out"))
        self.skips = spec.mask is not None and spec.mask.skips and not self.plan.everywhere
        self.read = (self.programs.masked, self.programs.full, self.weight, self.plan.at_weight)
        masked = self.plan.variants[0].gradients
        self.dense = dense_loads(*self.read, *(masked[entry.load] for entry in self.collected))
        self.side, self.query_gradients = kind.lanes(self), QueryGradients(self) if kind.fused else None
        self.tiles = BackwardTiles(self)
        # Whether anything is made of dS, and whether a product with it reduces over whole groups of lanes: what lies
        # behind the last one must be 0 then.
        self.wants_ds = kind.fused or 0 in self.results or 1 in self.results or bool(self.collected)
        self.reduces_lanes = (
            self.tiles.group_block > 1 if self.query_gradients is None else self.query_gradients.stores_ds
        )

    def text(self) -> KernelText:
        top = self._top()
        self.n_lanes, self.n_rows = (self.n_q, self.n_k) if self.axis is LaneAxis.QUERIES else (self.n_k, self.n_q)
        with self._watching():
            self.tiles.packed.clear()
            with self.dynamic_loop(self.params[("shares",)], "share") as self.share:
                self._share(top)
        tiles = self.tiles
        return self.kernel_text(
            rows=self.side.rows_per_item, key_step=tiles.key_step, step_bytes=tiles.step_bytes,
            part_bytes=0 if self.query_gradients is None else self.query_gradients.step_bytes,
            part_step=self.tiling.keys, windowed=True,
        )  # fmt: skip

    def _share(self, top: Scope) -> None:
        """Every so many pieces of work; mostly one. First those parts of all elements that are the longest under causal
        masks: keys that all queries see, queries that see all keys."""
        b, params, fused = self.b, self.params, self.query_gradients
        names = ("outer", "inner", "blocks", "parts", "part_blocks", "shares")
        outer, inner, blocks, parts, size, shares = (params[(name,)] for name in names)
        pieces = b.mul(outer, parts, "pieces")
        with b.loop(self.share, pieces, shares, hint="piece") as piece, b.loop(0, inner, hint="inner") as n:
            o, part = b.rem(piece, outer, "outer"), b.div(piece, outer, "part")
            if self.axis is LaneAxis.QUERIES:
                part = b.sub(b.sub(parts, 1), part, "part")
            first = b.mul(part, size)
            last = b.least(blocks, b.add(first, size))
            scope = self._element_scope(top, o, n)
            self.side.begin_element(scope)
            if fused is not None:
                fused.begin(b.add(b.mul(o, inner), n), part)
            with b.loop(first, last, hint="block") as block:
                for rows in self.side.blocks(scope.inner(), block):
                    self._block(rows)
                if fused is not None:
                    fused.end_block(block)
            if fused is not None:
                fused.end(scope)

    def _element_scope(self, top: Scope, outer: Value, inner: Value) -> Scope:
        """The scope of a batch element, with readers of its operands."""
        b, spec, side = self.b, self.spec, self.side
        outer_axes = [axis for axis in range(len(spec.batch)) if axis not in self.plan.inner]
        known = self._coordinates(top, outer_axes, outer) | self._coordinates(top, self.plan.inner, inner)
        scope = top.inner(known)
        flat = self.flat_number(scope)
        self.flat_query, self.flat_key = b.mul(flat, self.n_q, "row_base"), b.mul(flat, self.n_k, "column_base")
        scope.prepare(*self.read, bound=self.batch_names)
        self.readers = [self.reader(scope, number) for number in side.operands]
        side.loads = [side.load(scope, expr) for expr in self.dense]
        if self.tiles.centred is not None:
            self.tiles.centred.begin(self.readers[side.operands.index(1)])
        self.sinks = [GradientSink(self, entry, inner) for entry in self.collected]
        return scope

    def reader(self, scope: Scope, number: int) -> RowReader:
        """Reader of Q, K, V, dO or O."""
        if number >= 0:
            return super().reader(scope, number)
        number = len(self.spec.operands) if number == OUTPUT_GRADIENT else len(self.context.operands) - 1
        return self.rows_of(scope, number, tuple(coord(name) for name in self.spec.output.dims), I, E)

    def _block(self, block: Block) -> None:
        b, tiles, keys, size = self.b, self.tiles, self.tiling.keys, self.params[("window",)]
        tiles.pack_lanes(block, self.readers[:2])
        if self.query_gradients is not None:
            self.query_gradients.pack(block)
        several = b.compare("sgt", self.n_rows, tiles.span, "several")
        tiles.clear(block, several)
        low, high = self.side.rows(block)
        readers = self.readers[2:]
        pack = lambda row: tiles.pack_rows(row, readers)
        with (
            tiles.packed.windows(readers, low, high, size, pack) as (low, high),
            b.loop(low, high, keys, hint="r0") as first,
        ):
            rows = RowRange(first=first, count=b.least(b.sub(high, first), keys, "n_rows"))
            with b.when(self.side.may_meet(block, rows)):
                tiles.tile(block, rows)
                for sink in self.sinks:  # what small tables were given joins what they had before
                    if sink.entry.form is Form.SCATTERED:
                        with b.when(b.compare("sle", sink.size, SMALL_TABLE)):
                            sink.begin_span()
            with b.when(b.and_(several, self.ends_span(first, keys, tiles.span))):
                tiles.begin_span()
        with b.when(several):
            tiles.all_sums()
        with b.loop(0, block.groups, hint="g") as g:
            self.side.finish(block, g)

    def ends_span(self, first: Value, count: int, span: int) -> Value:
        """Whether rows first .. first + count - 1 are the last of a span, or the first of another."""
        b = self.b
        before, after = (b.div(b.add(first, n), span, "chapter") for n in (0, count))
        return b.compare("ne", before, after, "ends")

    def any_dead(self, queries: RowRange) -> Value:
        """Whether a query of these met no live key in the forward: its maximum is not above the fill, or its sum is
        nothing."""
        b, mask = self.b, self.spec.mask
        assert mask is not None

        def dead(i: Value) -> Value:
            c, shift, factor = (
                b.load(self.statistic(n, b.add(queries.first, i)), self.vector, n) for n in ("unit", "shift", "factor")
            )
            alive = b.compare("olt", b.unary("math.absf", factor), float("inf"))
            if math.isfinite(mask.fill):
                limit = max(mask.fill / 2 / self.programs.scale, -3e38)
                alive = b.and_(alive, b.compare("olt", shift, b.mul(c, -limit)))
            return b.reduce("or", b.and_(b.negated(alive), b.first_lanes(b.sub(queries.count, i), self.lanes)), "dead")

        return b.any(queries.count, self.lanes, dead, "i")

    def write_group(self, block: Block, g: Value) -> None:
        """The sums of a group's lanes, and its rows of the gradients: those of the second products, transposed."""
        b, lanes = self.b, self.lanes
        offset = b.mul(g, lanes)
        remaining = b.least(b.sub(block.count, offset), lanes)
        row, valid = b.add(block.first, offset), b.first_lanes(b.sub(block.count, offset), self.lanes)
        base = self.flat_query if self.axis is LaneAxis.QUERIES else self.flat_key
        for k, entry in enumerate(self.lane_sums):
            at = b.at(self.params[("ptr", "sums", self.sums.index(entry))], b.add(base, row), "f32")
            b.masked_store(b.load(self.tiles.sum_at(k, g), self.vector, "sum"), at, valid)
        for gemm in self.tiles.summed:
            change = lambda cell, scale=gemm.scale: cell if scale == 1.0 else b.mul(cell, scale)
            with self._lines(gemm.sums[g], gemm.products.e_padded, remaining, change) as (r, line):
                number = b.add(row, r)
                if gemm.operand == 0:
                    self.add_mean(line, number)
                self.write_line(block.scope, gemm.operand, line, number, gemm.width)

    def add_mean(self, line: Value, query: Value) -> None:
        """To a row of the gradient of Q: what it lacks where keys were centred, see `centring`."""
        if self.tiles.centred is None or not self.plan.adds_mean:
            return
        b = self.b

        def total(entry: RowSum) -> Value:
            start = self.params[("ptr", "sums", self.sums.index(entry))]
            return b.load(b.at(start, b.add(self.flat_query, query), "f32"), "f32", "sum")

        ds, drift, share = map(total, (SUM_OF_SLOPES, SUM_OF_DX, SUM_OF_SLOPES._replace(share=True)))
        lost, delta, off = (b.load(self.statistic(name, query), "f32", name) for name in ("lost", "delta", "off"))
        if self.spec.row_scale is not None:  # weights made anew add up to what differs from the forward's by rounding
            drift = b.sub(b.mul(drift, b.div(b.sub(1.0, lost), total(SUM_OF_WEIGHTS))), b.mul(lost, delta))
        if self.plan.at_log_sum is not None:
            drift = b.sub(drift, off)
        if self.spec.sinks:
            drift = b.sub(drift, delta)
        error = b.mul(drift, share)
        finite = b.compare("olt", b.unary("math.absf", error), float("inf"))
        ds = b.sub(ds, b.select(finite, error, b.constant(0.0, "f32")))
        self.tiles.centred.add_mean(line, b.mul(ds, self.programs.scale))

    def write_line(self, scope: Scope, operand: int, line: Value, row: Value, width: int) -> None:
        """`width` float32 numbers to a row of the operand's gradient."""
        memory, stride = self.results[operand], ("result_stride", operand)
        offset = self.batch_offset(scope, stride, self.b.mul(row, self.params[(*stride, "row")]))
        at = self.b.at(self.params[("ptr", "result", operand)], offset, memory)
        self._copy_row(line, at, memory, width, self.params[(*stride, "column")])

    def row_statistics(self, row: Value) -> dict[str, Value] | None:
        """`STATISTICS` of one query, the same for all lanes; None where there are none."""
        if not normalized(self.spec):
            return None
        b = self.b
        return {n: b.broadcast(b.load(self.statistic(n, row), "f32", n), self.lanes) for n in STATISTICS}

    def statistic(self, name: str, query: Value) -> Value:
        """Address of one of the `ROW_VALUES` of a query of this batch element."""
        b = self.b
        with b.at_entry():
            offset = b.mul(self.params[("row_value_stride",)], ROW_VALUES.index(name))
            row = b.at(self.params[("ptr", "rows")], offset, "f32", name)
        return b.at(row, b.add(self.flat_query, query), "f32")
