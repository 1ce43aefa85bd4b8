"""The whole kernel: the function `attention(params)` that every thread of a parallel region runs.

    for each work item (batch coordinates, block of query rows) of this thread
        pack Q^T
        for each window of the keys in range: all of them, unless packed K and V would take too much memory
            pack K and V, as far as needed, if the item reads other keys than the one before
            for each block of keys, with each row's maximum so far or, where the norms of Q and K say that the scores
            lie close together, without (`fixed_shift`)
                S^T = K Q^T;  score program, softmax statistics, weights;  O^T += V^T P^T
        where the keys are cut into parts: leave what is summed; the last of the item goes on with the sums of all
        where a row met no live key although keys were skipped: once more over all keys
        divide by the sum, transpose, write

Sizes and strides are run-time arguments; d, d_v and tile sizes compile-time constants. What is between memory and
registers lies in the thread's part of a workspace; packed K and V are as long as a window.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusion.ir.expr import I0, I1
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import dead_rows_need_keys
from fusion.planning.register_tiles import AllHeads, ByRows, Target, Tiling, in_float16

from .builder import Value
from .by_rows.kernel import RowKernel
from .dense import DenseLoad
from .fixed_shift import FixedShift, score_bounds
from .mixed_heads import MixedHeadsKernel
from .parts import TileParts
from .rows import STATE_BYTES, PackedRows, RowReader
from .scope import Scope
from .skeleton import KernelFunction
from .stream import Overlapped, Sequential
from .thread_function import KernelText
from .tile import Item, KeyRange, Tiles

UNIT = 2.0**7
"""Unit of weights in float16. They are at most 2**8 in their own (`softmax.RESCALE_ABOVE`), and so none is infinite;
those down to 2**-21 have all digits, and what others lose is below 2**-32."""


def emit(
    spec: AttentionSpec, tiling: Tiling | ByRows | AllHeads, target: Target, d: int, d_v: int,
    with_statistics: bool = False,
) -> KernelText:  # fmt: skip
    """The kernel of a spec whose Q and K have d columns and V d_v. with_statistics: that of training, which also writes
    the statistics of each row (`aux_outputs.TrainingStatistics`)."""
    if isinstance(tiling, ByRows):
        return RowKernel(spec, target, d, d_v, tiling.rows_at_once).text()
    if isinstance(tiling, AllHeads):
        return MixedHeadsKernel(spec, target, d, d_v).text()
    return AttentionKernel(spec, tiling, target, d, d_v, with_statistics).text()


class AttentionKernel(KernelFunction):
    """Writes the function; see the module."""

    def __init__(
        self, spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int, with_statistics: bool = False
    ):
        half = in_float16(spec, tiling.planes)
        degree = 5 if spec.out_dtype == "float32" or spec.aux_outputs else {1: 3 + half, 2: 4}.get(tiling.planes, 5)
        flush = tiling.planes > 0 and not spec.aux_outputs
        super().__init__(spec, target, d, d_v, degree, flush, may_flag=tiling.planes > 1)
        self.context.math.unit = self.unit = UNIT if half else 1
        self.tiling, self.tiles = tiling, Tiles(self, tiling, with_statistics)
        self.products = p = self.tiles.products
        p.staging = self.area(8 * p.staging_elements, "staging")
        self.out_rows = self.area(self.lanes * p.e_padded * 4, "out_rows")
        self.packed = PackedRows(self.b, self.area(STATE_BYTES, "state"), p.key_step)
        self.parts = TileParts(self.tiles) if tiling.cut else None
        bounds = score_bounds(self.tiles)
        self.bounded = None if bounds is None else FixedShift(self.tiles, bounds)
        self.stream = (Overlapped if p.overlaps else Sequential)(self.tiles)
        aux = self.tiles.aux_outputs
        sizes = [p.key_bytes, p.value_bytes, self.bounded.step_bytes if self.bounded else 0]
        self.windowed = aux is None  # whose kept weights are those of all keys
        self.step_bytes, (self.packed_keys, values, norms, behind) = sum(sizes), self.packed_areas([*sizes, 0])
        self.packed_values = values.first
        if self.bounded is not None:
            self.bounded.step_norms = norms
        if aux is not None:
            with self.b.at_entry():
                aux.lie_at(behind.first, self.params[("key_steps",)])

    def text(self) -> KernelText:
        top, aux = self._top(), self.tiles.aux_outputs
        self.tiles.enter()
        with self._watching():
            self.packed.clear()
            with self._items() as item:
                self._item(top, item)
        kept, beyond = (0, 0) if aux is None else (aux.step_bytes, aux.fixed_bytes)
        return self.kernel_text(
            beyond, rows=self.tiling.groups * self.lanes, key_step=self.products.key_step,
            step_bytes=self.step_bytes + kept, part_bytes=0 if self.parts is None else self.parts.record_bytes,
            part_step=self.tiling.keys, windowed=self.windowed,
        )  # fmt: skip

    def _item(self, top: Scope, piece: Value) -> None:
        """All keys of an item, or one part of them, whose last piece to finish merges the results of all; a second time
        over all keys where the mask let keys be skipped, and a row that met none that is live needs them."""
        b, mask, parts = self.b, self.spec.mask, self.parts
        item, own = self._begin(top, piece)
        low, high = self._item_keys(item)
        yes = b.constant(1, "i1") if mask is not None and mask.skips else None
        if mask is None or yes is None or not dead_rows_need_keys(self.spec):
            self._visit_parts(item, KeyRange(low=low, high=high, skipping=yes), own)
            with contextlib.nullcontext() if parts is None else parts.last_of(item.number, parts.cut()):
                if parts is not None:
                    parts.merge(item)
                self._end(item)
            return
        start = [b.as_value(low, "i64"), high, yes, *own, *([] if parts is None else [b.constant(0, "i1")])]
        with b.carry(0, 2, 1, start, hint="attempt") as (loop, attempt, (lo, hi, needed, *rest)):
            again = b.compare("eq", attempt, 0, "skipping")
            with b.when(needed):
                self._visit_parts(item, KeyRange(low=lo, high=hi, skipping=again), rest[:2])
            if parts is not None:
                last = b.either(again, lambda: parts.is_last(item.number), lambda: rest[2], "i1")
                with b.when(b.and_(last, needed)):
                    parts.merge(item)
                again, rest = b.and_(again, last), [b.constant(0, "i64"), parts.total, last]
            again = b.and_(again, self._any_dead(item, mask.fill), "again")
            loop.yields(b.constant(0, "i64"), self.n_k, again, *rest)
        with contextlib.nullcontext() if parts is None else b.when(loop.results[-1]):
            self._end(item)

    def _visit_parts(self, item: Item, keys: KeyRange, own: Sequence[Value]) -> None:
        """Sum up keys, or those of parts own[0]..own[1] - 1, each by itself."""
        if self.tiles.statistics is not None:
            self.tiles.statistics.clear(item.padded_groups)
        if self.parts is None:
            self._visit(item, keys)
            return
        with self.b.loop(*own, hint="part") as part:
            low, high = self.parts.keys(part, keys.low, keys.high)
            self._visit(item, replace(keys, low=low, high=high))
            self.parts.leave(item, part)

    def _item_keys(self, item: Item) -> tuple[Value | int, Value]:
        """The keys that an item visits, as far as the mask says."""
        b, mask = self.b, self.spec.mask
        last = b.sub(b.add(item.first, item.count), 1)
        ranged = item.scope.inner({I0: item.first, I1: last})
        step = self.tiling.keys if self.spec.reproducible else self.products.key_step
        low, high = self.key_range(ranged, step)
        if mask is not None and mask.tile_live is not None:
            low, high = self._live_range(ranged, mask.tile_live, low, high, step)
        return low, high

    def _begin(self, top: Scope, piece: Value) -> tuple[Item, list[Value]]:
        """An item with its queries packed, and the first and last part of its keys to visit, if there are parts."""
        b, p, tiles, rows = self.b, self.products, self.tiles, self.tiling.groups * self.lanes
        number, part, own = (piece, None, []) if self.parts is None else self.parts.begin(piece)
        blocks = self.params[("blocks",)]
        block = b.rem(number, blocks, "block")
        scope = self._batch_scope(top, b.div(number, blocks))
        first = b.mul(block, rows, "i0")
        count = b.least(b.sub(self.n_q, first), rows, "rows")
        groups = b.ceil_div(count, self.lanes, "groups")
        readers = self._readers(scope)
        tiles.loads = [DenseLoad(scope, expr) for expr in tiles.dense]
        padded_groups = b.mul(b.ceil_div(groups, p.nr), p.nr)
        group_block, size = tiles.group_block, p.weight_bytes * self.tiling.keys
        self.zero_unused(
            tiles.weights.first, b.mul(b.least(groups, group_block), size), b.constant(group_block * size, "i64")
        )
        with b.loop(0, padded_groups, hint="g") as g:  # zeros where there is no group: products read them
            at = tiles.queries[g]
            p.pack_queries(readers[0], b.add(first, b.mul(g, self.lanes)), at)
            if self.bounded is not None:
                self.bounded.note_queries(g, at)
        return Item(
            number=number, scope=scope, readers=readers, first=first, count=count, groups=groups,
            padded_groups=padded_groups, part=part,
        ), own  # fmt: skip

    def _pack(self, readers: list[RowReader], key: Value) -> None:
        """Pack a step of K and V, from a key on."""
        p, n = self.products, self.packed.number(key)
        keys = self.packed_keys[n]
        p.pack_keys(readers[1], key, keys)
        values = p.values_of(self.packed_values, n)
        p.pack_values(readers[2], key, values)
        if self.bounded is not None:
            self.bounded.note_step(n, keys, values)

    def _any_dead(self, item: Item, fill: float) -> Value:
        b = self.b

        def dead(g: Value) -> Value:
            m = b.load(self.tiles.max_of[g], self.vector, "m")
            dead = b.negated(self._alive(m, fill))
            rows = b.and_(dead, b.first_lanes(b.sub(item.count, b.mul(g, self.lanes)), self.lanes))
            return b.reduce("or", rows, "dead")

        return b.any(item.groups, 1, dead, "g")

    def _visit(self, item: Item, keys: KeyRange) -> None:
        b, tiles = self.b, self.tiles
        skips = self.spec.mask is not None and self.spec.mask.skips
        if tiles.aux_outputs is not None and tiles.aux_outputs.keeps and skips:
            tiles.aux_outputs.clear(item.padded_groups)
        readers, own = item.readers[1:], [] if item.part is None else [item.part]
        pack = functools.partial(self._pack, item.readers)

        @contextlib.contextmanager
        def windows() -> Iterator[KeyRange]:
            size = self.params[("window",)]
            with self.packed.windows(readers, keys.low, keys.high, size, pack, own) as (low, high):
                yield replace(keys, low=low, high=high)

        with contextlib.nullcontext() if self.bounded is None else b.when(self.bounded.attend(item, windows)):
            tiles.clear(item, float("-inf"))
            with windows() as window:
                self.stream.visit(item, window)

    def _end(self, item: Item) -> None:
        """Write the rows of an item, and what else is asked of them."""
        aux = self.tiles.aux_outputs
        if aux is not None:
            aux.begin()
        with self.b.loop(0, item.groups, hint="g") as g:
            self._finish(item, g)
        if aux is not None:
            aux.end(item)

    def _finish(self, item: Item, g: Value) -> None:
        """Scale, transpose and write one group."""
        b, tiles, memory, lanes = self.b, self.tiles, self.tiles.group(g), self.lanes
        rows = tiles.lane_scope(item, item.scope, g)
        tiles.all_sums(g)
        factor = None
        if self.spec.normalizer is not Normalizer.NONE:
            m, total = (b.load(at, self.vector, name) for at, name in ((memory.maximum, "m"), (memory.total, "l")))
            factor = self._row_factor(rows, m, b.div(total, self.unit))
            if tiles.statistics is not None:
                tiles.statistics.write(rows, g, m, factor)
        if tiles.aux_outputs is not None:
            tiles.aux_outputs.finish(item, g, rows, factor)
        first = b.add(item.first, b.mul(g, lanes))
        count = b.least(b.sub(item.count, b.mul(g, lanes)), lanes)
        scale = None if factor is None else b.div(factor, self.unit)
        change = (lambda cell: cell) if scale is None else (lambda cell: self.scaled(cell, scale))
        with self._lines(memory.output, self.products.e_padded, count, change) as (r, line):
            self._write_row(line, self._row_address(item.scope, b.add(first, r)))
