"""Kernels that make delta as exact as eager's where dO times O is not: see `call.BackwardCall._recompute_deltas`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fusion.lowering.backward_plan import STATISTICS, LaneAxis

from ..amx import Products
from ..builder import Value, vector_of
from ..rows import RowReader, Rows, load_f32
from ..scope import Lanes, Scope
from ..vectormath import sum_rows
from .lanes import OUTPUT, OUTPUT_GRADIENT, QueryLanes
from .tile import Block, Kind, RowRange

if TYPE_CHECKING:
    from .kernel import BackwardKernel

BLOCKS_PER_LIST = 4
"""In so many blocks at a time the rows that are wanted are found: they then fill few blocks."""


class ListedRows(RowReader):
    """The rows of a reader by their places in a list of row numbers, which goes on behind the last."""

    def __init__(self, reader: RowReader, numbers: Value):
        super().__init__(reader.scope, reader.access)
        self.numbers = numbers

    def rows(self, first: Value, count: int, padded: int, staging: Value, limit: Value | None = None) -> Rows:
        b = self.context.b
        with b.loop(0, count, hint="r") as r:
            number = b.load(b.at(self.numbers, b.add(first, r), "i64"), "i64", "row")
            self.put(number, padded, b.row(staging, r, padded, self.memory), self.memory)
        return Rows(pointer=staging, stride=padded, memory=self.memory, dtype=self.dtype)


class ListedQueries(QueryLanes):
    """Lanes that are rows of a list: those whose delta is to be exact, of which dx is summed over the keys. The forward
    has marked those with a large weight (random scores have few, causal masks the first); others are found by what rows
    of V have in common."""

    common_share: float | None = None
    """From which share of V's mean square on the square of O tells that its row needs an exact delta."""

    def __init__(self, kernel: BackwardKernel):
        super().__init__(kernel)
        self.rows_per_item = BLOCKS_PER_LIST * self.rows_per_block
        self.share = self.common_share or (1 / 2 if self.spec.out_dtype == "float32" else 3 / 4)

    def reserve(self, products: list[Products]) -> None:
        area, self.padded = self.kernel.area, products[1].e_padded
        self.listed = area(8 * (self.rows_per_item + self.rows_per_block), "listed")
        self.marks, self.columns = area(4 * self.rows_per_item, "marks"), area(8 * self.padded, "columns")
        self.rows_staging = [area(4 * self.lanes * self.padded, name) for name in ("arriving_rows", "output_rows")]

    def begin_element(self, scope: Scope) -> None:
        kernel = self.kernel
        self.multiplied = [kernel.reader(scope, number) for number in (OUTPUT_GRADIENT, OUTPUT)]
        kernel.readers[:2] = [ListedRows(reader, self.listed) for reader in kernel.readers[:2]]
        self.square, self.all = self._values_in_common(kernel.readers[3])

    def _values_in_common(self, values: RowReader) -> tuple[Value, Value]:
        """(mean square of V's rows, whether deltas of all rows are to be exact), see `call.BackwardCall._common`."""
        b, lanes, padded, kernel = self.b, self.lanes, self.padded, self.kernel
        kernel.zero(self.columns, 8 * padded)
        places = b.at(self.columns, 0, "f32"), b.at(self.columns, padded, "f32")
        with b.loop(0, kernel.n_k, lanes, hint="j") as j:
            rows = values.rows(j, lanes, padded, self.rows_staging[0])
            with b.loop(0, padded, lanes, hint="c") as c:
                before = [b.load(b.at(place, c, "f32"), self.vector, "before") for place in places]
                with b.carry(0, lanes, 1, before, hint="r") as (loop, r, (total, squares)):
                    x = load_f32(b, rows, r, c, lanes)
                    loop.yields(b.add(total, x), b.fma(x, x, squares))
                for place, x in zip(places, loop.results, strict=True):
                    b.store(x, b.at(place, c, "f32"))
        start = [b.constant(0.0, self.vector)] * 2
        with b.carry(0, padded, lanes, start, hint="c") as (loop, c, (common, every)):
            total, squares = (b.load(b.at(place, c, "f32"), self.vector, "sums") for place in places)
            loop.yields(b.fma(total, total, common), b.add(every, squares))
        count, factor = (b.convert("arith.sitofp", x, "f32") for x in (kernel.n_k, self.params[("common",)]))
        common, every = (b.div(b.reduce("add", x, "sum"), count) for x in loop.results)
        mean_square = b.div(common, count)  # of which the variance is `every` less this
        return every, b.compare("ogt", b.mul(mean_square, b.add(factor, b.constant(1.0, "f32"))), every)

    def blocks(self, scope: Scope, number: Value) -> Iterator[Block]:
        b, size = self.b, self.rows_per_block
        first = b.mul(number, self.rows_per_item, "first")
        looked_at = b.least(b.sub(self.kernel.n_q, first), self.rows_per_item, "count")
        count = self._list(RowRange(first=first, count=looked_at))
        with b.loop(0, count, size, hint="start") as start:
            here = b.least(b.sub(count, start), size, "count")
            low, high = self._listed(start), self._listed(b.sub(b.add(start, here), 1))
            yield self.block(scope.inner(), start, here, RowRange(first=low, count=b.add(b.sub(high, low), 1)))

    def _list(self, queries: RowRange) -> Value:
        """Write the numbers of the rows among these to the list, and the first of all behind it; returns how many."""
        b, lanes = self.b, self.lanes
        with b.loop(0, queries.count, lanes, hint="r") as r:
            valid = b.first_lanes(b.sub(queries.count, r), self.lanes)
            self._mark(b.add(queries.first, r), valid, b.at(self.marks, r, "f32"))
        with b.carry(0, queries.count, 1, [b.constant(0, "i64")], hint="r") as (loop, r, (count,)):
            b.store(b.add(queries.first, r), b.at(self.listed, count, "i64"))
            marked = b.compare("olt", b.load(b.at(self.marks, r, "f32"), "f32", "mark"), b.constant(0.0, "f32"))
            marked = b.or_(marked, self.all, "marked")
            loop.yields(b.add(count, b.convert("arith.extui", marked, "i64")))
        with b.loop(0, self.rows_per_block, hint="n") as n:
            b.store(queries.first, b.at(self.listed, b.add(loop.results[0], n), "i64"))
        return loop.results[0]

    def _mark(self, row: Value, valid: Value, marks: Value) -> None:
        """Negative numbers for the rows of a group that have a large weight, or a large O: without the former, that is
        what rows of V have in common."""
        b, kernel = self.b, self.kernel
        delta, square = self._delta_and_square(row)
        source = b.at(self.params[("ptr", "statistics")], b.add(kernel.flat_query, row), "f32")
        unit, *others = (
            b.masked_load(b.row(source, self.params[("statistics_rows",)], n), valid, self.vector, name)
            for n, name in enumerate(STATISTICS[:3])
        )
        common = b.compare("ogt", square, b.broadcast(b.mul(self.square, self.share), self.lanes))
        b.store(b.select(common, b.constant(-1.0, self.vector), unit), marks)
        if kernel.kind.deltas:
            for name, x in zip(STATISTICS, (b.unary("math.absf", unit), *others, delta), strict=True):
                b.masked_store(x, kernel.statistic(name, row), valid)

    def _delta_and_square(self, row: Value) -> list[Value]:
        """Sums of dO * O and of O * O over the columns of a group's rows, one to a lane."""
        b, lanes, padded = self.b, self.lanes, self.padded
        both = [
            reader.rows(row, lanes, padded, staging)
            for reader, staging in zip(self.multiplied, self.rows_staging, strict=True)
        ]
        with b.carry(0, padded, lanes, [b.constant(0.0, self.vector)] * (2 * lanes), hint="e") as (loop, e, sums):
            pairs = [[load_f32(b, rows, r, e, lanes) for rows in both] for r in range(lanes)]
            terms = [*pairs, *([x, x] for _, x in pairs)]
            loop.yields(*(b.fma(*pair, total) for pair, total in zip(terms, sums, strict=True)))
        return [sum_rows(b, loop.results[at : at + lanes]) for at in (0, lanes)]

    def _listed(self, place: Value) -> Value:
        return self.b.load(self.b.at(self.listed, place, "i64"), "i64", "row")

    def prefetch(self, block: Block, rows: RowRange) -> None:
        pass

    def scope(self, block: Block, g: Value) -> Scope:
        b, offset, lane = self.b, self.b.mul(g, self.lanes), self.kernel.axis.lane
        numbers = b.at(self.listed, b.add(block.first, offset), "i64")
        numbers = b.load(numbers, vector_of("i64", self.lanes), "rows")
        valid = b.first_lanes(b.sub(block.count, offset), self.lanes)
        return block.scope.inner({lane: numbers}, lanes=Lanes(coord=lane, first=None, valid=valid))

    def statistics(self, scope: Scope) -> dict[str, Value]:
        b, kernel, results = self.b, self.kernel, {}
        for name in STATISTICS:
            first = kernel.statistic(name, b.constant(0, "i64"))
            addresses = b.addresses(first, scope.value(kernel.axis.lane), "f32")
            results[name] = b.gather(addresses, scope.lanes.valid, self.vector)
        return results

    def finish(self, block: Block, g: Value) -> None:
        b, kernel, offset = self.b, self.kernel, self.b.mul(g, self.lanes)
        with b.loop(0, b.least(b.sub(block.count, offset), self.lanes), hint="lane") as lane:
            row = self._listed(b.add(b.add(block.first, offset), lane))
            total = b.load(b.at(kernel.tiles.sum_at(0, g), lane, "f32"), "f32", "sum")
            if kernel.kind.deltas:  # with sinks these are sums of P dP
                at = kernel.statistic("delta", row)
                b.store(total if self.spec.sinks else b.add(b.load(at, "f32", "delta"), total), at)
            else:  # the sums as they are, and 1 for each row that has one
                at = b.at(self.params[("ptr", "sums", 0)], b.add(kernel.flat_query, row), "f32")
                b.store(total, at)
                b.store(b.constant(1.0, "f32"), b.at(at, self.params[("statistics_rows",)], "f32"))


DELTAS = Kind(name="deltas", lanes=ListedQueries, axis=LaneAxis.QUERIES, deltas=True)
"""`STATISTICS` of each row: those of the forward, and delta, with what it lacks where it is to be exact."""
DELTA_ERRORS = Kind(name="delta errors", lanes=ListedQueries, axis=LaneAxis.QUERIES)
"""The sums of dx that should be 0."""
