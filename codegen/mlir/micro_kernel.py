"""Micro-kernels, in BLIS's sense: the loop along the reduction of every matrix product, C += A B, with C in registers.

A kernel is one instruction set's way to do a step of that loop:

- `FmaVectors`: C's rows are vectors of float32. One element of A is broadcast, times the vectors of a row of B.
- `Bf16Vectors`: the same of bfloat16, in pairs along the reduction (`x86.Avx512`, `arm.NeonPairs`).
- `AmxTiles`: C is made of 16 x 16 tiles, of products of f16 or bf16. A float32 is the exact sum of three bf16 values
  (planes), a float16 of two; of the products of planes 6 of 9 are accumulated for float32 (what is left out is below
  2**-24), 3 of 4 for float16.

`kr` elements along the reduction are one word of an operand. Accumulators are lists [row of A][vector or tile of B].
Packing is up to the caller, and so is the epilogue: what is done with the accumulators at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from .arm import NeonPairs
from .builder import Builder, Value, vector_of
from .x86 import LANES, Avx512, TileUnit

Integer = Value | int
Pieces = Sequence[Callable[[], None]]
"""Vector work in small pieces, to be written between the tile instructions of a step."""

TILE_ELEMENTS = 512
"""bf16 elements of an operand's tile."""
PlanePairs = Mapping[int, tuple[tuple[int, int], ...]]
PLANE_PAIRS: PlanePairs = {
    1: ((0, 0),),
    2: ((0, 1), (0, 0), (1, 0)),
    3: ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2)),
}
"""Plane pairs (of A, of B) that are multiplied, by number of planes, ordered so that each step loads one new pair of
tiles. Left out are products below 2**-24 of the whole (three planes) or 2**-16 (two)."""
SCORE_PAIRS = PLANE_PAIRS | {2: ((1, 1), *PLANE_PAIRS[2])}
"""Those of scores, which are exact to float32's rounding, as in eager mode: where terms cancel, 2**-16 of the whole is
much of a score, and its square root's derivative, or its sign, another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOperand:
    """A or B in memory: `count` parts (rows of A, vectors or tiles of B) from each base on. Distances are in words of
    the micro-kernel (in bf16 elements for tiles).

    step: from one step of the reduction to the next; unrolled: between the steps that are unrolled, by default the
    same; part: from one part to the next; plane: from one plane of a tile to the next; pitch: bytes from one row of a
    tile to the next."""

    bases: Sequence[Value]
    step: Integer = 0
    unrolled: Integer | None = None
    count: int = 1
    part: int = 0
    plane: int = TILE_ELEMENTS
    pitch: Integer = 64

    def at_step(self, b: Builder, k: Integer, word: str) -> MatrixOperand:
        return replace(self, bases=[b.row(base, k, self.step, word) for base in self.bases])

    def addresses(self, b: Builder, number: int, word: str) -> list[Value]:
        """Addresses of all parts, in the unrolled step of this number."""
        distance = b.mul(self.step if self.unrolled is None else self.unrolled, number)
        bases = [b.at(base, distance, word) for base in self.bases]
        return [b.at(base, n * self.part, word) for base in bases for n in range(self.count)]


Sides = tuple[MatrixOperand, MatrixOperand]  # A and B


class MicroKernel:
    """Base of the micro-kernels. A subclass says what accumulators are, and how a step is added to them."""

    word: ClassVar[str]
    """MLIR's type of a word of A."""
    kr: ClassVar[int]

    def __init__(self, b: Builder):
        self.b = b

    def zeros(self, count: int) -> list[Value]:
        """Accumulators."""
        raise NotImplementedError

    def update(self, sums: Sequence[Value], sides: Sides, number: int, pieces: Pieces) -> list[Value]:
        """Accumulators after the unrolled step of this number, of operands at a step."""
        raise NotImplementedError

    def gemm(
        self, sums: Sequence[Value], left: MatrixOperand, right: MatrixOperand, first: Integer, last: Integer,
        unroll: int = 1, stride: int = 1, beside: Callable[[Value], Pieces] | None = None,
    ) -> list[Value]:  # fmt: skip
        """Accumulators after steps first..last-1 of the reduction, every `stride` of them, each with `unroll` unrolled
        ones. beside: vector work beside a step, if products run on a unit of their own."""
        with self.b.carry(first, last, stride, sums, hint="k") as (loop, k, totals):
            loop.yields(*self.unrolled(totals, left, right, k, unroll, () if beside is None else beside(k)))
        return list(loop.results)

    def unrolled(
        self, sums: Sequence[Value], left: MatrixOperand, right: MatrixOperand, k: Integer, unroll: int,
        pieces: Pieces = (),
    ) -> list[Value]:  # fmt: skip
        """Accumulators after `unroll` steps from step k on, without a loop."""
        sides = left.at_step(self.b, k, self.word), right.at_step(self.b, k, self.word)
        for number in range(unroll):
            sums = self.update(sums, sides, number, pieces)
        return list(sums)


class FmaVectors(MicroKernel):
    """Vectors of `lanes` float32."""

    word, kr = "f32", 1

    def __init__(self, b: Builder, lanes: int):
        super().__init__(b)
        self.lanes, self.vector, self.align = lanes, vector_of("f32", lanes), 4 * lanes

    def zeros(self, count: int) -> list[Value]:
        return [self.b.constant(0.0, self.vector)] * count

    def load(self, cells: Iterable[Value]) -> list[Value]:
        """Accumulators from memory."""
        return [self.b.load(cell, self.vector, "c", align=self.align) for cell in cells]

    def store(self, sums: Sequence[Value], cells: Iterable[Value]) -> None:
        for total, cell in zip(sums, cells, strict=True):
            self.b.store(total, cell, align=self.align)

    def add(self, sums: Sequence[Value], cells: Iterable[Value]) -> None:
        """Add accumulators to memory."""
        for total, cell in zip(sums, cells, strict=True):
            self.store([self.b.add(*self.load([cell]), total, "c")], [cell])

    def update(self, sums: Sequence[Value], sides: Sides, number: int, pieces: Pieces) -> list[Value]:
        left, right = sides
        vectors = [self.load_vector(address) for address in right.addresses(self.b, number, self.word)]
        return self.rank_one(left.addresses(self.b, number, self.word), vectors, sums)

    def rank_one(self, left: Iterable[Value], right: Sequence[Value], sums: Sequence[Value]) -> list[Value]:
        """Accumulators after one step: left: addresses of words; right: vectors."""
        totals, new = iter(sums), []
        for address in left:
            word = self.broadcast(address)
            new += [self.multiply(word, vector, next(totals)) for vector in right]
        return new

    def load_vector(self, address: Value) -> Value:
        """A word for each lane."""
        return self.b.load(address, self.vector, "b", align=self.align)

    def broadcast(self, address: Value) -> Value:
        """One word for all lanes."""
        return self.b.broadcast(self.b.load(address, "f32", "a"), self.lanes)

    def multiply(self, left: Value, right: Value, total: Value) -> Value:
        return self.b.fma(left, right, total, "c")


class Bf16Vectors(FmaVectors):
    """Vectors of bfloat16 pairs, `lanes` of them."""

    word, kr = "i32", 2

    def __init__(self, b: Builder, lanes: int):
        super().__init__(b, lanes)
        self.pairs = vector_of("bf16", 2 * lanes)
        self.unit = Avx512(b) if lanes == LANES else NeonPairs(b)

    def load_vector(self, address: Value) -> Value:
        return self.b.load(address, self.pairs, "b", align=self.align)

    def broadcast(self, address: Value) -> Value:
        return self.b.bitcast(self.b.broadcast(self.b.load(address, "i32", "a"), self.lanes), self.pairs)

    def multiply(self, left: Value, right: Value, total: Value) -> Value:
        return self.unit.add_pair_products(total, left, right)


class AmxTiles(MicroKernel):
    """AMX tiles of one to three bf16 planes, or of f16. mirrored: plane pairs in the order of a kernel with A and B
    exchanged. pairs: those that are multiplied, by number of planes. element: MLIR's type."""

    word, kr = "bf16", 2

    def __init__(
        self, b: Builder, planes: int = 1, mirrored: bool = False, pairs: PlanePairs = PLANE_PAIRS,
        element: str = "bf16",
    ):  # fmt: skip
        super().__init__(b)
        self.pairs, self.mirrored, self.unit = pairs[planes], mirrored, TileUnit(b, element)

    def zeros(self, count: int) -> list[Value]:
        return [self.unit.zero() for _ in range(count)]

    def load(self, cells: Iterable[Value], pitch: int = 64) -> list[Value]:
        """Accumulators from memory; pitch: bytes from one row of a tile to the next."""
        return [self.unit.load(cell, "c", pitch) for cell in cells]

    def store(self, sums: Sequence[Value], cells: Iterable[Value], pitch: int = 64) -> None:
        for tile, cell in zip(sums, cells, strict=True):
            self.unit.store(tile, cell, pitch)

    def update(self, sums: Sequence[Value], sides: Sides, number: int, pieces: Pieces) -> list[Value]:
        """All plane pairs. `pieces` are written evenly between products: a processor looks ahead by a few hundred
        instructions, and so close vector work must stand to the 16 cycles of each."""
        b, sums = self.b, list(sums)
        places = [side.addresses(b, number, self.word) for side in sides]
        loaded: list[tuple[int, list[Value]]] = [(-1, []), (-1, [])]
        done, written = 0, 0
        for pair in self.pairs:
            for n, plane in enumerate(pair[::-1] if self.mirrored else pair):
                if loaded[n][0] != plane:
                    at = [b.at(place, plane * sides[n].plane, self.word) for place in places[n]]
                    loaded[n] = plane, [self.unit.load(address, "ab"[n], sides[n].pitch) for address in at]
            for n, (row, column) in enumerate(itertools.product(loaded[0][1], loaded[1][1])):
                sums[n] = self.unit.product(row, column, sums[n])
                done += 1
                while written < len(pieces) * done // (len(self.pairs) * len(sums)):
                    pieces[written]()
                    written += 1
        return sums
