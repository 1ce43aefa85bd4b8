"""Fills of masks in score programs: the value of a dead score, and its value in other units.

A program is `live if p else dead`, where `dead` is a constant (the score was replaced) or a sum with one (a mask was
added), which may be rounded to a narrower dtype. For live rows it only has to be far below. For rows without a live key
it is eager's value, rounding included, since the mean there is one over the keys with the largest of these values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fusion.ir.expr import Expr, Kind, const, walk
from fusion.ir.ops import apply, where
from fusion.ir.primitives import ROUNDED

LARGEST = 3.4028234663852886e38
"""The largest float32."""

SWALLOWS = 2.0**64
"""A finite fill beyond this stays what it is, or overflows, in a sum with scores in any dtype."""

_HIDES = 2.0**20
"""A unit of rounding of constants beyond this hides scores."""

_KEEPING = ("where", "fadd", "minimum", "maximum")
"""Operations of which -inf makes -inf, or nothing."""


def fill_of(value: Expr) -> float:
    """Upper bound of a dead score without ordinary scores that are added to it; +inf for a value that is not dead, or
    may be NaN."""
    if value.op == "const":
        return value.value
    if value.op == "where":
        return max(map(fill_of, value.args[1:]))
    if value.op in ROUNDED.values():
        return fill_of(value.args[0])
    if value.op == "fmul" and value.args[1].is_const and (by := fill_of(value.args[1])) > 0:
        return fill_of(value.args[0]) * by
    low = [fill for arg in value.args if (fill := fill_of(arg)) < -1e3] if value.op == "fadd" else []
    return sum(low) if low and not any(map(_loses_infinities, value.args)) else math.inf


def _loses_infinities(value: Expr) -> bool:
    """Whether a value may be NaN at a score that was masked with -inf: -inf * 0, say."""
    if value.op in _KEEPING or value.op in ROUNDED.values():
        return any(_loses_infinities(arg) for arg in value.args if arg.kind is Kind.FLOAT)
    constants = (part.value for part in walk(value) if part.is_const and part.kind is Kind.FLOAT)
    return not value.is_const and any(map(math.isinf, constants))


def has_fill(value: Expr) -> bool:
    """Whether a value contains a constant beside which scores vanish."""
    return any(part.is_const and part.kind is Kind.FLOAT and abs(part.value) > _HIDES for part in walk(value))


def is_dead(value: Expr) -> bool:
    """Whether a value is a constant, or a sum with a fill."""
    return value.is_const or fill_of(value) < 0


def in_units(dead: Expr, scale: float, divide: Callable[[Expr], Expr | None]) -> Expr | None:
    """Dead score / `scale` such that its rows keep their weights, or None. divide: the division for values that are not
    dead."""
    if dead.is_const:
        value = dead.value / scale
        return const(max(-LARGEST, min(LARGEST, value)) if math.isfinite(dead.value) else value, Kind.FLOAT)
    if dead.op == "where":
        arms = [in_units(arm, scale, divide) if is_dead(arm) else divide(arm) for arm in dead.args[1:]]
        return None if None in arms else where(dead.args[0], *arms)  # type: ignore[arg-type]
    if dead.op in ROUNDED.values():  # values apart are further apart than the division rounds
        constants = [part.value for part in walk(dead) if part.is_const and part.kind is Kind.FLOAT]
        fits = all(math.isinf(value) or abs(value) / scale < LARGEST / 16 for value in constants)
        return dead * (1 / scale) if fits else None
    if dead.op != "fadd":
        return None
    fill, rest = sorted(dead.args, key=lambda arg: not arg.is_const)
    if not fill.is_const or not _stays(fill.value, scale):
        return None
    moved = in_units(rest, scale, divide) if is_dead(rest) else divide(rest)
    return None if moved is None else apply("fadd", moved, in_units(fill, scale, divide))  # type: ignore[arg-type]


def _stays(fill: float, scale: float) -> bool:
    """Whether x + fill rounds and overflows in units of `scale` as it does without."""
    if math.isinf(fill):
        return True
    if -fill < SWALLOWS:
        return math.frexp(scale)[0] == 0.5
    return scale <= 1 and (-fill / scale <= LARGEST or -fill > LARGEST / 2)
