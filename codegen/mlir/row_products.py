"""The two products of the kernel for few queries: elements of K and V widened to float32, or bf16 pairs as they are.

Where elements are bfloat16, vectors of them are taken apart into those at even and those at odd places, one operation
for each. Where the processor multiplies pairs, they are not taken apart: a pair of K is multiplied with one of the
query, and elements of two rows of V, put side by side, with the weights of their keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.codegen.mlir.builder import Builder, Value, vector_of
from fusion.codegen.mlir.rows import Rows, load_f32, load_line, load_pair
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.x86 import BF16, LANES, Avx512
from fusion.ir.spec import AttentionSpec
from fusion.planning.register_tiles import planes_of


def row_products(
    b: Builder, spec: AttentionSpec, target: Target, d_padded: int, e_padded: int
) -> tuple[KeyProducts, ValueProducts]:
    """What suits a spec's operands, of so many columns in memory."""
    q, k, v = (spec.operands[n].dtype == "bfloat16" and spec.values[n] is None for n in (0, 1, 2))
    double, whole = 2 * target.lanes, target.pairs and planes_of(spec, target) == 1
    key_pairs, value_pairs = q and k and d_padded % double == 0, v and e_padded % double == 0
    keys = PairKeyProducts if whole and key_pairs else KeyProducts
    values = PairValueProducts if whole and value_pairs else ValueProducts
    return keys(b, target.lanes, d_padded, key_pairs), values(b, target.lanes, value_pairs)


def _columns(
    b: Builder, rows: Rows, row: Value | int, column: Value | int, lanes: int, count: int, pairs: bool
) -> list[Value]:
    """`count` vectors of a row from a column on; with pairs every two are elements at even and at odd places."""
    if not pairs:
        return [load_f32(b, rows, row, b.add(column, n * lanes), lanes) for n in range(count)]
    both = [load_pair(b, rows, row, b.add(column, n * lanes), lanes) for n in range(0, count, 2)]
    return [x for pair in both for x in pair]


class KeyProducts:
    """K q of L keys. pairs: elements are bfloat16 and taken two by two."""

    def __init__(self, b: Builder, lanes: int, d_padded: int, pairs: bool):
        self.b, self.lanes, self.d_padded, self.pairs = b, lanes, d_padded, pairs
        self.count = 2 if pairs else 1
        self.vector = vector_of("f32", lanes)

    def store_query(self, source: Rows, query: Value) -> None:
        """Row 0 of `source` as `dot_products` reads it."""
        b, lanes = self.b, self.lanes
        with b.loop(0, self.d_padded, self.count * lanes, hint="c") as c:
            for n, x in enumerate(_columns(b, source, 0, c, lanes, self.count, self.pairs)):
                b.store(x, b.at(b.at(query, c, "f32"), n * lanes, "f32"))

    def dot_products(self, rows: Rows, query: Value) -> list[Value]:
        """For each of L keys the products with the query, summed within lanes only."""
        b, lanes, count = self.b, self.lanes, self.count
        zero = b.constant(0.0, self.vector)
        with b.carry(0, self.d_padded, count * lanes, [zero] * lanes, hint="c") as (loop, c, sums):
            at, sums = b.at(query, c, "f32"), list(sums)
            q = [b.load(b.at(at, n * lanes, "f32"), self.vector, "q") for n in range(count)]
            for r in range(lanes):
                for part, x in zip(q, _columns(b, rows, r, c, lanes, count, self.pairs), strict=True):
                    sums[r] = b.fma(x, part, sums[r], "s")
            loop.yields(*sums)
        return loop.results


class PairKeyProducts(KeyProducts):
    """The same, two products in an instruction."""

    def store_query(self, source: Rows, query: Value) -> None:
        b = self.b
        with b.loop(0, self.d_padded, 2 * self.lanes, hint="c") as c:
            b.store(load_line(b, source, 0, c, BF16), b.at(query, c, "bf16"))

    def dot_products(self, rows: Rows, query: Value) -> list[Value]:
        b, lanes, unit = self.b, self.lanes, Avx512(self.b)
        zero = b.constant(0.0, self.vector)
        with b.carry(0, self.d_padded, 2 * lanes, [zero] * lanes, hint="c") as (loop, c, sums):
            q = b.load(b.at(query, c, "bf16"), BF16, "q")
            keys = [load_line(b, rows, r, c, BF16) for r in range(lanes)]
            loop.yields(*(unit.add_pair_products(s, key, q) for s, key in zip(sums, keys, strict=True)))
        return loop.results


class ValueProducts:
    """Weighted sums of rows of V. pairs: elements are bfloat16 and taken two by two."""

    def __init__(self, b: Builder, lanes: int, pairs: bool):
        self.b, self.lanes, self.pairs = b, lanes, pairs

    def prepare(self, weights: Value, low: Value, high: Value) -> None:
        """Bring the weights of keys [low, high) (float32, from `weights` on; behind them there is room for another
        vector) into the form that `add` reads."""

    def add(self, sums: list[Value], rows: Rows, weights: Value, key: Value, e: Value | int, count: int) -> None:
        """Add `count` vectors of columns, from column e on, of L rows, times the weights from number `key` on. There
        are several sets of sums, so that additions to one do not wait for each other."""
        b, weights = self.b, self.b.at(weights, key, "f32")
        for r in range(self.lanes):
            p = b.broadcast(b.load(b.at(weights, r, "f32"), "f32", "p"), self.lanes)
            for n, x in enumerate(_columns(b, rows, r, e, self.lanes, count, self.pairs)):
                place = (r * count + n) % len(sums)
                sums[place] = b.fma(x, p, sums[place], "o")

    def in_order(self, found: Sequence[Value]) -> list[Value]:
        """The sums of one set as their columns stand in a row."""
        if not self.pairs:
            return list(found)
        pairs, half = zip(found[::2], found[1::2], strict=True), self.lanes // 2
        orders = [[place + first for place in self.order()] for first in (0, half)]
        return [self.b.shuffle(*pair, order, "o") for pair in pairs for order in orders]

    def order(self) -> list[int]:
        """Which elements of two vectors are the first vector's."""
        return [place for lane in range(self.lanes // 2) for place in (lane, lane + self.lanes)]


class PairValueProducts(ValueProducts):
    """The same of two keys in an instruction, with weights rounded to bfloat16, as eager mode's are. Elements of two
    rows are put side by side within 16 bytes, which is one operation."""

    def prepare(self, weights: Value, low: Value, high: Value) -> None:
        b, vector = self.b, vector_of("f32", self.lanes)
        with b.loop(0, b.sub(high, low), 2 * self.lanes, hint="j") as j:  # in place: what is overwritten has been read
            halves = [b.load(b.at(b.at(weights, j, "f32"), n, "f32"), vector, "p") for n in (0, self.lanes)]
            b.store(Avx512(b).narrow(*halves), b.at(weights, j, "bf16"))

    def add(self, sums: list[Value], rows: Rows, weights: Value, key: Value, e: Value | int, count: int) -> None:
        b, unit, weights = self.b, Avx512(self.b), self.b.at(weights, key, "bf16")
        low = [8 * part + n + row for part in range(4) for n in range(4) for row in (0, 2 * LANES)]
        for r in range(0, self.lanes, 2):
            p = b.bitcast(b.broadcast(b.load(b.at(weights, r, "bf16"), "i32", "p"), self.lanes), BF16)
            for n in range(0, count, 2):
                lines = [load_line(b, rows, r + k, b.add(e, n * self.lanes), BF16) for k in (0, 1)]
                for half in (0, 1):
                    place = (r // 2 * count + n + half) % len(sums)
                    pairs = b.shuffle(*lines, [element + 4 * half for element in low], "pairs")
                    sums[place] = unit.add_pair_products(sums[place], pairs, p)

    def order(self) -> list[int]:
        return [4 * part + n + high for part in (0, 1) for high in (0, self.lanes) for n in range(4)]
