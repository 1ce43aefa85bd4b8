"""Softmax with a fixed shift in place of the running maximum, where scores lie near a centre that is known beforehand
(`lowering.bounded_scores`): no pass looks for maxima.

The norms of queries and keys are kept as they are packed, and tell for a work item and a window of keys whether its
scores are near. On AMX half of the weights take the place of the maxima then, and weights have two areas, in turns:

    the second half of the weights of one tile beside the scores of the next, then the product with V of the one beside
    the first half of the weights of the next
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

from fusion.ir.expr import Expr
from fusion.ir.results import keeps_ends
from fusion.ir.spec import Normalizer
from fusion.lowering.bounded_scores import SLACK, VALUE_EXPONENTS, BoundedScores, bounded_scores
from fusion.lowering.elementary import BIAS, MANTISSA

from .amx import Amx
from .builder import Value
from .products import Bf16Dot
from .softmax import GroupSoftmax, Weigh
from .stream import KeyWork, Overlapped, Sequential
from .tile import Item, KeyRange, ScoreTile, Tiles
from .values import Array
from .vectormath import sum_rows
from .x86 import BF16, F32, HALVES, LANES, WORDS, Avx512, magnitude


def score_bounds(tiles: Tiles) -> BoundedScores | None:
    """When the scores of a kernel are near a centre; None where it would gain nothing (products outweigh the softmax
    with several planes, pairs need exponentials for training) or rows need their true maximum."""
    spec, programs = tiles.spec, tiles.programs
    gains = tiles.kernel.target.looks_up_bytes and (tiles.products.overlaps or tiles.statistics is None)
    gains = gains and tiles.tiling.planes == 1 and spec.out_dtype != "float32"
    gains = gains and spec.dtype != "float16"  # whose exponents reach less far than the bound
    true_maximum = tiles.weight is not None or keeps_ends(spec) or spec.aux_outputs
    if not gains or true_maximum or spec.reproducible or spec.normalizer is Normalizer.NONE:
        return None
    known = [program for program in (programs.masked, programs.full) if program is not None]
    return bounded_scores(known, programs.scale, *((MANTISSA, BIAS) if tiles.statistics is None else (1.0, 0.0)))


class FixedShift:
    """Norms, decisions and weights of a kernel. step_bytes: of a step's norms and magnitudes, all in `step_norms`."""

    step_norms: Array

    def __init__(self, tiles: Tiles, scores: BoundedScores):
        kernel, size, products = tiles.kernel, 4 * LANES, tiles.products
        assert isinstance(products, (Amx, Bf16Dot))
        self.tiles, self.b, self.products, self.scores, self.step_bytes = tiles, tiles.b, products, scores, 2 * size
        self.query_norms = kernel.array(tiles.tiling.groups, size, "query_norms")
        self.needs_general, self.keys_done = kernel.area(64, "needs_general"), kernel.area(64, "keys_done")
        self.vectors = Avx512(tiles.b)
        self.stream = (_Overlapped if products.overlaps else _Sequential)(self)

    def note_queries(self, g: Value, packed: Value) -> None:
        """The squared norms of a packed group of queries, a lane each."""
        b = self.b
        with b.carry(0, self.products.d_padded // 2, 1, [b.constant(0.0, F32)], hint="pair") as (loop, pair, (total,)):
            x = b.load(b.row(packed, pair, 2 * LANES, "bf16"), BF16, "pairs")
            loop.yields(self.vectors.add_pair_products(total, x, x))
        b.store(magnitude(b, loop.results[0]), self.query_norms[g])

    def note_step(self, number: Value, keys: Value, values: Value) -> None:
        """The largest squared norms and magnitudes of a packed key step, as vectors of bits. Keys lie in parts of so
        many rows; a row and the next, two lines of a row, are so many bf16 apart. Of values so many lines are together;
        a number of words times a distance further are the next."""
        b, p, note = self.b, self.products, self.step_norms[number]
        (parts, rows, row, line), chunks = p.lines_of_keys, p.d_padded // (2 * LANES)
        with b.carry(0, parts, 1, [b.constant(0, WORDS)], hint="half") as (halves, half, (largest,)):
            with b.carry(0, chunks, 1, [b.constant(0.0, F32)] * rows, hint="chunk") as (loop, chunk, totals):
                first = b.row(keys, b.add(chunk, b.mul(half, chunks)), line, "bf16")
                pairs = [b.load(b.at(first, row * r, "bf16"), BF16, "pairs") for r in range(rows)]
                loop.yields(*map(self.vectors.add_pair_products, totals, pairs, pairs))
            sums = sum_rows(b, loop.results)
            if rows < LANES:  # each lane has half of a row's
                sums = b.add(sums, b.shuffle(sums, sums, [(lane + rows) % LANES for lane in range(LANES)], "other"))
            halves.yields(b.most(largest, magnitude(b, sums)))
        b.store(halves.results[0], note)
        (lines, words, distance), count = p.lines_of_values, p.key_step * p.e_padded // (2 * LANES)
        with b.carry(0, count, 1, [b.constant(0, HALVES)], hint="line") as (loop, n, (worst,)):
            stretch = b.row(values, b.mul(b.div(n, lines), words), distance, "i32")
            bits = b.load(b.row(stretch, b.rem(n, lines), LANES, "i32"), HALVES, "bits")
            loop.yields(b.most(worst, b.and_(bits, 0x7FFF), "worst"))
        words = b.bitcast(loop.results[0], WORDS, "words")
        highest = b.most(b.and_(words, -0x10000), b.binary("arith.shli", words, 16), "highest")
        b.store(highest, b.at(note, LANES, "i32"))

    def attend(self, item: Item, windows: Callable[[], AbstractContextManager[KeyRange]]) -> Value:
        """Visit the keys of all windows as long as their scores are near; whether the item has to be visited without
        that (i1)."""
        b, tiles, zero = self.b, self.tiles, self.b.constant(0, "i64")
        b.store(zero, self.needs_general)
        tiles.clear(item, self.scores.centre)
        with windows() as keys:
            so_far = b.compare("eq", b.load(self.needs_general, "i64"), 0, "so_far")
            with b.when(b.and_(so_far, self._are_bounded(item, keys))):
                b.store(zero, self.keys_done)
                self.stream.visit(item, keys)
            with b.otherwise():
                b.store(b.constant(1, "i64"), self.needs_general)
        with b.when(b.compare("eq", b.load(self.needs_general, "i64"), 0)):
            if tiles.statistics is not None:
                tiles.statistics.end_exponents(item.padded_groups, self.scores.centre)
            dead = self._mark_dead_rows(item)
            if self.scores.finite:  # else nothing else would come out
                b.store(b.convert("arith.extui", dead, "i64"), self.needs_general)
        again = b.compare("ne", b.load(self.needs_general, "i64"), 0, "again")
        if tiles.statistics is not None:
            with b.when(again):
                tiles.statistics.clear(item.padded_groups)
        return again

    def _are_bounded(self, item: Item, keys: KeyRange) -> Value:
        """Whether the scores of the item's queries with these keys are, and the values are not extreme."""
        b, step, nothing = self.b, self.products.key_step, self.b.constant(0, WORDS)

        def largest(vector: Value) -> Value:
            """Largest magnitude in a vector, as a number: ordered as their bits, infinities and NaN above others."""
            return b.bitcast(b.reduce("maxsi", vector, "largest"), "f32")

        with b.carry(0, item.padded_groups, 1, [nothing], hint="g") as (queries, g, (worst,)):
            queries.yields(b.most(worst, b.load(self.query_norms[g], nothing.type, "norms")))
        first = self.tiles.kernel.packed.number(b.as_value(keys.low, "i64"))
        end = b.add(first, b.ceil_div(b.most(b.sub(keys.high, keys.low), 0), step))  # a part may have no keys
        with b.carry(first, end, 1, [nothing, nothing], hint="n") as (steps, n, (norm, magnitude)):
            note = self.step_norms[n]
            norms, magnitudes = (b.load(b.at(note, k * LANES, "i32"), nothing.type) for k in (0, 1))
            steps.yields(b.most(norm, norms), b.most(magnitude, magnitudes))
        squared = b.mul(largest(queries.results[0]), largest(steps.results[0]))
        values = largest(steps.results[1])
        close = b.compare("ole", squared, (self.scores.bound / SLACK) ** 2, "close")
        small = b.compare("ole", values, 2.0**VALUE_EXPONENTS)
        large = b.compare("oge", values, 2.0**-VALUE_EXPONENTS)
        usual = b.and_(small, b.or_(large, b.compare("oeq", values, 0.0)), "usual")
        return b.and_(close, usual, "near")

    def _mark_dead_rows(self, item: Item) -> Value:
        """Rows whose sum is zero met no live key: their maximum becomes -inf. Returns whether there is one."""
        b, tiles = self.b, self.tiles

        def mark(g: Value) -> Value:
            memory = tiles.group(g)
            dead = b.compare("oeq", tiles.total(memory), 0.0, "dead")
            m = b.load(memory.maximum, F32, "m")
            b.store(b.select(dead, float("-inf"), m), memory.maximum)
            rows = b.and_(dead, b.first_lanes(b.sub(item.count, b.mul(g, tiles.lanes)), tiles.lanes))
            return b.reduce("or", rows, "found")

        return b.any(item.groups, 1, mark, "g")

    def weigh_all(self, tile: ScoreTile, exponent: Expr, low: Value | int, high: Value) -> None:
        """The weights of keys [low, high) of a tile, and dense operands before, if they are staged group by group."""
        with self.tiles.members(tile, low, high) as member:
            if not self.products.overlaps:
                self.tiles.stage(tile, member, exponent)
            softmax, g = self.tiles.softmax(tile, member), self.b.add(tile.g, member)
            weigh, whole = (self.weigher(softmax, g, known) for known in (None, exponent))
            softmax.weigh_all(self.tiles.row_program(tile, member, exponent), weigh, low, high, whole)

    def weigher(self, softmax: GroupSoftmax, g: Value, exponent: Expr | None) -> Weigh:
        """Function that turns exponents of a group into weights: rounded at once, and their sum with them, where
        nothing else is made of it. exponent: the program; None where rows of no weight are among those."""
        b, store, statistics = self.b, self.tiles.store_of(softmax), self.tiles.statistics
        ordinary = exponent is not None and exponent not in self.scores.filled

        def weigh(key: Value, first: Value, second: Value, total: Value) -> Value:
            if statistics is None:
                pair = self.vectors.power_pairs(first, second, ordinary)
                b.store(pair, b.row(softmax.group.weights, key, LANES, "bf16"), align=64)
                return self.vectors.add_pair_products(total, b.bitcast(pair, BF16), b.constant(1.0, BF16))
            statistics.note_exponents(g, first, second)
            weights = [self.tiles.kernel.context.math.exp2(x) for x in (first, second)]
            store(key, *weights)
            return b.add(total, b.add(*weights), "l")

        return weigh


class _Sequential(Sequential):
    """One tile after the other."""

    def __init__(self, fixed: FixedShift):
        super().__init__(fixed.tiles)
        self.fixed = fixed

    def tile(self, tile: ScoreTile) -> None:
        self.tiles.score_all(tile)
        for program in self.tiles.variants(tile):
            self.fixed.weigh_all(tile, self.fixed.scores.exponents[program], 0, tile.block.padded)
        self.tiles.accumulate(tile)


class _Overlapped(Overlapped):
    """Two tiles in the works at a time. `FixedShift.keys_done` says how many keys of one have weights already."""

    def __init__(self, fixed: FixedShift):
        tiles, self.fixed, self.keys_done = fixed.tiles, fixed, fixed.keys_done
        super().__init__(tiles, (tiles.weights, tiles.kernel.array(tiles.group_block, tiles.weights.size, "others")))

    def advance(self, old: ScoreTile, new: ScoreTile) -> None:
        """Programs and exponentials are one pass."""
        b, tiles, scores = self.b, self.tiles, self.fixed.scores
        half, masked = self.products.key_step // 2, scores.exponents[tiles.programs.masked]
        plain = masked if tiles.programs.full is None else scores.exponents[tiles.programs.full]
        padded, done = old.block.padded, b.load(self.keys_done, "i64", "keys_done")
        # So many keys of the old tile that the new scores are never stored over some that still have no weights.
        ahead = b.most(b.div(padded, 2), b.sub(padded, b.mul(new.steps, half)))
        start = b.most(done, ahead, "start")
        self.fixed.weigh_all(old, plain, done, start)
        both = b.div(b.sub(padded, start), half, "both")
        self.score_beside(new, both, self._weigh_beside(old, plain, start))
        with b.when(self._is_regular(new)):
            both = b.least(old.steps, new.steps, "both")
            tiles.stage_all(new, plain)
            self.accumulate_beside(old, both, self._weigh_beside(new, plain, 0))
            self.accumulate(old, both, old.steps)
            b.store(b.mul(both, half), self.keys_done)
        with b.otherwise():
            self.accumulate(old, 0, old.steps)
            tiles.stage_all(new, masked)
            self.fixed.weigh_all(new, masked, 0, new.block.padded)
            b.store(new.block.padded, self.keys_done)
        tiles.end_block(old)

    def _is_regular(self, tile: ScoreTile) -> Value:
        """Whether a tile's key steps are full and no key of it is masked."""
        b, block, kernel = self.b, tile.block, self.tiles.kernel
        full = b.compare("eq", block.count, block.padded, "full")
        whole = kernel.whole(kernel.with_keys(tile.scope, block.first, block.count))
        return full if whole is None else b.and_(full, whole, "regular")

    def _weigh_beside(self, tile: ScoreTile, exponent: Expr, first: Value | int) -> KeyWork:
        """Half of the keys of each step."""
        b, (softmaxes, programs) = self.b, self.pair(tile, exponent)
        weigh = [
            self.fixed.weigher(softmax, b.add(tile.g, member), exponent) for member, softmax in enumerate(softmaxes)
        ]

        def take(member: int, key: Value, sums: list[Value]) -> list[Value]:
            return softmaxes[member].apply_and_weigh(programs[member], weigh[member], key, sums)

        return KeyWork(
            keys=self.products.key_step // 2, first=first, begin=lambda member: [b.constant(0.0, self.vector)],
            take=take, end=lambda member, sums: softmaxes[member].add_total(sums),
            rest=functools.partial(self.fixed.weigh_all, tile, exponent),
        )  # fmt: skip
