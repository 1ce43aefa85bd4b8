"""Attention whose product Q K^T is Strassen's, on the simulated memory: I/O of a fast matrix product against its bound.

The scores are cut into d x d squares. A square whose three matrices fit the fast memory is multiplied there; a larger
one is halved, and its seven half-size products and the sums around them go through slow memory. d is a power of two
and divides N_q and N_k.
"""

from __future__ import annotations

import math

import numpy as np

from fusion.errors import ProblemError

from .memory import TwoLevelMemory
from .rows import Tile, length, spans
from .schedules import exponentiate_and_multiply

# (left sum, right sum, targets): quadrants 0..3 = 11, 12, 21, 22 with their signs (Strassen 1969).
_PRODUCTS = (
    (((0, 1), (3, 1)), ((0, 1), (3, 1)), ((0, 1), (3, 1))),
    (((2, 1), (3, 1)), ((0, 1),), ((2, 1), (3, -1))),
    (((0, 1),), ((1, 1), (3, -1)), ((1, 1), (3, 1))),
    (((3, 1),), ((2, 1), (0, -1)), ((0, 1), (2, 1))),
    (((0, 1), (1, 1)), ((3, 1),), ((1, 1), (0, -1))),
    (((2, 1), (0, -1)), ((0, 1), (1, 1)), ((3, 1),)),
    (((1, 1), (3, -1)), ((2, 1), (3, 1)), ((0, 1),)),
)
# Half-size squares moved by the sums of one step: ten input sums of 3, four first and eight further contributions.
_SUMS = 10 * 3 + 4 * 2 + 8 * 3


def product_io(n_q: int, n_k: int, d: int, capacity: int) -> int:
    """Elements that the Strassen product of Q and K^T moves: the closed form of what `strassen` does."""
    levels = 0
    while 3 * (d >> levels) ** 2 > capacity:
        levels += 1
    sums = sum(7**level * _SUMS * (d >> (level + 1)) ** 2 for level in range(levels))
    return n_q // d * (n_k // d) * (7**levels * 3 * (d >> levels) ** 2 + sums)


def strassen(memory: TwoLevelMemory, sizes: tuple[int, int, int, int], tile: Tile) -> int:
    """Runs it; returns the I/O of the product alone. Slow memory gets S, L and O."""
    n_q, d, n_k, _ = sizes
    if d & (d - 1) or n_q % d or n_k % d:
        raise ProblemError(
            f"the Strassen product wants d a power of two that divides N_q and N_k, not {sizes}; pad them"
        )
    if memory.capacity < 3:
        raise ProblemError(f"the Strassen product wants a fast memory of at least 3 elements, not {memory.capacity}")
    memory.reserve("S", (n_q, n_k))
    memory.reserve("KT", (d, n_k))
    memory.result("KT")[...] = memory.result("K").T  # a view of the same elements: how K is stored costs nothing
    for rows in spans(n_q, d):
        for keys in spans(n_k, d):
            _multiply(memory, ("Q", rows, slice(0, d)), ("KT", slice(0, d), keys), ("S", rows, keys), d, 0)
    product = memory.io
    _row_statistics(memory, n_q, n_k, d)
    exponentiate_and_multiply(memory, sizes, tile)
    return product


Region = tuple[str, slice, slice]


def _quadrant(region: Region, index: int) -> Region:
    name, rows, columns = region
    half = length(rows) // 2
    row, column = rows.start + half * (index // 2), columns.start + half * (index % 2)
    return name, slice(row, row + half), slice(column, column + half)


def _multiply(memory: TwoLevelMemory, left: Region, right: Region, target: Region, size: int, depth: int) -> None:
    if 3 * size * size <= memory.capacity:
        memory.load("a", left[0], left[1:])
        memory.load("b", right[0], right[1:])
        memory["c"] = memory["a"] @ memory["b"]
        memory.store("c", target[0], target[1:])
        memory.free("a", "b", "c")
        return
    half, written = size // 2, set()
    whole = (slice(0, half), slice(0, half))
    for name in ("left", "right", "product"):
        memory.reserve(f"{name}{depth}", (half, half))
    for left_sum, right_sum, targets in _PRODUCTS:
        a = _sum(memory, left, left_sum, (f"left{depth}", *whole))
        b = _sum(memory, right, right_sum, (f"right{depth}", *whole))
        product = (f"product{depth}", *whole)
        _multiply(memory, a, b, product, half, depth + 1)
        for quadrant, sign in targets:
            _add(memory, product, sign, _quadrant(target, quadrant), fresh=quadrant not in written)
            written.add(quadrant)


def _sum(memory: TwoLevelMemory, region: Region, parts: tuple[tuple[int, int], ...], target: Region) -> Region:
    """The signed sum of up to two quadrants, written to `target`; a single quadrant is used where it lies."""
    if len(parts) == 1:
        return _quadrant(region, parts[0][0])
    (first, _), (second, sign) = parts
    for a, b, c in _strips(memory, _quadrant(region, first), _quadrant(region, second), target):
        memory.load("a", a[0], a[1:])
        memory.load("b", b[0], b[1:])
        memory["a"] = memory["a"] + sign * memory["b"]
        memory.store("a", c[0], c[1:])
        memory.free("a", "b")
    return target


def _add(memory: TwoLevelMemory, source: Region, sign: int, target: Region, *, fresh: bool) -> None:
    for a, c in _strips(memory, source, target):
        memory.load("a", a[0], a[1:])
        if fresh:
            memory["a"] = sign * memory["a"]
        else:
            memory.load("b", c[0], c[1:])
            memory["a"] = memory["b"] + sign * memory["a"]
            memory.free("b")
        memory.store("a", c[0], c[1:])
        memory.free("a")


def _strips(memory: TwoLevelMemory, *regions: Region):
    """The regions cut alike into pieces of which two fit the fast memory."""
    size = length(regions[0][1])
    columns = max(1, min(size, memory.capacity // 2))
    rows = max(1, memory.capacity // (2 * columns))
    for row in spans(size, rows):
        for column in spans(size, columns):
            yield [
                (
                    name,
                    slice(a.start + row.start, a.start + row.stop),
                    slice(b.start + column.start, b.start + column.stop),
                )
                for name, a, b in regions
            ]


def _row_statistics(memory: TwoLevelMemory, n_q: int, n_k: int, d: int) -> None:
    """Scales S by 1 / sqrt(d) in passing and leaves the rows' log-sum-exp in L."""
    for row in range(n_q):
        memory.full("L", (1,), -np.inf)
        for keys in spans(n_k, memory.capacity - 1):
            memory.load("s", "S", (row, keys))
            memory["s"] = memory["s"] / math.sqrt(d)
            memory["L"] = np.logaddexp(memory["L"], np.logaddexp.reduce(memory["s"]))
            memory.store("s", "S", (row, keys))
            memory.free("s")
        memory.store("L", "L", slice(row, row + 1))
        memory.free("L")
