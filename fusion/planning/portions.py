"""How threads share the work items of a call on a CPU: each takes the next portion from a common counter when it is
free.

Portions become smaller, so that threads end at about the same time although items are unequal (causal masks) and cores
have other work, too (guided self-scheduling, Polychronopoulos and Kuck 1987).
"""

from __future__ import annotations

from typing import NamedTuple

PER_THREAD = 4
"""Portions. The first has the 2 / (PER_THREAD * threads)-th part of the work, the last is an item."""

FEW_BLOCKS = 4
"""Items of a head up to which they stay together if that is fair: each thread that meets a head packs its keys."""

ENOUGH_HEADS = 8
"""Heads per thread from which whole heads are fair, whatever their number."""


class Portions(NamedTuple):
    """count: of portions. unit: how many items that follow each other stay together."""

    count: int
    unit: int


def portions(heads: int, blocks: int, threads: int) -> Portions:
    """How so many threads share the `blocks` items of each of `heads` heads."""
    if threads == 1:
        return Portions(1, heads * blocks)
    whole = blocks <= FEW_BLOCKS and (heads % threads == 0 or heads >= ENOUGH_HEADS * threads)
    unit = blocks if whole else 1
    return Portions(min(PER_THREAD * threads, one_by_one(heads * blocks // unit).count), unit)


def one_by_one(items: int) -> Portions:
    """Portions of at most one item."""
    return Portions(2 * items, 1)


def before(number: int, units: int, count: int) -> int:
    """How many of `units` are in portions before one. Kernels compute the same."""
    return units - units * (count - number) ** 2 // count**2
