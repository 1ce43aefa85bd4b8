"""Value ranges of expressions, by the transfer functions of the primitives, and integers of a limited width, which wrap
around in their dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from fusion.ir import integers
from fusion.ir.expr import Expr, Kind, walk
from fusion.ir.primitives import ANY, PRIMITIVES
from fusion.ir.transfer import Range

LARGEST_SIZE = 2**25
"""Run-time sizes are below this (launchers check), so that small multiples of coordinates fit in 32 bits."""

_WIDE = ANY[Kind.INT]
_LARGEST = torch.finfo(torch.float32).max
_EXACT = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

Ends = tuple[int, int]
"""(least, largest) integer."""


def range_of(expr: Expr, leaf: Callable[[Expr], Range | None]) -> Range:
    """Range of an expression. leaf: that of a coordinate, size, load or score; None where it is unknown."""
    ranges: dict[Expr, Range] = {}
    for part in walk(expr):
        if part.is_const:
            ranges[part] = _of_constant(part)
        elif part.op in PRIMITIVES:
            ranges[part] = transferred(part.op, *(ranges[arg] for arg in part.args))
        else:
            ranges[part] = leaf(part) or ANY[part.kind]
    return ranges[expr]


def transferred(op: str, *parts: Range) -> Range:
    """Range of a primitive's result. Integers wrap around at the ends of 64 bits, and may then be any. Floats are
    computed in float32, or better."""
    primitive = PRIMITIVES[op]
    result = functools.reduce(primitive.transfer, parts) if op in ("add", "mul") else primitive.transfer(*parts)
    if primitive.result is Kind.FLOAT:
        return Range(_below(result.low), -_below(-result.high), result.nan)
    wraps = primitive.result is Kind.INT and not (_WIDE.low <= result.low and result.high <= _WIDE.high)
    return _WIDE if wraps else result


def _below(value: float) -> float:
    """An end from below: with room for rounding, for what lies beyond the range of float32, and for denormal numbers,
    which may count as zero."""
    if value <= -_LARGEST:
        return -math.inf
    value = min(value, _LARGEST)
    return 0.0 if 0.0 <= value < 2.0**-126 else value - abs(value) * 2.0**-22


def _of_constant(part: Expr) -> Range:
    if part.kind is not Kind.FLOAT:
        value = integers.in_64_bits(part.integer) if part.kind is Kind.INT else bool(part.attr)
        return Range(value, value)
    if math.isnan(part.value):
        return Range(math.inf, -math.inf, True)
    return Range(_below(part.value), -_below(-part.value))


def interval(expr: Expr, bounds: integers.Bounds, of_load: Callable[[Expr], Ends]) -> Ends:
    """(least, largest) value that an integer may have, by the bounds of coordinates and of tensors that are read."""

    def leaf(part: Expr) -> Range | None:
        if part.op == "coord":
            extent = bounds.get(part)
            return Range(0, max(0, (LARGEST_SIZE if extent is None else range_of(extent, leaf).high) - 1))
        if part.op == "size":
            return Range(0, LARGEST_SIZE)
        return Range(*of_load(part)) if part.op == "load" and part.kind is Kind.INT else None

    span = range_of(expr, leaf)
    return span.low, span.high


def may_be_moved(left: Expr, right: Expr) -> bool:
    """Whether `left <= right` is `0 <= right - left`: no sum or product on the way leaves 64 bits, where it would wrap
    around. Data may be any number."""
    return not any(map(_may_wrap, (left, right, integers.sub(right, left))))


def _may_wrap(value: Expr) -> bool:
    return any(
        part.op in ("add", "mul")
        and any(map(_may_be_large, walk(part)))
        and not within_half(interval(part, {}, lambda load: (_WIDE.low, _WIDE.high)))
        for part in walk(value)
    )


def _may_be_large(part: Expr) -> bool:
    """Whether a leaf may be an integer of any size; positions in memory are not."""
    return part.op in ("load", "to_int") or (part.is_const and part.kind is Kind.INT and abs(part.integer) > 2**31)


def within_half(limits: Ends) -> bool:
    """Whether the difference of two such integers is one of 64 bits."""
    return -(2**62) <= limits[0] and limits[1] <= 2**62


def within(value: Expr, dtype: torch.dtype, limits: Ends) -> Expr | None:
    """Integer within `limits` wrapped around to `dtype`; None where that cannot be expressed."""
    info = torch.iinfo(dtype)
    if dtype is torch.int64 or (info.min <= limits[0] and limits[1] <= info.max):
        return value
    if value.is_const:
        return integers.integer((value.integer - info.min) % 2**info.bits + info.min)
    if info.bits > 16 or any(part.op == "to_int" for part in walk(value)):
        return None  # kernels may compute in 32 bits; and a float beyond an integer's range becomes any number
    return integers.add(integers.mod(integers.sub(value, info.min), 2**info.bits), info.min)


def dtype_range(dtype: str) -> Ends:
    """(least, largest) integer of a dtype."""
    info = torch.iinfo(getattr(torch, dtype))
    return info.min, info.max


def is_exact(limits: Ends, dtype: torch.dtype) -> bool:
    """Whether a floating dtype holds every integer in `limits`."""
    return max(map(abs, limits)) <= math.ldexp(1, _EXACT[dtype])
