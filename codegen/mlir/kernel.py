"""The whole kernel: the function `attention(params)` that every thread of a parallel region runs.

    for each work item (batch coordinates, block of query rows) of this thread
        pack K and V, as far as needed, if the item reads other keys than the one before
        pack Q^T
        for each block of keys in range, with each row's maximum so far or, where the norms of Q and K say that the
        scores lie close together, without (`lowering.bounded_scores`)
            S^T = K Q^T;  score program, softmax statistics, weights;  O^T += V^T P^T
        where the keys are cut into parts: leave what is summed; the last of the item goes on with the sums of all
        where a row met no live key although keys were skipped: once more over all keys
        divide by the sum, transpose, write

Sizes and strides are run-time arguments; d, d_v and tile sizes compile-time constants. What is between memory and
registers lies in the thread's part of a workspace; packed K and V are as long as the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from fusion.ir.expr import I0, I1
from fusion.ir.results import keeps_ends
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.bounded_scores import SLACK, VALUE_EXPONENTS, BoundedScores, near
from fusion.lowering.dead_rows import dead_rows_need_keys
from fusion.planning.register_tiles import Target, Tiling

from .amx import Amx
from .builder import Value, vector_of
from .dense import DenseLoad
from .overlap import OverlappingKernel
from .packing import STATE_BYTES, PackedRows, clear_largest, raise_flag
from .parts import TileParts
from .rows import RowReader
from .scope import Scope
from .skeleton import KernelText
from .tile import Item, KeyRange, Tile
from .x86 import BIAS, MANTISSA


def emit(
    spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int, with_statistics: bool = False
) -> KernelText:
    """The kernel of a spec whose Q and K have d columns and V d_v. with_statistics: that of training, which also writes
    the statistics of each row (`training_statistics`)."""
    return AttentionKernel(spec, tiling, target, d, d_v, with_statistics).text()


class AttentionKernel(OverlappingKernel):
    """Writes the function; see the module. A selective kernel is made from it (`sparse_kernel`)."""

    looks_ahead = True  # takes the range of the scores from the norms of their operands, where that helps

    def __init__(
        self, spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int, with_statistics: bool = False
    ):
        super().__init__(spec, tiling, target, d, d_v, with_statistics)
        p = self.products
        self.staging = self.area(8 * p.staging_elements(), "staging")
        self.finished = self.area(self.lanes * p.e_padded * 4, "finished")
        self.packed = PackedRows(self.b, self.area(STATE_BYTES, "state"))
        self.parts = TileParts(self) if tiling.cut else None
        self.near = self._near() if self.looks_ahead else None
        if self.near is not None:
            self.query_norms = self.area(tiling.groups * 4 * self.lanes, "query_norms")
            self.undone, self.weighed = self.area(64, "undone"), self.area(64, "weighed")
            self.other_weights = self.area(self.together * p.weight_bytes(tiling.keys), "other_weights")
        b = self.b
        fixed = self.workspace_bytes
        with b.at_entry():
            self.packed_keys = b.at(self.base, fixed, "i8", "packed_keys")
            steps = self.params[("key_steps",)]
            p.note_key_steps(steps)
            self.packed_values = b.row(self.packed_keys, steps, p.key_bytes(), "i8", "packed_values")
            self.notes = b.row(self.packed_values, steps, p.value_bytes(), "i8", "notes")
            if self.further is not None:
                self.further.lie_at(b.row(self.notes, steps, self.note_bytes, "i8", "kept"), steps)

    def _near(self) -> BoundedScores | None:
        """When this kernel's scores are near a centre; None where it would gain nothing (products outweigh the softmax
        with several planes) or rows need their true maximum."""
        spec = self.spec
        gains = isinstance(self.products, Amx) and self.tiling.planes == 1 and spec.out_dtype != "float32"
        true_maximum = self.weight is not None or keeps_ends(spec) or spec.further
        if not gains or true_maximum or spec.normalizer is Normalizer.NONE:
            return None
        programs = [program for program in (self.programs.masked, self.programs.full) if program is not None]
        return near(programs, self.programs.scale, *((MANTISSA, BIAS) if self.statistics is None else (1.0, 0.0)))

    def text(self) -> KernelText:
        b = self.b
        top = self._top()
        if self.worst is not None:
            clear_largest(b, self.worst)
        self.packed.clear()
        with self._items() as item:
            self._item(top, item)
        if self.worst is not None:
            raise_flag(b, self.worst, self.params[("ptr", "flag")])
        kept, beyond = (0, 0) if self.further is None else (self.further.step_bytes, self.further.fixed_bytes)
        return KernelText(
            source=self.function(), slots=self.slots(), rows=self.tiling.groups * self.lanes,
            key_step=self.products.key_step, fixed_bytes=self.workspace_bytes + beyond,
            step_bytes=self.products.key_bytes() + self.products.value_bytes() + self.note_bytes + kept,
            may_flag=self.may_flag, part_bytes=0 if self.parts is None else self.parts.record_bytes,
            part_step=self.tiling.keys,
        )  # fmt: skip

    @property
    def note_bytes(self) -> int:
        """Of a key step's norms of keys and magnitudes of values, each a vector of bits."""
        return 0 if self.near is None else 8 * self.lanes

    def _item(self, top: Scope, number: Value) -> None:
        if self.parts is not None:
            self._part_of_item(self.parts, top, number)
            return
        item = self._begin(top, number)
        low, high = self._item_keys(item)
        self._attend(item, low, high)
        self._end(item)

    def _part_of_item(self, parts: TileParts, top: Scope, piece: Value) -> None:
        """The keys of one part; whoever is the last of an item goes on with the sums of all."""
        b, mask, (number, part) = self.b, self.spec.mask, parts.piece(piece)
        item, cut = self._begin(top, number, part), parts.cut()
        low, high = parts.keys(part, *self._item_keys(item))
        skips = mask is not None and mask.skips
        self._visit(item, KeyRange(low=low, high=high, skipping=b.constant(1, "i1") if skips else None))
        with b.when(cut):
            parts.leave(item, piece)
        with parts.last_of(number, cut):
            with b.when(cut):
                self._clear(item, float("-inf"))
                parts.merge(item)
            if mask is not None and skips and dead_rows_need_keys(self.spec):
                with b.when(self._any_dead(item, mask.fill)):
                    self._visit(item, KeyRange(low=0, high=self.n_k))
            self._end(item)

    def _item_keys(self, item: Item) -> tuple[Value | int, Value]:
        """The keys that an item visits, as far as the mask says."""
        b, mask = self.b, self.spec.mask
        last = b.sub(b.add(item.first, item.count), 1)
        ranged = item.scope.inner({I0: item.first, I1: last})
        low, high = self._key_range(ranged, self.products.key_step)
        if mask is not None and mask.tile_live is not None:
            low, high = self._live_range(ranged, mask.tile_live, low, high, self.products.key_step)
        return low, high

    def _end(self, item: Item) -> None:
        """Write the rows of an item, and what else is asked of them."""
        if self.further is not None:
            self.further.begin()
        with self.b.loop(0, item.groups, hint="g") as g:
            self._finish(item, g)
        if self.further is not None:
            self.further.end(item)

    def _begin(self, top: Scope, number: Value, part: Value | None = None) -> Item:
        """The item of a number, with its queries packed. part: of its keys, which is packed anew."""
        b, p, rows = self.b, self.products, self.tiling.groups * self.lanes
        blocks = self.params[("blocks",)]
        block = b.rem(number, blocks, "block")
        scope = self._batch_scope(top, b.div(number, blocks))
        first = b.mul(block, rows, "i0")
        count = b.least(b.sub(self.n_q, first), rows, "rows")
        groups = b.ceil_div(count, self.lanes, "groups")
        readers = self._readers(scope)
        self.loads = [DenseLoad(self.context, scope, expr) for expr in self.dense]
        self.packed.note(readers[1:], part)
        padded_groups = b.mul(b.ceil_div(groups, p.group_step), p.group_step)
        size = p.weight_bytes(self.tiling.keys)
        self._zero_unused(
            self.weights, b.mul(b.least(groups, self.together), size), b.constant(self.together * size, "i64")
        )
        with b.loop(0, padded_groups, hint="g") as g:  # zeros where there is no group: products read them
            at = b.row(self.queries, g, p.query_bytes(), "i8")
            p.pack_queries(readers[0], b.add(first, b.mul(g, self.lanes)), self.n_q, at, self.staging)
            if self.near is not None:
                norms = b.row(self.query_norms, g, self.lanes)
                b.store(self._amx.query_norms(at), norms)
        return Item(
            number=number, scope=scope, readers=readers, first=first, count=count, groups=groups,
            padded_groups=padded_groups,
        )  # fmt: skip

    def _pack(self, readers: list[RowReader], low: Value | int, high: Value) -> None:
        """Make sure that keys [low, high) (low on a step) are packed."""
        b, p = self.b, self.products

        def pack(key: Value) -> None:
            n = b.div(key, p.key_step)
            keys = b.row(self.packed_keys, n, p.key_bytes(), "i8")
            p.pack_keys(readers[1], key, self.n_k, keys, self.staging)
            values = p.values_of(self.packed_values, n)
            p.pack_values(readers[2], key, self.n_k, values, self.staging)
            if self.near is not None:
                note = b.row(self.notes, n, self.note_bytes, "i8")
                b.store(self._amx.key_norms(keys), note)
                b.store(self._amx.value_magnitudes(values), b.at(note, self.lanes, "i32"))

        self.packed.extend(low, high, p.key_step, pack)

    def _attend(self, item: Item, low: Value | int, high: Value) -> None:
        """All key blocks; a second time over all keys where the mask let keys be skipped, and a row that met none that
        is live needs them."""
        b, mask = self.b, self.spec.mask
        if mask is None or not mask.skips:
            self._visit(item, KeyRange(low=low, high=high))
            return
        yes = b.constant(1, "i1")
        if not dead_rows_need_keys(self.spec):
            self._visit(item, KeyRange(low=low, high=high, skipping=yes))
            return
        with b.carry(0, 2, 1, [b.as_value(low, "i64"), high, yes], hint="attempt") as (loop, attempt, (lo, hi, needed)):
            skipping = b.compare("eq", attempt, 0, "skipping")
            with b.when(needed):
                self._visit(item, KeyRange(low=lo, high=hi, skipping=skipping))
            again = b.and_(skipping, self._any_dead(item, mask.fill), "again")
            loop.yields(b.constant(0, "i64"), self.n_k, again)

    def _any_dead(self, item: Item, fill: float) -> Value:
        b, lanes = self.b, self.lanes
        no = b.constant(0, "i1")
        with b.carry(0, item.groups, 1, [no], hint="g") as (loop, g, (dead,)):
            m = b.load(b.row(self.maxima, g, lanes), self.vector, "m")
            dead_here = b.negated(self._alive(m, fill))
            found = b.and_(dead_here, self._valid(b.sub(item.count, b.mul(g, lanes))))
            loop.yields(b.or_(dead, b.reduce("or", found, "dead")))
        return loop.results[0]

    def _visit(self, item: Item, keys: KeyRange) -> None:
        b, near = self.b, self.near
        if self.statistics is not None:
            self.statistics.clear(item.padded_groups)
        skips = self.spec.mask is not None and self.spec.mask.skips
        if self.further is not None and self.further.keeps and skips:
            self.further.clear(item.padded_groups)
        self._pack(item.readers, keys.low, keys.high)
        if near is None:
            self._clear(item, float("-inf"))
            self._visit_tiles(item, keys)
            return
        b.store(b.constant(1, "i64"), self.undone)
        with b.when(self._is_near(near, item, keys)):
            self._clear(item, near.centre)
            b.store(b.constant(0, "i64"), self.weighed)
            self._visit_overlapped(item, keys, functools.partial(self._overlap_near, near))
            if self.statistics is not None:
                self.statistics.end_exponents(item.padded_groups, near.centre)
            dead = self._mark_dead_rows(item)
            if not near.finite:  # nothing else would come out
                dead = b.constant(0, "i1")
            b.store(b.convert("arith.extui", dead, "i64"), self.undone)
        with b.when(b.compare("ne", b.load(self.undone, "i64"), 0, "again")):
            self._clear(item, float("-inf"))
            self._visit_tiles(item, keys)

    def _visit_tiles(self, item: Item, keys: KeyRange) -> None:
        if self.products.overlaps:
            self._visit_overlapped(item, keys, self._overlap)
        else:
            self._visit_in_turn(item, keys)

    def _clear(self, item: Item, maximum: float) -> None:
        b, lanes = self.b, self.lanes
        with b.loop(0, item.padded_groups, hint="g") as g:
            memory = self._group_memory(g)
            b.store(b.constant(maximum, self.vector), memory.maximum)
            with b.loop(0, memory.rows, hint="e") as e:
                b.store(b.constant(0.0, self.vector), b.row(memory.output, e, lanes))

    def _is_near(self, near: BoundedScores, item: Item, range_: KeyRange) -> Value:
        """Whether the scores of the item's queries with these keys are, and the values are not extreme."""
        b, step = self.b, self.products.key_step
        nothing = b.constant(0, vector_of("i32", self.lanes))

        def largest(vector: Value) -> Value:
            """As a number. Magnitudes are ordered as their bits are, infinities and NaN above all others."""
            bits = b.reduce("maxsi", vector, "largest")
            return b.bitcast(bits, "f32")

        with b.carry(0, item.padded_groups, 1, [nothing], hint="g") as (queries, g, (worst,)):
            norms = b.load(b.row(self.query_norms, g, self.lanes), nothing.type, "norms")
            queries.yields(b.most(worst, norms))
        first, end = b.div(b.as_value(range_.low, "i64"), step), b.ceil_div(range_.high, step)
        with b.carry(first, end, 1, [nothing, nothing], hint="n") as (keys, n, (norm, magnitude)):
            note = b.row(self.notes, n, self.note_bytes, "i8")
            norms, magnitudes = (b.load(b.at(note, k * self.lanes, "i32"), nothing.type) for k in (0, 1))
            keys.yields(b.most(norm, norms), b.most(magnitude, magnitudes))
        squared = b.mul(largest(queries.results[0]), largest(keys.results[0]))
        values = largest(keys.results[1])
        close = b.compare("ole", squared, (near.bound / SLACK) ** 2, "close")
        small = b.compare("ole", values, 2.0**VALUE_EXPONENTS)
        large = b.compare("oge", values, 2.0**-VALUE_EXPONENTS)
        usual = b.and_(small, b.or_(large, b.compare("oeq", values, 0.0)), "usual")
        return b.and_(close, usual, "near")

    def _mark_dead_rows(self, item: Item) -> Value:
        """Rows whose sum is zero met no live key: their maximum becomes -inf. Returns whether there is one."""
        b, lanes = self.b, self.lanes
        with b.when(self.several), b.loop(0, item.groups, hint="g") as g:
            self._merge_partial_sums(g, 1, 0)
        with b.carry(0, item.groups, 1, [b.constant(0, "i1")], hint="g") as (loop, g, (any_,)):
            memory = self._group_memory(g)
            dead = b.compare("oeq", b.load(memory.total, self.vector, "l"), 0.0, "dead")
            m = b.load(memory.maximum, self.vector, "m")
            b.store(b.select(dead, float("-inf"), m), memory.maximum)
            rows = b.and_(dead, self._valid(b.sub(item.count, b.mul(g, lanes))))
            found = b.reduce("or", rows, "found")
            loop.yields(b.or_(any_, found))
        return loop.results[0]

    def _visit_in_turn(self, item: Item, keys: KeyRange) -> None:
        b = self.b
        with (
            b.loop(keys.low, keys.high, self.tiling.keys, hint="j0") as j0,
            b.loop(0, item.groups, self.together, hint="g") as g,
        ):
            rows, n = self._rows_and_keys(item, keys, g, j0)
            with b.when(b.compare("sgt", n, 0)):
                self._tile(self._make_tile(item, rows, g, j0, n))

    def _visit_overlapped(self, item: Item, keys: KeyRange, turn: Callable[[Tile, Tile], None]) -> None:
        """The same tiles in the same order, and one more turn to finish the last: `turn(old, new)`. A tile without keys
        takes no turn."""
        b, size = self.b, self.tiling.keys
        sets = b.ceil_div(item.groups, self.together, "sets")
        blocks = b.div(b.most(b.add(b.sub(keys.high, keys.low), size - 1), 0), size, "blocks_here")
        tiles = b.mul(blocks, sets, "tiles")
        nothing = b.constant(0, "i64")
        areas = [self.weights, self.weights if self.near is None else self.other_weights]
        start = [nothing, nothing, nothing, *areas]
        with b.carry(0, b.add(tiles, 1), 1, start, hint="t") as (loop, t, (*before, area, other)):
            end = b.compare("eq", t, tiles, "end")
            j0 = b.add(b.mul(b.div(t, sets), size), keys.low, "j0")
            g = b.mul(b.rem(t, sets), self.together, "g")
            rows, n = self._rows_and_keys(item, keys, g, j0)
            n = b.select(end, 0, n, "n_keys")
            taken = b.or_(end, b.compare("sgt", n, 0), "taken")
            with b.when(taken):
                old = self._make_tile(item, item.scope, *before, area)
                turn(old, self._make_tile(item, rows, g, j0, n, other))
            following = zip((g, j0, n, other, area), (*before, area, other), strict=True)
            loop.yields(*(b.select(taken, x, y) for x, y in following))

    def _rows_and_keys(self, item: Item, keys: KeyRange, g: Value, j0: Value) -> tuple[Scope, Value]:
        """The scope that knows the rows of the groups from g on, and how many keys from j0 on they visit."""
        b, lanes = self.b, self.lanes
        start, rows = b.add(item.first, b.mul(g, lanes)), b.sub(item.count, b.mul(g, lanes))
        last = b.sub(b.add(start, b.least(rows, self.together * lanes)), 1)
        tile = item.scope.inner({I0: start, I1: last})
        n = b.least(b.sub(keys.high, j0), self.tiling.keys, "n_keys")
        return tile, n if keys.skipping is None else self._tile_keys(tile, j0, n, keys.skipping)

    def _tile_keys(self, tile: Scope, j0: Value, n: Value, skipping: Value) -> Value:
        """How many of the n keys from j0 on the rows of a tile need."""
        b, mask = self.b, self.spec.mask
        assert mask is not None
        low, high = self._key_range(tile, self.products.key_step)
        needed = b.least(n, b.sub(high, j0))
        needed = b.select(b.compare("sle", b.add(j0, n), b.as_value(low, "i64")), 0, needed)
        if mask.tile_live is not None:
            live = b.as_value(self._with_keys(tile, j0, n).integer(mask.tile_live), "i64")
            needed = b.select(b.compare("eq", live, 0), 0, needed)
        return b.select(skipping, needed, n, "n_keys")

    def _finish(self, item: Item, g: Value) -> None:
        """Scale, transpose and write one group."""
        b, memory, lanes = self.b, self._group_memory(g), self.lanes
        rows = self._lane_scope(item, item.scope, g)
        with b.when(self.several):
            self._merge_partial_sums(g, 1, 0)
        factor = None
        if self.spec.normalizer is not Normalizer.NONE:
            m, total = (b.load(at, self.vector, name) for at, name in ((memory.maximum, "m"), (memory.total, "l")))
            factor = self._row_factor(rows, m, total)
            if self.statistics is not None:
                self.statistics.write(rows, g, m, factor)
        if self.further is not None:
            self.further.finish(item, g, rows, factor)
        padded = self.products.e_padded
        self._turn(memory.output, padded, lambda cell: cell if factor is None else self._scaled(cell, factor))
        remaining = b.least(b.sub(item.count, b.mul(g, lanes)), lanes)
        with b.loop(0, remaining, hint="r") as r:
            target = self._row_address(item.scope, b.add(b.add(item.first, b.mul(g, lanes)), r))
            self._write_row(b.row(self.finished, r, padded), target)
