"""The two products of the kernel for few queries by vector instructions: elements of K and V widened to float32, or
bf16 pairs as they are.

Where elements are bfloat16, vectors of them are taken apart into those at even and those at odd places, one operation
for each. Where the processor multiplies pairs, they are not taken apart: a pair of K is multiplied with one of the
query, and elements of two rows of V, put side by side within 16 bytes (one operation), with the weights of their keys.

Rows go in groups of R, with an R-th of a vector for each. As many bytes of a key, read into all parts, meet those of R
queries; what is left to add across is an R-th of a vector as well. A vector of V serves R rows. R is 1 where elements
are widened, and where one row alone reads them.

    queries   [group of R rows][columns of a step][vector][row][L / R words]
    outputs   [row][column], of a chunk
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion.ir.expr import J
from fusion.ir.spec import AttentionSpec
from fusion.lowering.addresses import in_line, runs
from fusion.planning.cpu_planner import MOST_ROWS
from fusion.planning.register_tiles import planes_of

from ..builder import Value, shape_of, vector_of
from ..micro_kernel import Bf16Vectors, FmaVectors
from ..rows import Rows, SharedRows, load_f32, load_line, widen_pairs
from ..vectormath import sum_rows, transpose
from .products import STEP, KeyChunk, RowProducts, Source

if TYPE_CHECKING:
    from .kernel import RowKernel

RUN = 8  # rows of K in a page from which on finding them costs less than putting a copy of them in order
CHAINS = 8  # sums that are added to at a time: two additions begin per cycle and take four
GROUP_SUMS = 16  # those of a group of rows
SECOND_CACHE = 1 << 18  # bytes of K and V, as float32, of a chunk: they are asked for a product ahead

Prefetch = Callable[[Value, int], None]  # asks for so many rows that are read later, ahead of those from a key on
Columns = tuple[Value | int, int]
"""Vectors of columns that follow each other: the first's first column, and how many vectors."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of K or V as a micro-kernel takes them. per_word: 2 where they are bfloat16 and taken two by two."""

    kernel: FmaVectors
    per_word: int

    @property
    def scalar(self) -> str:
        return "bf16" if self.kernel.kr == 2 else "f32"

    @property
    def vectors(self) -> int:
        """Vectors that elements in the words of one become."""
        return self.per_word // self.kernel.kr

    def read(self, rows: Rows, row: Value | int, column: Value | int, words: int, times: int = 1) -> list[Value]:
        """Those of a row from a column on, in so many words, `times` beside each other: pairs, those at even places and
        those at odd ones, or in order."""
        b = self.kernel.b
        if self.per_word == 1:
            x = load_f32(b, rows, row, column, words)
        else:
            x = load_line(b, rows, row, column, vector_of("bf16", 2 * words))
        if times > 1:
            x = b.shuffle(x, x, [*range(shape_of(x.type)[0])] * times, "parts")
        return [*widen_pairs(b, b.bitcast(x, vector_of("i32", words * times)))] if self.vectors == 2 else [x]


class VectorRows(RowProducts):
    """By vector instructions, one group after the other for every few keys, which the first-level cache holds
    meanwhile. While K is multiplied, V of the same chunk is asked for, and while V is, K of the next one. So memory is
    read all the time, not only while the processor waits for it."""

    @classmethod
    def reads(cls, spec: AttentionSpec, number: int) -> bool:
        index = (spec.k, spec.v)[number - 1]
        return spec.values[number] is None and (in_line(index, J) or runs(index, J)[0] % RUN == 0)

    def __init__(self, kernel: RowKernel, rows_at_once: int, brain: bool = False):
        """rows_at_once: see `ByRows`. brain: V is read as bfloat16, whatever it is stored in."""
        super().__init__(kernel)
        spec, target, words = kernel.spec, kernel.target, FmaVectors(self.b, self.lanes)
        q, k, v = (spec.operands[n].dtype == "bfloat16" and spec.values[n] is None for n in (0, 1, 2))
        both = q and k and self.d_padded % (2 * self.lanes) == 0, brain or v and self.e_padded % (2 * self.lanes) == 0
        pairs = Bf16Vectors(self.b, self.lanes) if target.pairs and planes_of(spec, target) == 1 else words
        self.k, self.v = (Elements(pairs, 2) if paired else Elements(words, 1) for paired in both)
        whole = self.k.kernel.kr == self.v.kernel.kr == 2 and target.groups_rows
        self.alone, self.group = rows_at_once == 1, rows_at_once if whole else 1
        self.part = self.lanes // self.group  # words of a row in a vector, and keys whose products one is left with
        self.columns = self.part * self.k.per_word  # of K that are multiplied at a time
        # Sums of more keys, with elements that are being widened, do not fit into registers.
        self.keys_at_once = self.lanes if self.k.kernel.kr == 2 else min(CHAINS, self.lanes)
        self.queries = kernel.array(MOST_ROWS, self.d_padded, "queries", "f32")
        self.outputs = kernel.array(MOST_ROWS, self.e_padded, "outputs", "f32")

    @staticmethod
    def chunk_keys(columns: int) -> int:
        return SECOND_CACHE // (4 * columns)

    def _query(self, first: Value, column: Value, number: int, r: Value | int = 0) -> Value:
        """Address of the vector of this number of a group, for the columns from one on, and the part of row r."""
        start = self.b.row(self.queries[first], column, self.group, self.k.scalar)
        part = self.b.mul(self.b.add(r, number * self.group), self.part * self.k.kernel.kr)
        return self.b.at(start, part, self.k.scalar)

    def store_query(self, source: Rows, r: Value) -> None:
        b, own = self.b, self.b.rem(r, self.group)
        with b.loop(0, self.d_padded, self.columns, hint="c") as c:
            for n, x in enumerate(self.k.read(source, 0, c, self.part)):
                b.store(x, self._query(b.sub(r, own), c, n, own))

    @contextlib.contextmanager
    def _turns(self, every: KeyChunk, ahead: Source, distance: int) -> Iterator[tuple[KeyChunk, Value, Prefetch]]:
        """A few keys, the first row of a group, and what prefetches its share of the rows of K or V so many keys ahead
        (a chunk where they are put in order)."""
        b, distance = self.b, self.chunk if isinstance(ahead, SharedRows) else distance
        if self.alone:
            yield every, b.constant(0, "i64"), lambda key, count: ahead.prefetch(b.add(key, distance), count)
            return

        def prefetch(key: Value, count: int) -> None:
            key = b.add(key, distance)
            if self.group == 1:
                share = b.div(b.constant(count, "i64"), every.rows)
                ahead.prefetch(b.add(key, b.mul(share, first)), share)
            else:
                with b.when(b.compare("eq", first, 0, "leads")):
                    ahead.prefetch(key, count)

        with b.loop(every.first, every.high, STEP, hint="key") as key, b.loop(0, every.rows, self.group) as first:
            low, high = b.most(key, every.low), b.least(b.add(key, STEP), every.high)
            yield replace(every, low=low, high=high), first, prefetch

    def begin(self, every: KeyChunk) -> None:
        with (
            self._turns(every, every.v, 0) as (few, first, prefetch),
            self.b.loop(few.low, few.high, self.lanes, hint="j0") as j0,
        ):
            for n, products in enumerate(self._dot_products(few, first, j0, prefetch)):
                self.b.store(products, self.weight(few, self.b.add(first, n), j0))

    def _dot_products(self, few: KeyChunk, first: Value, j0: Value, prefetch: Prefetch) -> list[Value]:
        """For each row of a group the products with the L keys from j0 on."""
        b, kernel, count, sums = self.b, self.k.kernel, self.keys_at_once, list[Value]()
        rows = few.k.gather_rows(j0, self.lanes, self.d_padded, self.staging)
        word, asked = vector_of(self.k.scalar, kernel.kr * self.lanes), max(1, count * self.columns // self.d_padded)
        if self.group == 1:
            prefetch(j0, self.lanes)
        for start in range(0, self.lanes, count):
            with b.carry(0, self.d_padded, self.columns, kernel.zeros(count), hint="c") as (loop, c, so_far):
                if self.group > 1:  # a few at a time: many requests at once would wait for each other
                    prefetch(b.add(b.add(j0, start), b.mul(b.div(c, self.columns), asked)), asked)
                queries = [b.load(self._query(first, c, n), word, "q") for n in range(self.k.vectors)]
                totals = list(so_far)
                for n in range(count):
                    for x, y in zip(self.k.read(rows, start + n, c, self.part, self.group), queries, strict=True):
                        totals[n] = kernel.multiply(x, y, totals[n])
                loop.yields(*totals)
            sums += loop.results
        return transpose(b, [sum_rows(b, sums[n : n + self.part]) for n in range(0, self.lanes, self.part)], self.part)

    def weigh(self, every: KeyChunk, r: Value) -> None:
        b, v = self.b, self.v.kernel
        if isinstance(v, Bf16Vectors):  # in place: what is overwritten has been read
            with b.loop(*(b.sub(key, every.start) for key in (every.first, every.high)), 2 * self.lanes, hint="j") as j:
                place = b.at(self.scores[r], j, "f32")
                halves = [b.load(b.at(place, n, "f32"), self.vector, "p") for n in (0, self.lanes)]
                b.store(v.unit.narrow(*halves), b.at(self.scores[r], j, "bf16"))
        self.clear(r)

    def clear(self, r: Value) -> None:
        """No output yet."""
        self.b.fill(self.outputs[r], self.e_padded // self.lanes, self.b.constant(0.0, self.vector), hint="e")

    def end(self, every: KeyChunk) -> None:
        with self._turns(every, every.k, self.chunk) as (few, first, prefetch):
            self.add_values(few, first, prefetch)

    def add_values(self, few: KeyChunk, first: Value, prefetch: Prefetch | None) -> None:
        """Add a group's weights x V over a few keys, some vectors of columns at a time, in registers."""
        b, lanes, count = self.b, self.lanes, CHAINS if self.group == 1 else GROUP_SUMS // self.group
        whole, rest = divmod(self.e_padded // lanes, count)
        self._add_columns(few, first, (0, count if whole else rest), prefetch)
        if whole > 1:
            with b.loop(count * lanes, whole * count * lanes, count * lanes, hint="e") as e:
                self._add_columns(few, first, (e, count), None)
        if whole and rest:
            self._add_columns(few, first, (whole * count * lanes, rest), None)

    def _add_columns(self, few: KeyChunk, first: Value, columns: Columns, prefetch: Prefetch | None) -> None:
        """Several sets of sums, over different keys, where one has few: additions to a sum wait for each other."""
        b, (e, count), kr = self.b, columns, self.v.kernel.kr
        members = [b.add(first, n) for n in range(self.group)]
        outputs = [b.at(self.outputs[r], e, "f32") for r in members]
        places = [b.at(output, n * self.lanes, "f32") for output in outputs for n in range(count)]
        size = len(places)
        sets = max(1, CHAINS // size)
        sums = [b.load(place, self.vector, "o") for place in places] + self.v.kernel.zeros((sets - 1) * size)
        whole = b.most(b.floor_to(few.high, self.lanes), few.low, "whole")
        # A key's sums do not depend on what keys follow it.
        for low, high, number in (few.low, whole, self.lanes), (whole, few.high, min(self.lanes, sets * kr)):
            with b.carry(low, high, number, sums, hint="j0") as (loop, j0, so_far):
                rows, sums = few.v.gather_rows(j0, number, self.e_padded, self.staging, few.high), list(so_far)
                at = [b.at(self.scores[r], b.sub(j0, few.start), self.v.scalar) for r in members]
                for word in range(number // kr):
                    if prefetch is not None and (self.group > 1 or word == 0):
                        prefetch(b.add(j0, word * kr), kr if self.group > 1 else number)
                    weights = [b.at(row, word * kr, self.v.scalar) for row in at]
                    own = slice(word * size % len(sums), word * size % len(sums) + size)
                    sums[own] = self.v.kernel.rank_one(weights, self._values(rows, word, columns), sums[own])
                loop.yields(*sums)
            sums = loop.results
        for n, place in enumerate(places):
            b.store(functools.reduce(b.add, sums[n::size]), place)

    def _values(self, rows: Rows, word: int, columns: Columns) -> list[Value]:
        """Vectors of columns of a word of rows of V."""
        b, (e, count), lanes = self.b, columns, self.lanes
        starts = [b.add(e, n * lanes) for n in range(0, count, self.v.per_word)]
        if self.v.scalar == "f32":
            return [x for start in starts for x in self.v.read(rows, word, start, lanes)]
        lines = [[self.v.read(rows, 2 * word + k, start, lanes)[0] for k in (0, 1)] for start in starts]
        low = [8 * part + n + row for part in range(lanes // 4) for n in range(4) for row in (0, 2 * lanes)]
        orders = [[element + 4 * half for element in low] for half in (0, 1)]
        return [b.shuffle(*both, order, "pairs") for both in lines for order in orders]

    def add_output(self, every: KeyChunk, r: Value, target: Value) -> None:
        self.b.update(target, self.e_padded, self.b.add, self.vector, self.outputs[r])

    def in_order(self, results: Sequence[Value]) -> list[Value]:
        if self.v.per_word == 1:
            return list(results)
        lanes, widened = self.lanes, self.v.scalar == "f32"
        # Positions of columns among the elements of two vectors.
        order = [
            n // 2 + n % 2 * lanes if widened else n // 8 * 4 + n % 4 + n // 4 % 2 * lanes for n in range(2 * lanes)
        ]
        pairs = zip(results[::2], results[1::2], strict=True)
        return [self.b.shuffle(*pair, part, "o") for pair in pairs for part in (order[:lanes], order[lanes:])]
