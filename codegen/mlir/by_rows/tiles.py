"""The two products of the kernel for few queries, of all rows at a time: on AMX tiles.

A tile product takes as long for one row as for many. K is its left side, V its right side, both as they lie in memory:

    products[key, row] += K[key, 2 n] Q[row, 2 n] + K[key, 2 n + 1] Q[row, 2 n + 1]     16 keys, pairs of columns
    even[row, n] += p[row, key] V[key, 2 n] + 0 V[key, 2 n + 1]                         16 keys, pairs of columns
    odd[row, n] += 0 V[key, 2 n] + p[row, key] V[key, 2 n + 1]                          in the same tile product

Half of the second product's factors are 0, which saves putting the elements of two keys side by side. But 0 times an
infinity is NaN: a row whose output has a NaN is weighed once more, by itself.

    queries   tiles [d chunk of 32][16 pairs][16 rows][2]
    products  [key][16 rows]
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
from ..micro_kernel import TILE_ELEMENTS, AmxTiles, MatrixOperand
from ..rows import Rows, load_line
from ..vectormath import transpose
from ..x86 import BF16, F32, LANES, WORDS
from .products import STEP, KeyChunk, RowProducts
from .vectors import VectorRows

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
    tiles = target.amx and query and whole and planes_of(spec, target) == 1
    # What only one row reads is widened in registers.
    return TileRows if tiles and (rows_at_once > 1 or all(TileRows.reads(spec, n) for n in (1, 2))) else VectorRows


class TileRows(RowProducts):
    """All rows at a time."""

    memory = "bf16"

    def __init__(self, kernel: RowKernel, rows_at_once: int):
        super().__init__(kernel)
        b, area = kernel.b, kernel.area
        self.kernel, self.alone = AmxTiles(b), VectorRows(kernel, 1, brain=True)
        self.in_order = self.alone.in_order
        self.chunks, self.blocks = self.d_padded // PAIRED, self.e_padded // PAIRED
        self.sets = 2 if 2 * self.blocks <= SUMS else 1
        self.keys = self.chunk + 3 * STEP  # at a distance that does not fill few sets of the cache
        self.queries = area(2 * TILE_ELEMENTS * self.chunks, "queries")
        self.products = kernel.array(self.chunk, LANES, "products", "f32")
        self.powers = area(4 * 2 * MOST_ROWS * self.keys, "powers")
        self.halves = area(4 * TILE * self.blocks * self.sets, "halves")

    @staticmethod
    def chunk_keys(columns: int) -> int:
        return CHUNK

    def store_query(self, source: Rows, r: Value) -> None:
        b = self.b
        with b.loop(0, self.chunks, hint="chunk") as chunk:
            words = b.bitcast(load_line(b, source, 0, b.mul(chunk, PAIRED), BF16), WORDS)
            column = b.at(b.row(self.queries, chunk, TILE_ELEMENTS, "bf16"), r, "i32")
            for pair in range(LANES):
                b.store(b.extract(words, pair, "word"), b.at(column, LANES * pair, "i32"))

    def begin(self, every: KeyChunk) -> None:
        b = self.b
        with b.loop(every.first, every.high, STEP, hint="key") as key:
            rows = every.k.rows(key, STEP, self.d_padded, self.staging)
            lines = [b.row(rows.pointer, rows.stride, n, "bf16") for n in (0, LANES)]
            left = MatrixOperand(bases=lines, step=PAIRED, pitch=b.mul(rows.stride, 2))
            right = MatrixOperand(bases=[self.queries], step=TILE_ELEMENTS)
            sums = self.kernel.gemm(self.kernel.zeros(2), left, right, 0, self.chunks)
            place = b.sub(key, every.start)
            self.kernel.store(sums, [self.products[b.add(place, LANES * n)] for n in range(2)])
        with b.loop(every.first, every.high, LANES, hint="key") as key:
            self._transpose(every, key)

    def _transpose(self, every: KeyChunk, key: Value) -> None:
        """16 keys: two squares of 8 keys and 8 rows beside each other."""
        b, place = self.b, self.b.sub(key, every.start)
        halves = [b.load(self.products[b.add(place, n)], f"vector<{MOST_ROWS}xf32>") for n in range(LANES)]
        both = [b.shuffle(low, high, range(LANES)) for low, high in zip(halves[:8], halves[8:], strict=True)]
        for r, x in enumerate(transpose(b, both)):
            b.store(x, self.weight(every, b.constant(r, "i64"), key))

    def weigh(self, every: KeyChunk, r: Value) -> None:
        """Bits of weights in bfloat16, as first and as second element of a pair."""
        b = self.b
        with b.loop(every.first, every.stop, LANES, hint="key") as key:
            p = b.convert("arith.truncf", b.load(self.weight(every, r, key), F32, "p"), "bf16")
            word = b.convert("arith.extui", b.bitcast(p, f"vector<{LANES}xi16>"), "i32", "word")
            at = self._powers(every, r, key)
            b.store(word, at)
            b.store(b.binary("arith.shli", word, 16), b.at(at, MOST_ROWS * self.keys, "i32"))

    def _powers(self, every: KeyChunk, row: Value | int, key: Value) -> Value:
        return self.b.at(self.powers, self.b.add(self.b.mul(row, self.keys), self.b.sub(key, every.start)), "i32")

    def end(self, every: KeyChunk) -> None:
        b, whole = self.b, self.blocks // SUMS * SUMS
        if whole:
            with b.loop(0, whole, SUMS, hint="block") as block:
                self._accumulate(every, block, SUMS)
        if self.blocks > whole:
            self._accumulate(every, whole, self.blocks - whole)

    def _accumulate(self, every: KeyChunk, block: Value | int, count: int) -> None:
        """The outputs of `count` blocks of 32 columns."""
        b, kernel, sets = self.b, self.kernel, self.sets
        with b.carry(every.first, every.high, STEP, kernel.zeros(sets * count), hint="key") as (loop, key, so_far):
            rows, sums = every.v.rows(key, STEP, self.e_padded, self.staging, every.high), list(so_far)
            pitch, column = b.mul(rows.stride, 2), b.mul(block, PAIRED)
            for half in (0, 1):
                place = self._powers(every, 0, b.add(key, LANES * half))
                line = b.at(rows.pointer, b.add(b.mul(rows.stride, LANES * half), column), "bf16")
                left = MatrixOperand(bases=[place], pitch=4 * self.keys)
                right = MatrixOperand(bases=[line], count=count, part=PAIRED, pitch=pitch)
                own = slice(half % sets, None, sets)
                sums[own] = kernel.update(sums[own], (left, right), 0, ())
            loop.yields(*sums)
        first = b.mul(block, sets)
        kernel.store(loop.results, [b.row(self.halves, b.add(first, n), TILE) for n in range(sets * count)])

    def add_output(self, every: KeyChunk, r: Value, target: Value) -> None:
        b, zero, output = self.b, self.b.constant(0.0, F32), self.alone.outputs[r]
        with b.carry(0, self.blocks, 1, [zero], hint="block") as (loop, block, (total,)):
            tiles = b.row(self.halves, block, self.sets * TILE)
            for odd in (0, 1):
                line = b.row(tiles, b.add(r, MOST_ROWS * odd), LANES)
                x = functools.reduce(b.add, (b.load(b.at(line, n * TILE, "f32"), F32, "o") for n in range(self.sets)))
                b.store(x, b.at(output, b.add(b.mul(block, PAIRED), LANES * odd), "f32"))
                total = b.add(total, x)
            loop.yields(total)
        with b.when(b.compare("uno", b.reduce("add", loop.results[0], "total"), 0.0, "again")):
            self.alone.clear(r)
            self.alone.add_values(every, r, None)
        self.alone.add_output(every, r, target)
