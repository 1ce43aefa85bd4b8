"""Square blocks in registers: transposition, and sums of rows."""

from __future__ import annotations

from collections.abc import Sequence

from .builder import Builder, Value, shape_of


def transpose(b: Builder, rows: Sequence[Value], run: int = 1) -> list[Value]:
    """The columns of square blocks that lie beside each other: L vectors (L a power of two) of a multiple of L runs of
    elements, by log2(L) rounds of L two-operand shuffles. run: elements that stay together. In the round of distance h,
    rows r and r + h exchange the off-diagonal halves of every 2h x 2h block."""
    values = list(rows)
    lanes = shape_of(values[0].type)[0]
    if lanes % (len(values) * run):
        raise ValueError(f"{len(values)} rows of {lanes} elements are not square blocks")
    h = len(values) // 2
    while h:
        apart = h * run
        low = [lane if not lane & apart else lane - apart + lanes for lane in range(lanes)]
        high = [lane + apart if not lane & apart else lane + lanes for lane in range(lanes)]
        for r in range(len(values)):
            if not r & h:
                x, y = values[r], values[r + h]
                values[r], values[r + h] = b.shuffle(x, y, low, "tr"), b.shuffle(x, y, high, "tr")
        h //= 2
    return values


def sum_rows(b: Builder, rows: Sequence[Value]) -> Value:
    """The vector whose lane r is the sum of row r; with fewer rows than lanes, that for each of the square blocks side
    by side. Of two halves that are added, one stays in its place, which is cheaper than a shuffle."""
    values = list(rows)
    lanes = shape_of(values[0].type)[0]
    h = len(values) // 2
    while h:
        stay = [lane if not lane & h else lane + lanes for lane in range(lanes)]
        move = [lane + h if not lane & h else lane - h + lanes for lane in range(lanes)]
        values = [
            b.add(b.shuffle(x, y, stay, "stay"), b.shuffle(x, y, move, "move"), "sum")
            for x, y in zip(values[:h], values[h:], strict=True)
        ]
        h //= 2
    return values[0]
