"""All gradients in one kernel, whose lanes are keys: dQ += dS K is summed up beside dK and dV. Scores, weights and dP
are computed once instead of twice.

A thread sums up dQ of all queries of a batch element. Where the blocks of keys are cut into parts, each part leaves its
dQ, and the last part of an element adds up those of all parts, in the order of the keys: split-K, as in the forward
(`parts`). All of these lie in memory that threads share: first what parts leave, then the sums of each thread.

On AMX tiles:

    ds       dS as left operands [16 queries][32 keys], by [block of 16 queries][pair of lane groups][plane]
    keys     K as right operands, by [pair of lane groups][block of 16 columns][plane]; keys n and n + 16 are a pair
             along the reduction
    sums     dQ as tiles [block of 16 queries][block of 16 columns][16][16], for all queries of the batch element

By multiply-adds, lanes of the third product are columns:

    ds       dS as the product for dK has it, [lane group][query][L]: one scalar at a time is broadcast
    keys     K [key][d]
    sums     dQ [query][d]

Sums over the keys (`plan.RowSum`) are kept for all queries, too: [query][sum][L], a lane for every L-th key.

Pairs of bfloat16 are along the keys here and along the queries in the product for dK, so that dS is stored twice:

    ds       [lane group][query][L], one pair at a time is broadcast
    keys     K [pair of keys][d]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fusion.ir.expr import I
from fusion.lowering.backward_plan import LaneAxis
from fusion.planning.register_tiles import KEY_SPAN

from ..amx import KEYS, Amx, Products
from ..builder import Builder, Value
from ..micro_kernel import TILE_ELEMENTS, AmxTiles, MatrixOperand
from ..parts import Parts
from ..products import MultiplyAdd
from ..rows import RowReader, load_f32
from ..scope import Scope
from ..values import round_up, vector_of
from ..vectormath import sum_rows
from ..x86 import F32
from .tile import PAIR, Block, Pair

if TYPE_CHECKING:
    from .kernel import BackwardKernel

QUERY_GRADIENT_SPAN = 8 * KEY_SPAN
"""Keys after which the sums of a whole head's dQ begin anew: they pass through the caches."""


class TiledQueryGradient:
    """Memory and products on tiles. product: that of Q and K; groups: lane groups of a block (even); rows: of a tile.
    ds_bytes, pair_bytes, step_bytes: of ds, of keys, and of the sums of a key step of queries."""

    def __init__(self, b: Builder, product: Amx, groups: int, rows: int):
        self.b, self.product, self.pairs = b, product, groups // 2
        self.planes, self.blocks = product.planes, product.e_blocks
        self.tile = TILE_ELEMENTS * self.planes
        self.ds_bytes = 2 * self.tile * (rows // 16) * self.pairs
        self.pair_bytes = 2 * self.tile * self.pairs * self.blocks
        self.step_bytes = 4 * 32 * 16 * self.blocks

    def pack_keys(self, reader: RowReader, first: Value, target: Value) -> None:
        """The block's keys from `first` on."""
        b, p = self.b, self.product
        for pair in range(self.pairs):
            rows = reader.rows(b.add(first, 32 * pair), 32, p.e_padded, p.staging)
            with b.loop(0, self.blocks, hint="block") as block:
                base = b.row(target, b.add(block, pair * self.blocks), self.tile, "bf16")
                with b.loop(0, 16, hint="k") as k:
                    lines = [load_f32(b, rows, b.add(k, 16 * half), b.mul(block, 16), 16) for half in (0, 1)]
                    for plane, x in enumerate(p.split(*lines, KEYS)):
                        line = b.shuffle(x, x, [i + 16 * s for i in range(16) for s in (0, 1)], "pair")
                        b.store(line, b.at(b.row(base, k, 32, "bf16"), plane * TILE_ELEMENTS, "bf16"))

    def store(self, ds: Value, row: Value, group: Value, pair: Sequence[Value]) -> None:
        """dS of one row and the pair of lane groups from `group` on."""
        b = self.b
        block = b.add(b.mul(b.div(row, 16), self.pairs), b.div(group, 2))
        base = b.at(ds, b.add(b.mul(block, self.tile), b.mul(b.rem(row, 16), 32)), "bf16")
        for plane, words in enumerate(self.product.pairs(*pair)):
            b.store(words, b.at(base, plane * TILE_ELEMENTS, "bf16"), align=64)

    def accumulate(self, ds: Value, keys: Value, sums: Value, steps: Value, _: Value) -> None:
        """sums (of the first of these queries) += dS K over `steps` steps of 32 queries and the block's keys."""
        with self.b.loop(0, steps, hint="step") as step:
            for block, count in self.product.column_blocks():
                self._accumulate(ds, keys, sums, step, block, count)

    def _accumulate(self, ds: Value, keys: Value, sums: Value, step: Value, block: Value | int, count: int) -> None:
        b, kernel, line = self.b, AmxTiles(self.b, self.planes), self.pairs * self.tile
        corner = b.row(sums, b.add(b.mul(step, 2 * self.blocks), block), 256)
        cells = [b.at(corner, 256 * (self.blocks * a + c), "f32") for a in (0, 1) for c in range(count)]
        left = MatrixOperand(bases=[ds], step=2 * line, unrolled=self.tile, count=2, part=line)
        right = MatrixOperand(
            bases=[b.row(keys, block, self.tile, "bf16")], unrolled=self.blocks * self.tile, count=count,
            part=self.tile,
        )  # fmt: skip
        kernel.store(kernel.unrolled(kernel.load(cells), left, right, step, self.pairs), cells)

    def line(self, sums: Value, row: Value) -> Sequence[Value]:
        """The vectors of one query's gradient."""
        b = self.b
        base = b.add(b.mul(b.div(row, 16), 256 * self.blocks), b.mul(b.rem(row, 16), 16))
        return [b.load(b.at(b.at(sums, base, "f32"), 256 * block, "f32"), F32, "dq") for block in range(self.blocks)]


class VectorQueryGradient:
    """dQ by multiply-adds, of float32 or of pairs."""

    def __init__(self, b: Builder, product: MultiplyAdd, groups: int, rows: int):
        self.b, self.product, self.groups, self.rows = b, product, groups, rows
        self.lanes, self.width, self.vector = product.lanes, product.e_padded, product.vector
        self.words = self.lanes // product.kr  # of a row of dS, in a lane group
        # None where the product for dK has them.
        self.ds_bytes = 0 if product.kr == 1 else 4 * groups * rows * self.words
        self.pair_bytes = 4 * groups * self.words * self.width
        self.step_bytes = 4 * product.key_step * self.width

    def pack_keys(self, reader: RowReader, first: Value, target: Value) -> None:
        """The block's keys from `first` on."""
        b, p, lanes = self.b, self.product, self.lanes
        with b.loop(0, self.groups, hint="g") as g:
            rows = reader.rows(b.add(first, b.mul(g, lanes)), lanes, self.width, p.staging)
            start = b.row(target, g, self.words * self.width, p.word)
            for word in range(self.words):
                with b.loop(0, self.width, lanes, hint="c") as c:
                    b.store(p.value_word(rows, word, c), b.at(start, b.add(c, word * self.width), p.word))

    def store(self, ds: Value, row: Value, group: Value, pair: Sequence[Value]) -> None:
        """dS of one row and a lane group, unless the product for dK has it."""
        if self.product.kr > 1:
            place = self.b.row(ds, self.b.add(self.b.mul(group, self.rows), row), self.lanes, "bf16")
            self.b.store(self.b.convert("arith.truncf", pair[0], "bf16"), place)

    def accumulate(self, ds: Value, keys: Value, sums: Value, steps: Value, count: Value) -> None:
        """sums (of the first of these queries) += dS K over `steps` key steps of queries and `count` keys.

        A row's vectors are taken in runs as long as a register tile has groups, or one less."""
        b, vectors = self.b, self.width // self.lanes
        runs = -(-vectors // self.product.nr)
        short, longer = divmod(vectors, runs)
        with b.loop(0, steps, hint="step") as step:
            for low, high, length in ((0, longer, short + 1), (longer, runs, short)):
                with b.loop(low, high, hint="run") as run:
                    column = b.mul(b.add(b.mul(run, length), low), self.lanes)  # the runs before are one longer
                    self._add_block(ds, b.at(keys, column, "f32"), b.at(sums, column, "f32"), step, count, length)

    def _add_block(self, ds: Value, keys: Value, sums: Value, step: Value, count: Value, length: int) -> None:
        """`length` vectors of the sums of one key step of queries, over the block's keys. The block is summed up by
        itself first: so short sums lose no digits."""
        b, p, kernel, lanes, words = self.b, self.product, self.product.kernel, self.lanes, self.words
        rows, whole, group = p.key_step, b.div(count, lanes), self.rows * words
        left = MatrixOperand(
            bases=[b.row(ds, step, rows * words, p.word)], step=group, unrolled=1, count=rows, part=words
        )
        right = MatrixOperand(bases=[keys], step=words * self.width, unrolled=self.width, count=length, part=lanes)
        total = kernel.gemm(kernel.zeros(rows * length), left, right, 0, whole, unroll=words)
        left, right = (replace(x.at_step(b, whole, p.word), step=x.unrolled) for x in (left, right))
        total = kernel.gemm(total, left, right, 0, b.ceil_div(b.rem(count, lanes), p.kr))  # what a pair lacks is 0
        corner = b.row(sums, step, rows * self.width)
        kernel.add(total, [b.at(corner, r * self.width + n * lanes, "f32") for r in range(rows) for n in range(length)])

    def line(self, sums: Value, row: Value) -> Sequence[Value]:
        """The vectors of one query's gradient."""
        start = self.b.row(sums, row, self.width)
        return [self.b.load(self.b.at(start, n, "f32"), self.vector, "dq") for n in range(0, self.width, self.lanes)]


class QueryGradients:
    """dQ of a whole batch element, and the sums over the keys that belong to it, beside the products of a kernel."""

    def __init__(self, kernel: BackwardKernel):
        self.kernel, self.b, self.lanes, self.vector = kernel, kernel.b, kernel.lanes, kernel.vector
        # Sums of narrower dtypes take so few blocks of keys, each summed up by itself, that they need not begin anew.
        self.begins_anew = kernel.spec.out_dtype == "float32"
        self.row_sums = [number for number, entry in enumerate(kernel.sums) if entry.axis is LaneAxis.QUERIES]
        self.row_bytes = 4 * self.lanes * len(self.row_sums)

    def reserve(self, products: Sequence[Products]) -> None:
        """Memory."""
        product, sizes, kernel = products[0], (self.kernel.tiling.groups, self.kernel.tiling.keys), self.kernel
        if isinstance(product, Amx):
            self.product = TiledQueryGradient(self.b, product, *sizes)
        else:
            self.product = VectorQueryGradient(self.b, product, *sizes)
        self.stores_ds = self.product.ds_bytes > 0  # dS once more
        self.row_ds = kernel.area(self.product.ds_bytes, "row_ds")
        self.key_pairs = kernel.area(self.product.pair_bytes, "key_pairs")
        self.step_bytes = round_up(self.product.step_bytes + product.key_step * self.row_bytes, 64)  # see `zero`
        self.steps = kernel.params[("query_steps",)]
        with self.b.at_entry():
            self.sum_bytes = self.b.mul(self.steps, self.step_bytes, "sum_bytes")
        self.parts = Parts(kernel, self.sum_bytes)

    def begin(self, element: Value, part: Value) -> None:
        """Before the first block of a part of a batch element."""
        b, params, self.element = self.b, self.kernel.params, element
        self.sums = self.parts.record(b.add(params[("records",)], self.kernel.thread))
        self.row_area = b.row(self.sums, self.steps, self.product.step_bytes, "i8", "row_sums")
        # Sums of the spans of keys before, or what a part leaves.
        self.cut = self.parts.cut()
        self.several_spans = b.compare(
            "sgt", b.mul(params[("blocks",)], self.kernel.side.rows_per_block), QUERY_GRADIENT_SPAN
        )
        record = b.add(b.mul(element, params[("parts",)]), part)
        self.record = self.parts.record(b.select(self.cut, record, self.kernel.thread))
        self.uses_record = b.or_(self.cut, self.several_spans, "left") if self.begins_anew else self.cut
        self.kernel.zero(self.sums, self.sum_bytes)
        with b.when(self.uses_record):
            self.kernel.zero(self.record, self.sum_bytes)

    def _begin_span(self) -> None:
        """Add sums to those of the spans before, and clear them."""
        self.b.move_sums(self.sums, self.record, self.b.div(self.sum_bytes, 64), vector_of("f32", 16))

    def end_block(self, number: Value) -> None:
        if self.begins_anew:
            b, size = self.b, self.kernel.side.rows_per_block
            ends = self.kernel.ends_span(b.mul(number, size), size, QUERY_GRADIENT_SPAN)
            with b.when(b.and_(ends, self.uses_record)):
                self._begin_span()

    def end(self, scope: Scope) -> None:
        """After the last block of a part."""
        b = self.b
        with b.when(self.uses_record):
            self._begin_span()
        with self.parts.last_of(self.element, self.cut):
            with b.when(self.cut), self.parts.records(self.element) as record:
                self._add(record)
            with b.when(b.and_(self.uses_record, b.negated(self.cut))):
                self._add(self.record)
            self._write(scope)

    def _add(self, record: Value) -> None:
        """Add what lies in a record."""
        count = self.b.div(self.sum_bytes, 4)
        self.b.update(self.sums, count, self.b.add, vector_of("f32", 16), record)

    def pack(self, block: Block) -> None:
        b, kernel = self.b, self.kernel
        keys = kernel.tiles.centred or kernel.readers[0]
        self.product.pack_keys(keys, block.first, self.key_pairs)
        with b.when(b.compare("slt", block.groups, kernel.tiling.groups, "partial")):
            kernel.zero(self.row_ds, self.product.ds_bytes)

    def store(self, row: Value, g: Value, ds: Sequence[Pair]) -> None:
        """dS of rows `row` and `row` + 1 of the groups from g on."""
        for u in range(PAIR):
            self.product.store(self.row_ds, self.b.add(row, u), g, [pair[u] for pair in ds])

    def add_to_row(self, number: int, row: Scope, term: Value) -> None:
        """Add a vector of lanes to sum `number` of a row."""
        b, at = self.b, self._row_sum(row.integer(I), number)
        term = b.select(row.lanes.valid, term, b.constant(0.0, self.vector))
        b.store(b.add(b.load(at, self.vector, "sum", align=4 * self.lanes), term), at, align=4 * self.lanes)

    def _row_sum(self, query: Value, number: int) -> Value:
        start = self.b.row(self.row_area, query, self.row_bytes, "i8")
        return self.b.at(start, self.row_sums.index(number) * self.lanes, "f32")

    def accumulate(self, block: Block, start: Value, steps: Value) -> None:
        """The third product of a tile."""
        sums = self.b.row(self.sums, start, self.product.step_bytes, "i8")
        ds = self.row_ds if self.stores_ds else self.kernel.tiles.score_gemms.weights.first
        self.product.accumulate(ds, self.key_pairs, sums, steps, block.count)

    def _write(self, scope: Scope) -> None:
        """Sums over the keys, L queries at a time, and the gradient of Q."""
        b, kernel, lanes = self.b, self.kernel, self.lanes
        with b.loop(0, kernel.n_q if self.row_sums else 0, lanes, hint="i") as i:
            for number in self.row_sums:
                rows = [b.least(b.add(i, n), b.sub(kernel.n_q, 1)) for n in range(lanes)]
                lines = [b.load(self._row_sum(row, number), self.vector, "sum") for row in rows]
                at = b.at(kernel.params[("ptr", "sums", number)], b.add(kernel.flat_query, i), "f32")
                b.masked_store(sum_rows(b, lines), at, b.first_lanes(b.sub(kernel.n_q, i), self.lanes))
        with b.loop(0, kernel.n_q, hint="i") as i:
            for block, part in enumerate(self.product.line(self.sums, i)):
                b.store(b.mul(part, kernel.programs.scale), b.at(kernel.out_rows, lanes * block, "f32"))
            kernel.add_mean(kernel.out_rows, i)
            kernel.write_line(scope, 0, kernel.out_rows, i, kernel.d)
