"""How the work of a call is divided: items of query rows, the keys that they visit, tiles of both."""

from __future__ import annotations

from dataclasses import dataclass

from .builder import Value
from .rows import RowReader
from .scope import Scope
from .softmax import KeyBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The tiles of a kernel. together: how many groups (a multiple of the products' group step; 0 for one such step) go
    through a block of keys at a time. cut: whether the keys of an item may be in parts. chain: words of a score's
    product that are summed one after the other by multiply-adds; 0 for `LONGEST_CHAIN`."""

    groups: int  # lane vectors of queries in a work item
    keys: int  # keys in a block
    planes: int  # of AMX products, 0 for multiply-add
    together: int = 0
    cut: bool = False
    chain: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRows:
    """In place of a tiling: the kernel for few queries. together: rows that it may multiply with keys at a time, 1, 2
    or 4; 1 where no two rows of a call read the same keys."""

    together: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllHeads:
    """In place of a tiling: the kernel whose work items are rows of all heads, which are mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A work item: some query rows of one batch element."""

    number: Value  # of the item, among all of a call
    scope: Scope  # knows the batch coordinates
    readers: list[RowReader]  # of Q, K and V
    first: Value  # row
    count: Value  # of rows
    groups: Value  # groups of lanes that hold them
    padded_groups: Value  # the same, up to a multiple of the products' group step


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRange:
    """The keys that an item visits. low, high: from low on, before high. skipping: whether a tile visits only those
    that its own rows need (i1); None where they need all."""

    low: Value | int
    high: Value
    skipping: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Some groups of an item against a block of keys."""

    item: Item
    scope: Scope  # knows the tile's first and last row (i0, i1)
    g: Value  # the first group
    here: Value  # how many of its groups exist
    block: KeyBlock
    steps: Value  # of keys, in the block
    weights: Value  # where they lie
