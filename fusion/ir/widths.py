"""Integers of a limited width: between which bounds an INT expression lies, and what is left of it in a dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fusion.ir import integers
from fusion.ir.expr import Expr, Kind, walk

LARGEST_SIZE = 2**25
"""Run-time sizes are below this (launchers check), so that small multiples of coordinates fit in 32 bits."""

_WIDE = (-(2**63), 2**63 - 1)
_EXACT = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

Range = tuple[int, int]


def interval(expr: Expr, bounds: integers.Bounds, of_load: Callable[[Expr], Range]) -> Range:
    """(least, largest) value that is possible, by the bounds of the coordinates and of the tensors that are read."""

    def of(part: Expr) -> Range:
        if part.op == "const":
            return part.integer, part.integer
        if part.op == "coord":
            extent = bounds.get(part)
            return 0, max(0, (of(extent)[1] if extent is not None else LARGEST_SIZE) - 1)
        if part.op == "size":
            return 0, LARGEST_SIZE
        if part.op == "load":
            return of_load(part)
        rule = _RULES.get(part.op)
        return _WIDE if rule is None else rule([of(arg) for arg in part.args if arg.kind is Kind.INT])

    return of(expr)


def _product(parts: list[Range]) -> Range:
    low, high = parts[0]
    for least, largest in parts[1:]:
        ends = [x * y for x in (low, high) for y in (least, largest)]
        low, high = min(ends), max(ends)
    return low, high


def _magnitude(parts: list[Range]) -> Range:
    low, high = parts[0]
    return max(0, low, -high), max(abs(low), abs(high))


_RULES: dict[str, Callable[[list[Range]], Range]] = {
    "add": lambda parts: (sum(low for low, _ in parts), sum(high for _, high in parts)),
    "mul": _product,
    "floordiv": lambda parts: (min(0, parts[0][0]), max(0, parts[0][1])),
    "mod": lambda parts: (0, parts[1][1]),
    "imin": lambda parts: (min(low for low, _ in parts), min(high for _, high in parts)),
    "imax": lambda parts: (max(low for low, _ in parts), max(high for _, high in parts)),
    "iwhere": lambda parts: (min(low for low, _ in parts), max(high for _, high in parts)),
    "iabs": _magnitude,
    "hash": lambda parts: (0, 2**31 - 1),
    "bool_to_int": lambda parts: (0, 1),
}


def may_be_moved(left: Expr, right: Expr) -> bool:
    """Whether `left <= right` is `0 <= right - left`: no sum or product on the way leaves 64 bits, where it would wrap
    around. Data may be any number."""
    return not any(map(_may_wrap, (left, right, integers.sub(right, left))))


def _may_wrap(value: Expr) -> bool:
    return any(
        part.op in ("add", "mul")
        and any(map(_may_be_large, walk(part)))
        and not within_half(interval(part, {}, lambda load: _WIDE))
        for part in walk(value)
    )


def _may_be_large(part: Expr) -> bool:
    """Whether a leaf may be an integer of any size; positions in memory are not."""
    return part.op in ("load", "to_int") or (part.is_const and part.kind is Kind.INT and abs(part.integer) > 2**31)


def within_half(limits: Range) -> bool:
    """Whether the difference of two such integers is one of 64 bits."""
    return -(2**62) <= limits[0] and limits[1] <= 2**62


def within(value: Expr, dtype: torch.dtype, limits: Range) -> Expr | None:
    """An integer within `limits` as `dtype` holds it, wrapped around; None where that cannot be expressed."""
    held = torch.iinfo(dtype)
    if dtype is torch.int64 or (held.min <= limits[0] and limits[1] <= held.max):
        return value
    if value.is_const:
        return integers.integer((value.integer - held.min) % 2**held.bits + held.min)
    if held.bits > 16 or any(part.op == "to_int" for part in walk(value)):
        return None  # kernels may compute in 32 bits; and a float beyond an integer's range becomes any number
    return integers.add(integers.mod(integers.sub(value, held.min), 2**held.bits), held.min)


def dtype_range(dtype: str) -> Range:
    """The integers of a dtype."""
    held = torch.iinfo(getattr(torch, dtype))
    return held.min, held.max


def is_exact(limits: Range, dtype: torch.dtype) -> bool:
    """Whether a floating dtype holds every integer in `limits`."""
    return max(map(abs, limits)) <= math.ldexp(1, _EXACT[dtype])
