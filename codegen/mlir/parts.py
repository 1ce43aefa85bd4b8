"""Work items whose keys are cut into parts, each a piece of work of its own: where there are fewer items than threads.
Where results are to be reproducible, keys are always cut at the same places, and one piece may have all parts.

A piece leaves maximum, sum and output of its keys in memory that all threads share. Whoever is the last of an item
merges them, in the order of the keys, so that results do not depend on who that was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion.ir.spec import Normalizer

from .builder import PTR, Value
from .skeleton import KernelFunction

if TYPE_CHECKING:
    from .tile import Item, Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Partial sums of rows that share a vector of maxima: vectors of outputs and sums, in units of that maximum."""

    maximum: Value
    vectors: Sequence[tuple[Value, int]]  # (where they begin, how many)


class Parts:
    """The parts of a kernel's items. record_bytes: of what a piece of work leaves."""

    def __init__(self, kernel: KernelFunction, record_bytes: int):
        self.kernel, self.record_bytes, self.b, self.params = kernel, record_bytes, kernel.b, kernel.params
        self.count = kernel.area(64, "count")

    def piece(self, number: Value) -> tuple[Value, Value]:
        """(the item, the part) of a piece of work."""
        parts = self.params[("parts",)]
        return self.b.div(number, parts), self.b.rem(number, parts)

    def cut(self) -> Value:
        """Whether there is more than one part."""
        return self.b.compare("sgt", self.params[("parts",)], 1, "cut")

    def keys(self, part: Value, low: Value | int, high: Value) -> tuple[Value, Value]:
        """Those of the keys [low, high) that are in a part."""
        b, size = self.b, self.params[("part_keys",)]
        first = b.mul(part, size)
        return b.most(b.as_value(low, "i64"), first), b.least(high, b.add(first, size))

    def record(self, number: Value) -> Value:
        """Record that a piece of work leaves for the one that merges."""
        return self.b.row(self.params[("ptr", "partials")], number, self.record_bytes, "i8", "record")

    @contextlib.contextmanager
    def records(self, item: Value) -> Iterator[Value]:
        """A loop over the records of an item, in the order of the keys."""
        b, parts = self.b, self.params[("parts",)]
        with b.loop(0, parts, hint="part") as part:
            yield self.record(b.add(b.mul(item, parts), part))

    @contextlib.contextmanager
    def last_of(self, item: Value, cut: Value) -> Iterator[None]:
        """Only where all other parts of the item have arrived, what they wrote is seen, and the count is 0 again."""
        b, one, nothing = self.b, self.b.constant(1, "i64"), self.b.constant(0, "i64")
        b.store(nothing, self.count)
        arrivals = b.select(cut, b.at(self.params[("ptr", "arrivals")], item, "i64"), self.count)
        before = b.op(f"llvm.atomicrmw add {arrivals}, {one} acq_rel : {PTR}, i64", "i64", "before")
        with b.when(b.compare("eq", b.add(before, 1), self.params[("parts",)])):
            b.store(nothing, arrivals)
            yield

    def join(self, own: Sums, more: Sums) -> None:
        """Add what other keys have left."""
        b, kernel = self.b, self.kernel
        m, other = (b.load(sums.maximum, kernel.vector, "m") for sums in (own, more))
        m_new = kernel.exponent.larger(m, other, "m_new")
        plain = kernel.spec.normalizer is Normalizer.NONE
        factors = (1.0, 1.0) if plain else [kernel.exponent.factor(old, m_new) for old in (m, other)]
        for (mine, count), (theirs, _) in zip(own.vectors, more.vectors, strict=True):
            both = lambda x, y: b.add(b.mul(x, factors[0]), b.mul(y, factors[1]))
            b.update(mine, count * kernel.lanes, both, kernel.vector, theirs)
        b.store(m_new, own.maximum)


class TileParts(Parts):
    """Those of a kernel in tiles, whose lanes are queries."""

    def __init__(self, tiles: Tiles):
        self.tiles, self.rows = tiles, tiles.products.e_padded + 2  # of a group: its output, sum and maximum
        super().__init__(tiles.kernel, 4 * tiles.tiling.groups * self.rows * tiles.lanes)

    def begin(self, piece: Value) -> tuple[Value, Value, list[Value]]:
        """At the start of a piece of work: (its item, the part of its keys, -1 for all, the first and last part of
        them). The records of parts lie with those of all items or, where it has all, in memory of this thread."""
        b, params, cut, (number, part) = self.b, self.params, self.cut(), self.piece(piece)
        size = params[("part_keys",)]
        self.total = b.div(b.add(self.kernel.n_k, b.sub(size, 1)), size, "total_parts")
        self.several = b.compare("sgt", self.total, 1, "several_parts")
        own = b.mul(self.kernel.thread, self.total)
        self.first = b.select(cut, b.mul(number, params[("parts",)]), own, "first_record")
        here = b.select(cut, part, b.constant(0, "i64")), b.select(cut, b.add(part, 1), self.total)
        return number, b.select(cut, part, b.constant(-1, "i64")), [*here]

    def is_last(self, item: Value) -> Value:
        """Whether all other parts of the item have arrived: see `last_of`."""
        b, last = self.b, self.b.at(self.count, 1, "i64", "last")
        b.store(b.constant(0, "i64"), last)
        with self.last_of(item, self.cut()):
            b.store(b.constant(1, "i64"), last)
        return b.compare("eq", b.load(last, "i64"), 1, "is_last")

    def _own(self, g: Value) -> Sums:
        """Sums of a group of this piece of work, which are merged."""
        memory = self.tiles.group(g)
        return Sums(maximum=memory.maximum, vectors=[(memory.output, self.rows - 1)])

    def _recorded(self, record: Value, g: Value) -> Sums:
        """Sums of a group, in a record."""
        b, lanes = self.b, self.kernel.lanes
        start = b.row(record, g, self.rows * lanes)
        return Sums(maximum=b.at(start, (self.rows - 1) * lanes, "f32"), vectors=[(start, self.rows - 1)])

    def leave(self, item: Item, part: Value) -> None:
        """Copy the item's sums to the record of a part, where there are several."""
        b, kernel, record = self.b, self.kernel, self.record(self.b.add(self.first, part))
        with b.when(self.several), b.loop(0, item.groups, hint="g") as g:
            self.tiles.all_sums(g)
            own, there = self._own(g), self._recorded(record, g)
            b.store(b.load(own.maximum, kernel.vector, "m"), there.maximum)
            for (source, count), (target, _) in zip(own.vectors, there.vectors, strict=True):
                b.update(target, count * kernel.lanes, lambda old, new: new, kernel.vector, source)

    def merge(self, item: Item) -> None:
        """The sums of all parts of an item, in their order, where there are several."""
        b = self.b
        with b.when(self.several):
            self.tiles.clear(item, float("-inf"))
            with b.loop(0, self.total, hint="part") as part, b.loop(0, item.groups, hint="g") as g:
                self.join(self._own(g), self._recorded(self.record(b.add(self.first, part)), g))
