"""Matrix products on AMX tiles of bf16 planes, or of float16. See `products` for the layout shared by all strategies.

Two by two C tiles share two A and two B tiles (`micro_kernel.AmxTiles`), so that loading does not bound the rate.

    K step (32 keys)     A tiles [key half][d chunk of 32][plane][16 keys][32]
    V step (32 keys)     A tiles [e block of 16][plane][16 e][32 keys]
    Q group (16 queries) B tiles [d chunk][plane][16 pairs][16 queries][2]
    P group              B tiles [plane][key step][16 pairs][16 queries][2]
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fusion.planning.register_tiles import PLANES, Tiling, in_float16

from .builder import Value
from .micro_kernel import SCORE_PAIRS, TILE_ELEMENTS, AmxTiles, MatrixOperand
from .products import InterleavedWork, MultiplyAdd, WorkOfStep, vector_products
from .rows import RowReader, Rows, load_f32, load_line
from .values import Array, round_up, vector_of
from .vectormath import transpose
from .x86 import LANES, WORDS, magnitude, split_lines, split_pairs

if TYPE_CHECKING:
    from .skeleton import KernelFunction

QUERIES, KEYS, VALUES = OPERANDS = range(3)
"""Operands of the two products, by how they are packed."""


class Amx:
    """Products on AMX tiles, of one to three bf16 planes, or of float16. keeps_nan: weights may be NaN where the row's
    sum is not. mirrored: scores are those of a kernel with the two sides exchanged, bit by bit. any_weights: float16
    need not hold the weights, which with the values are in bf16 planes then. max_abs: address of three vectors of i32
    that collect the largest magnitudes packed of queries, keys and values, as bits."""

    overlaps = True
    key_step = 32
    nr = 2
    lanes = 16
    lines_of_keys, lines_of_values = (2, 16, 32, TILE_ELEMENTS), (16, TILE_ELEMENTS // 2, 1)  # see `fixed_shift`
    staging: Value  # see `MultiplyAdd`

    def __init__(
        self, kernel: KernelFunction, tiling: Tiling, d: int, e: int, keeps_nan: bool, mirrored: bool, any_weights: bool
    ):
        self.b, self.max_abs, self.keeps_nan = kernel.b, kernel.watch(), keeps_nan
        planes, self.key_capacity = tiling.planes, tiling.keys
        half = in_float16(kernel.spec, planes)
        first = planes, "f16" if half else "bf16"
        self.formats = first, (PLANES["float16"], "bf16") if half and any_weights else first  # of each product's sides
        (self.score_planes, element), (self.planes, values) = self.formats
        self.kernel = AmxTiles(kernel.b, planes, mirrored, SCORE_PAIRS, element)
        self.value_kernel = AmxTiles(kernel.b, self.planes, element=values)
        self.d_padded, self.e_padded = round_up(d, 32), round_up(e, 16)
        self.chunks, self.e_blocks = self.d_padded // 32, self.e_padded // 16
        self.score_parts, self.value_parts = 2 * self.chunks, max(self.e_blocks // 2, 1)
        self.query_bytes = 2 * TILE_ELEMENTS * self.chunks * planes
        self.key_bytes, self.value_bytes = 2 * self.query_bytes, 2 * TILE_ELEMENTS * self.e_blocks * self.planes
        self.weight_bytes = 2 * 16 * self.planes
        self.staged_rows = 32 * max(self.d_padded, self.e_padded)  # behind them 16 columns of 32 keys in float32
        self.staging_elements = self.staged_rows + TILE_ELEMENTS // 2

    def values_of(self, values: Value, step: Value) -> Value:
        return self.b.row(values, step, self.value_bytes, "i8")

    def split(self, low: Value, high: Value, operand: int, product: int = 1) -> list[Value]:
        """See `x86.split_lines`, of an operand (`QUERIES`, `KEYS` or `VALUES`) for the first or second product."""
        b = self.b
        if self.max_abs is not None:
            place, bits = b.at(self.max_abs, LANES * operand, "i32"), b.most(magnitude(b, low), magnitude(b, high))
            b.store(b.most(b.load(place, WORDS, "worst"), bits), place)
        return split_lines(b, low, high, *self.formats[product])

    def _pack_row(self, rows: Rows, row: Value, column: Value, target: Value, operand: int) -> None:
        """32 elements of a row as one vector of bf16 per plane, a tile apart."""
        b, product = self.b, int(operand == VALUES)
        if (1, rows.memory) == self.formats[product] and self.max_abs is None:
            b.store(load_line(b, rows, row, column, vector_of(rows.memory, 32)), target)
            return
        halves = [load_f32(b, rows, row, b.add(column, h), 16) for h in (0, 16)]
        for plane, x in enumerate(self.split(*halves, operand, product)):
            b.store(x, b.at(target, plane * TILE_ELEMENTS, "bf16"))

    def pack_queries(self, reader: RowReader, first: Value, target: Value) -> None:
        """One group of 16 queries: pairs along d, transposed in place as 32-bit words."""
        b = self.b
        rows = reader.rows(first, 16, self.d_padded, self.staging)
        with b.loop(0, self.chunks, hint="chunk") as chunk:
            base = b.row(target, chunk, TILE_ELEMENTS * self.score_planes, "bf16")
            with b.loop(0, 16, hint="r") as r:
                self._pack_row(rows, r, b.mul(chunk, 32), b.row(base, r, 32, "bf16"), QUERIES)
            with b.loop(0, self.score_planes, hint="plane") as plane:
                lines = [b.at(base, b.add(b.mul(plane, TILE_ELEMENTS), 32 * k), "bf16") for k in range(16)]
                for line, pair in zip(lines, transpose(b, [b.load(line, WORDS) for line in lines]), strict=True):
                    b.store(pair, line)

    def pack_keys(self, reader: RowReader, first: Value, target: Value) -> None:
        b = self.b
        rows = reader.rows(first, 32, self.d_padded, self.staging)
        with b.loop(0, 32, hint="r") as r, b.loop(0, self.chunks, hint="chunk") as chunk:
            tile = b.add(b.mul(b.div(r, 16), self.chunks), chunk)
            offset = b.add(b.mul(tile, TILE_ELEMENTS * self.score_planes), b.mul(b.rem(r, 16), 32))
            self._pack_row(rows, r, b.mul(chunk, 32), b.at(target, offset, "bf16"), KEYS)

    def pack_values(self, reader: RowReader, first: Value, target: Value) -> None:
        b = self.b
        rows = reader.rows(first, 32, self.e_padded, self.staging)
        if (1, rows.memory) == self.formats[1]:
            self._copy_columns(rows, target)
            return
        columns = b.at(self.staging, self.staged_rows, "f64", "columns")
        with b.loop(0, self.e_blocks, hint="block") as block:
            with b.loop(0, 32, 16, hint="half") as half:
                lines = [load_f32(b, rows, b.add(half, r), b.mul(block, 16), 16) for r in range(16)]
                for column, line in enumerate(transpose(b, lines)):
                    b.store(line, b.at(columns, b.add(half, 32 * column), "f32"))
            base = b.row(target, block, TILE_ELEMENTS * self.planes, "bf16")
            with b.loop(0, 16, hint="e") as column:
                line = Rows(pointer=columns, stride=32, memory="f32", dtype="float32")
                self._pack_row(line, column, b.constant(0, "i64"), b.row(base, column, 32, "bf16"), VALUES)

    def _copy_columns(self, rows: Rows, target: Value) -> None:
        """V steps of rows in the tiles' type: pairs of keys as words, transposed."""
        b, half = self.b, vector_of(rows.memory, 16)
        with b.loop(0, self.e_blocks, hint="block") as block:
            pairs = []
            for r in range(0, 32, 2):
                first, second = (load_line(b, rows, r + n, b.mul(block, 16), half) for n in (0, 1))
                mixed = b.shuffle(first, second, [n + 16 * s for n in range(16) for s in (0, 1)], "mixed")
                pairs.append(b.bitcast(mixed, WORDS, "pair"))
            base = b.row(target, block, TILE_ELEMENTS, "bf16")
            for column, line in enumerate(transpose(b, pairs)):
                b.store(line, b.at(base, 32 * column, "bf16"))

    def scores(
        self, keys: Value, queries: Sequence[Value], target: Sequence[Value], beside: WorkOfStep | None = None
    ) -> None:
        """S^T of 32 keys and two groups."""
        b, kernel, size, parts = self.b, self.kernel, TILE_ELEMENTS * self.score_planes, self.score_parts
        with b.loop(0, 2, hint="half") as half:
            first = b.mul(half, self.chunks)
            left = MatrixOperand(bases=[b.row(keys, first, size, "bf16")], step=size)
            right = MatrixOperand(bases=queries, step=size)
            work = None if beside is None else lambda chunk, first=first: beside(b.add(chunk, first), parts)
            sums = kernel.gemm(kernel.zeros(len(queries)), left, right, 0, self.chunks, beside=work)
            kernel.store(sums, [b.row(place, half, 256) for place in target])

    def store_weights(self, target: Value, key: Value, first: Value, second: Value) -> None:
        """Weights of keys `key` (even) and `key` + 1 of one group, as pairs."""
        base = self.b.row(target, key, 16, "bf16")
        for plane, pair in enumerate(self.pairs(first, second)):
            self.b.store(pair, self.b.at(base, plane * self.key_capacity * 16, "bf16"), align=64)

    def pairs(self, first: Value, second: Value) -> list[Value]:
        """See `x86.split_pairs`."""
        return split_pairs(self.b, first, second, self.planes, self.keeps_nan, self.formats[1][1])

    def accumulate(
        self, values: Value, steps: Value, weights: Array, output: Array, sets: Value | None = None,
        first: Value | int = 0, beside: InterleavedWork | None = None,
    ) -> None:  # fmt: skip
        """O^T += V^T P^T over key steps first..steps-1, for `sets` pairs of groups, or the first. Columns of V are
        outermost, so that their tiles are read from the first-level cache by all but the first pair."""
        b, parts, size, kernel = self.b, self.value_parts, TILE_ELEMENTS * self.planes, self.value_kernel
        for block, count in self.column_blocks():
            work = None
            if beside is not None and (count > 1 or self.e_blocks == 1):  # nothing beside a block that is left over
                part = b.div(block, 2)
                work = lambda step, part=part, work=beside: work(step, part, parts)
            with contextlib.nullcontext(0) if sets is None else b.loop(0, sets, hint="pair") as pair:
                members = [b.add(b.mul(pair, 2), k) for k in (0, 1)]
                sources, targets = ([side[m] for m in members] for side in (weights, output))
                cells = [b.at(b.row(o, block, 256), 256 * a, "f32") for a in range(count) for o in targets]
                base = b.row(values, block, size, "bf16")
                left = MatrixOperand(bases=[base], step=self.e_blocks * size, count=count, part=size)
                right = MatrixOperand(bases=sources, step=TILE_ELEMENTS, plane=self.key_capacity * 16)
                kernel.store(kernel.gemm(kernel.load(cells), left, right, first, steps, beside=work), cells)

    def column_blocks(self) -> Iterator[tuple[Value | int, int]]:
        """First block and number of blocks, of all blocks of 16 value columns, two at a time."""
        if pairs := self.e_blocks // 2:
            with self.b.loop(0, pairs, hint="block") as block:
                yield self.b.mul(block, 2), 2
        if self.e_blocks % 2:
            yield self.e_blocks - 1, 1


Products = Amx | MultiplyAdd


def products_of(
    kernel: KernelFunction, tiling: Tiling, d: int, e: int, keeps_nan: bool = True, mirrored: bool = False,
    any_weights: bool = False,
) -> Products:  # fmt: skip
    """The products of a tiling with d columns of Q and K and e of V. keeps_nan, mirrored, any_weights: see `Amx`."""
    target, key_steps = kernel.target, kernel.params[("key_steps",)]
    if tiling.planes and target.amx:
        return Amx(kernel, tiling, d, e, keeps_nan, mirrored, any_weights)
    few = replace(target, tile_groups=min(target.tile_groups, tiling.groups))
    result = vector_products(kernel.b, few, tiling.planes > 0, d, e, key_steps)
    result.chain = tiling.chain or result.chain
    return result
