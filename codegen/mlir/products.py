"""The two matrix products of a tile, behind one interface: vectors of float32 or of bf16 pairs, or AMX tiles of bf16
planes.

Everything is arranged so that vector lanes are queries. Queries come in groups of L (the vector width); a block has
several groups.

    scores      S^T [group][key][L]      = K Q^T
    weights     P^T, packed as the strategy wants it
    output      O^T [group][e][L]       += V^T P^T

Both products have the same shape: a left operand whose elements (or 16 x 32 tiles) are used for many lanes, and a right
operand with lanes innermost. The strategies differ in how operands are packed for their micro-kernel (`micro_kernel`),
and in the register tile, whose sizes have the names of BLIS: `mr` rows are broadcast, against `nr` vectors (groups of
queries), `kr` elements along the reduction at a time.

- `MultiplyAdd`: float32. Left operands K [key][d] and V in panels of as many columns as a register tile has,
  [e / rows][key][rows]: one scalar at a time is broadcast. (From rows of V parts of lines of the cache would be read,
  several times, from places whose distance is a power of two.)
- `Bf16Dot`: bfloat16, in pairs along the reduction, in the place of scalars: K [key][pair of d],
  V [e / rows][pair of keys][rows].
- `Amx`: left operands in 16 x 32 tiles of bf16 planes, right operands in pairs along the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion.planning.register_tiles import Target

from .builder import Builder, Value, shape_of, vector_of
from .micro_kernel import Bf16Vectors, FmaVectors, MatrixOperand, Pieces
from .rows import RowReader, Rows, load_f32, load_line
from .values import Array, round_up
from .vectormath import transpose

LONGEST_CHAIN = 128
"""Words of a product that are summed one after the other: rounding grows with a chain's length. Sums of chains are
added up, so that wide heads (channel attention, whose features are tokens) are as exact as eager mode's products."""


#: Vector work to be written between the instructions of a product, in small pieces: called with (key step, part, number
#: of parts), where the parts of a step share its work; and that of one step.
InterleavedWork = Callable[[Value, Value | int, int], Pieces]
WorkOfStep = Callable[[Value | int, int], Pieces]


class MultiplyAdd:
    """float32 vectors. One key step is `mr` keys (a multiple of 2)."""

    overlaps = False  # whether products run beside vector work, on a unit of their own; only then is a `beside` taken
    element = "f32"
    staging: Value  # memory of `staging_elements`, in which rows that are not read in place are staged

    def __init__(self, kernel: FmaVectors, target: Target, d: int, e: int, key_steps: Value):
        """key_steps: of a head's packed operands."""
        self.kernel, self.b, self.lanes, self.vector = kernel, kernel.b, kernel.lanes, kernel.vector
        self.word, self.kr = kernel.word, kernel.kr  # a word, 4 bytes, stands for `kr` elements along the reduction
        self.d, self.mr, self.nr = d, target.tile_rows, target.tile_groups
        self.key_step = self.mr
        self.d_padded = round_up(d, self.lanes * self.kr)
        self.e_padded = round_up(e, self.lanes)
        self.chain = LONGEST_CHAIN
        # Words of a column of V in a key step, and in a trip of the second product's loop: 24 multiply-adds outweigh
        # its overhead, and a loop of many more does not fit where processors keep one decoded.
        self.words_of_step = self.key_step // self.kr
        self.words_at_once = 1 if self.mr * self.nr >= 24 else self.words_of_step
        with self.b.at_entry():
            self.column_words = self.b.mul(key_steps, self.words_of_step)
        self.query_bytes, self.key_bytes, self.value_bytes = (
            4 * rows * columns // self.kr
            for rows, columns in (
                (self.lanes, self.d_padded), (self.key_step, self.d_padded), (self.key_step, self.e_padded)
            )
        )  # fmt: skip
        self.weight_bytes = 4 * self.lanes // self.kr
        self.staging_elements = max(self.lanes, self.key_step) * max(self.d_padded, self.e_padded)

    def values_of(self, values: Value, step: Value) -> Value:
        """Address of a key step in a head's packed values."""
        return self.b.row(values, step, self.words_of_step * self.mr, self.word)

    def pack_queries(self, reader: RowReader, first: Value, target: Value) -> None:
        """One group: words of Q^T [d / kr][L]."""
        b, lanes, words = self.b, self.lanes, vector_of(self.word, self.lanes)
        rows = reader.rows(first, lanes, self.d_padded, self.staging)
        with b.loop(0, self.d_padded, self.kr * lanes, hint="c") as c:
            columns = transpose(b, [b.bitcast(self.elements(rows, r, c), words) for r in range(lanes)])
            start = b.row(target, b.div(c, self.kr), lanes, self.word)
            for r, column in enumerate(columns):
                b.store(column, b.at(start, r * lanes, self.word))

    def pack_keys(self, reader: RowReader, first: Value, target: Value) -> None:
        b, padded = self.b, self.d_padded
        rows = reader.rows(first, self.key_step, padded, self.staging)
        for r in range(self.key_step):
            with b.loop(0, padded, self.kr * self.lanes, hint="c") as c:
                b.store(self.elements(rows, r, c), b.at(target, b.add(c, r * padded), self.element))

    def elements(self, rows: Rows, row: Value | int, column: Value | int) -> Value:
        """A vector of words of a row."""
        return load_f32(self.b, rows, row, column, self.lanes)

    def pack_values(self, reader: RowReader, first: Value, target: Value) -> None:
        b = self.b
        rows = reader.rows(first, self.key_step, self.e_padded, self.staging)
        with b.loop(0, self.e_padded, self.lanes, hint="c") as c:
            for word in range(self.words_of_step):
                line = self.value_word(rows, word, c)  # to the panels of a key step
                elements = shape_of(line.type)[0] // self.lanes
                for n in range(0, self.lanes, self.mr):
                    part = b.shuffle(line, line, range(n * elements, (n + self.mr) * elements))
                    b.store(part, b.at(self._column(target, b.add(c, n)), word * self.mr, self.word))

    def value_word(self, rows: Rows, word: int, column: Value) -> Value:
        """A word of each of `lanes` columns of V."""
        return load_f32(self.b, rows, word, column, self.lanes)

    def scores(self, keys: Value, queries: Sequence[Value], target: Sequence[Value]) -> None:
        """S^T of one key step and `nr` groups; target: where the step's first row of each group goes."""
        b, kernel, depth = self.b, self.kernel, -(-self.d // self.kr)
        left = MatrixOperand(bases=[keys], step=1, count=self.mr, part=self.d_padded // self.kr)
        right = MatrixOperand(bases=queries, step=self.lanes)
        cells = [b.at(place, row * self.lanes, "f32") for row in range(self.mr) for place in target]
        whole, nothing = min(depth, self.chain), kernel.zeros(len(cells))
        kernel.store(kernel.gemm(nothing, left, right, 0, whole), cells)
        if whole < depth:
            with b.loop(whole, depth, self.chain, hint="chain") as first:
                last = b.least(b.add(first, self.chain), depth)
                kernel.add(kernel.gemm(nothing, left, right, first, last), cells)

    def store_weights(self, target: Value, key: Value, first: Value, second: Value) -> None:
        """Weights of keys `key` (even) and `key` + 1 of one group."""
        address = self.b.row(target, key, self.lanes)
        self.b.store(first, address, align=4 * self.lanes)
        self.b.store(second, self.b.at(address, self.lanes, "f32"), align=4 * self.lanes)

    def accumulate(self, values: Value, steps: Value, weights: Array, output: Array, sets: Value) -> None:
        """O^T += V^T P^T over `steps` key steps, which are summed up by themselves first, for `sets` times `nr`
        groups."""
        b, kernel, size, unroll = self.b, self.kernel, self.nr, self.words_at_once
        words = b.mul(steps, self.words_of_step)
        with b.loop(0, self.e_padded, self.mr, hint="e") as e, b.loop(0, sets, hint="set") as number:
            members = [b.add(b.mul(number, size), k) for k in range(size)]
            left = MatrixOperand(bases=[self._column(values, e)], step=self.mr, count=self.mr, part=1)
            right = MatrixOperand(bases=[weights[m] for m in members], step=self.lanes)
            corners = [b.row(output[m], e, self.lanes) for m in members]
            cells = [b.at(corner, row * self.lanes, "f32") for row in range(self.mr) for corner in corners]
            kernel.add(kernel.gemm(kernel.zeros(len(cells)), left, right, 0, words, unroll, stride=unroll), cells)

    def _column(self, values: Value, e: Value) -> Value:
        """Address of the words of a column of V, the first of a panel."""
        return self.b.row(values, self.column_words, e, self.word)


class Bf16Dot(MultiplyAdd):
    """Pairs of bfloat16; others are rounded to them. Weights are rounded, as eager mode's are."""

    element = "bf16"

    def __init__(self, kernel: Bf16Vectors, target: Target, d: int, e: int, key_steps: Value):
        super().__init__(kernel, target, d, e, key_steps)
        self.unit, self.pairs = kernel.unit, kernel.pairs
        self.lines_of_keys = 1, self.mr, self.d_padded, 2 * self.lanes  # see `fixed_shift`
        self.lines_of_values = self.words_of_step * self.mr // self.lanes, self.mr, self.column_words

    def elements(self, rows: Rows, row: Value | int, column: Value | int) -> Value:
        b = self.b
        if rows.memory == "bf16":
            return load_line(b, rows, row, column, self.pairs)
        return self.unit.narrow(*(load_f32(b, rows, row, b.add(column, n), self.lanes) for n in (0, self.lanes)))

    def value_word(self, rows: Rows, word: int, column: Value) -> Value:
        return self.unit.pairs(*(load_f32(self.b, rows, 2 * word + n, column, self.lanes) for n in (0, 1)))

    def store_weights(self, target: Value, key: Value, first: Value, second: Value) -> None:
        address = self.b.row(target, self.b.div(key, 2), self.lanes, "i32")
        self.b.store(self.unit.pairs(first, second), address, align=4 * self.lanes)


def vector_products(b: Builder, target: Target, pairs: bool, d: int, e: int, key_steps: Value) -> MultiplyAdd:
    """The products of a target that has no tiles, or does not use them. pairs: of bfloat16."""
    if pairs:
        return Bf16Dot(Bf16Vectors(b, target.lanes), target, d, e, key_steps)
    return MultiplyAdd(FmaVectors(b, target.lanes), target, d, e, key_steps)
