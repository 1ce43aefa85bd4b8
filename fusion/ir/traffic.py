"""Bytes of the elements of K and V in memory: less than one for packed elements, and including their scales."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusion.ir.expr import C, E, Expr, J, Kind, coordinates, loads
from fusion.ir.ops import evaluate

if TYPE_CHECKING:
    from fusion.ir.spec import AttentionSpec

ROWS = 256
"""Keys that are looked at: scales are shared by no more of them, or cost next to nothing."""
_ANY_SIZE = 1 << 12


def bytes_of_rows(
    reads: Sequence[Expr],
    itemsize: Callable[[int], int],
    widths: Mapping[Expr, int],
    rows: int,
    sizes: Mapping[str, int],
) -> float:
    """Bytes that have to be read for `rows` keys of one head, every stored element once.

    itemsize: bytes of an element of an operand.
    widths: extents of the columns.
    sizes: of the call; unknown ones are arbitrary.
    """
    if not rows:
        return 0.0
    seen, known = min(rows, ROWS), tuple(sorted(sizes.items()))
    found = (itemsize(r.operand) * _distinct(r, tuple(widths.items()), seen, known) for r in dict.fromkeys(reads))
    return sum(found) * rows / seen


@functools.lru_cache(maxsize=1024)
def _distinct(part: Expr, widths: tuple[tuple[Expr, int], ...], rows: int, sizes: tuple[tuple[str, int], ...]) -> int:
    """Number of elements that a load reads for so many columns of so many keys of one head."""
    places = {column: torch.arange(width) for column, width in widths} | {J: torch.arange(rows)[:, None]}
    known, zero = dict(sizes), torch.zeros((), dtype=torch.int64)

    def leaf(expr: Expr):
        if expr.op == "size":
            return torch.tensor(known.get(expr.name, _ANY_SIZE))
        if expr.op == "load":
            return lambda *index: _mixed(index, expr.operand) if expr.kind is Kind.INT else zero.float()
        return places.get(expr, zero)

    index = [torch.as_tensor(evaluate(entry, leaf)) for entry in part.args]
    return int(_mixed(index, part.operand).unique().numel())


def _mixed(index: tuple[Tensor, ...] | list[Tensor], seed: int) -> Tensor:
    """A number for an element's index that differs between indices."""
    total = torch.tensor(seed + 1)
    for entry in index:
        total = (total * 1000003 + entry) % (1 << 40)
    return total


def bytes_per_element(element: Expr, itemsize: Callable[[int], int], column: Expr, width: int) -> float:
    """Bytes read per element of K or V, over many keys."""
    return bytes_of_rows(loads(element), itemsize, {column: width}, ROWS, {}) / (ROWS * width)


def stored_bytes(spec: AttentionSpec, d: int, d_v: int, n_k: int, sizes: Mapping[str, int]) -> float:
    """Mean of the bytes read per element of K and V, with those read once per key included."""
    if not (d + d_v) * n_k:
        return 0.0
    of_keys = [r for r in loads(spec.score, spec.weight) if "j" in coordinates(r) and "i" not in coordinates(r)]
    of_elements = [*loads(spec.element(1)), *loads(spec.element(2))]

    def total(reads: Sequence[Expr]) -> float:
        return bytes_of_rows(reads, lambda n: spec.operands[n].torch_dtype.itemsize, {C: d, E: d_v}, n_k, sizes)

    return (total(of_elements) + total(of_keys)) / (n_k * (d + d_v))
