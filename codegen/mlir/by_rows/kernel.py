"""The kernel for few queries (decoding): lanes are keys, K and V are read in place.

Packing K and V pays off only over many queries. Here a work item is a few rows that read the same keys: those of one
head, or of all heads that share its keys (grouped queries). They take turns at a chunk of keys that a cache holds, so
that K and V come from memory once for all of them, in their own dtype, through a table where they are in pages. Keys
at the ends of a row that a mask of data leaves out are not visited. For a row

    x = K q           for every L keys L dot products, their partial sums added across by a transposition that adds
    score program     with the key as the lane coordinate, statistics for the whole row
    o += p V          one weight at a time against a row of V, columns in registers

Where rows of bfloat16 share keys, AMX tiles take both products of all of them at a time (`tiles`). Output and sum
begin anew with every chunk (see `tile` for why).

Where there are fewer items than threads, the keys of an item are cut into `parts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from fusion.ir.expr import SCORE, I, J, coord, coordinates, loads
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.addresses import runs
from fusion.lowering.score_programs import dead_rows_need_keys
from fusion.planning.cpu_planner import MOST_ROWS
from fusion.planning.register_tiles import Target

from ..builder import Value
from ..parts import Parts, Sums
from ..rows import SharedRows
from ..scope import Scope
from ..skeleton import KernelFunction
from ..thread_function import KernelText
from ..values import Array, round_up
from .products import STEP, KeyChunk, Source
from .tiles import row_products

MOST_KEYS = 512
"""Most keys of a chunk, whose lanes are keys, so that each lane sums only a part of them."""


class RowKernel(KernelFunction):
    """Writes the function; see the module. rows_at_once: see `ByRows`."""

    def __init__(self, spec: AttentionSpec, target: Target, d: int, d_v: int, rows_at_once: int):
        super().__init__(spec, target, d, d_v, degree=5)
        self.d_padded, self.e_padded = round_up(d, self.lanes), round_up(d_v, self.lanes)
        products = row_products(spec, target, (d, d_v), rows_at_once)
        self.chunk = products.chunk_keys(self.d_padded + self.e_padded, MOST_KEYS)
        self.products = products(self, rows_at_once)
        # Of K and V where they are not read in place: rows of a chunk, for all rows that read them.
        columns = (1, d, self.d_padded), (2, d_v, self.e_padded)
        self.shared = [
            None if rows_at_once == 1 or products.reads(spec, number) and width == padded
            else self.area(8 * padded * (self.chunk + STEP), "shared")
            for number, width, padded in columns
        ]  # fmt: skip
        # Of every row of the item: its output, maximum and sum (vectors), and the keys it has to visit.
        self.record_bytes = 4 * MOST_ROWS * (self.e_padded + 2 * self.lanes)
        self.sums = self.area(self.record_bytes, "sums")
        self.parts = Parts(self, self.record_bytes)
        self.ranges = self.array(MOST_ROWS, 2, "ranges", "i64")  # of keys
        self.factors = self.area(4 * (self.chunk + self.lanes), "factors")

    def text(self) -> KernelText:
        top = self._top()
        with self._items() as item:
            self._rows(top, item)
        return self.kernel_text(
            rows=MOST_ROWS, key_step=self.lanes, across_heads=True, part_bytes=self.record_bytes,
            part_step=4 * self.lanes,
        )  # fmt: skip

    def _rows(self, top: Scope, number: Value) -> None:
        """One part of the keys of one item: rows that follow each other in the order (batch coordinates.., query)."""
        b, blocks, (item, part) = self.b, self.params[("blocks",)], self.parts.piece(number)
        span, most = self.params[("span",)], self.params[("block_rows",)]
        start = b.mul(b.rem(item, blocks), most)
        first, count = b.add(b.mul(b.div(item, blocks), span), start, "first"), b.least(most, b.sub(span, start))
        cut = self.parts.cut()
        self._use_record(b.select(cut, self.parts.record(number), self.sums))
        with b.loop(0, count, hint="r") as r:
            self._begin(*self._row_scope(top, b.add(first, r)), r, part)
        self._visit(top, first, count)
        with self.parts.last_of(item, cut):
            self._use_record(self.sums)
            with b.when(cut):
                self._merge(item, count)
            if self._visits_again():
                # Rows for which all the keys that the mask leaves are dead count every key.
                with b.loop(0, count, hint="r") as r:
                    self._begin_again(r)
                self._visit(top, first, count)
            with b.loop(0, count, hint="r") as r:
                self._finish(*self._row_scope(top, b.add(first, r)), r)

    def _use_record(self, record: Value) -> None:
        """Output, maximum and sum (vectors) of every row are in this record from here on."""
        self.outputs, self.maxima, self.totals = self._areas(record)

    def _areas(self, record: Value) -> tuple[Array, Array, Array]:
        """Outputs, maxima and totals of all rows, in a record."""
        b, lanes = self.b, self.lanes
        maxima = b.at(record, MOST_ROWS * self.e_padded, "f32", "maxima")
        totals = b.at(maxima, MOST_ROWS * lanes, "f32", "totals")
        return Array(b, record, self.e_padded, "f32"), Array(b, maxima, lanes, "f32"), Array(b, totals, lanes, "f32")

    def _sums(self, record: Value, r: Value) -> Sums:
        """Sums of row r, in a record."""
        outputs, maxima, totals = self._areas(record)
        vectors = [(totals[r], 1), (outputs[r], self.e_padded // self.lanes)]
        return Sums(maximum=maxima[r], vectors=vectors)

    def _merge(self, item: Value, count: Value) -> None:
        """Sum up what the parts of an item have left."""
        b, nothing = self.b, self.b.constant(0, "i64")
        with b.loop(0, count, hint="r") as r:
            self._clear(r, nothing, nothing)
            with self.parts.records(item) as record:
                self.parts.join(self._sums(self.sums, r), self._sums(record, r))

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
        """Read the query, find the keys of the part to visit, clear what is summed."""
        source = self._readers(batch)[0].rows(i, 1, self.d_padded, self.products.staging)
        self.products.store_query(source, r)
        step = self.lanes if any(runs(index, J)[0] > 1 for index in (self.spec.k, self.spec.v)) else 1
        self._clear(r, *self.parts.keys(part, *self.key_range(scope, step)))
        if self._mask_is_data():
            self._trim(scope, r)

    def _mask_is_data(self) -> bool:
        """Whether only data says which keys are live."""
        return self.spec.mask is not None and any(J.name in coordinates(x) for x in loads(self.spec.mask.maybe_live))

    def _trim(self, scope: Scope, r: Value) -> None:
        """Leave out keys at both ends of row r's, a vector at a time, as long as none of them is live: padding, or the
        room that a cache has left. Looking costs next to nothing where there are none, and less than they do else."""
        b, lanes = self.b, self.lanes
        assert self.spec.mask is not None
        live, ends = self.spec.mask.maybe_live, self.ranges[r]

        def first(low: Value, high: Value) -> Value:
            return low

        def last(low: Value, high: Value) -> Value:
            return b.add(low, b.floor_to(b.sub(b.sub(high, low), 1), lanes), "last")

        def stop(start: Callable[[Value, Value], Value]) -> Value:
            """Not 0 where no keys are left, or some of the vector is live."""
            low, high = self._range(r)

            def alive() -> Value:
                at = start(low, high)
                here = scope.along(J, at, b.sub(high, at))
                result = b.reduce("or", b.and_(here.vector(live), here.lanes.valid), "alive")
                return b.convert("arith.extui", result, "i64")

            return b.either(b.compare("slt", low, high), alive, lambda: b.constant(1, "i64"), "i64")

        with b.taking(lambda: stop(first), b.constant(1, "i64")):
            b.store(b.add(self._range(r)[0], lanes), ends)
        with b.taking(lambda: stop(last), b.constant(1, "i64")):
            b.store(last(*self._range(r)), b.at(ends, 1, "i64"))

    def _clear(self, r: Value, low: Value, high: Value) -> None:
        b, zero, ends = self.b, self.b.constant(0.0, self.vector), self.ranges[r]
        b.store(low, ends)
        b.store(high, b.at(ends, 1, "i64"))
        b.store(b.constant(float("-inf"), self.vector), self.maxima[r])
        b.store(zero, self.totals[r])
        b.fill(self.outputs[r], self.e_padded // self.lanes, zero, hint="e")

    def _begin_again(self, r: Value) -> None:
        """All keys for a row whose keys were all dead, none for others."""
        b, nothing = self.b, self.b.constant(0, "i64")
        b.store(nothing, b.at(self.ranges[r], 1, "i64"))
        m = b.load(self.maxima[r], self.vector, "m")
        assert self.spec.mask is not None
        alive = b.extract(self._alive(m, self.spec.mask.fill), 0, "alive")
        with b.when(b.negated(alive)):
            self._clear(r, nothing, self.n_k)

    def _range(self, r: Value) -> tuple[Value, Value]:
        ends = self.ranges[r]
        return self.b.load(ends, "i64", "low"), self.b.load(self.b.at(ends, 1, "i64"), "i64", "high")

    def _visit(self, top: Scope, first: Value, count: Value) -> None:
        """All chunks of the keys that any of the rows has to visit."""
        b = self.b
        with b.carry(0, count, 1, [self.n_k, b.constant(0, "i64")], hint="r") as (ends, r, (lowest, highest)):
            low, high = self._range(r)
            ends.yields(b.least(lowest, low), b.most(highest, high))
        # Chunks begin where no other row of the item has a say, so that a row's sums do not depend on these.
        lowest, highest = b.floor_to(ends.results[0], self.chunk), ends.results[1]
        keys, values = self._sources(self._row_scope(top, first)[1])  # those of all rows of the item
        with b.loop(lowest, highest, self.chunk, hint="start") as start:
            low, high = b.most(ends.results[0], start), b.least(highest, b.add(start, self.chunk))
            step_start = b.sub(low, b.rem(b.sub(low, start), STEP))
            every = KeyChunk(start=start, first=step_start, low=low, high=high, rows=count, k=keys, v=values)
            for source in (keys, values):
                if isinstance(source, SharedRows):
                    source.fill(start, step_start, low, high)
            self.products.begin(every)
            with self.active_rows(every) as (r, mine):
                self._attend(self._row_scope(top, b.add(first, r))[0], r, mine)
            self.products.end(every)
            with self.active_rows(every) as (r, mine):
                self.products.add_output(mine, r, self.outputs[r])

    def _sources(self, scope: Scope) -> list[Source]:
        """K and V."""
        results: list[Source] = []
        columns = self.d_padded, self.e_padded
        for reader, area, padded in zip(self._readers(scope)[1:], self.shared, columns, strict=True):
            sizes, memory = (self.chunk, STEP, padded), self.products.memory or reader.memory
            results.append(reader if area is None else SharedRows(reader, area, sizes, memory))
        return results

    @contextlib.contextmanager
    def active_rows(self, every: KeyChunk) -> Iterator[tuple[Value, KeyChunk]]:
        """The rows that visit keys of a chunk, and which."""
        b = self.b
        with b.loop(0, every.rows, hint="r") as r:
            low, high = self._range(r)
            low, high = b.most(low, every.low), b.least(high, every.high)
            with b.when(b.compare("slt", low, high)):
                yield r, replace(every, low=low, high=high)

    def _attend(self, scope: Scope, r: Value, mine: KeyChunk) -> None:
        """Row r's weights of its keys of a chunk, and its maximum and sum with them; its output is rescaled."""
        b, maximum, total = self.b, self.maxima[r], self.totals[r]
        m, before = b.load(maximum, self.vector, "m"), b.load(total, self.vector, "l")
        m_new, own = self._weights(scope, r, mine, m)
        if self.spec.normalizer is not Normalizer.NONE:
            factor, output = self.exponent.factor(m, m_new), self.outputs[r]
            before = b.mul(before, factor)
            b.update(output, self.e_padded, lambda x: b.mul(x, factor), self.vector)
        b.store(m_new, maximum)
        b.store(b.add(before, own), total)
        self.products.weigh(mine, r)

    def _finish(self, scope: Scope, batch: Scope, i: Value, r: Value) -> None:
        b, lanes = self.b, self.lanes
        output, factor = self.outputs[r], None
        if self.spec.normalizer is not Normalizer.NONE:
            m, total = (b.load(area[r], self.vector) for area in (self.maxima, self.totals))
            total = b.reduce("add", total, "sum")
            factor = self._row_factor(scope, m, b.broadcast(total, lanes))
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
        b, lanes, (low, high), weights = self.b, self.lanes, (mine.low, mine.high), self.products.weights(r)

        def at(area: Value, key: Value) -> Value:
            return b.at(area, b.sub(key, mine.start), "f32")

        with b.carry(low, high, lanes, [b.constant(float("-inf"), self.vector)], hint="j0") as (loop, j0, (highest,)):
            x, weight = self._scores(scope, r, mine, j0)
            b.store(x, at(weights, j0))
            if weight is not None:
                b.store(weight, at(self.factors, j0))
            loop.yields(self.exponent.larger(highest, x))
        total = b.constant(0.0, self.vector)
        if self.spec.normalizer is not Normalizer.NONE:
            m = self.exponent.larger(m, self._largest(loop.results[0]))
            c, shift = self.exponent.coefficients(m)
            with b.carry(low, high, lanes, [total], hint="j0") as (loop, j0, (total,)):
                p = self.context.math.exp2(b.fma(b.load(at(weights, j0), self.vector, "x"), c, shift))
                b.store(p, at(weights, j0))
                loop.yields(b.add(total, p))
            total = loop.results[0]
        if self.weight is not None:
            with b.loop(low, high, lanes, hint="j0") as j0:
                p, factor = (b.load(at(area, j0), self.vector, "p") for area in (weights, self.factors))
                b.store(b.mul(p, factor), at(weights, j0))
        return m, total

    def _largest(self, x: Value) -> Value:
        """The largest lane in all lanes. (Of a reduction LLVM makes one lane after the other.)"""
        distance = self.lanes // 2
        while distance:
            x = self.exponent.larger(x, self.b.shuffle(x, x, [lane ^ distance for lane in range(self.lanes)]))
            distance //= 2
        return x

    def _scores(self, scope: Scope, r: Value, mine: KeyChunk, j0: Value) -> tuple[Value, Value | None]:
        """The score program (and weight program) of L keys; -inf (or weight 0) beyond the last."""
        b, score = self.b, self.products.scores(mine, r, j0)
        here = scope.along(J, j0, b.sub(mine.high, j0), {SCORE: score})
        valid = here.lanes.valid
        outside = 0.0 if self.spec.normalizer is Normalizer.NONE else float("-inf")
        x = b.select(valid, here.vector(self.programs.masked), outside, "x")
        return x, None if self.weight is None else b.select(valid, here.vector(self.weight), 0.0, "w")
