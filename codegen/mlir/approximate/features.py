"""Kernels of approximate attention on AMX tiles: polynomial features are made in the caches, multiplied, and forgotten.

    state     S[a, e]   = sum over keys j of phi_a(k_j) * v[j, e]            phi_a: the monomials of `monomials`
    readout   O^T[e, i] = sum over features a of (w_a S[a, e]) * phi_a(q_i)

A feature is the product of an earlier one (its *parent*, of one degree less) and one coordinate. Only the parents, the
features below the top degree, are kept for a block of keys or queries, in float32; a chunk of 32 features is made from
them in bf16, as operands of the tile product, and used at once. Lanes are keys in the first kernel, queries in the
second.

Features below the top degree are multiplied in two bf16 planes (three of four products, exact to 2**-16), those of the
top degree in `planes` of them: one plane errs by 2**-8 in a term that is small, which the caller's bound counts.

Layouts, with blocks of BLOCK keys or queries and everything padded with zeros:

    rows     float32 [head][block][BLOCK][d, up to a multiple of 16]      keys or queries as they are
    values   float32 [head][block][BLOCK][d_v, up to a multiple of 16]
    parents, variables   int64 [features]             rows of the parents' area, and of x
    state    float32 [head][features][e]
    planes   bf16    [head][chunk of 32 features][e tile][plane][16 e][32]
    out      float32 [head][block][BLOCK][d_v, up to a multiple of 16], or [e] where it is not divided by the last sum

and in the workspace of a thread, besides the parents and a chunk of features:

    x        float32 [d, up to a multiple of 16][BLOCK]      coordinates; then a row of ones and a row of zeros
    packed   bf16    [step of 32 keys][e tile][plane][16 pairs][16 e][2]       the values of a block
"""

from __future__ import annotations

from dataclasses import dataclass

from ..builder import Value
from ..micro_kernel import TILE_ELEMENTS, AmxTiles, MatrixOperand
from ..thread_function import KernelText, ThreadFunction
from ..values import round_up
from ..vectormath import transpose
from ..x86 import F32, split_lines, split_pairs

BLOCK = 128  # keys or queries whose parents are in the cache at a time
QUERY_BLOCK = 64
CHUNK = 32
CHUNKS_TOGETHER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureShape:
    """The sizes that a pair of kernels is made for."""

    d: int  # coordinates
    d_v: int  # columns of V
    low: int  # features below the top degree
    planes: int  # of the top degree

    @property
    def low_padded(self) -> int:
        return round_up(self.low, CHUNK)

    @property
    def e(self) -> int:
        return round_up(self.d_v + 1, 16)

    @property
    def value_width(self) -> int:
        """Columns of a row of values in memory."""
        return round_up(self.d_v, 16)

    @property
    def width(self) -> int:
        """Coordinates of a row in memory; row `width` of x is ones, the next one zeros."""
        return round_up(self.d, 16)


class FeaturesKernel(ThreadFunction):
    """Base of both kernels: features of a block of keys or queries. stage: bytes of a few chunks of features."""

    def __init__(self, shape: FeatureShape, block: int, stage: int):
        super().__init__()
        self.shape, self.block = shape, block
        self.parents_area = self.area(shape.low * block * 4, "parents_area")
        self.x = self.area((shape.width + 2) * block * 4, "x")
        self.stage = self.area(stage, "stage")

    def _source(self, feature: Value) -> tuple[Value, Value]:
        """Addresses of the rows whose product a feature is."""
        b, row = self.b, 4 * self.block
        parent, variable = (
            b.load(b.at(self.params[("ptr", name)], feature, "i64"), "i64", name) for name in ("parents", "variables")
        )
        return b.row(self.parents_area, parent, row, "i8"), b.row(self.x, variable, row, "i8")

    def transpose_rows(self, rows: Value) -> None:
        """Write x for the keys or queries at `rows`."""
        b, width = self.b, self.shape.width
        with b.loop(0, self.block, 16, hint="lane") as lane:
            for column in range(0, width, 16):
                corner = b.at(rows, b.add(b.mul(lane, width), column), "f32")
                results = [b.load(b.at(corner, width * r, "f32"), F32, "row") for r in range(16)]
                target = b.at(self.x, b.add(lane, column * self.block), "f32")
                for c, line in enumerate(transpose(b, results)):
                    b.store(line, b.at(target, c * self.block, "f32"), align=64)
            for row, value in ((width, 1.0), (width + 1, 0.0)):
                b.store(b.constant(value, F32), b.at(self.x, b.add(lane, row * self.block), "f32"), align=64)

    def make_parents(self) -> None:
        """The rows of all features below the top degree, from x."""
        b = self.b
        with b.loop(0, self.block, 16, hint="lane") as lane:
            b.store(b.constant(1.0, F32), b.at(self.parents_area, lane, "f32"), align=64)
        with b.loop(1, self.shape.low, hint="low") as feature:
            parent, variable = self._source(feature)
            target = b.row(self.parents_area, feature, 4 * self.block, "i8")
            with b.loop(0, self.block, 64, hint="lane") as lane:
                for part in range(0, 64, 16):
                    at = b.add(lane, part)
                    b.store(self._product((parent, variable), at), b.at(target, at, "f32"), align=64)

    def _product(self, rows: tuple[Value, Value], lane: Value | int) -> Value:
        return self.b.mul(*(self.b.load(self.b.at(row, lane, "f32"), F32, "x", align=64) for row in rows))

    def ranges(self, first: Value | int, last: Value) -> list[tuple[Value | int, Value, int]]:
        """Chunks [first, last) in ranges of as many planes: those below the top degree have two."""
        if self.shape.planes == 2:
            return [(first, last, 2)]
        low = self.shape.low_padded // CHUNK
        return [(first, self.b.least(last, low), 2), (self.b.most(first, low), last, self.shape.planes)]

    def _tiles(self, base: Value, step: int, count: int) -> MatrixOperand:
        """`count` of the tiles from an address on, in two planes, of which a step of the reduction has `step`."""
        return MatrixOperand(bases=[base], step=step * 2 * TILE_ELEMENTS, count=count, part=2 * TILE_ELEMENTS)


class State(FeaturesKernel):
    """One item: the features of some chunks of one head, over all its keys."""

    name = "state"

    def __init__(self, shape: FeatureShape):
        super().__init__(shape, BLOCK, stage=BLOCK // 32 * 2 * CHUNK * 64)
        self.packed = self.area(BLOCK * 2 * 2 * shape.e, "packed")

    def text(self) -> KernelText:
        b, p = self.b, self.params
        chunks, groups, blocks = p[("chunks",)], p[("groups",)], p[("blocks",)]
        with self.dynamic_loop(p[("items",)], "item") as item:
            head, group = b.div(item, groups), b.rem(item, groups)
            first, last = (b.div(b.mul(chunks, b.add(group, k)), groups) for k in (0, 1))
            with b.loop(0, blocks, hint="block") as block:
                number = b.add(b.mul(head, blocks), block)
                self.transpose_rows(b.row(p[("ptr", "rows")], number, self.shape.width * self.block, "f32", "rows"))
                # Keys beyond the end have no monomial that is not 0: not even the one of degree 0.
                ones, left = self.shape.width * self.block, b.sub(p[("n",)], b.mul(block, self.block))
                with b.loop(b.least(left, self.block), self.block, hint="beyond") as lane:
                    b.store(b.constant(0.0, "f32"), b.at(self.x, b.add(lane, ones), "f32"))
                self.make_parents()
                values = b.mul(number, self.shape.value_width * self.block)
                self._pack(b.at(p[("ptr", "values")], values, "f32", "values"))
                for start, end, planes in self.ranges(first, last):
                    with b.loop(start, end, hint="chunk") as chunk:
                        self._chunk(head, chunk, planes)
        return self.kernel_text()

    def _pack(self, values: Value) -> None:
        """The planes of a block of values as right operands of the tile product."""
        b, e, width, d_v = self.b, self.shape.e, self.shape.value_width, self.shape.d_v
        one = b.dense([float(lane == d_v % 16) for lane in range(16)], F32, "one")
        with b.loop(0, self.block // 2, hint="pair") as pair:
            place = b.add(b.mul(b.div(pair, 16), e // 16 * 1024), b.mul(b.rem(pair, 16), 32))
            place = b.at(self.packed, place, "bf16")
            lines = [b.row(values, b.add(b.mul(pair, 2), k), width) for k in (0, 1)]
            for column in range(0, e, 16):
                read = [b.load(b.at(line, column, "f32"), F32, "v") for line in lines] if column < width else [one, one]
                if d_v - d_v % 16 == column < width:
                    read = [b.add(x, one) for x in read]  # on a zero
                for plane, words in enumerate(split_pairs(b, *read, planes=2)):
                    b.store(words, b.at(place, column // 16 * 1024 + plane * 512, "bf16"), align=64)

    def _chunk(self, head: Value, chunk: Value, planes: int) -> None:
        b, kernel, steps = self.b, AmxTiles(self.b, planes), self.block // 32
        with b.loop(0, CHUNK, hint="f") as f:
            rows = self._source(b.add(b.mul(chunk, CHUNK), f))
            place = b.row(self.stage, f, 32, "bf16")
            for step in range(steps):
                halves = [self._product(rows, 32 * step + h) for h in (0, 16)]
                for plane, line in enumerate(split_lines(b, *halves, planes)):
                    b.store(line, b.at(place, (step * 2 + plane) * CHUNK * 32, "bf16"), align=64)
        e, tiles = self.shape.e, self.shape.e // 16
        state = b.mul(b.add(b.mul(head, b.mul(self.params[("chunks",)], CHUNK)), b.mul(chunk, CHUNK)), e)
        state = b.at(self.params[("ptr", "state")], state, "f32", "state")
        for column in range(0, tiles, 2):
            count = min(2, tiles - column)
            cells = [b.at(state, 16 * half * e + 16 * (column + t), "f32") for half in (0, 1) for t in range(count)]
            left = MatrixOperand(bases=[self.stage], step=2 * CHUNK * 32, count=2, part=TILE_ELEMENTS, plane=CHUNK * 32)
            right = self._tiles(b.at(self.packed, column * 1024, "bf16"), tiles, count)
            kernel.store(kernel.gemm(kernel.load(cells, 4 * e), left, right, 0, steps), cells, 4 * e)


class Readout(FeaturesKernel):
    """One item: a block of queries, over all features."""

    name = "readout"

    def __init__(self, shape: FeatureShape):
        super().__init__(shape, QUERY_BLOCK, stage=CHUNKS_TOGETHER * QUERY_BLOCK // 16 * 2 * 1024)
        self.sums = self.area(QUERY_BLOCK * 4 * shape.e, "sums")

    def text(self) -> KernelText:
        b, p = self.b, self.params
        blocks = p[("blocks",)]
        with self.dynamic_loop(p[("items",)], "item") as item:
            head = b.div(item, blocks)
            self.transpose_rows(b.row(p[("ptr", "rows")], item, self.shape.width * self.block, "f32", "rows"))
            self.make_parents()
            with b.loop(0, self.shape.e * self.block, 16, hint="zero") as place:
                b.store(b.constant(0.0, F32), b.at(self.sums, place, "f32"), align=64)
            for start, end, planes in self.ranges(0, p[("chunks",)]):
                with b.loop(start, end, CHUNKS_TOGETHER, hint="chunk") as chunk:
                    count = b.least(b.sub(end, chunk), CHUNKS_TOGETHER)
                    self._chunks(head, chunk, b.as_value(count, "i64"), planes)
            divided = b.compare("ne", p[("divided",)], 0, "divided")
            with b.when(divided):
                self._write_rows(item, self.shape.value_width, divide=True)
            with b.otherwise():
                self._write_rows(item, self.shape.e, divide=False)
        return self.kernel_text()

    def _write_rows(self, item: Value, width: int, divide: bool) -> None:
        """The sums of a block, a row per query, with the first `width` columns."""
        b, block = self.b, self.block
        out = b.row(self.params[("ptr", "out")], item, width * block, "f32", "out")
        with b.loop(0, block, 16, hint="lane") as lane:
            sums = b.at(self.sums, lane, "f32")
            total = b.load(b.at(sums, self.shape.d_v * block, "f32"), F32, "total", align=64) if divide else None
            for column in range(0, width, 16):
                read = [b.load(b.at(sums, (column + c) * block, "f32"), F32, "sum", align=64) for c in range(16)]
                if total is not None:
                    read = [b.div(x, total) for x in read]
                for r, line in enumerate(transpose(b, read)):
                    b.store(line, b.at(out, b.add(b.mul(b.add(lane, r), width), column), "f32"))

    def _chunks(self, head: Value, chunk: Value, count: Value, planes: int) -> None:
        b, groups = self.b, self.block // 16
        chunk_elements = groups * 2 * 512
        with b.loop(0, b.mul(count, 16), hint="pair") as pair:
            feature = b.add(b.mul(chunk, CHUNK), b.mul(pair, 2))
            sources = [self._source(b.add(feature, k)) for k in (0, 1)]
            place = b.add(b.mul(b.div(pair, 16), chunk_elements), b.mul(b.rem(pair, 16), 32))
            place = b.at(self.stage, place, "bf16")
            for group in range(groups):
                pair = [self._product(rows, 16 * group) for rows in sources]
                for plane, words in enumerate(split_pairs(b, *pair, planes=planes)):
                    b.store(words, b.at(place, (group * 2 + plane) * 512, "bf16"), align=64)
        tiles = self.shape.e // 16
        chunks = self.params[("chunks",)]
        state = b.mul(b.add(b.mul(head, chunks), chunk), tiles * 1024)
        state = b.at(self.params[("ptr", "planes")], state, "bf16", "state")
        for column in range(0, tiles, 2):
            width = min(2, tiles - column)
            with b.loop(0, groups, 2, hint="g") as g:
                self._accumulate(state, g, column, width, count, planes)

    def _accumulate(self, state: Value, g: Value, column: int, width: int, count: Value, planes: int):
        b, kernel, tiles, stride = self.b, AmxTiles(self.b, planes), self.shape.e // 16, 4 * self.block
        corner = b.row(self.sums, g, 16)
        cells = [b.at(corner, 16 * (column + t) * self.block + 16 * k, "f32") for t in range(width) for k in (0, 1)]
        left = self._tiles(b.at(state, column * 1024, "bf16"), tiles, width)
        right = self._tiles(b.row(self.stage, g, 1024, "bf16"), self.block // 16, 2)
        kernel.store(kernel.gemm(kernel.load(cells, stride), left, right, 0, count), cells, stride)
