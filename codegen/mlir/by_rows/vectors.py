"""The two products of the kernel for few queries, row by row: elements of K and V widened to float32, or bf16 pairs as
they are.

Where elements are bfloat16, vectors of them are taken apart into those at even and those at odd places, one operation
for each. Where the processor multiplies pairs, they are not taken apart: a pair of K is multiplied with one of the
query, and elements of two rows of V, put side by side, with the weights of their keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from fusion.ir.expr import J
from fusion.ir.spec import AttentionSpec
from fusion.lowering.addresses import in_line, runs
from fusion.planning.cpu_planner import MOST_ROWS
from fusion.planning.register_tiles import planes_of

from ..builder import Builder, Value, vector_of
from ..micro_kernel import Bf16Vectors, FmaVectors
from ..rows import Rows, SharedRows, load_f32, load_line, load_pair
from ..vectormath import sum_rows
from .products import STEP, Columns, KeyChunk, Prefetch, RowProducts, Source

if TYPE_CHECKING:
    from .kernel import RowKernel

RUN = 8  # rows of K in a page from which on finding them costs less than putting a copy of them in order
CHAINS = 8  # sums that are added to at a time: two additions begin per cycle and take four
SECOND_CACHE = 1 << 18  # bytes of K and V, as float32, of a chunk: they are asked for a product ahead


class VectorRows(RowProducts):
    """By vector instructions, one row after the other for every few keys, which the first-level cache holds meanwhile.
    While K is multiplied, V of the same chunk is asked for, and while V is, K of the next one. So memory is read all
    the time, not only while the processor waits for it."""

    @classmethod
    def reads(cls, spec: AttentionSpec, number: int) -> bool:
        index = (spec.k, spec.v)[number - 1]
        return spec.values[number] is None and (in_line(index, J) or runs(index, J)[0] % RUN == 0)

    def __init__(self, kernel: RowKernel, rows_at_once: int):
        super().__init__(kernel, rows_at_once)
        spec, target = kernel.spec, kernel.target
        q, k, v = (spec.operands[n].dtype == "bfloat16" and spec.values[n] is None for n in (0, 1, 2))
        double, whole = 2 * target.lanes, target.pairs and planes_of(spec, target) == 1
        key_pairs, value_pairs = q and k and self.d_padded % double == 0, v and self.e_padded % double == 0
        words = FmaVectors(self.b, self.lanes)
        pairs = Bf16Vectors(self.b, self.lanes) if whole else words
        self.keys = KeyProducts(pairs if key_pairs else words, self.d_padded, key_pairs)
        if isinstance(pairs, Bf16Vectors) and value_pairs:
            self.values = PairValueProducts(pairs, self, pairs=True)
        else:
            self.values = ValueProducts(words, self, value_pairs)
        self.in_order = self.values.in_order
        self.queries = kernel.array(MOST_ROWS, self.d_padded, "queries", "f32")
        self.outputs = kernel.array(MOST_ROWS, self.e_padded, "outputs", "f32")
        self.room = self.chunk + 2 * self.lanes
        self.products = kernel.array(MOST_ROWS, self.room, "products", "f32")

    @staticmethod
    def chunk_keys(columns: int, most: int) -> int:
        while most > STEP and 4 * most * columns > SECOND_CACHE:
            most //= 2
        return most

    def store_query(self, source: Rows, r: Value) -> None:
        self.keys.store_query(source, self.queries[r])

    def begin(self, every: KeyChunk) -> None:
        b, lanes = self.b, self.lanes
        with self._steps(every) as few, self.active_rows(few) as (r, mine):
            prefetch = self._prefetcher(few.v, few, r, 0)
            with b.loop(mine.low, mine.high, lanes, hint="j0") as j0:
                if prefetch is not None:
                    prefetch(j0)
                rows = mine.k.gather_rows(j0, lanes, self.d_padded, self.staging)
                products = sum_rows(b, self.keys.dot_products(rows, self.queries[r]))
                b.store(products, self._product(r, mine, j0))

    @contextmanager
    def _steps(self, every: KeyChunk) -> Iterator[KeyChunk]:
        """The keys that rows take turns at: a few at a time, where there are several rows."""
        b = self.b
        if self.rows_at_once == 1:
            yield every
            return
        with b.loop(every.first, every.high, STEP, hint="key") as key:
            yield replace(every, low=b.most(key, every.low), high=b.least(b.add(key, STEP), every.high))

    def _prefetcher(self, ahead: Source, few: KeyChunk, r: Value, distance: int) -> Prefetch | None:
        """Prefetch rows of K or V, so many keys ahead: here for row r's share of them, where there are several rows,
        else by what is returned, for those of L keys from one on."""
        b, distance = self.b, self._distance(ahead, distance)
        if self.rows_at_once == 1:
            return lambda key: ahead.prefetch(b.add(key, distance), self.lanes)
        share = b.div(b.constant(STEP, "i64"), few.rows)
        ahead.prefetch(b.add(b.add(few.low, b.mul(share, r)), distance), share)
        return None

    def _distance(self, ahead: Source, distance: int) -> int:
        """Prefetch distance: operands put in order for all rows are read a chunk ahead."""
        return self.chunk if isinstance(ahead, SharedRows) else distance

    def _product(self, r: Value, mine: KeyChunk, key: Value) -> Value:
        return self.b.at(self.weights(r), self.b.sub(key, mine.start), "f32")

    def scores(self, mine: KeyChunk, r: Value, key: Value) -> Value:
        return self.b.load(self._product(r, mine, key), self.vector, "score")

    def weights(self, r: Value) -> Value:
        return self.products[r]

    def weigh(self, mine: KeyChunk, r: Value) -> None:
        b = self.b
        self.values.prepare(self.weights(r), b.sub(mine.low, mine.start), b.sub(mine.high, mine.start))
        self._clear_output(r)

    def _clear_output(self, r: Value) -> None:
        zero = self.b.constant(0.0, self.vector)
        self.b.fill(self.outputs[r], self.e_padded // self.lanes, zero, hint="e")

    def end(self, every: KeyChunk) -> None:
        with self._steps(every) as few, self.active_rows(few) as (r, mine):
            prefetch = self._prefetcher(few.k, few, r, self.chunk)
            self.values.weigh(mine, self.weights(r), self.outputs[r], prefetch)

    def add_output(self, mine: KeyChunk, r: Value, target: Value) -> None:
        self.b.update(target, self.e_padded, self.b.add, self.vector, self.outputs[r])


def _columns(b: Builder, rows: Rows, row: Value | int, columns: Columns, lanes: int, pairs: bool) -> list[Value]:
    """Vectors of columns of a row; with pairs every two are elements at even and at odd places."""
    column, count = columns
    if not pairs:
        return [load_f32(b, rows, row, b.add(column, n * lanes), lanes) for n in range(count)]
    both = [load_pair(b, rows, row, b.add(column, n * lanes), lanes) for n in range(0, count, 2)]
    return [x for pair in both for x in pair]


class KeyProducts:
    """K q of L keys. pairs: elements are bfloat16 and taken two by two: widened, or multiplied as they are by a
    micro-kernel of pairs."""

    def __init__(self, kernel: FmaVectors, d_padded: int, pairs: bool):
        self.kernel, self.b, self.lanes, self.d_padded, self.pairs = kernel, kernel.b, kernel.lanes, d_padded, pairs
        self.whole = kernel.kr > 1
        self.element = "bf16" if self.whole else "f32"
        self.vector = vector_of(self.element, kernel.kr * self.lanes)
        self.columns = (2 if pairs else 1) * self.lanes
        # Sums of more keys, with elements that are being widened, do not fit into registers.
        self.keys_at_once = self.lanes if self.whole else min(CHAINS, self.lanes)

    def _vectors(self, rows: Rows, row: Value | int, column: Value) -> list[Value]:
        """The elements of some columns of a row."""
        if self.whole:
            return [load_line(self.b, rows, row, column, self.vector)]
        return _columns(self.b, rows, row, (column, self.columns // self.lanes), self.lanes, self.pairs)

    def _query(self, query: Value, column: Value) -> list[Value]:
        """Addresses of the same elements of a query."""
        start = self.b.at(query, column, self.element)
        return [self.b.at(start, n, "f32") for n in range(0, self.lanes if self.whole else self.columns, self.lanes)]

    def store_query(self, source: Rows, query: Value) -> None:
        """Row 0 of `source` as `dot_products` reads it."""
        with self.b.loop(0, self.d_padded, self.columns, hint="c") as c:
            for x, place in zip(self._vectors(source, 0, c), self._query(query, c), strict=True):
                self.b.store(x, place)

    def dot_products(self, rows: Rows, query: Value) -> list[Value]:
        """For each of L keys the products with the query, summed within lanes only."""
        b, count, results = self.b, self.keys_at_once, []
        for first in range(0, self.lanes, count):
            with b.carry(0, self.d_padded, self.columns, self.kernel.zeros(count), hint="c") as (loop, c, sums):
                q = [b.load(place, self.vector, "q") for place in self._query(query, c)]
                keys = (self._vectors(rows, first + r, c) for r in range(count))
                loop.yields(*(self._product(key, q, total) for key, total in zip(keys, sums, strict=True)))
            results += loop.results
        return results

    def _product(self, key: list[Value], query: list[Value], total: Value) -> Value:
        for x, y in zip(key, query, strict=True):
            total = self.kernel.multiply(x, y, total)
        return total


class ValueProducts:
    """Weighted sums of rows of V. pairs: elements are bfloat16 and taken two by two. stored: MLIR's type of weights as
    they are read."""

    stored: ClassVar[str] = "f32"

    def __init__(self, kernel: FmaVectors, rows: RowProducts, pairs: bool):
        self.kernel, self.b, self.lanes, self.pairs = kernel, kernel.b, kernel.lanes, pairs
        self.e_padded, self.staging = rows.e_padded, rows.staging

    def prepare(self, weights: Value, low: Value, high: Value) -> None:
        """Bring weights number `low` to `high` - 1 (float32; behind them there is room for another vector) into the
        form that `weigh` reads."""

    def weigh(self, mine: KeyChunk, weights: Value, output: Value, prefetch: Prefetch | None = None) -> None:
        """output += weights x V over keys, a few vectors of columns at a time, in registers. weights: the first is that
        of the chunk's first key. prefetch: called for every L keys, once."""
        b, step, width = self.b, CHAINS * self.lanes, self.e_padded
        if whole := width // step:
            with b.loop(0, whole * step, step, hint="e") as e:
                self._weigh_columns(mine, weights, b.at(output, e, "f32"), (e, CHAINS), prefetch)
        if rest := width // self.lanes - whole * CHAINS:
            at = b.at(output, whole * step, "f32")
            self._weigh_columns(mine, weights, at, (whole * step, rest), None if whole else prefetch)

    def _weigh_columns(
        self, mine: KeyChunk, weights: Value, output: Value, columns: Columns, prefetch: Prefetch | None
    ) -> None:
        """Add the weighted values of some vectors of columns."""
        b, lanes, (e, count) = self.b, self.lanes, columns
        vector = vector_of("f32", lanes)
        sets = max(1, CHAINS // count)  # of sums, over different keys: additions to one wait for each other
        whole = b.add(mine.low, b.floor_to(b.sub(mine.high, mine.low), lanes), "whole")
        places = [b.at(output, n * lanes, "f32") for n in range(count)]
        sums = [b.load(place, vector, "o") for place in places] + [b.constant(0.0, vector)] * ((sets - 1) * count)
        for low, high, number in (mine.low, whole, lanes), (whole, mine.high, 1):
            with b.carry(low, high, number, sums, hint="j0") as (loop, j0, sums):
                if prefetch is not None and number > 1:
                    with b.when(b.compare("eq", b.as_value(e, "i64"), 0)):
                        prefetch(j0)
                rows, sums = mine.v.gather_rows(j0, number, self.e_padded, self.staging), list(sums)
                self.add(sums, rows, number, b.at(weights, b.sub(j0, mine.start), self.stored), columns)
                loop.yields(*sums)
            sums = loop.results
        for n, place in enumerate(places):
            b.store(functools.reduce(b.add, sums[n::count]), place)

    def add(self, sums: list[Value], rows: Rows, number: int, weights: Value, columns: Columns) -> None:
        """Add some vectors of columns of `number` rows, times their weights. There are several sets of sums, so that
        additions to one do not wait for each other."""
        kernel, count = self.kernel, columns[1]
        for word in range(-(-number // kernel.kr)):
            first = word * count % len(sums)
            weight = self.weight(self.b.at(weights, word * kernel.kr, self.stored), number)
            for n, x in enumerate(self.vectors(rows, word, number, columns), first):
                sums[n] = kernel.multiply(weight, x, sums[n])

    def weight(self, address: Value, number: int) -> Value:
        """The weights of a word of some of `number` rows, for all lanes."""
        return self.kernel.broadcast(address)

    def vectors(self, rows: Rows, word: int, number: int, columns: Columns) -> list[Value]:
        """Vectors of columns of a word of `number` rows."""
        return _columns(self.b, rows, word, columns, self.lanes, self.pairs)

    def in_order(self, results: Sequence[Value]) -> list[Value]:
        """The sums of one set as their columns stand in a row."""
        if not self.pairs:
            return list(results)
        pairs, lanes = zip(results[::2], results[1::2], strict=True), self.lanes
        orders = [[self.place(column) for column in range(first, first + lanes)] for first in (0, lanes)]
        return [self.b.shuffle(*pair, order, "o") for pair in pairs for order in orders]

    def place(self, column: int) -> int:
        """Position of a column among the elements of two vectors."""
        return column // 2 + column % 2 * self.lanes


class PairValueProducts(ValueProducts):
    """Products with V of two keys in an instruction, with weights rounded to bfloat16, as eager mode's are. Elements of
    two rows are put side by side within 16 bytes, which is one operation."""

    stored = "bf16"

    def __init__(self, kernel: Bf16Vectors, rows: RowProducts, pairs: bool):
        super().__init__(kernel, rows, pairs)
        self.unit, self.line = kernel.unit, kernel.pairs

    def prepare(self, weights: Value, low: Value, high: Value) -> None:
        b, vector = self.b, vector_of("f32", self.lanes)
        with b.loop(low, high, 2 * self.lanes, hint="j") as j:  # in place: what is overwritten has been read
            halves = [b.load(b.at(b.at(weights, j, "f32"), n, "f32"), vector, "p") for n in (0, self.lanes)]
            b.store(self.unit.narrow(*halves), b.at(weights, j, "bf16"))

    def weight(self, address: Value, number: int) -> Value:
        if number > 1:
            return super().weight(address, number)
        b = self.b
        weight = b.convert("arith.extui", b.load(address, "i16", "p"), "i32")
        return b.bitcast(b.broadcast(weight, self.lanes), self.line)

    def vectors(self, rows: Rows, word: int, number: int, columns: Columns) -> list[Value]:
        lines = [self.lines(rows, 2 * word + k, columns) for k in range(min(2, number))]
        lines += [[self.b.constant(0.0, self.line)] * (columns[1] // 2)] * (2 - len(lines))
        return self.paired(lines)

    def lines(self, rows: Rows, r: int, columns: Columns) -> list[Value]:
        """A row's vectors of columns, in bfloat16: half as many."""
        b, (e, count) = self.b, columns
        return [load_line(b, rows, r, b.add(e, n * self.lanes), self.line) for n in range(0, count, 2)]

    def paired(self, lines: Sequence[list[Value]]) -> list[Value]:
        """Factors made of two rows' lines: a vector of pairs for each vector of columns."""
        parts, rows = range(self.lanes // 4), (0, 2 * self.lanes)
        low = [8 * part + n + row for part in parts for n in range(4) for row in rows]
        orders = [[element + 4 * half for element in low] for half in (0, 1)]
        return [self.b.shuffle(*both, order, "pairs") for both in zip(*lines, strict=True) for order in orders]

    def place(self, column: int) -> int:
        part, half, n = column // 8, column // 4 % 2, column % 4
        return 4 * part + n + half * self.lanes
