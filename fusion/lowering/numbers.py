"""Constants of the exponential, and the ranges of numbers that kernels compute with."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping

from fusion.ir.expr import WEIGHT, Expr, Kind, walk
from fusion.ir.primitives import ROUNDED, is_step
from fusion.ir.ranges import interval, range_of
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.ir.transfer import Range

LOG2E = math.log2(math.e)

HUGE = 2.0**30
"""Largest product of a maximum, scale and log2(e): above it neighbours are 64 or more apart, 2**-64 in weights."""


def exponent_units(scale: float) -> tuple[float, float, float]:
    """(unit, limit, exact): the weight of a score x is exp2(x * unit - m * unit), for the maximum m, in units of
    `scale`. Where m is above the limit, m * unit is rounded by more than an exponent may be off: scores that are not
    equal to m have no weight there, and the unit is a power of two, with which products are exact."""
    factor = scale * LOG2E
    return factor, HUGE / factor, min(1.0, 2.0 ** math.floor(math.log2(factor)))


def is_moderate(scale: float) -> bool:
    """Whether ordinary scores stay so if they are scaled later: overflow moves by 2**24 at most."""
    return 2.0**-24 <= abs(scale) <= 2.0**24


@functools.lru_cache(maxsize=4096)
def feeding_comparisons(*exprs: Expr | None) -> frozenset[Expr]:
    """Floats below a comparison, a rounding to integers, or one of positions and masks to a narrower dtype, where a
    unit in the last place decides what follows. They are computed as written."""
    deciding = [part for part in walk(*filter(None, exprs)) if is_step(part.op) or _rounds_the_same(part)]
    return frozenset(part for part in walk(*(arg for e in deciding for arg in e.args)) if part.kind is Kind.FLOAT)


def _rounds_the_same(part: Expr) -> bool:
    """Whether a rounding applies to the same number as in eager mode, and to no score."""
    return part.op in ROUNDED.values() and not any(inner.op in ("score", "dot") for inner in walk(part))


def in_float32(value: float) -> float:
    """Nearest number of float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def width(expr: Expr) -> int:
    """Upper bound of all INT arguments and results of an operation: a remainder may be less than its argument."""
    return max(map(magnitude, (expr, *(arg for arg in expr.args if expr.op in ("mod", "floordiv")))))


@functools.lru_cache(maxsize=4096)
def magnitude(expr: Expr) -> int:
    """Upper bound of the absolute value of an INT expression, and of its subexpressions except for the arguments of
    remainders and hashes, of which 32 bits count; at least 2**63 where none is known."""
    low, high = interval(expr, {}, lambda load: (-(2**63), 2**63))
    inner = () if expr.op in ("load", "mod", "hash") else (arg for arg in expr.args if arg.kind is Kind.INT)
    return max(-low, high, *map(magnitude, inner))


def is_ordinary(expr: Expr, known: Mapping[Expr, Range]) -> bool:
    """Whether a value is a positive number of float32, neither denormal nor infinite, or NaN. known: ranges of leaves;
    others are arbitrary."""
    result = range_of(expr, known.get)
    return result.low >= 2.0**-125 and result.high <= 2.0**127  # with room for the rounding of float32


def shares(spec: AttentionSpec) -> dict[Expr, Range]:
    """Range of a weight that is a share of its row, but for rounding."""
    shares = spec.normalizer is not Normalizer.NONE and spec.row_scale is None
    return {WEIGHT: Range(0.0, 2.0, True)} if shares else {}
