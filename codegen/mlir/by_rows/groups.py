"""The two products of the kernel for few queries, two or four rows at a time: bf16 pairs, where rows share keys.

Each of R rows has an R-th of a vector. As many bytes of a key, read into all parts, meet those of R queries; what is
left to add across is an R-th of a vector as well. Elements of two rows of V are put side by side once for R rows.

    queries   [group of R rows][32 / R columns][row][32 / R], bf16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fusion.ir.spec import AttentionSpec

from ..builder import Value
from ..rows import Rows, load_line
from ..vectormath import sum_rows, transpose
from ..x86 import BF16, F32, LANES, Avx512
from .products import Columns, KeyChunk, Source
from .vectors import PairValueProducts, VectorRows

if TYPE_CHECKING:
    from .kernel import RowKernel

SUMS = 16  # vectors of outputs that are in registers

PrefetchRows = Callable[[Value, int], None]
"""Asks for so many rows that are read later, those that are ahead of the ones from a key on."""


class GroupedRows(VectorRows):
    """Groups of rows. All are weighed over the keys that any of an item visits, with 0 where a row does not."""

    values: PairValueProducts

    @classmethod
    def suits(cls, spec: AttentionSpec) -> bool:
        """Whether Q, K and V are multiplied as they are stored, in pairs."""
        return all(spec.operands[n].dtype == "bfloat16" and spec.values[n] is None for n in (0, 1, 2))

    def __init__(self, kernel: RowKernel, rows_at_once: int):
        super().__init__(kernel, rows_at_once)
        self.part = 2 * LANES // self.rows_at_once  # elements of a row in a vector
        self.part_type = f"vector<{self.part}xbf16>"

    def store_query(self, source: Rows, r: Value) -> None:
        b, own = self.b, self.b.rem(r, self.rows_at_once)
        place = b.row(self._queries(b.sub(r, own)), own, self.part, "bf16")
        with b.loop(0, self.d_padded, self.part, hint="c") as c:
            b.store(load_line(b, source, 0, c, self.part_type), b.row(place, c, self.rows_at_once, "bf16"))

    def _queries(self, first: Value) -> Value:
        """Those of a group, whose first row this is."""
        return self.b.row(self.queries.first, first, self.d_padded, "bf16")

    @contextmanager
    def _groups(self, every: KeyChunk, ahead: Source, distance: int) -> Iterator[tuple[KeyChunk, Value, PrefetchRows]]:
        """A few keys, the first row of a group, and what prefetches the row of K or V so many keys ahead of one: a
        few at a time, as many requests at once would wait for each other."""
        b, distance = self.b, self._distance(ahead, distance)
        with self._steps(every) as few, b.loop(0, few.rows, self.rows_at_once, hint="first") as first:
            leads = b.compare("eq", first, 0, "leads")

            def prefetch(key: Value, count: int) -> None:
                with b.when(leads):
                    ahead.prefetch(b.add(key, distance), count)

            yield few, first, prefetch

    def begin(self, every: KeyChunk) -> None:
        b = self.b
        with (
            self._groups(every, every.v, 0) as (few, first, prefetch),
            b.loop(few.low, few.high, LANES, hint="j0") as j0,
        ):
            rows = few.k.gather_rows(j0, LANES, self.d_padded, self.staging)
            for n, products in enumerate(self._dot_products(rows, self._queries(first), j0, prefetch)):
                b.store(products, self._product(b.add(first, n), few, j0))

    def _dot_products(self, rows: Rows, queries: Value, j0: Value, prefetch: PrefetchRows) -> list[Value]:
        """For each row of a group the products with the L keys from j0 on."""
        b, unit, rows_at_once = self.b, Avx512(self.b), self.rows_at_once
        start, asked = [b.constant(0.0, F32)] * LANES, max(1, LANES * self.part // self.d_padded)
        with b.carry(0, self.d_padded, self.part, start, hint="c") as (loop, c, sums):
            prefetch(b.add(j0, b.mul(b.div(c, self.part), asked)), asked)
            q = b.load(b.row(queries, c, rows_at_once, "bf16"), BF16, "q")
            parts = [load_line(b, rows, n, c, self.part_type) for n in range(LANES)]
            keys = [b.shuffle(x, x, [*range(self.part)] * rows_at_once, "key") for x in parts]
            loop.yields(*(unit.add_pair_products(s, key, q) for s, key in zip(sums, keys, strict=True)))
        keys_of_part = LANES // rows_at_once
        parts = [sum_rows(b, loop.results[n : n + keys_of_part]) for n in range(0, LANES, keys_of_part)]
        return transpose(b, parts, keys_of_part)

    def weigh(self, mine: KeyChunk, r: Value) -> None:
        b, lanes, weights = self.b, self.lanes, self.weights(r)
        first, low, high = (b.sub(x, mine.start) for x in (mine.first, mine.low, mine.high))
        zero, whole = b.constant(0.0, self.vector), b.add(first, b.floor_to(b.sub(low, first), lanes))
        with b.loop(first, whole, lanes, hint="j") as j:
            b.store(zero, b.at(weights, j, "f32"))
        with b.loop(whole, low, hint="j") as j:
            b.store(b.constant(0.0, "f32"), b.at(weights, j, "f32"))
        with b.loop(high, self.chunk, lanes, hint="j") as j:
            b.store(zero, b.at(weights, j, "f32"))
        self.values.prepare(weights, first, b.constant(self.chunk, "i64"))
        self._clear_output(r)

    def end(self, every: KeyChunk) -> None:
        b, lanes = self.b, self.lanes
        count = SUMS // self.rows_at_once
        whole, rest = divmod(self.e_padded // lanes, count)
        with self._groups(every, every.k, self.chunk) as (few, first, prefetch):
            self._weigh(few, first, (0, count if whole else rest), prefetch)
            with b.loop(count * lanes, whole * count * lanes, count * lanes, hint="e") as e:
                self._weigh(few, first, (e, count), None)
            if whole and rest:
                self._weigh(few, first, (whole * count * lanes, rest), None)

    def _weigh(self, few: KeyChunk, first: Value, columns: Columns, prefetch: PrefetchRows | None) -> None:
        """Add a group's weights x V over a few keys, for some vectors of columns. Keys are paired from the chunk's
        first on, so that a row's sums do not depend on what others visit."""
        b, (e, count), (low, high) = self.b, columns, (few.low, few.high)
        odd = b.rem(b.sub(low, few.start), 2)
        begin = b.add(low, odd)
        whole = b.add(begin, b.floor_to(b.most(b.sub(high, begin), 0), LANES))
        outputs = [b.at(self.outputs[b.add(first, r)], e, "f32") for r in range(self.rows_at_once)]
        places = [b.at(output, n * self.lanes, "f32") for output in outputs for n in range(count)]
        sums = [b.load(place, self.vector, "o") for place in places]
        for start, stop, number in (b.sub(low, odd), begin, 2), (begin, whole, LANES), (whole, high, 2):
            with b.carry(start, stop, number, sums, hint="j0") as (loop, j0, so_far):
                sums = list(so_far)
                for n, vectors in enumerate(self._pairs(few, j0, number, columns, prefetch)):
                    place = b.sub(b.add(j0, 2 * n), few.start)
                    weights = (b.at(self.weights(b.add(first, r)), place, "bf16") for r in range(self.rows_at_once))
                    sums = self.values.kernel.rank_one(weights, vectors, sums)
                loop.yields(*sums)
            sums = loop.results
        for x, place in zip(sums, places, strict=True):
            b.store(x, place)

    def _pairs(
        self, few: KeyChunk, j0: Value, number: int, columns: Columns, prefetch: PrefetchRows | None
    ) -> Iterator[list[Value]]:
        """Vectors of pairs of every two of the keys from j0 on. Of two alone, at an end, one may not be there."""
        b, read = self.b, lambda key, count: few.v.gather_rows(key, count, self.e_padded, self.staging)
        if number > 2:
            rows = read(j0, number)
            for n in range(0, number, 2):
                if prefetch is not None:
                    prefetch(b.add(j0, n), 2)
                yield self.values.paired([self.values.lines(rows, n + k, columns) for k in (0, 1)])
            return
        results = []
        for k in (0, 1):
            key = b.add(j0, k)
            there = b.least(b.most(key, few.low), b.sub(few.high, 1))
            lines = self.values.lines(read(there, 1), 0, columns)
            inside = b.compare("eq", key, there, "inside")
            results.append([b.select(inside, line, b.constant(0.0, BF16)) for line in lines])
        yield self.values.paired(results)
