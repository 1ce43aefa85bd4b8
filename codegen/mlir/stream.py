"""The tiles of a work item in the order in which they are visited: one after the other, or two in the works at a time.

Where the products run on a unit of their own (AMX), vector work runs beside them, and both units are busy:

    the weights of one tile beside the scores of the next, then the product with V of the one beside the maxima of the
    next

No memory is needed twice: the weights of a key step are made before the next tile's scores of that step are stored over
the scores that they were made of. The processor overlaps the two by itself where their instructions stand close
together: the products take pieces of vector work that they write between tile instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.ir.expr import Expr

from .amx import Amx
from .builder import Value
from .products import InterleavedWork
from .softmax import PAIR, GroupSoftmax, RowProgram
from .tile import Item, KeyRange, ScoreTile, Tiles
from .values import Array

GROUP_PAIR = (0, 1)  # of the set of groups that overlapping products take


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWork:
    """Vector work on the keys of a tile from `first` on, `keys` of them beside each key step of a product. Pieces of it
    hand on a state: `begin(member)`, `take(member, key, state)` of PAIR keys, `end(member, state)`, for each member of
    GROUP_PAIR. rest: the work on keys [low, high) without a product beside it."""

    keys: int
    begin: Callable[[int], Any]
    take: Callable[[int, Value, Any], Any]
    end: Callable[[int, Any], object]
    rest: Callable[[Value | int, Value], None]
    first: Value | int = 0

    def left_over(self, parts: int) -> int:
        """Number of a step's keys that so many parts leave over."""
        return self.keys - parts * (self.keys // parts // PAIR * PAIR)


class Sequential:
    """One tile after the other."""

    def __init__(self, tiles: Tiles):
        self.tiles, self.b, self.tiling = tiles, tiles.b, tiles.tiling

    def visit(self, item: Item, keys: KeyRange) -> None:
        b, tiles = self.b, self.tiles
        with (
            b.loop(keys.low, keys.high, self.tiling.keys, hint="j0") as j0,
            b.loop(0, item.groups, tiles.group_block, hint="g") as g,
        ):
            rows, n = tiles.rows_and_keys(item, keys, g, j0)
            with b.when(b.compare("sgt", n, 0)):
                self.tile(tiles.tile(item, rows, g, j0, n))

    def tile(self, tile: ScoreTile) -> None:
        """All stages of a tile."""
        tiles = self.tiles
        tiles.score_all(tile)
        tiles.reset_maxima(tile)
        for program in tiles.variants(tile):
            tiles.maxima(tile, program, 0, tile.block.count, staging=True)
        tiles.rescale(tile)
        tiles.weigh(tile, 0, tile.block.padded)
        tiles.accumulate(tile)


class Overlapped:
    """The second half of one tile beside the first half of the next."""

    def __init__(self, tiles: Tiles, areas: Sequence[Array] = ()):
        """areas: where weights of one tile and the next lie; in the same place by default."""
        self.tiles, self.b, self.vector = tiles, tiles.b, tiles.vector
        assert isinstance(tiles.products, Amx)
        self.products, self.areas = tiles.products, areas or (tiles.weights, tiles.weights)

    def visit(self, item: Item, keys: KeyRange) -> None:
        """Tiles in order, each overlapped with the next, and one step to finish the last. A tile without keys takes
        none."""
        b, tiles, size = self.b, self.tiles, self.tiles.tiling.keys
        sets = b.ceil_div(item.groups, tiles.group_block, "sets")
        blocks = b.div(b.most(b.add(b.sub(keys.high, keys.low), size - 1), 0), size, "blocks_here")
        count, nothing = b.mul(blocks, sets, "tiles"), b.constant(0, "i64")
        start = [nothing, nothing, nothing, *(area.first for area in self.areas)]
        at = functools.partial(Array, b, size=self.areas[0].size)
        with b.carry(0, b.add(count, 1), 1, start, hint="t") as (loop, t, (*before, area, other)):
            end = b.compare("eq", t, count, "end")
            j0 = b.add(b.mul(b.div(t, sets), size), keys.low, "j0")
            g = b.mul(b.rem(t, sets), tiles.group_block, "g")
            rows, n = tiles.rows_and_keys(item, keys, g, j0)
            n = b.select(end, 0, n, "n_keys")
            taken = b.or_(end, b.compare("sgt", n, 0), "taken")
            with b.when(taken):
                old = tiles.tile(item, item.scope, *before, at(area))
                self.advance(old, tiles.tile(item, rows, g, j0, n, at(other)))
            following = zip((g, j0, n, other, area), (*before, area, other), strict=True)
            loop.yields(*(b.select(taken, x, y) for x, y in following))

    def advance(self, old: ScoreTile, new: ScoreTile) -> None:
        """The second half of a tile and the first half of the next; either may have no keys."""
        b, tiles, step_keys = self.b, self.tiles, self.products.key_step
        both = b.least(old.steps, new.steps, "both")
        self.score_beside(new, both, self._weights_beside(old))
        tiles.weigh(old, b.mul(both, step_keys), old.block.padded)
        tiles.reset_maxima(new)
        whole, plain = b.div(new.block.count, step_keys), tiles.programs.full or tiles.programs.masked
        both = b.least(old.steps, whole, "both")
        for program in tiles.variants(new):
            with tiles.members(new) as member:
                tiles.stage(new, member, program)
            if program is not plain:  # few tiles are partly masked
                self.accumulate(old, 0, both)
                tiles.maxima(new, program, 0, new.block.count)
                continue
            self.accumulate_beside(old, both, self._maxima_beside(new, program))
            tiles.maxima(new, program, b.mul(both, step_keys), new.block.count)
        self.accumulate(old, both, old.steps)
        tiles.end_block(old)
        with b.when(b.compare("sgt", new.steps, 0)):
            tiles.rescale(new)

    def score_beside(self, new: ScoreTile, both: Value, work: KeyWork) -> None:
        """The scores of a tile; beside `both` of the steps work on the keys of another."""
        b, pieces = self.b, self._pieces(work)
        with b.loop(0, both, hint="step") as step:
            self._do_left_over(work, step, self.products.score_parts)
            self.tiles.score(new, step, 0, pieces)
        with b.loop(both, new.steps, hint="step") as step:
            self.tiles.score(new, step)

    def accumulate_beside(self, old: ScoreTile, both: Value, work: KeyWork) -> None:
        """The product with V over `both` key steps of a tile, beside work on the keys of another."""
        self.accumulate(old, 0, both, self._pieces(work))
        with self.b.loop(0, both, hint="step") as step:
            self._do_left_over(work, step, self.products.value_parts)

    def accumulate(
        self, tile: ScoreTile, first: Value | int, steps: Value, beside: InterleavedWork | None = None
    ) -> None:
        """The product with V of key steps first..steps-1 of a tile."""
        with self.b.when(self.b.compare("slt", self.b.as_value(first, "i64"), steps)):
            self.products.accumulate(*self.tiles.second_product(tile, steps), first=first, beside=beside)

    def _do_left_over(self, work: KeyWork, step: Value, parts: int) -> None:
        """Work on the keys of a step that its parts leave over. They are worked on before the others, so that half of
        all are done with half of the parts, when the first new scores are stored."""
        if count := work.left_over(parts):
            start = self.b.add(self.b.mul(step, work.keys), work.first)
            work.rest(start, self.b.add(start, count))

    def _pieces(self, work: KeyWork) -> InterleavedWork:
        """Work in pieces, of PAIR keys of a member of GROUP_PAIR each."""
        b = self.b

        def pieces(step: Value, part: Value | int, parts: int) -> list[Callable[[], None]]:
            width = work.keys // parts // PAIR * PAIR
            start = b.add(b.mul(step, work.keys), b.mul(part, width))
            start = b.add(start, b.add(work.first, work.left_over(parts)))
            states: dict[int, Any] = {}

            def piece(member: int, key: int) -> None:
                state = work.begin(member) if key == 0 else states[member]
                states[member] = work.take(member, b.add(start, key), state)
                if key + PAIR == width:
                    work.end(member, states[member])

            return [functools.partial(piece, member, key) for key in range(0, width, PAIR) for member in GROUP_PAIR]

        return pieces

    def pair(self, tile: ScoreTile, program: Expr) -> tuple[list[GroupSoftmax], list[RowProgram]]:
        """Softmaxes and programs of the members of GROUP_PAIR."""
        softmaxes = [self.tiles.softmax(tile, member) for member in GROUP_PAIR]
        return softmaxes, [self.tiles.row_program(tile, member, program) for member in GROUP_PAIR]

    def _weights_beside(self, tile: ScoreTile) -> KeyWork:
        softmaxes = [self.tiles.softmax(tile, member) for member in GROUP_PAIR]
        stores = [self.tiles.store_of(softmax) for softmax in softmaxes]
        coefficients = [softmax.coefficients() for softmax in softmaxes]

        def take(member: int, key: Value, sums: Sequence[Value]) -> Sequence[Value]:
            return softmaxes[member].weigh(stores[member], key, coefficients[member], sums)

        return KeyWork(
            keys=self.products.key_step, begin=lambda member: softmaxes[member].no_sums(), take=take,
            end=lambda member, sums: softmaxes[member].add_total(sums), rest=functools.partial(self.tiles.weigh, tile),
        )  # fmt: skip

    def _maxima_beside(self, tile: ScoreTile, program: Expr) -> KeyWork:
        b, (softmaxes, programs) = self.b, self.pair(tile, program)
        places = [self.tiles.highest[member] for member in GROUP_PAIR]

        def take(member: int, key: Value, highest: Value) -> Value:
            return softmaxes[member].raise_to(highest, softmaxes[member].apply_rows(programs[member], key, PAIR))

        return KeyWork(
            keys=self.products.key_step, begin=lambda member: b.load(places[member], self.vector, "h"), take=take,
            end=lambda member, highest: b.store(highest, places[member]),
            rest=functools.partial(self.tiles.maxima, tile, program),
        )  # fmt: skip
