"""The two matrix products of a tile, behind one interface: multiply-add vectors, or AMX tiles of bf16 planes.

Everything is arranged so that vector lanes are queries. Queries come in groups of L (the vector width); a block has
several groups.

    scores      S^T [group][key][L]      = K Q^T
    weights     P^T, packed as the strategy wants it
    output      O^T [group][e][L]       += V^T P^T

Both products have the same shape: a left operand whose elements (or 16 x 32 tiles) are used for many lanes, and a right
operand with lanes innermost. The strategies differ in how operands are packed and in the register tile.

- `MultiplyAdd`: float32. Left operands K [key][d] and V [key][e]: one scalar at a time is broadcast.
- `Amx`: left operands in 16 x 32 tiles of bf16, right operands in pairs along the reduction. A float32 is the exact sum
of three bf16
  values (planes), a float16 of two; the products of planes that matter are accumulated in float32: 6 of 9 for float32
  (what is left out is below 2**-24 of the product), 3 of 4 for float16, one for bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fusion.codegen.mlir.builder import Builder, Value, vector_of
from fusion.codegen.mlir.rows import RowReader, load_f32
from fusion.codegen.mlir.transpose import transpose


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


#: Vector work to be written between the instructions of a product, in small pieces: called with (key step, part, number
#: of parts), where the parts of a step share its work.
InterleavedWork = Callable[[Value, "Value | int", int], Sequence[Callable[[], None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Memory of consecutive groups: the first one's address and the distance in bytes."""

    first: Value
    stride: int

    def member(self, b: Builder, number: Value | int) -> Value:
        return b.at(self.first, b.mul(number, self.stride), "i8")


class Products(Protocol):
    """What the kernel needs of a strategy. Sizes in elements are static; `*_bytes` are sizes of packed operands.

    overlaps: whether products run beside vector work, on a unit of their own; only then is a `beside` taken.
    """

    overlaps: bool
    key_step: int
    group_step: int
    d_padded: int
    e_padded: int

    def query_bytes(self) -> int: ...
    def key_bytes(self) -> int: ...
    def value_bytes(self) -> int: ...
    def weight_bytes(self, keys: int) -> int: ...
    def staging_elements(self) -> int: ...
    def pack_queries(self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value) -> None: ...
    def pack_keys(self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value) -> None: ...
    def pack_values(self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value) -> None: ...
    def scores(
        self,
        keys: Value,
        queries: Sequence[Value],
        target: Sequence[Value],
        step: Value | None = None,
        beside: InterleavedWork | None = None,
    ) -> None: ...
    def store_weights(self, target: Value, key: Value, first: Value, second: Value) -> None: ...
    def accumulate(
        self,
        values: Value,
        steps: Value,
        weights: Sequence[Value],
        output: Sequence[Value],
        first: Value | int = 0,
        beside: InterleavedWork | None = None,
    ) -> None: ...
    def accumulate_sets(self, values: Value, steps: Value, weights: Groups, output: Groups, sets: Value) -> None: ...


class MultiplyAdd:
    """float32 vectors. One key step is `tile_rows` keys (a multiple of 2)."""

    overlaps = False

    def __init__(self, b: Builder, lanes: int, d: int, e: int, tile_rows: int, tile_groups: int):
        self.b, self.lanes, self.d, self.e = b, lanes, d, e
        self.tile_rows, self.group_step = tile_rows, tile_groups
        self.key_step = tile_rows
        self.d_padded = round_up(d, lanes)
        self.e_padded = round_up(e, lanes)
        self.vector = vector_of("f32", lanes)

    def query_bytes(self) -> int:
        """Of one group."""
        return 4 * self.d_padded * self.lanes

    def key_bytes(self) -> int:
        """Of one key step."""
        return 4 * self.key_step * self.d_padded

    def value_bytes(self) -> int:
        return 4 * self.key_step * self.e_padded

    def weight_bytes(self, keys: int) -> int:
        return 4 * keys * self.lanes

    def staging_elements(self) -> int:
        return max(self.lanes, self.key_step) * max(self.d_padded, self.e_padded)

    def pack_queries(self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value) -> None:
        """One group: Q^T [d][L]."""
        b, lanes = self.b, self.lanes
        rows = reader.rows(first, lanes, limit, self.d, self.d_padded, staging)
        with b.loop(0, self.d_padded, lanes, hint="c") as c:
            columns = transpose(b, [load_f32(b, rows, r, c, lanes) for r in range(lanes)])
            for r, column in enumerate(columns):
                b.store(column, b.at(target, b.mul(b.add(c, r), lanes), "f32"))

    def _copy(
        self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value, width: int, padded: int
    ) -> None:
        b = self.b
        rows = reader.rows(first, self.key_step, limit, width, padded, staging)
        for r in range(self.key_step):
            with b.loop(0, padded, self.lanes, hint="c") as c:
                b.store(load_f32(b, rows, r, c, self.lanes), b.at(target, b.add(c, r * padded), "f32"))

    def pack_keys(self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value) -> None:
        self._copy(reader, first, limit, target, staging, self.d, self.d_padded)

    def pack_values(self, reader: RowReader, first: Value, limit: Value, target: Value, staging: Value) -> None:
        self._copy(reader, first, limit, target, staging, self.e, self.e_padded)

    def scores(
        self,
        keys: Value,
        queries: Sequence[Value],
        target: Sequence[Value],
        step: Value | None = None,
        beside: InterleavedWork | None = None,
    ) -> None:
        """S^T of one key step and `group_step` groups; target: where the step's first row of each group goes."""
        b, rows, groups = self.b, range(self.tile_rows), range(len(queries))
        zero = b.constant(0.0, self.vector)
        with b.carry(0, self.d, 1, [zero] * (len(rows) * len(groups)), hint="c") as (loop, c, sums):
            right = [
                b.load(b.at(queries[g], b.mul(c, self.lanes), "f32"), self.vector, "q", align=4 * self.lanes)
                for g in groups
            ]
            new = []
            for r in rows:
                left = b.broadcast(b.load(b.at(keys, b.add(c, r * self.d_padded), "f32"), "f32", "k"), self.lanes)
                new += [b.fma(left, right[g], sums[r * len(groups) + g], "s") for g in groups]
            loop.yields(*new)
        for r in rows:
            for g in groups:
                b.store(loop.results[r * len(groups) + g], b.at(target[g], r * self.lanes, "f32"), align=4 * self.lanes)

    def store_weights(self, target: Value, key: Value, first: Value, second: Value) -> None:
        """Weights of keys `key` (even) and `key` + 1 of one group."""
        address = self.b.at(target, self.b.mul(key, self.lanes), "f32")
        self.b.store(first, address, align=4 * self.lanes)
        self.b.store(second, self.b.at(address, self.lanes, "f32"), align=4 * self.lanes)

    def accumulate(
        self,
        values: Value,
        steps: Value,
        weights: Sequence[Value],
        output: Sequence[Value],
        first: Value | int = 0,
        beside: InterleavedWork | None = None,
    ) -> None:
        """O^T += V^T P^T over key steps first..steps-1, for `group_step` groups."""
        b = self.b
        with b.loop(0, self.e_padded, self.tile_rows, hint="e") as e:
            cells = [b.at(o, b.mul(e, self.lanes), "f32") for o in output]
            self._accumulate(
                b.at(values, e, "f32"), (b.mul(first, self.key_step), b.mul(steps, self.key_step)), weights, cells
            )

    def accumulate_sets(self, values: Value, steps: Value, weights: Groups, output: Groups, sets: Value) -> None:
        """The same for `sets` times `group_step` groups."""
        b, size = self.b, self.group_step
        with b.loop(0, self.e_padded, self.tile_rows, hint="e") as e, b.loop(0, sets, hint="set") as number:
            members = [b.add(b.mul(number, size), k) for k in range(size)]
            sources = [weights.member(b, m) for m in members]
            cells = [b.at(output.member(b, m), b.mul(e, self.lanes), "f32") for m in members]
            self._accumulate(b.at(values, e, "f32"), (0, b.mul(steps, self.key_step)), sources, cells)

    def _accumulate(
        self, column: Value, keys: tuple[Value | int, Value], weights: Sequence[Value], output: Sequence[Value]
    ) -> None:
        """`tile_rows` columns of V from `column` on, against one set of groups."""
        b, rows, groups, lanes = self.b, range(self.tile_rows), range(len(weights)), self.lanes
        cells = [b.at(output[g], r * lanes, "f32") for r in rows for g in groups]
        start = [b.load(cell, self.vector, "o", align=4 * lanes) for cell in cells]
        with b.carry(*keys, 1, start, hint="j") as (loop, j, sums):
            right = [
                b.load(b.at(weights[g], b.mul(j, lanes), "f32"), self.vector, "p", align=4 * lanes) for g in groups
            ]
            base = b.at(column, b.mul(j, self.e_padded), "f32")
            new = []
            for r in rows:
                left = b.broadcast(b.load(b.at(base, r, "f32"), "f32", "v"), lanes)
                new += [b.fma(left, right[g], sums[r * len(groups) + g], "o") for g in groups]
            loop.yields(*new)
        for cell, result in zip(cells, loop.results, strict=True):
            b.store(result, cell, align=4 * lanes)
