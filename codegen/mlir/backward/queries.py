"""The backward kernels whose lanes are queries: dQ += dS K, and sums over keys of gradients of loads."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fusion.codegen.mlir.amx import Products
from fusion.codegen.mlir.backward.kernel import OUTPUT, OUTPUT_GRADIENT, BackwardKernel
from fusion.codegen.mlir.backward.plan import STATISTICS, SUM_OF_DX, Form, LaneAxis, RowSum, normalized
from fusion.codegen.mlir.backward.tile import Block, Rows
from fusion.codegen.mlir.builder import Value
from fusion.codegen.mlir.rows import load_f32
from fusion.codegen.mlir.scope import Scope
from fusion.codegen.mlir.transpose import sum_rows
from fusion.ir.expr import I0, I1


class QueriesKernel(BackwardKernel):
    """dQ, and gradients of loads that are free of the key."""

    axis = LaneAxis.QUERIES
    forms = (Form.PER_QUERY,)
    gradients = (0,)
    sides = (0, OUTPUT_GRADIENT, 1, 2)

    def _row_range(self, block: Block) -> tuple[Value, Value]:
        """The keys that the mask leaves for these queries; all where one of them met no live key."""
        b = self.b
        if not self.skips:
            return b.constant(0, "i64"), self.n_rows
        queries = Rows(first=block.first, count=block.count)
        ranged = block.scope.inner({I0: block.first, I1: b.sub(b.add(block.first, block.count), 1)})
        low, high = self._key_range(ranged, self.score_half.products.key_step)
        low = b.as_value(low, "i64")
        if not normalized(self.spec):
            return low, high
        self.dead = self._any_dead(queries)
        return b.select(self.dead, b.constant(0, "i64"), low, "low"), b.select(self.dead, self.n_k, high, "high")

    def _may_meet(self, block: Block, rows: Rows) -> Value:
        """By the map of live tiles: the range of rows has seen to the keys' closed-form range."""
        b, mask = self.b, self.spec.mask
        if mask is None or not self.skips or mask.tile_live is None:
            return b.constant(1, "i1")
        live = b.as_value(self._tile_scope(block, rows).integer(mask.tile_live), "i64")
        meets = b.compare("ne", live, 0, "meets")
        return b.binary("arith.ori", meets, self.dead, "meets") if normalized(self.spec) else meets

    def _prefetch(self, block: Block, rows: Rows) -> None:
        """Dense tensors that are read."""
        size, keys = self.rows_per_block, self.score_half.products.key_step
        for load in self.loads:
            load.ask_ahead(block.first, size, rows.first, keys, size, self.n_k)

    def lane_statistics(self, first: Value) -> dict[str, Value] | None:
        if not normalized(self.spec):
            return None
        return {name: self.b.load(self.statistic(name, first), self.vector, name) for name in STATISTICS}


class RowSumsKernel(QueriesKernel):
    """One sum over the keys for each row, and no gradients."""

    gradients = ()

    def _sums(self, needs: Sequence[bool]) -> tuple[RowSum, ...]:
        return (SUM_OF_DX,)


class DeltaErrorKernel(RowSumsKernel):
    """Sums of dx over the keys, in the blocks that are wanted; see `call.BackwardCall._correct_concentrated`."""

    @contextlib.contextmanager
    def _one_block(self, scope: Scope, number: Value):
        b = self.b
        place = b.add(b.mul(self.flat, self.params[("blocks",)]), number)
        wanted = b.load(b.at(self.params[("ptr", "wanted")], place, "i64"), "i64", "wanted")
        with b.when(b.compare("ne", wanted, 0)):
            yield


class DeltaKernel(RowSumsKernel):
    """`STATISTICS` of each row: those of the forward, and delta, with what it lacks where rows are concentrated; see
    `call.BackwardCall._correct_concentrated`."""

    def _packed_areas(self, products: Sequence[Products]) -> list[Value]:
        size = 4 * self.lanes * products[1].e_padded
        self.rows_staging = [self.area(size, name) for name in ("arriving_rows", "output_rows")]
        return super()._packed_areas(products)

    def _element_scope(self, top: Scope, outer: Value, inner: Value) -> Scope:
        scope = super()._element_scope(top, outer, inner)
        self.multiplied = [self._reader(scope, number) for number in (OUTPUT_GRADIENT, OUTPUT)]
        return scope

    @contextlib.contextmanager
    def _one_block(self, scope: Scope, number: Value):
        b, lanes = self.b, self.lanes
        block = self._block_of(scope, number)
        with b.carry(0, block.groups, 1, [b.constant(0, "i1")], hint="g") as (loop, g, (found,)):
            offset = b.mul(g, lanes)
            row, valid = b.add(block.first, offset), self._valid(b.sub(block.count, offset))
            concentrated = self._copy_statistics(row, valid)
            b.masked_store(self._delta(row), self.statistic("delta", row), valid)
            loop.yields(b.binary("arith.ori", found, concentrated))
        with b.when(loop.results[0]):
            yield

    def _copy_statistics(self, row: Value, valid: Value) -> Value:
        """Those of a group that the forward left; returns whether a row of it is concentrated."""
        b, params = self.b, self.params
        source = b.at(params[("ptr", "statistics")], b.add(self.flat_query, row), "f32")
        copied = [
            b.masked_load(b.at(source, b.mul(params[("statistics_rows",)], n), "f32"), valid, self.vector, name)
            for n, name in enumerate(STATISTICS[:3])
        ]
        unit = b.unary("math.absf", copied[0])
        for name, x in zip(STATISTICS, (unit, *copied[1:]), strict=False):
            b.masked_store(x, self.statistic(name, row), valid)
        return b.reduce("or", b.compare("olt", copied[0], 0.0), "concentrated")

    def _delta(self, row: Value) -> Value:
        """Sums of dO * O of a group's rows, one to a lane."""
        b, lanes, padded = self.b, self.lanes, self.value_half.products.e_padded
        both = [
            reader.rows(row, lanes, self.n_q, self.d_v, padded, staging)
            for reader, staging in zip(self.multiplied, self.rows_staging, strict=True)
        ]
        with b.carry(0, padded, lanes, [b.constant(0.0, self.vector)] * lanes, hint="e") as (loop, e, sums):
            pairs = [[load_f32(b, rows, r, e, lanes) for rows in both] for r in range(lanes)]
            loop.yields(*(b.fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)))
        return sum_rows(b, loop.results)

    def _finish(self, block: Block, g: Value) -> None:
        b, offset = self.b, self.b.mul(g, self.lanes)
        at, valid = self.statistic("delta", b.add(block.first, offset)), self._valid(b.sub(block.count, offset))
        found = b.load(self.sum_at(0, g), self.vector, "sum")
        if not self.spec.sinks:  # with sinks these are sums of P dP
            found = b.add(b.masked_load(at, valid, self.vector, "delta"), found)
        b.masked_store(found, at, valid)


class FurtherSumsKernel(RowSumsKernel):
    """Sums over the keys of P times what further outputs give: their part of delta."""

    sums_further = True
