"""Two tiles in the works at a time, so that products and vector work run side by side.

Where the products run on a unit of their own (AMX), two tiles are in the works at a time. With several planes, so that
both units are busy:

    the weights of one tile beside the scores of the next, then the product with V of the one beside the maxima of the
    next

The processor overlaps the two by itself where their instructions stand close together: the products take pieces of
vector work that they write between tile instructions. No memory is needed twice: the weights of a key step are made
before the next tile's scores of that step are stored over the scores that they were made of. With one plane that gains
nothing, and products and vector work alternate:

    the scores of the next tile and the product with V of the last, then maxima and weights of the next
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from fusion.codegen.mlir.amx import Amx
from fusion.codegen.mlir.bounds import BoundedScores
from fusion.codegen.mlir.builder import Value
from fusion.codegen.mlir.products import InterleavedWork
from fusion.codegen.mlir.softmax import PAIR, UNROLL
from fusion.codegen.mlir.tile import TileKernel
from fusion.codegen.mlir.work_items import Tile
from fusion.ir.expr import Expr
from fusion.ir.spec import Normalizer

GROUP_PAIR = (0, 1)  # of the set of groups that overlapping products take


class OverlappingKernel(TileKernel):
    """The stages of one tile beside those of the next."""

    def _alternate(self, old: Tile, new: Tile, near: BoundedScores | None = None) -> None:
        """All products and all vector work of a turn each in one piece: the product with V of a tile after the scores
        of the next, so that neither waits for what has just been stored. near: every row's maximum is known beforehand,
        and programs and exponentials are one pass."""
        b = self.b
        self._all_scores(new)
        with b.when(b.compare("sgt", old.steps, 0)):
            self._accumulate(old)
        if near is None:
            self._make_weights(new)
            return
        for program in self._variants(new):
            with b.loop(0, new.here, hint="member") as member:
                self._stage(new, member, program)
                self._weights_at_once(new, member, near.exponents[program])

    def _weights_at_once(self, tile: Tile, member: Value, exponent: Expr) -> None:
        b, block, softmax = self.b, tile.block, self._softmax(tile, member)
        rows, store = self._row_program(tile, member, exponent), self._store_of(softmax)
        whole = b.mul(b.div(block.count, UNROLL), UNROLL)
        softmax.apply_and_weigh(rows, store, whole)
        with b.when(b.compare("slt", whole, block.padded)):
            with b.loop(whole, block.count, hint="j") as j:
                softmax.apply_row(rows, j)
            softmax.fill_beyond(float("-inf"))
            one, zero = (b.constant(x, self.vector) for x in (1.0, 0.0))
            softmax.exponentials(store, whole, block.padded, (one, zero))

    def _overlap(self, old: Tile, new: Tile) -> None:
        """The second half of a tile and the first half of the next; either may have no keys."""
        b, step_keys = self.b, self.products.key_step
        p = self.products
        assert isinstance(p, Amx)
        both = b.least(old.steps, new.steps, "both")
        beside = self._weights_beside(old)
        with b.loop(0, both, hint="step") as step:
            self._emit_remaining_work(step, p.score_parts, functools.partial(self._weights, old))
            self._scores(new, step, 0, beside)
        with b.loop(both, new.steps, hint="step") as step:
            self._scores(new, step)
        self._weights(old, b.mul(both, step_keys), old.block.padded)
        self._no_maxima(new)
        values, packed, output = self._second_product(old)
        pair = [[side.member(b, member) for member in GROUP_PAIR] for side in (packed, output)]
        both = b.least(old.steps, b.div(new.block.count, step_keys), "both")
        for program in self._variants(new):
            with b.loop(0, new.here, hint="member") as member:
                self._stage(new, member, program)
            with b.when(b.compare("sgt", both, 0)):
                p.accumulate(values, both, *pair, beside=self._maxima_beside(new, program))
            with b.loop(0, both, hint="step") as step:
                self._emit_remaining_work(step, p.value_parts, functools.partial(self._all_maxima, new, program))
            self._all_maxima(new, program, b.mul(both, step_keys), new.block.count)
        with b.when(b.compare("slt", both, old.steps)):
            p.accumulate(values, old.steps, *pair, first=both)
        self._end_key_span(old)
        with b.when(b.compare("sgt", new.steps, 0)):
            self._update_maxima(new)

    def _width(self, parts: int) -> int:
        """How many keys of each of a step's `parts` parts are worked on beside a product."""
        return self.products.key_step // parts // PAIR * PAIR

    def _emit_remaining_work(self, step: Value, parts: int, work: Callable[[Value, Value], None]) -> None:
        """`work(low, high)` on the keys of a step that its parts leave over."""
        b, keys, done = self.b, self.products.key_step, parts * self._width(parts)
        if done < keys:
            start = b.mul(step, keys)
            work(b.add(start, done), b.add(start, keys))

    def _weights_beside(self, tile: Tile) -> InterleavedWork:
        b = self.b
        softmaxes = [self._softmax(tile, member) for member in GROUP_PAIR]
        stores = [self._store_of(softmax) for softmax in softmaxes]
        coefficients = [softmax.coefficients() for softmax in softmaxes]
        zero = b.constant(0.0, self.vector)
        plain = self.spec.normalizer is Normalizer.NONE

        def pieces(step: Value, part: Value | int, parts: int) -> list[Callable[[], None]]:
            start = b.add(b.mul(step, self.products.key_step), b.mul(part, self._width(parts)))
            sums = {member: [zero] * PAIR for member in GROUP_PAIR}

            def piece(member: int, key: int) -> None:
                at = b.add(start, key)
                if plain:
                    softmaxes[member].weigh_plain(stores[member], at)
                    return
                sums[member] = softmaxes[member].weigh(stores[member], at, coefficients[member], sums[member])
                if key + PAIR == self._width(parts):
                    softmaxes[member].add_total(sums[member])

            keys = range(0, self._width(parts), PAIR)
            return [functools.partial(piece, member, key) for key in keys for member in GROUP_PAIR]

        return pieces

    def _maxima_beside(self, tile: Tile, program: Expr) -> InterleavedWork:
        b = self.b
        softmaxes = [self._softmax(tile, member) for member in GROUP_PAIR]
        programs = [self._row_program(tile, member, program) for member in GROUP_PAIR]
        places = [self._part(self.highest, member, 4 * self.lanes, "h_at") for member in GROUP_PAIR]

        def pieces(step: Value, part: Value | int, parts: int) -> list[Callable[[], None]]:
            start = b.add(b.mul(step, self.products.key_step), b.mul(part, self._width(parts)))
            highest: dict[int, Value] = {}

            def piece(member: int, key: int) -> None:
                if key == 0:
                    highest[member] = b.load(places[member], self.vector, "h")
                softmax = softmaxes[member]
                rows = softmax.apply_rows(programs[member], b.add(start, key), PAIR)
                highest[member] = softmax.raise_to(highest[member], rows)
                if key + PAIR == self._width(parts):
                    b.store(highest[member], places[member])

            keys = range(0, self._width(parts), PAIR)
            return [functools.partial(piece, member, key) for key in keys for member in GROUP_PAIR]

        return pieces
