"""In which interval a value lies, where that makes it cheaper to compute."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusion.ir.expr import WEIGHT, Expr
from fusion.ir.spec import AttentionSpec, Normalizer

Interval = tuple[float, float]
_ANY = (-math.inf, math.inf)
_LEAST_NORMAL, _ABOVE = 2.0**-126, 2.0**127


def ranges(spec: AttentionSpec) -> dict[Expr, Interval]:
    """What is known of leaves: a weight that is no NaN is a share of its row, but for rounding."""
    shares = spec.normalizer is not Normalizer.NONE and spec.row_scale is None
    return {WEIGHT: (0.0, 2.0)} if shares else {}


def is_ordinary(expr: Expr, known: Mapping[Expr, Interval]) -> bool:
    """Whether a value is a positive number of float32, neither denormal nor infinite, or NaN."""
    low, high = _interval(expr, known)
    return low >= _LEAST_NORMAL and high <= _ABOVE


def _interval(expr: Expr, known: Mapping[Expr, Interval]) -> Interval:
    """Bounds of a value that is no NaN."""
    if expr in known:
        return known[expr]
    if expr.is_const:
        return expr.value, expr.value
    if expr.op not in ("fadd", "fmul", "maximum", "minimum"):
        return _ANY
    (a, b), (c, d) = (_interval(arg, known) for arg in expr.args)
    if expr.op == "fadd":
        return a + c, b + d
    if expr.op == "fmul":
        return (a * c, b * d) if min(a, c) >= 0.0 and max(b, d) < math.inf else _ANY
    pick = max if expr.op == "maximum" else min
    return pick(a, c), pick(b, d)
