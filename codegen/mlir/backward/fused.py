"""All gradients in one kernel, whose lanes are keys: dQ += dS K is summed up beside dK and dV, where all blocks of a
batch element are one thread's. Scores, weights and dP are then computed once instead of twice.

On AMX tiles:

    slopes   dS as left operands [16 queries][32 keys], by [block of 16 queries][pair of lane groups][plane]
    keys     K as right operands, by [pair of lane groups][block of 16 columns][plane]; keys n and n + 16 are a pair
             along the reduction
    sums     dQ as tiles [block of 16 queries][block of 16 columns][16][16], for all queries of the batch element

By multiply-adds, lanes of the third product are columns:

    slopes   dS as the product for dK has it, [lane group][query][L]: one scalar at a time is broadcast
    keys     K [key][d]
    sums     dQ [query][d]

Sums over the keys (`plan.RowSum`) are kept for all queries, too: [query][sum][L], a lane for every L-th key.

Pairs of bfloat16 are along the keys here and along the queries in the product for dK, so that dS is stored twice:

    slopes   [lane group][query][L], one pair at a time is broadcast
    keys     K [pair of keys][d]
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fusion.ir.expr import I
from fusion.lowering.backward_plan import Form, LaneAxis
from fusion.planning.register_tiles import KEY_SPAN

from ..amx import TILE_ELEMENTS, Amx, Products
from ..builder import Builder, Value
from ..products import MultiplyAdd
from ..rows import RowReader, load_f32
from ..scope import Scope
from ..transpose import sum_rows
from ..values import round_up
from ..x86 import F32
from .element import PAIR, Pair
from .keys import KeysKernel
from .tile import Block

QUERY_GRADIENT_SPAN = 8 * KEY_SPAN
"""Keys after which the sums of a whole head's dQ begin anew: they pass through the caches."""


class TiledQueryGradient:
    """Memory and products on tiles. product: that of Q and K; groups: lane groups of a block (even); rows: of a tile.
    slope_bytes, pair_bytes, step_bytes: of slopes, of keys, and of the sums of a key step of queries."""

    def __init__(self, b: Builder, product: Amx, groups: int, rows: int):
        self.b, self.product, self.pairs = b, product, groups // 2
        self.planes, self.blocks = product.planes, product.e_blocks
        self.tile = TILE_ELEMENTS * self.planes
        self.slope_bytes = 2 * self.tile * (rows // 16) * self.pairs
        self.pair_bytes = 2 * self.tile * self.pairs * self.blocks
        self.step_bytes = 4 * 32 * 16 * self.blocks

    def pack_keys(self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value) -> None:
        """The block's keys from `first` on, those from `limit` on as zeros."""
        b, p = self.b, self.product
        for pair in range(self.pairs):
            rows = reader.rows(b.add(first, 32 * pair), 32, limit, p.d, p.e_padded, staging)
            with b.loop(0, self.blocks, hint="block") as block:
                base = b.row(target, b.add(block, pair * self.blocks), self.tile, "bf16")
                with b.loop(0, 16, hint="k") as k:
                    lines = [load_f32(b, rows, b.add(k, 16 * half), b.mul(block, 16), 16) for half in (0, 1)]
                    both = zip(*(p.split(line) for line in lines), strict=True)
                    for plane, (x, y) in enumerate(both):
                        line = b.shuffle(x, y, [i + 16 * s for i in range(16) for s in (0, 1)], "pair")
                        b.store(line, b.at(b.row(base, k, 32, "bf16"), plane * TILE_ELEMENTS, "bf16"))

    def store(self, slopes: Value, row: Value, group: Value, pair: Sequence[Value]) -> None:
        """dS of one row and the pair of lane groups from `group` on."""
        b = self.b
        block = b.add(b.mul(b.div(row, 16), self.pairs), b.div(group, 2))
        base = b.at(slopes, b.add(b.mul(block, self.tile), b.mul(b.rem(row, 16), 32)), "bf16")
        for plane, words in enumerate(self.product.pairs(*pair)):
            b.store(words, b.at(base, plane * TILE_ELEMENTS, "bf16"), align=64)

    def accumulate(self, slopes: Value, keys: Value, sums: Value, steps: Value, count: Value) -> None:
        """sums (of the first of these queries) += dS K over `steps` steps of 32 queries and the block's keys."""
        b = self.b
        with b.loop(0, steps, hint="step") as step:
            with b.loop(0, self.blocks // 2, hint="block") as block:
                self._accumulate(slopes, keys, sums, step, b.mul(block, 2), 2)
            if self.blocks % 2:
                self._accumulate(slopes, keys, sums, step, self.blocks - 1, 1)

    def _accumulate(self, slopes: Value, keys: Value, sums: Value, step: Value, block: Value | int, count: int) -> None:
        b, p = self.b, self.product
        lines = [b.add(b.mul(step, 2), a) for a in (0, 1)]
        cells = [
            b.row(sums, b.add(b.add(b.mul(line, self.blocks), block), c), 256) for line in lines for c in range(count)
        ]
        tiles = [p.unit.load(cell, "dq") for cell in cells]
        for pair in range(self.pairs):
            left = [p.planes_at(slopes, b.mul(b.add(b.mul(line, self.pairs), pair), self.tile)) for line in lines]
            right = [
                p.planes_at(keys, b.mul(b.add(b.add(block, c), pair * self.blocks), self.tile)) for c in range(count)
            ]
            tiles = p.unit.multiply(tiles, left, right, p.planes)
        for cell, tile in zip(cells, tiles, strict=True):
            p.unit.store(tile, cell)

    def line(self, sums: Value, row: Value) -> Sequence[Value]:
        """The vectors of one query's gradient."""
        b = self.b
        base = b.add(b.mul(b.div(row, 16), 256 * self.blocks), b.mul(b.rem(row, 16), 16))
        return [b.load(b.at(b.at(sums, base, "f32"), 256 * block, "f32"), F32, "dq") for block in range(self.blocks)]


class VectorQueryGradient:
    """The same by multiply-adds, of float32 or of pairs."""

    def __init__(self, b: Builder, product: MultiplyAdd, groups: int, rows: int):
        self.b, self.product, self.groups, self.rows = b, product, groups, rows
        self.lanes, self.width, self.vector = product.lanes, product.e_padded, product.vector
        self.words = self.lanes // product.per_word  # of a row of dS, in a lane group
        # None where the product for dK has them.
        self.slope_bytes = 0 if product.per_word == 1 else 4 * groups * rows * self.words
        self.pair_bytes = 4 * groups * self.words * self.width
        self.step_bytes = 4 * product.key_step * self.width

    def pack_keys(self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value) -> None:
        """The block's keys from `first` on, those from `limit` on as zeros."""
        b, p, lanes = self.b, self.product, self.lanes
        with b.loop(0, self.groups, hint="g") as g:
            rows = reader.rows(b.add(first, b.mul(g, lanes)), lanes, limit, p.d, self.width, staging)
            start = b.row(target, g, self.words * self.width, p.word)
            for word in range(self.words):
                with b.loop(0, self.width, lanes, hint="c") as c:
                    b.store(p.value_word(rows, word, c), b.at(start, b.add(c, word * self.width), p.word))

    def store(self, slopes: Value, row: Value, group: Value, pair: Sequence[Value]) -> None:
        """dS of one row and a lane group, unless the product for dK has it."""
        if self.product.per_word > 1:
            place = self.b.row(slopes, self.b.add(self.b.mul(group, self.rows), row), self.lanes, "bf16")
            self.b.store(self.b.convert("arith.truncf", pair[0], "bf16"), place)

    def accumulate(self, slopes: Value, keys: Value, sums: Value, steps: Value, count: Value) -> None:
        """sums (of the first of these queries) += dS K over `steps` key steps of queries and `count` keys.

        A row's vectors are taken in runs as long as a register tile has groups, or one less."""
        b, vectors = self.b, self.width // self.lanes
        runs = -(-vectors // self.product.group_step)
        short, longer = divmod(vectors, runs)
        with b.loop(0, steps, hint="step") as step:
            for low, high, length in ((0, longer, short + 1), (longer, runs, short)):
                with b.loop(low, high, hint="run") as run:
                    column = b.mul(b.add(b.mul(run, length), low), self.lanes)  # the runs before are one longer
                    self._add_block(slopes, b.at(keys, column, "f32"), b.at(sums, column, "f32"), step, count, length)

    def _add_block(self, slopes: Value, keys: Value, sums: Value, step: Value, count: Value, length: int) -> None:
        """`length` vectors of the sums of one key step of queries, over the block's keys. The block is summed up by
        itself first: so short sums lose no digits."""
        b, p, lanes, words, rows = self.b, self.product, self.lanes, self.words, self.product.key_step
        first = b.row(slopes, step, rows * words, p.word)

        def add_word(sums: Sequence[Value], left: Value, g: Value, word: Value | int) -> list[Value]:
            line = b.row(keys, b.add(b.mul(g, words), word), self.width, p.word)
            right, new = [p.load(b.at(line, n * lanes, p.word), "k") for n in range(length)], []
            for r in range(rows):
                slope = p.broadcast(b.at(left, b.add(word, r * words), p.word), "ds")
                new += [p.multiply(slope, x, sums[r * length + n], "dq") for n, x in enumerate(right)]
            return new

        start, whole = [b.constant(0.0, self.vector)] * (rows * length), b.div(count, lanes)
        with b.carry(0, whole, 1, start, hint="g") as (loop, g, total):
            left = b.row(first, g, self.rows * words, p.word)
            for word in range(words):
                total = add_word(total, left, g, word)
            loop.yields(*total)
        left = b.row(first, whole, self.rows * words, p.word)
        last = b.ceil_div(b.rem(count, lanes), p.per_word)  # what a pair lacks is 0
        with b.carry(0, last, 1, loop.results, hint="word") as (rest, word, total):
            rest.yields(*add_word(total, left, whole, word))
        for number, total in enumerate(rest.results):
            row, n = divmod(number, length)
            cell = b.at(sums, b.add(b.mul(step, rows * self.width), row * self.width + n * lanes), "f32")
            b.store(b.add(b.load(cell, self.vector, "dq", align=4 * lanes), total), cell, align=4 * lanes)

    def line(self, sums: Value, row: Value) -> Sequence[Value]:
        """The vectors of one query's gradient."""
        start = self.b.row(sums, row, self.width)
        return [self.b.load(self.b.at(start, n, "f32"), self.vector, "dq") for n in range(0, self.width, self.lanes)]


class FusedKernel(KeysKernel):
    """All gradients."""

    gradients = (0, 1, 2)
    forms = tuple(Form)

    @property
    def wants_slopes(self) -> bool:
        return True

    @property
    def reduces_lanes(self) -> bool:
        """Where dS is stored once more for dQ."""
        return self.queries.slope_bytes > 0

    def _packed_areas(self, products: Sequence[Products]) -> list[Value]:
        product, sizes = products[0], (self.tiling.groups, self.tiling.keys)
        if isinstance(product, Amx):
            self.queries = TiledQueryGradient(self.b, product, *sizes)
        else:
            self.queries = VectorQueryGradient(self.b, product, *sizes)
        self.row_slopes = self.area(self.queries.slope_bytes, "row_slopes")
        self.key_pairs = self.area(self.queries.pair_bytes, "key_pairs")
        packed = super()._packed_areas(products)
        self.query_sums = packed[4:]
        return packed

    @property
    def spans(self) -> int:
        """Of dQ's sums. Those of narrower dtypes take so few blocks of keys, each summed up by itself, that they need
        not begin anew."""
        return 2 if self.spec.out_dtype == "float32" else 1

    def _step_sizes(self, products: Sequence[Products]) -> list[int]:
        """After the packed rows: dQ and other sums over this span of keys, and over those before."""
        self.row_sums = [number for number, entry in enumerate(self.sums) if entry.axis is LaneAxis.QUERIES]
        self.row_bytes = 4 * self.lanes * len(self.row_sums)
        self.query_bytes = round_up(self.queries.step_bytes + products[0].key_step * self.row_bytes, 64)  # see `_zero`
        return [*super()._step_sizes(products), *[self.query_bytes] * self.spans]

    @contextlib.contextmanager
    def _element(self, scope: Scope, blocks: Value):
        b = self.b
        steps = self.params[("key_steps",)]
        self.sum_bytes = b.mul(steps, self.query_bytes)
        self.row_area = b.row(self.query_sums[0], steps, self.queries.step_bytes, "i8", "row_sums")
        for area in self.query_sums:
            self._zero(area, self.sum_bytes)
        yield
        if self.spans > 1:
            here, before = self.query_sums
            reached = b.mul(blocks, self.rows_per_block, "reached")
            with b.when(b.compare("sge", reached, QUERY_GRADIENT_SPAN)):
                self._add_partial_sums(before, here, self.sum_bytes)
        self._write_row_sums()
        self._write_queries(scope)

    @contextlib.contextmanager
    def _one_block(self, scope: Scope, number: Value):
        yield
        if self.spans > 1:
            first = self.b.mul(number, self.rows_per_block)
            with self.b.when(self._ends_key_span(first, self.rows_per_block, QUERY_GRADIENT_SPAN)):
                self._add_partial_sums(*self.query_sums, self.sum_bytes)

    def _pack_lanes(self, block: Block) -> None:
        super()._pack_lanes(block)
        self.queries.pack_keys(self.centred or self.readers[0], block.first, self.n_lanes, self.key_pairs, self.staging)
        with self.b.when(self.b.compare("slt", block.groups, self.tiling.groups, "partial")):
            self._zero(self.row_slopes, self.queries.slope_bytes)

    def keep_slopes(self, row: Value, g: Value, slopes: Sequence[Pair]) -> None:
        for u in range(PAIR):
            self.queries.store(self.row_slopes, self.b.add(row, u), g, [pair[u] for pair in slopes])

    def add_to_row(self, number: int, row: Scope, term: Value) -> None:
        b, at = self.b, self._row_sum(row.integer(I), number)
        term = b.select(row.lanes.valid, term, b.constant(0.0, self.vector))
        b.store(b.add(b.load(at, self.vector, "sum", align=4 * self.lanes), term), at, align=4 * self.lanes)

    def _row_sum(self, query: Value, number: int) -> Value:
        start = self.part(self.row_area, query, self.row_bytes)
        return self.b.at(start, self.row_sums.index(number) * self.lanes, "f32")

    def _second_products(self, block: Block, start: Value, steps: Value) -> None:
        super()._second_products(block, start, steps)
        sums = self.part(self.query_sums[0], start, self.queries.step_bytes)
        slopes = self.row_slopes if self.reduces_lanes else self.score_half.weights
        self.queries.accumulate(slopes, self.key_pairs, sums, steps, block.count)

    def _write_queries(self, scope: Scope) -> None:
        """The gradient of Q of a whole batch element."""
        b = self.b
        with b.loop(0, self.n_q, hint="i") as i:
            for block, part in enumerate(self.queries.line(self.query_sums[0], i)):
                b.store(b.mul(part, self.programs.scale), b.at(self.finished, self.lanes * block, "f32"))
            self._add_mean(self.finished, i)
            self._write_line(scope, 0, self.finished, i, self.d)

    def _write_row_sums(self) -> None:
        """Those over the keys of a whole batch element, L queries at a time."""
        b, lanes = self.b, self.lanes
        with b.loop(0, self.n_q if self.row_sums else 0, lanes, hint="i") as i:
            for number in self.row_sums:
                rows = [b.least(b.add(i, n), b.sub(self.n_q, 1)) for n in range(lanes)]
                lines = [b.load(self._row_sum(row, number), self.vector, "sum") for row in rows]
                at = b.at(self.params[("ptr", "sums", number)], b.add(self.flat_query, i), "f32")
                b.masked_store(sum_rows(b, lines), at, self._valid(b.sub(self.n_q, i)))
