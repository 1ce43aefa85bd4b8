"""Transfer functions of value ranges: from the ranges of the arguments to that of the result.

Ends are Python numbers or, for one range per cell of a mask, tensors: integers and predicates are computed alike on
both. Here integers do not wrap around, and floats are not rounded (`fusion.ir.ranges` does). Divisors are positive.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Range:
    """low <= value <= high, or NaN where `nan`; low > high where it is always NaN. For a predicate: whether it must be,
    and may be, true."""

    low: Any
    high: Any
    nan: bool = False


Transfer = Callable[..., Range]


def least(*values: Any) -> Any:
    return functools.reduce(torch.minimum, values) if isinstance(values[0], torch.Tensor) else min(values)


def greatest(*values: Any) -> Any:
    return functools.reduce(torch.maximum, values) if isinstance(values[0], torch.Tensor) else max(values)


def rising(function: Callable[..., Any]) -> Transfer:
    """Transfer function of a function that rises with each argument, or falls with none."""
    return lambda *parts: Range(function(*(part.low for part in parts)), function(*(part.high for part in parts)))


def by_ends(function: Callable[..., Any]) -> Transfer:
    """Transfer function of an integer function that is monotone in each argument, rising or falling."""

    def transfer(*parts: Range) -> Range:
        values = [function(*ends) for ends in itertools.product(*((part.low, part.high) for part in parts))]
        return Range(least(*values), greatest(*values))

    return transfer


def floor_division(x: Range, divisor: Range) -> Range:
    one = divisor.low * 0 + 1
    return by_ends(lambda x, y: x // y)(x, Range(greatest(divisor.low, one), greatest(divisor.high, one)))


def remainder(x: Range, divisor: Range) -> Range:
    zero = divisor.low * 0
    return Range(zero, greatest(divisor.high - 1, zero))


def absolute(x: Range) -> Range:
    return Range(greatest(x.low, -x.high, x.low * 0), greatest(abs(x.low), abs(x.high)))


def selection(condition: Range, then: Range, otherwise: Range) -> Range:
    if condition.low is True or condition.high is False:
        return then if condition.low is True else otherwise
    return Range(least(then.low, otherwise.low), greatest(then.high, otherwise.high), then.nan | otherwise.nan)


def truncation(x: Range) -> Range:
    """Range after truncation to an integer; one beyond 64 bits becomes any."""
    fits = not x.nan and max(-x.low, x.high) < 2.0**63
    return Range(int(x.low), int(x.high)) if fits else Range(-(2**63), 2**63 - 1)


def comparison(name: str) -> Transfer:
    """Transfer function of `lt`, `le`, `eq` or `ne`. Ends of tensors may be NaN, which compares false: a comparison
    with it may be true unless ends that are numbers exclude that. NaN is unequal to everything."""

    def transfer(a: Range, b: Range) -> Range:
        numbers = not (a.nan or b.nan)
        if name == "le":
            return Range((a.high <= b.low) & numbers, (a.low > b.high) ^ True)
        if name == "lt":
            return Range((a.high < b.low) & numbers, (a.low >= b.high) ^ True)
        apart = (a.low > b.high) | (a.high < b.low)
        same = (a.low == b.high) & (a.high == b.low) & numbers
        return Range(same, apart ^ True) if name == "eq" else Range(apart, same ^ True)

    return transfer


def negation(a: Range) -> Range:
    return Range(a.high ^ True, a.low ^ True)


def between(low: float, high: float) -> Transfer:
    """Transfer function of a function whose finite arguments have a result in this range, and others perhaps none."""
    return lambda *parts: Range(low, high, any(part.nan or max(-part.low, part.high) == math.inf for part in parts))


def by_points(evaluate: Callable[..., torch.Tensor], *critical: float) -> Transfer:
    """Transfer function of a float function that is monotone in each argument between the critical points: from its
    values at the ends and there, in float64."""

    def points(part: Range) -> list[float]:
        inside = [x for x in critical if part.low <= x <= part.high]
        zeros = [-0.0] if 0 in inside else []
        ends = [part.low, part.high] if part.low <= part.high else []
        return [*ends, *inside, *zeros, *([math.nan] if part.nan else [])]

    def transfer(*parts: Range) -> Range:
        columns = torch.tensor([*itertools.product(*map(points, parts))], dtype=torch.float64).unbind(-1)
        values = evaluate(*columns).double()
        numbers = values[~values.isnan()].tolist()
        return Range(min(numbers, default=math.inf), max(numbers, default=-math.inf), len(numbers) < values.numel())

    return transfer


_power = by_points(torch.pow, 0.0, 1.0)


def power(base: Range, exponent: Range) -> Range:
    """A negative base has a power for integers alone, of either sign."""
    if base.low > 0 or base.low > base.high:
        return _power(base, exponent)
    size = Range(max(base.low, -base.high, 0.0), max(-base.low, base.high), base.nan)
    top = _power(size, exponent).high
    return Range(-top, top, True)
