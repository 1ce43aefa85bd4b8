"""Softmax with a fixed shift in place of the running maximum, where scores lie near a centre that is known beforehand
(`lowering.bounded_scores`): no pass looks for maxima.

The norms of queries and keys are kept as they are packed, and tell for a work item and a window of keys whether its
scores are near. Then half of the weights take the place of the maxima, and weights have two areas, in turns:

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
from .builder import Value, vector_of
from .softmax import GroupSoftmax, Weigh
from .stream import KeyWork, Overlapped
from .tile import Item, KeyRange, ScoreTile, Tiles
from .values import Array


def score_bounds(tiles: Tiles) -> BoundedScores | None:
    """When the scores of a kernel are near a centre; None where it would gain nothing (products outweigh the softmax
    with several planes) or rows need their true maximum."""
    spec, programs = tiles.spec, tiles.programs
    gains = isinstance(tiles.products, Amx) and tiles.tiling.planes == 1 and spec.out_dtype != "float32"
    gains = gains and spec.dtype != "float16"  # whose exponents reach less far than the bound
    true_maximum = tiles.weight is not None or keeps_ends(spec) or spec.aux_outputs
    if not gains or true_maximum or spec.normalizer is Normalizer.NONE:
        return None
    known = [program for program in (programs.masked, programs.full) if program is not None]
    return bounded_scores(known, programs.scale, *((MANTISSA, BIAS) if tiles.statistics is None else (1.0, 0.0)))


class FixedShift(Overlapped):
    """The loop over the tiles of one kernel. step_bytes: of a key step's norms of keys and magnitudes of values, each a
    vector of bits. step_norms: where those of all steps lie."""

    step_norms: Array

    def __init__(self, tiles: Tiles, scores: BoundedScores):
        kernel, size = tiles.kernel, 4 * tiles.lanes
        self.scores, self.step_bytes = scores, 2 * size
        self.query_norms = kernel.array(tiles.tiling.groups, size, "query_norms")
        self.needs_general, self.keys_done = kernel.area(64, "needs_general"), kernel.area(64, "keys_done")
        other_weights = kernel.array(tiles.group_block, tiles.weights.size, "other_weights")
        super().__init__(tiles, (tiles.weights, other_weights))

    def store_query_norms(self, g: Value, packed: Value) -> None:
        """The norms of a group of queries."""
        self.b.store(self.products.query_norms(packed), self.query_norms[g])

    def store_step_norms(self, number: Value, keys: Value, values: Value) -> None:
        """The largest norm and magnitude of a packed key step."""
        note = self.step_norms[number]
        self.b.store(self.products.key_norms(keys), note)
        self.b.store(self.products.value_magnitudes(values), self.b.at(note, self.tiles.lanes, "i32"))

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
                self.visit(item, keys)
            with b.otherwise():
                b.store(b.constant(1, "i64"), self.needs_general)
        with b.when(b.compare("eq", b.load(self.needs_general, "i64"), 0)):
            if tiles.statistics is not None:
                tiles.statistics.end_exponents(item.padded_groups, self.scores.centre)
            dead = self._mark_dead_rows(item)
            if not self.scores.finite:  # nothing else would come out
                dead = b.constant(0, "i1")
            b.store(b.convert("arith.extui", dead, "i64"), self.needs_general)
        again = b.compare("ne", b.load(self.needs_general, "i64"), 0, "again")
        if tiles.statistics is not None:
            with b.when(again):
                tiles.statistics.clear(item.padded_groups)
        return again

    def _are_bounded(self, item: Item, keys: KeyRange) -> Value:
        """Whether the scores of the item's queries with these keys are, and the values are not extreme."""
        b, step, nothing = self.b, self.products.key_step, self.b.constant(0, vector_of("i32", self.tiles.lanes))

        def largest(vector: Value) -> Value:
            """Largest magnitude in a vector, as a number. Magnitudes are ordered as their bits are, infinities and NaN
            above all others."""
            return b.bitcast(b.reduce("maxsi", vector, "largest"), "f32")

        with b.carry(0, item.padded_groups, 1, [nothing], hint="g") as (queries, g, (worst,)):
            queries.yields(b.most(worst, b.load(self.query_norms[g], nothing.type, "norms")))
        first = self.tiles.kernel.packed.number(b.as_value(keys.low, "i64"))
        count = b.most(b.sub(keys.high, keys.low), 0)  # a part of the keys may have none of them
        end = b.add(first, b.ceil_div(count, step))
        with b.carry(first, end, 1, [nothing, nothing], hint="n") as (steps, n, (norm, magnitude)):
            note = self.step_norms[n]
            norms, magnitudes = (b.load(b.at(note, k * self.tiles.lanes, "i32"), nothing.type) for k in (0, 1))
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
            m = b.load(memory.maximum, self.vector, "m")
            b.store(b.select(dead, float("-inf"), m), memory.maximum)
            rows = b.and_(dead, b.first_lanes(b.sub(item.count, b.mul(g, tiles.lanes)), tiles.lanes))
            return b.reduce("or", rows, "found")

        return b.any(item.groups, 1, mark, "g")

    def advance(self, old: ScoreTile, new: ScoreTile) -> None:
        """Programs and exponentials are one pass. `keys_done` says how many keys of a tile have weights already."""
        b, tiles, scores = self.b, self.tiles, self.scores
        half, masked = self.products.key_step // 2, scores.exponents[tiles.programs.masked]
        plain = masked if tiles.programs.full is None else scores.exponents[tiles.programs.full]
        ordinary = plain not in scores.filled
        padded, done = old.block.padded, b.load(self.keys_done, "i64", "keys_done")
        # So many keys of the old tile that the new scores are never stored over some that still have no weights.
        ahead = b.most(b.div(padded, 2), b.sub(padded, b.mul(new.steps, half)))
        start = b.most(done, ahead, "start")
        self._weigh_all(old, plain, done, start)
        both = b.div(b.sub(padded, start), half, "both")
        self.score_beside(new, both, self._weigh_beside(old, plain, start, ordinary))
        with b.when(self._is_regular(new)):
            both = b.least(old.steps, new.steps, "both")
            tiles.stage_all(new, plain)
            self.accumulate_beside(old, both, self._weigh_beside(new, plain, 0, ordinary))
            self.accumulate(old, both, old.steps)
            b.store(b.mul(both, half), self.keys_done)
        with b.otherwise():
            self.accumulate(old, 0, old.steps)
            tiles.stage_all(new, masked)
            self._weigh_all(new, masked, 0, new.block.padded)
            b.store(new.block.padded, self.keys_done)
        tiles.end_block(old)

    def _is_regular(self, tile: ScoreTile) -> Value:
        """Whether a tile's key steps are full and no key of it is masked."""
        b, block, kernel = self.b, tile.block, self.tiles.kernel
        full = b.compare("eq", block.count, block.padded, "full")
        whole = kernel.whole(kernel.with_keys(tile.scope, block.first, block.count))
        return full if whole is None else b.and_(full, whole, "regular")

    def _weigh_beside(self, tile: ScoreTile, exponent: Expr, first: Value | int, ordinary: bool) -> KeyWork:
        """Half of the keys of each step. ordinary: exponents are no fills."""
        b, (softmaxes, programs) = self.b, self.pair(tile, exponent)
        weigh = [self._weigh(softmax, b.add(tile.g, member), ordinary) for member, softmax in enumerate(softmaxes)]
        zero = b.constant(0.0, self.vector)

        def take(member: int, key: Value, sums: list[Value]) -> list[Value]:
            return softmaxes[member].apply_and_weigh(programs[member], weigh[member], key, sums)

        return KeyWork(
            keys=self.products.key_step // 2, first=first, begin=lambda member: [zero], take=take,
            end=lambda member, sums: softmaxes[member].add_total(sums),
            rest=functools.partial(self._weigh_all, tile, exponent),
        )  # fmt: skip

    def _weigh_all(self, tile: ScoreTile, exponent: Expr, low: Value | int, high: Value) -> None:
        with self.tiles.members(tile, low, high) as member:
            softmax = self.tiles.softmax(tile, member)
            weigh = self._weigh(softmax, self.b.add(tile.g, member), False)
            softmax.weigh_all(self.tiles.row_program(tile, member, exponent), weigh, low, high)

    def _weigh(self, softmax: GroupSoftmax, g: Value, ordinary: bool) -> Weigh:
        """Function that turns exponents of a group into weights: rounded at once, and their sum with them, where
        nothing else is made of it."""
        b, store, statistics = self.b, self.tiles.store_of(softmax), self.tiles.statistics
        if statistics is None:
            powers = functools.partial(self.products.store_powers, softmax.group.weights)
            return functools.partial(powers, ordinary=ordinary)

        def weigh(key: Value, first: Value, second: Value, total: Value) -> Value:
            statistics.note_exponents(g, first, second)
            weights = [self.tiles.kernel.context.math.exp2(x) for x in (first, second)]
            store(key, *weights)
            return b.add(total, b.add(*weights), "l")

        return weigh
