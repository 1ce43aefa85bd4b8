"""Two tiles in the works at a time, so that products and vector work run side by side.

Where the products run on a unit of their own (AMX), both units are then busy:

    the weights of one tile beside the scores of the next, then the product with V of the one beside the maxima of the
    next

No memory is needed twice: the weights of a key step are made before the next tile's scores of that step are stored over
the scores that they were made of. Where no maxima are needed (`lowering.bounded_scores`), half of the weights take
their place, and weights have two areas, in turns:

    the second half of the weights of one tile beside the scores of the next, then the product with V of the one beside
    the first half of the weights of the next

The processor overlaps the two by itself where their instructions stand close together: the products take pieces of
vector work that they write between tile instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from fusion.ir.expr import Expr
from fusion.ir.spec import Normalizer
from fusion.lowering.bounded_scores import BoundedScores

from .amx import Amx
from .builder import Value
from .products import InterleavedWork
from .softmax import PAIR, GroupSoftmax, RowProgram, Weigh
from .tile import Tile, TileKernel

GROUP_PAIR = (0, 1)  # of the set of groups that overlapping products take
State = TypeVar("State")


class OverlappingKernel(TileKernel):
    """The stages of one tile beside those of the next."""

    def _overlap(self, old: Tile, new: Tile) -> None:
        """The second half of a tile and the first half of the next; either may have no keys."""
        b, step_keys = self.b, self.products.key_step
        p = self._amx
        both = b.least(old.steps, new.steps, "both")
        beside = self._weights_beside(old)
        with b.loop(0, both, hint="step") as step:
            self._emit_remaining_work(step, step_keys, p.score_parts, functools.partial(self._weights, old))
            self._scores(new, step, 0, beside)
        with b.loop(both, new.steps, hint="step") as step:
            self._scores(new, step)
        self._weights(old, b.mul(both, step_keys), old.block.padded)
        self._no_maxima(new)
        whole, plain = b.div(new.block.count, step_keys), self.programs.full or self.programs.masked
        both = b.least(old.steps, whole, "both")
        for program in self._variants(new):
            with b.loop(0, new.here, hint="member") as member:
                self._stage(new, member, program)
            if program is not plain:  # few tiles are partly masked
                self._accumulate_pair(old, 0, both)
                self._all_maxima(new, program, 0, new.block.count)
                continue
            self._accumulate_pair(old, 0, both, self._maxima_beside(new, program))
            with b.loop(0, both, hint="step") as step:
                work = functools.partial(self._all_maxima, new, program)
                self._emit_remaining_work(step, step_keys, p.value_parts, work)
            self._all_maxima(new, program, b.mul(both, step_keys), new.block.count)
        self._accumulate_pair(old, both, old.steps)
        self._end_key_span(old)
        with b.when(b.compare("sgt", new.steps, 0)):
            self._update_maxima(new)

    def _overlap_near(self, near: BoundedScores, old: Tile, new: Tile) -> None:
        """The same where every row's maximum is known beforehand, so that programs and exponentials are one pass.
        `weighed` says how many keys of a tile have weights already."""
        b, half, masked = self.b, self.products.key_step // 2, near.exponents[self.programs.masked]
        plain = masked if self.programs.full is None else near.exponents[self.programs.full]
        ordinary = plain not in near.filled
        p, padded, weighed = self._amx, old.block.padded, b.load(self.weighed, "i64", "weighed")
        # So many keys of the old tile that the new scores are never stored over some that are still to be weighed.
        ahead = b.most(b.div(padded, 2), b.sub(padded, b.mul(new.steps, half)))
        start = b.most(weighed, ahead, "start")
        self._weigh_all(old, plain, weighed, start)
        both, beside = b.div(b.sub(padded, start), half, "both"), self._weigh_beside(old, plain, start, ordinary)
        with b.loop(0, both, hint="step") as step:
            self._emit_remaining_work(step, half, p.score_parts, functools.partial(self._weigh_all, old, plain), start)
            self._scores(new, step, 0, beside)
        with b.loop(both, new.steps, hint="step") as step:
            self._scores(new, step)
        with b.when(self._is_regular(new)):
            both = b.least(old.steps, new.steps, "both")
            self._stage_all(new, plain)
            self._accumulate_pair(old, 0, both, self._weigh_beside(new, plain, 0, ordinary))
            with b.loop(0, both, hint="step") as step:
                self._emit_remaining_work(step, half, p.value_parts, functools.partial(self._weigh_all, new, plain))
            self._accumulate_pair(old, both, old.steps)
            b.store(b.mul(both, half), self.weighed)
        with b.otherwise():
            self._accumulate_pair(old, 0, old.steps)
            self._stage_all(new, masked)
            self._weigh_all(new, masked, 0, new.block.padded)
            b.store(new.block.padded, self.weighed)
        self._end_key_span(old)

    def _is_regular(self, tile: Tile) -> Value:
        """Whether a tile's key steps are full and no key of it is masked."""
        b, block = self.b, tile.block
        full = b.compare("eq", block.count, block.padded, "full")
        whole = self._whole(self._with_keys(tile.scope, block.first, block.count))
        return full if whole is None else b.and_(full, whole, "regular")

    @property
    def _amx(self) -> Amx:
        assert isinstance(self.products, Amx)
        return self.products

    def _accumulate_pair(
        self, tile: Tile, first: Value | int, steps: Value, beside: InterleavedWork | None = None
    ) -> None:
        """The product with V of key steps first..steps-1 of a tile."""
        b = self.b
        values, packed, output = self._second_product(tile)
        pair = [[side.member(b, member) for member in GROUP_PAIR] for side in (packed, output)]
        with b.when(b.compare("slt", b.as_value(first, "i64"), steps)):
            self._amx.accumulate(values, steps, *pair, first=first, beside=beside)

    def _width(self, keys: int, parts: int) -> int:
        """How many of so many keys each of a step's `parts` parts works on beside a product."""
        return keys // parts // PAIR * PAIR

    def _left_over(self, keys: int, parts: int) -> int:
        """How many of a step's keys its parts leave over. They are worked on before the others, so that half of all are
        done with half of the parts, when the first new scores are stored."""
        return keys - parts * self._width(keys, parts)

    def _emit_remaining_work(
        self, step: Value, keys: int, parts: int, work: Callable[[Value, Value], None], first: Value | int = 0
    ) -> None:
        """`work(low, high)` on those of a step's `keys` keys that its parts leave over; first: where those of the first
        step begin."""
        if count := self._left_over(keys, parts):
            start = self.b.add(self.b.mul(step, keys), first)
            work(start, self.b.add(start, count))

    def _beside(
        self,
        keys: int,
        first: Value | int,
        begin: Callable[[int], State],
        work: Callable[[int, Value, State], State],
        end: Callable[[int, State], object],
    ) -> InterleavedWork:
        """Work on `keys` keys a step from `first` on, PAIR keys of a member of GROUP_PAIR at a time. Pieces hand on a
        state: `begin(member)`, `work(member, key, state)`, `end(member, state)`."""
        b = self.b

        def pieces(step: Value, part: Value | int, parts: int) -> list[Callable[[], None]]:
            width = self._width(keys, parts)
            start = b.add(b.add(b.mul(step, keys), b.mul(part, width)), b.add(first, self._left_over(keys, parts)))
            states: dict[int, State] = {}

            def piece(member: int, key: int) -> None:
                state = begin(member) if key == 0 else states[member]
                states[member] = work(member, b.add(start, key), state)
                if key + PAIR == width:
                    end(member, states[member])

            return [functools.partial(piece, member, key) for key in range(0, width, PAIR) for member in GROUP_PAIR]

        return pieces

    def _pair(self, tile: Tile, program: Expr) -> tuple[list[GroupSoftmax], list[RowProgram]]:
        """Of the members of GROUP_PAIR."""
        softmaxes = [self._softmax(tile, member) for member in GROUP_PAIR]
        return softmaxes, [self._row_program(tile, member, program) for member in GROUP_PAIR]

    def _weights_beside(self, tile: Tile) -> InterleavedWork:
        softmaxes = [self._softmax(tile, member) for member in GROUP_PAIR]
        stores = [self._store_of(softmax) for softmax in softmaxes]
        coefficients = [softmax.coefficients() for softmax in softmaxes]
        zero = self.b.constant(0.0, self.vector)
        plain = self.spec.normalizer is Normalizer.NONE

        def work(member: int, key: Value, sums: Sequence[Value]) -> Sequence[Value]:
            if plain:
                softmaxes[member].weigh_plain(stores[member], key)
                return sums
            return softmaxes[member].weigh(stores[member], key, coefficients[member], sums)

        def end(member: int, sums: Sequence[Value]) -> None:
            if not plain:
                softmaxes[member].add_total(sums)

        return self._beside(self.products.key_step, 0, lambda member: [zero] * PAIR, work, end)

    def _maxima_beside(self, tile: Tile, program: Expr) -> InterleavedWork:
        b = self.b
        softmaxes, programs = self._pair(tile, program)
        places = list(map(self._highest_of, GROUP_PAIR))

        def work(member: int, key: Value, highest: Value) -> Value:
            return softmaxes[member].raise_to(highest, softmaxes[member].apply_rows(programs[member], key, PAIR))

        return self._beside(
            self.products.key_step, 0, lambda member: b.load(places[member], self.vector, "h"), work,
            lambda member, highest: b.store(highest, places[member]),
        )  # fmt: skip

    def _weigh_beside(self, tile: Tile, exponent: Expr, first: Value | int, ordinary: bool) -> InterleavedWork:
        """Half of the keys of each step. ordinary: exponents are no fills."""
        b = self.b
        softmaxes, programs = self._pair(tile, exponent)
        weigh = [self._weigh(softmax, b.add(tile.g, member), ordinary) for member, softmax in enumerate(softmaxes)]
        zero = b.constant(0.0, self.vector)

        def work(member: int, key: Value, sums: list[Value]) -> list[Value]:
            return softmaxes[member].apply_and_weigh(programs[member], weigh[member], key, sums)

        return self._beside(
            self.products.key_step // 2, first, lambda member: [zero], work,
            lambda member, sums: softmaxes[member].add_total(sums),
        )  # fmt: skip

    def _weigh_all(self, tile: Tile, exponent: Expr, low: Value | int, high: Value) -> None:
        b = self.b
        with b.when(b.compare("slt", b.as_value(low, "i64"), high)), b.loop(0, tile.here, hint="member") as member:
            softmax = self._softmax(tile, member)
            weigh = self._weigh(softmax, b.add(tile.g, member), False)
            softmax.weigh_all(self._row_program(tile, member, exponent), weigh, low, high)

    def _weigh(self, softmax: GroupSoftmax, g: Value, ordinary: bool) -> Weigh:
        """How exponents of a group become weights: rounded at once, and their sum with them, where nothing else is made
        of it."""
        b, p, store = self.b, self._amx, self._store_of(softmax)

        def exactly(key: Value, first: Value, second: Value, total: Value) -> Value:
            assert self.statistics is not None
            self.statistics.note_exponents(g, first, second)
            weights = [self.context.math.exp2(x) for x in (first, second)]
            store(key, *weights)
            return b.add(total, b.add(*weights), "l")

        def rounded(key: Value, first: Value, second: Value, total: Value) -> Value:
            return p.store_powers(softmax.group.weights, key, first, second, total, ordinary)

        return exactly if self.statistics is not None else rounded
