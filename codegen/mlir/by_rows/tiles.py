"""The two products of the kernel for few queries, of all rows at a time: on AMX tiles.

A tile product takes as long for one row as for many. K is its left side, V its right side, both as they lie in memory:

    products[key, row] += K[key, 2 n] Q[row, 2 n] + K[key, 2 n + 1] Q[row, 2 n + 1]     16 keys, pairs of columns
    even[row, n] += p[row, key] V[key, 2 n] + 0 V[key, 2 n + 1]                         16 keys, pairs of columns
    odd[row, n] += 0 V[key, 2 n] + p[row, key] V[key, 2 n + 1]                          in the same tile product

Half of the second product's factors are 0, which saves putting the elements of two keys side by side. But 0 times an
infinity is NaN: a row whose output has a NaN is weighed once more, by itself.

    queries   tiles [d chunk of 32][16 pairs][16 rows][2]
    products  [key][16 rows]
    raw       [row][key]
    powers    words [even and odd][row][key], weights in bfloat16 beside zeros
    halves    [even and odd][row][pair of columns]
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fusion.ir.spec import AttentionSpec
from fusion.planning.cpu_planner import MOST_ROWS, PAIRED
from fusion.planning.register_tiles import Target, planes_of

from ..builder import Value
from ..micro_kernel import TILE_ELEMENTS, AmxTiles, FmaVectors, MatrixOperand
from ..rows import Rows, load_line
from ..vectormath import transpose
from ..x86 import BF16, F32, LANES, WORDS
from .groups import GroupedRows
from .products import STEP, KeyChunk, RowProducts
from .vectors import ValueProducts, VectorRows

if TYPE_CHECKING:
    from .kernel import RowKernel

TILE = 256  # float32 in a tile
CHUNK = 128  # keys: what is made of them stays in the first-level cache
SUMS = 4  # tiles that are added to at a time: a product takes 52 cycles, and one begins every 16


def row_products(
    spec: AttentionSpec, target: Target, widths: tuple[int, int], rows_at_once: int
) -> type[VectorRows] | type[TileRows]:
    """Products that suit a spec's operands with so many columns of K and V. rows_at_once: see `ByRows`."""
    query, whole = spec.operands[0].dtype == "bfloat16" and spec.values[0] is None, all(w % PAIRED == 0 for w in widths)
    if not (query and whole and planes_of(spec, target) == 1):
        return VectorRows
    # What only one row reads is widened in registers.
    if target.amx and (rows_at_once > 1 or all(TileRows.reads(spec, number) for number in (1, 2))):
        return TileRows
    return GroupedRows if target.groups_rows and rows_at_once > 1 and GroupedRows.suits(spec) else VectorRows


class TileRows(RowProducts):
    """All rows at a time."""

    memory = "bf16"

    def __init__(self, kernel: RowKernel, rows_at_once: int):
        super().__init__(kernel, rows_at_once)
        b, area = kernel.b, kernel.area
        self.kernel, self.values = AmxTiles(b), ValueProducts(FmaVectors(b, LANES), self, pairs=True)
        self.in_order = self.values.in_order
        self.chunks, self.blocks = self.d // PAIRED, self.d_v // PAIRED
        self.sets = 2 if 2 * self.blocks <= SUMS else 1
        self.keys = self.chunk + 3 * STEP
        self.queries = area(2 * TILE_ELEMENTS * self.chunks, "queries")
        self.products = kernel.array(self.keys, LANES, "products", "f32")
        self.raw = area(4 * MOST_ROWS * self.keys, "raw")
        self.powers = area(4 * 2 * MOST_ROWS * self.keys, "powers")
        self.halves = area(4 * TILE * self.blocks * self.sets, "halves")
        self.output = area(4 * self.d_v, "output")
        self.own_weights = area(4 * (self.chunk + LANES), "weights")  # of one row at a time

    @staticmethod
    def chunk_keys(columns: int, most: int) -> int:
        return min(most, CHUNK)

    def store_query(self, source: Rows, r: Value) -> None:
        b = self.b
        with b.loop(0, self.chunks, hint="chunk") as chunk:
            words = b.bitcast(load_line(b, source, 0, b.mul(chunk, PAIRED), BF16), WORDS)
            column = b.at(b.row(self.queries, chunk, TILE_ELEMENTS, "bf16"), r, "i32")
            for pair in range(LANES):
                word = b.extract(words, pair, "word")
                b.store(word, b.at(column, LANES * pair, "i32"))

    def begin(self, every: KeyChunk) -> None:
        b = self.b
        with b.loop(every.first, every.high, STEP, hint="key") as key:
            rows = every.k.rows(key, STEP, self.d, self.staging, every.high)
            place, pitch = b.sub(key, every.start), b.mul(rows.stride, 2)
            lines = [b.row(rows.pointer, rows.stride, n, "bf16") for n in (0, LANES)]
            left = MatrixOperand(bases=lines, step=PAIRED, pitch=pitch)
            right = MatrixOperand(bases=[self.queries], step=TILE_ELEMENTS)
            sums = self.kernel.gemm(self.kernel.zeros(2), left, right, 0, self.chunks)
            self.kernel.store(sums, [self.products[b.add(place, LANES * n)] for n in range(2)])
        with b.loop(b.sub(every.first, every.start), b.sub(every.high, every.start), LANES, hint="place") as place:
            self._transpose(place)

    def _transpose(self, place: Value) -> None:
        """16 keys: two squares of 8 keys and 8 rows beside each other."""
        b = self.b
        lines = [self.products[b.add(place, n)] for n in range(LANES)]
        halves = [b.load(line, f"vector<{MOST_ROWS}xf32>") for line in lines]
        both = [b.shuffle(low, high, range(LANES)) for low, high in zip(halves[:8], halves[8:], strict=True)]
        for r, x in enumerate(transpose(b, both)):
            b.store(x, b.at(b.at(self.raw, r * self.keys, "f32"), place, "f32"))

    def scores(self, mine: KeyChunk, r: Value, key: Value) -> Value:
        b = self.b
        return b.load(b.at(self.raw, b.add(b.mul(r, self.keys), b.sub(key, mine.start)), "f32"), F32, "score")

    def weights(self, r: Value) -> Value:
        return self.own_weights

    def weigh(self, mine: KeyChunk, r: Value) -> None:
        b, zero = self.b, self.b.constant(0, WORDS)
        first, low, high = (b.sub(x, mine.start) for x in (mine.first, mine.low, mine.high))
        with b.loop(first, low, LANES, hint="place") as place:  # keys of other rows, or that fill a step
            self._store_powers(r, place, zero)
        with b.loop(low, high, LANES, hint="place") as place:
            p = b.convert("arith.truncf", b.load(b.at(self.own_weights, place, "f32"), F32, "p"), "bf16")
            self._store_powers(r, place, b.convert("arith.extui", b.bitcast(p, f"vector<{LANES}xi16>"), "i32", "word"))
        behind = b.add(low, b.mul(b.ceil_div(b.sub(high, low), LANES), LANES), "behind")
        with b.loop(behind, self.chunk + STEP, LANES, hint="place") as place:
            self._store_powers(r, place, zero)

    def _store_powers(self, r: Value, place: Value, words: Value) -> None:
        """Bits of weights in bfloat16, as first and as second element of a pair."""
        b, at = self.b, self._powers(r, place)
        b.store(words, at)
        b.store(b.binary("arith.shli", words, 16), b.at(at, MOST_ROWS * self.keys, "i32"))

    def _powers(self, row: Value | int, place: Value) -> Value:
        return self.b.at(self.powers, self.b.add(self.b.mul(row, self.keys), place), "i32")

    def end(self, every: KeyChunk) -> None:
        b, whole = self.b, self.blocks // SUMS * SUMS
        if whole:
            with b.loop(0, whole, SUMS, hint="block") as block:
                self._accumulate(every, block, SUMS)
        if self.blocks > whole:
            self._accumulate(every, whole, self.blocks - whole)

    def _accumulate(self, every: KeyChunk, block: Value | int, count: int) -> None:
        """The outputs of `count` blocks of 32 columns."""
        b, unit, sets = self.b, self.kernel.unit, self.sets
        start = self.kernel.zeros(sets * count)
        with b.carry(every.first, every.high, STEP, start, hint="key") as (loop, key, sums):
            rows, sums = every.v.rows(key, STEP, self.d_v, self.staging, every.high), list(sums)
            for half in (0, 1):
                place = b.add(b.sub(key, every.start), LANES * half)
                left = unit.load(self._powers(0, place), "p", 4 * self.keys)
                line = b.at(rows.pointer, b.add(b.mul(rows.stride, LANES * half), b.mul(block, PAIRED)), "bf16")
                for n in range(count):
                    right = unit.load(b.at(line, n * PAIRED, "bf16"), "v", b.mul(rows.stride, 2))
                    own = n * sets + half % sets
                    sums[own] = unit.product(left, right, sums[own])
            loop.yields(*sums)
        for n, tile in enumerate(loop.results):
            unit.store(tile, b.row(self.halves, b.add(b.mul(block, sets), n), TILE))

    def add_output(self, mine: KeyChunk, r: Value, target: Value) -> None:
        b, zero = self.b, self.b.constant(0.0, F32)
        with b.carry(0, self.blocks, 1, [zero], hint="block") as (loop, block, (total,)):
            tiles = b.row(self.halves, block, self.sets * TILE)
            for odd in (0, 1):
                line = b.row(tiles, b.add(r, MOST_ROWS * odd), LANES)
                parts = [b.load(b.at(line, n * TILE, "f32"), F32, "o") for n in range(self.sets)]
                x = functools.reduce(b.add, parts)
                b.store(x, b.at(self.output, b.add(b.mul(block, PAIRED), LANES * odd), "f32"))
                total = b.add(total, x)
            loop.yields(total)
        with b.when(b.compare("uno", b.reduce("add", loop.results[0], "total"), 0.0, "again")):
            with b.loop(0, self.d_v, LANES, hint="e") as e:
                b.store(zero, b.at(self.output, e, "f32"))
            # What was a weight's word, as second element, is the weight in float32.
            weights = self._powers(b.add(r, MOST_ROWS), b.constant(0, "i64"))
            self.values.weigh(mine, weights, self.output)
        b.update(target, self.e_padded, b.add, self.vector, self.output)
