"""Square blocks in registers: transposition, and sums of rows."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.codegen.mlir.builder import Builder, Value, shape_of


def transpose(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """The columns of square blocks that lie beside each other: L vectors (L a power of two) of a multiple of L
    elements, by log2(L) rounds of L two-operand shuffles.

    In the round of distance h, rows r and r + h exchange the off-diagonal halves of every 2h x 2h block.
    """
    values = list(rows)
    lanes = shape_of(values[0].type)[0]
    if lanes % len(values):
        raise ValueError(f"{len(values)} rows of {lanes} elements are not square blocks")
    h = len(values) // 2
    while h:
        low = [lane if not lane & h else lane - h + lanes for lane in range(lanes)]
        high = [lane + h if not lane & h else lane + lanes for lane in range(lanes)]
        for r in range(len(values)):
            if not r & h:
                x, y = values[r], values[r + h]
                values[r], values[r + h] = b.shuffle(x, y, low, "tr"), b.shuffle(x, y, high, "tr")
        h //= 2
    return values


def sum_rows(b: Builder, rows: Sequence[Value]) -> Value:
    """The vector whose lane r is the sum of row r: the rounds of the transposition, adding what they exchange."""
    values = list(rows)
    lanes = shape_of(values[0].type)[0]
    h = lanes // 2
    while h:
        low = [lane if not lane & h else lane - h + lanes for lane in range(lanes)]
        high = [lane + h if not lane & h else lane + lanes for lane in range(lanes)]
        values = [
            b.add(b.shuffle(x, y, low, "low"), b.shuffle(x, y, high, "high"), "sum")
            for x, y in zip(values[:h], values[h:], strict=True)
        ]
        h //= 2
    return values[0]
