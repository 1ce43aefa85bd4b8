"""The kernel for few queries (decoding): lanes are keys, K and V are read in place.

Packing K and V pays off only over many queries. Here a work item is a few rows that read the same keys: those of one
head, or of all heads that share its keys (grouped queries); one row alone is the plain case. They take turns at a chunk
of keys that a cache holds, so that K and V come from memory once for all of them, in their own dtype, through a table
where they are in pages. Keys at the ends of a row that a mask of data leaves out are not visited, unless others of the
item visit them: they have weight 0. For a row

    x = K q           for every L keys L dot products, their partial sums added across by a transposition that adds
    score program     with the key as the lane coordinate, statistics for the whole row
    o += p V          one weight at a time against a row of V, columns in registers

Where rows of bfloat16 share keys, AMX tiles take both products of all of them at a time (`tiles`). Output and sum
begin anew with every chunk (see `tile` for why).

Where there are fewer items than threads, the keys of an item are cut into `parts`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from fusion.ir.expr import SCORE, I, J, coord, coordinates, loads
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import dead_rows_need_keys
from fusion.planning.cpu_planner import MOST_ROWS
from fusion.planning.register_tiles import Target

from ..builder import Value
from ..parts import Parts, Sums
from ..rows import SharedRows
from ..scope import Scope
from ..skeleton import KernelFunction
from ..thread_function import KernelText
from ..values import round_up
from .products import STEP, KeyChunk, Source
from .tiles import row_products

MOST_KEYS = 512
"""Most keys of a chunk, whose lanes are keys, so that each lane sums only a part of them."""


class RowKernel(KernelFunction):
    """Writes the function; see the module. rows_at_once: see `ByRows`."""

    def __init__(self, spec: AttentionSpec, target: Target, d: int, d_v: int, rows_at_once: int):
        super().__init__(spec, target, d, d_v, degree=5)
        lanes = self.lanes
        self.d_padded, self.e_padded = round_up(d, lanes), round_up(d_v, lanes)
        products = row_products(spec, target, (d, d_v), rows_at_once)
        most = min(MOST_KEYS, products.chunk_keys(self.d_padded + self.e_padded))
        self.chunk = max(STEP, most // STEP * STEP)
        self.staging = self.area(8 * lanes * max(self.d_padded, self.e_padded), "staging")
        # Of every row: products, scores, weights, in each other's place. The distance fills all sets of the cache.
        self.scores = self.array(MOST_ROWS, self.chunk + 2 * lanes, "scores", "f32")
        self.factors = self.area(4 * self.chunk, "factors")
        self.products = products(self, rows_at_once)
        # Of K and V where they are not read in place: rows of a chunk, for all rows that read them.
        columns = (1, d, self.d_padded), (2, d_v, self.e_padded)
        self.shared = [
            None if rows_at_once == 1 or products.reads(spec, number) and width == padded
            else self.area(8 * padded * self.chunk, "shared")
            for number, width, padded in columns
        ]  # fmt: skip
        # Of every row: its output, sum and maximum (vectors), and the keys it has to visit.
        self.record_size = self.e_padded + 2 * lanes
        self.parts = Parts(self, 4 * MOST_ROWS * self.record_size)
        self.sums = self.area(self.parts.record_bytes, "sums")
        self.ranges = self.array(MOST_ROWS, 2, "ranges", "i64")  # of keys

    def text(self) -> KernelText:
        top = self._top()
        with self._items() as item:
            self._rows(top, item)
        return self.kernel_text(
            rows=MOST_ROWS, key_step=self.lanes, across_heads=True, part_bytes=self.parts.record_bytes,
            part_step=4 * self.lanes,
        )  # fmt: skip

    def _rows(self, top: Scope, number: Value) -> None:
        """One part of the keys of one item: rows that follow each other in the order (batch coordinates.., query)."""
        b, blocks, (item, part) = self.b, self.params[("blocks",)], self.parts.piece(number)
        span, most = self.params[("span",)], self.params[("block_rows",)]
        start = b.mul(b.rem(item, blocks), most)
        first, count = b.add(b.mul(b.div(item, blocks), span), start, "first"), b.least(most, b.sub(span, start))
        cut = self.parts.cut()
        self.record = b.select(cut, self.parts.record(number), self.sums, "record")
        with b.loop(0, count, hint="r") as r:
            self._begin(*self._row_scope(top, b.add(first, r)), r, part)
        self._visit(top, first, count)
        with self.parts.last_of(item, cut):
            self.record = self.sums
            with b.when(cut), b.loop(0, count, hint="r") as r:
                self._clear(r, b.constant(0, "i64"), b.constant(0, "i64"))
                with self.parts.records(item) as record:
                    self.parts.join(self._sums(r), self._sums(r, record))
            if self._visits_again():
                # Rows for which all the keys that the mask leaves are dead count every key.
                with b.loop(0, count, hint="r") as r:
                    self._begin_again(r)
                self._visit(top, first, count)
            with b.loop(0, count, hint="r") as r:
                self._finish(*self._row_scope(top, b.add(first, r)), r)

    def _sums(self, r: Value, record: Value | None = None) -> Sums:
        """Output and sum of row r, one behind the other, and its maximum, in the record in use or another."""
        start = self.b.row(record or self.record, r, self.record_size)
        maximum = self.b.at(start, self.e_padded + self.lanes, "f32", "maximum")
        return Sums(maximum=maximum, vectors=[(start, self.e_padded // self.lanes + 1)])

    def _memory(self, r: Value) -> tuple[Value, Value, Value]:
        """Output, sum and maximum of row r."""
        sums = self._sums(r)
        output = sums.vectors[0][0]
        return output, self.b.at(output, self.e_padded, "f32", "total"), sums.maximum

    def _visits_again(self) -> bool:
        mask = self.spec.mask
        bounded = mask is not None and (mask.key_lo is not None or mask.key_hi is not None)
        return (bounded or self._mask_is_data()) and dead_rows_need_keys(self.spec)

    def _row_scope(self, top: Scope, row: Value) -> tuple[Scope, Scope, Value]:
        """(scope of the row, of its batch element, its query i); row: number in the order (batch coordinates.., i)."""
        i, batch = self.b.rem(row, self.n_q, "i"), self._batch_scope(top, self.b.div(row, self.n_q))
        # The row's coordinate is bound under three names: as a row, and as first and last row of a block.
        scope = batch.inner({I: i, coord("i0"): i, coord("i1"): i})
        scope.prepare(self.programs.masked, self.weight, bound=self.batch_names | {"i"})
        return scope, batch, i

    def _begin(self, scope: Scope, batch: Scope, i: Value, r: Value, part: Value) -> None:
        """Read the query, find the keys of the part to visit, from whole vectors on, and clear what is summed."""
        self.products.store_query(self._readers(batch)[0].rows(i, 1, self.d_padded, self.staging), r)
        self._clear(r, *self.parts.keys(part, *self.key_range(scope, self.lanes)))
        if self._mask_is_data():
            self._trim(scope, r)

    def _mask_is_data(self) -> bool:
        """Whether only data says which keys are live."""
        return self.spec.mask is not None and any(J.name in coordinates(x) for x in loads(self.spec.mask.maybe_live))

    def _trim(self, scope: Scope, r: Value) -> None:
        """Leave out keys at both ends of row r's, a vector at a time, as long as none of them is live: padding, or the
        room that a cache has left. Looking costs next to nothing where there are none, and less than they do else."""
        b, lanes, ends = self.b, self.lanes, self.ranges[r]
        for back in (False, True):
            with b.taking(functools.partial(self._at_live, scope, r, back), b.constant(1, "i64")):
                low, high = self._range(r)
                change = b.floor_to(b.sub(high, 1), lanes) if back else b.add(low, lanes)
                b.store(change, b.at(ends, int(back), "i64"))

    def _at_live(self, scope: Scope, r: Value, back: bool) -> Value:
        """Not 0 where row r has no keys left, or some of its first (or last) vector of keys is live."""
        b, (low, high) = self.b, self._range(r)

        def alive() -> Value:
            assert self.spec.mask is not None
            at = b.floor_to(b.sub(high, 1), self.lanes, "last") if back else low
            here = scope.along(J, at, b.sub(high, at))
            result = b.reduce("or", b.and_(here.vector(self.spec.mask.maybe_live), here.lanes.valid), "alive")
            return b.convert("arith.extui", result, "i64")

        return b.either(b.compare("slt", low, high), alive, lambda: b.constant(1, "i64"), "i64")

    def _clear(self, r: Value, low: Value, high: Value) -> None:
        """Nothing yet of row r's keys [low, high)."""
        b, ends, sums = self.b, self.ranges[r], self._sums(r)
        b.store(low, ends)
        b.store(high, b.at(ends, 1, "i64"))
        b.store(b.constant(float("-inf"), self.vector), sums.maximum)
        b.fill(*sums.vectors[0], b.constant(0.0, self.vector), hint="e")

    def _begin_again(self, r: Value) -> None:
        """All keys for a row whose keys were all dead, none for others."""
        b, nothing = self.b, self.b.constant(0, "i64")
        b.store(nothing, b.at(self.ranges[r], 1, "i64"))
        m = b.load(self._sums(r).maximum, self.vector, "m")
        assert self.spec.mask is not None
        alive = b.extract(self._alive(m, self.spec.mask.fill), 0, "alive")
        with b.when(b.negated(alive)):
            self._clear(r, nothing, self.n_k)

    def _range(self, r: Value) -> tuple[Value, Value]:
        ends = self.ranges[r]
        return self.b.load(ends, "i64", "low"), self.b.load(self.b.at(ends, 1, "i64"), "i64", "high")

    def _visit(self, top: Scope, first: Value, count: Value) -> None:
        """All chunks of the keys that any of the rows has to visit."""
        b, chunk = self.b, self.chunk
        with b.carry(0, count, 1, [self.n_k, b.constant(0, "i64")], hint="r") as (ends, r, (lowest, highest)):
            low, high = self._range(r)
            ends.yields(b.least(lowest, low), b.most(highest, high))
        # Chunks and steps begin where no other row of the item has a say, so that a row's sums do not depend on these.
        lowest, highest = ends.results
        keys, values = self._sources(self._row_scope(top, first)[1])  # those of all rows of the item
        with b.loop(b.floor_to(lowest, chunk), highest, chunk, hint="start") as start:
            low, high = b.most(lowest, start), b.least(highest, b.add(start, chunk))
            step, stop = b.floor_to(low, STEP, "step"), b.mul(b.ceil_div(high, STEP), STEP, "stop")
            every = KeyChunk(start=start, first=step, low=low, high=high, stop=stop, rows=count, k=keys, v=values)
            for source in (keys, values):
                if isinstance(source, SharedRows):
                    source.fill(start, step, low, high, stop)
            self.products.begin(every)
            with b.loop(0, count, hint="r") as r:
                self._attend(self._row_scope(top, b.add(first, r))[0], r, every)
            self.products.end(every)
            with b.loop(0, count, hint="r") as r:
                self.products.add_output(every, r, self._memory(r)[0])

    def _sources(self, scope: Scope) -> list[Source]:
        """K and V, in place or in order."""
        memory = self.products.memory
        every = zip(self.shared, self._readers(scope)[1:], (self.d_padded, self.e_padded), strict=True)
        return [x if area is None else SharedRows(x, area, padded, memory or x.memory) for area, x, padded in every]

    def _attend(self, scope: Scope, r: Value, every: KeyChunk) -> None:
        """Row r's weights of its keys of a chunk, and 0 for those of others; its maximum and sum with them. Its output
        is rescaled."""
        b, lanes, (output, total, maximum) = self.b, self.lanes, self._memory(r)
        low, high = self._range(r)
        low, high = b.most(low, every.low), b.least(high, every.high)
        behind = b.mul(b.ceil_div(high, lanes), lanes, "behind")
        for first, last in (every.first, b.least(low, every.stop)), (b.most(behind, every.first), every.stop):
            with b.loop(first, last, lanes, hint="j0") as j0:
                b.store(b.constant(0.0, self.vector), self.products.weight(every, r, j0))
        m, before = b.load(maximum, self.vector, "m"), b.load(total, self.vector, "l")
        m_new, own = self._weights(scope, r, replace(every, low=low, high=high), m)
        if self.spec.normalizer is not Normalizer.NONE:
            factor = self.exponent.factor(m, m_new)
            before = b.mul(before, factor)
            b.update(output, self.e_padded, lambda x: b.mul(x, factor), self.vector)
        b.store(m_new, maximum)
        b.store(b.add(before, own), total)
        self.products.weigh(every, r)

    def _finish(self, scope: Scope, batch: Scope, i: Value, r: Value) -> None:
        b, lanes, (output, total, maximum), factor = self.b, self.lanes, self._memory(r), None
        if self.spec.normalizer is not Normalizer.NONE:
            sum_ = b.reduce("add", b.load(total, self.vector), "sum")
            factor = self._row_factor(scope, b.load(maximum, self.vector), b.broadcast(sum_, lanes))
        step = lanes if self.e_padded % (2 * lanes) else 2 * lanes
        with b.loop(0, self.e_padded, step, hint="e") as e:
            places = [b.at(b.at(output, e, "f32"), n, "f32") for n in range(0, step, lanes)]
            result = self.products.in_order([b.load(at, self.vector, "o") for at in places])
            for x, at in zip(result, places, strict=True):
                b.store(x if factor is None else self.scaled(x, factor), at)
        self._write_row(output, self._row_address(batch, i))

    def _weights(self, scope: Scope, r: Value, mine: KeyChunk, m: Value) -> tuple[Value, Value]:
        """The weights of row r's keys of a chunk, which come after others whose maximum was m: the maximum of all,
        and the sum of these per lane. In two passes, so that keys do not wait for each other: scores, then weights."""
        b, lanes, low, high = self.b, self.lanes, mine.low, mine.high
        weight_of = lambda key: self.products.weight(mine, r, key)
        factor_of = lambda key: b.at(self.factors, b.sub(key, mine.start), "f32")
        with b.carry(low, high, lanes, [b.constant(float("-inf"), self.vector)], hint="j0") as (loop, j0, (highest,)):
            x, factor = self._scores(scope, b.load(weight_of(j0), self.vector, "score"), j0, high)
            b.store(x, weight_of(j0))
            if factor is not None:
                b.store(factor, factor_of(j0))
            loop.yields(self.exponent.larger(highest, x))
        total = b.constant(0.0, self.vector)
        if self.spec.normalizer is not Normalizer.NONE:
            m = self.exponent.larger(m, self._largest(loop.results[0]))
            c, shift = self.exponent.coefficients(m)
            with b.carry(low, high, lanes, [total], hint="j0") as (loop, j0, (total,)):
                p = self.context.math.exp2(b.fma(b.load(weight_of(j0), self.vector, "x"), c, shift))
                b.store(p, weight_of(j0))
                loop.yields(b.add(total, p))
            total = loop.results[0]
        if self.weight is not None:
            with b.loop(low, high, lanes, hint="j0") as j0:
                p, factor = (b.load(of(j0), self.vector, "p") for of in (weight_of, factor_of))
                b.store(b.mul(p, factor), weight_of(j0))
        return m, total

    def _largest(self, x: Value) -> Value:
        """The largest lane in all lanes. (Of a reduction LLVM makes one lane after the other.)"""
        distance = self.lanes // 2
        while distance:
            x = self.exponent.larger(x, self.b.shuffle(x, x, [lane ^ distance for lane in range(self.lanes)]))
            distance //= 2
        return x

    def _scores(self, scope: Scope, score: Value, j0: Value, high: Value) -> tuple[Value, Value | None]:
        """The score program (and weight program) of L keys; -inf (or weight 0) from key `high` on."""
        b, here = self.b, scope.along(J, j0, self.b.sub(high, j0), {SCORE: score})
        outside = 0.0 if self.spec.normalizer is Normalizer.NONE else float("-inf")
        x = b.select(here.lanes.valid, here.vector(self.programs.masked), outside, "x")
        return x, None if self.weight is None else b.select(here.lanes.valid, here.vector(self.weight), 0.0, "w")
