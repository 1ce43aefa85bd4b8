"""Rarely used functions of one or two floats, as compositions of score-language primitives.

Where torch's gradient at a special point is no limit of the function's own gradient, a term without a value adds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import torch

from fusion.ir.expr import ONE, ZERO, Expr, Kind, const
from fusion.ir.ops import apply, where

from .casts import Builder, Call, float_function, kind_of
from .elementary import INFINITY, not_above_zero

aten = torch.ops.aten


def _acosh(x: Expr, call: Call) -> Expr:
    """log1p(t + sqrt(t) sqrt(t + 2)) with t = x - 1, and log(2 x) where both are equal."""
    large = apply("flt", const(1e8), x)
    above = where(large, ONE, x) - 1.0
    near = apply("log1p", above + apply("sqrt", above) * apply("sqrt", above + 2.0))
    return where(large, apply("log", where(large, x, ONE)) + math.log(2), near)


def _logit(x: Expr, call: Call) -> Expr:
    """log(x) - log(1 - x), of x clamped where there is a bound."""
    if (eps := call.get(1, "eps")) is not None and eps >= 0:
        low, high = const(float(eps)), const(1.0 - float(eps))
        x = where(apply("flt", x, low), low, where(apply("flt", high, x), high, x))
    return apply("log", x) - apply("log1p", -x)


def _prelu(x: Expr, slope: Expr, call: Call) -> Expr:
    return where(apply("flt", ZERO, x), x, slope * not_above_zero(x))


def _extremum_of_numbers(order: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr, Call], Expr]:
    """fmax and fmin: for a number and NaN the number, for equal numbers the first."""

    def compose(a: Expr, b: Expr, call: Call) -> Expr:
        return where(apply("or", order(b, a), apply("fne", b, b)), a, b)

    return compose


def _log_add_exp_2(a: Expr, b: Expr, call: Call) -> Expr:
    """log2(2^a + 2^b), built like `elementary.log_add_exp`."""
    highest, apart = apply("maximum", a, b), where(apply("flt", a, b), b - a, a - b)
    added = apply("log1p", apply("exp", -apart * math.log(2))) * (1 / math.log(2))
    return where(apply("feq", a, b), highest + 1.0, highest + added)


def _round(x: Expr, call: Call) -> Expr:
    if (decimals := call.get(1, "decimals", 0)) == 0:
        return apply("round", x)
    power = 10.0 ** abs(decimals)
    return apply("round", x * power) / power if decimals > 0 else apply("round", x / power) * power


def _sinc(x: Expr, call: Call) -> Expr:
    """sin(pi x) / (pi x), near 0 its series: a derivative by quotients would be inf - inf."""
    near = apply("flt", apply("abs", x), const(0.01))
    small, angle = where(near, x, ZERO) * math.pi, where(near, ONE, x) * math.pi
    square = small * small
    return where(near, 1.0 - square * (1.0 - square * (1 / 20)) * (1 / 6), apply("sin", angle) / angle)


def _is_negative(x: Expr) -> Expr:
    """Whether a number has the sign of -1; -0.0 has."""
    zero = apply("feq", x, ZERO)
    below_zero = apply("flt", ONE / where(zero, x, ONE), ZERO)
    return apply("or", apply("flt", x, ZERO), apply("and", zero, below_zero))


def _sign_bit(call: Call) -> Expr | None:
    if (
        kind_of(call.dtype) is not Kind.BOOL
        or not isinstance(call.args[0], Expr)
        or call.args[0].kind is not Kind.FLOAT
    ):
        return None
    return _is_negative(call.args[0])


def _copysign(x: Expr, sign: Expr, call: Call) -> Expr:
    """x times the quotient of the result and x, as which torch takes the gradient: at 0 it is 0, at infinities NaN."""
    zero, infinite = apply("feq", x, ZERO), apply("feq", apply("abs", x), INFINITY)
    negative = _is_negative(sign)
    turned = apply("or", apply("and", negative, apply("fle", ZERO, x)), _neither(negative, apply("fle", ZERO, x)))
    factor = where(turned, -ONE, ONE)
    endless = where(infinite, x, ONE)
    result = where(infinite, endless * (factor + ZERO * (ONE / endless)), x * factor)
    return where(zero, where(negative, const(-0.0), ZERO), result)


def _neither(a: Expr, b: Expr) -> Expr:
    return apply("not", apply("or", a, b))


def _ndtr(x: Expr, call: Call) -> Expr:
    return (apply("erf", x * math.sqrt(0.5)) + 1.0) * 0.5


def _hypot(x: Expr, y: Expr, call: Call) -> Expr:
    """sqrt(x^2 + y^2), squared in a unit that keeps it within float32, as x (x / h) + y (y / h), whose quotients have
    no gradient; an infinity decides the result alone."""
    sides = [apply("detach", side) for side in (x, y)]
    sizes = [apply("abs", side) for side in sides]
    largest = apply("maximum", *sizes)
    unit = where(apply("flt", largest, const(1e-18)), const(2.0**123), ONE)
    unit = where(apply("flt", const(1e18), largest), const(2.0**-70), unit)
    length = apply("sqrt", reduce(add, ((side * unit) * (side * unit) for side in sides))) / unit
    end = apply("or", apply("feq", length, ZERO), apply("feq", length, INFINITY))
    inside = [where(end, ONE, side) for side in (x, y)]
    usual = reduce(add, (side * (moved / length) for side, moved in zip(inside, sides, strict=True)))
    outside = [where(end, side, ONE) for side in (x, y)]
    endless = apply("or", *(apply("feq", size, INFINITY) for size in sizes))
    nan = apply("and", endless, apply("fne", largest, largest))
    return where(nan, INFINITY, where(end, apply("sqrt", reduce(add, (side * side for side in outside))), usual))


SPECIAL: dict[Any, Builder] = {
    aten.acosh: float_function(_acosh), aten.arccosh: float_function(_acosh),
    aten.logit: float_function(_logit), aten.special_logit: float_function(_logit),
    aten._prelu_kernel: float_function(_prelu, 2),
    aten.fmax: float_function(_extremum_of_numbers(lambda a, b: apply("fle", a, b)), 2),
    aten.fmin: float_function(_extremum_of_numbers(lambda a, b: apply("fle", b, a)), 2),
    aten.logaddexp2: float_function(_log_add_exp_2, 2),
    aten.round: float_function(_round), aten.special_round: float_function(_round),
    aten.sinc: float_function(_sinc), aten.special_sinc: float_function(_sinc),
    aten.signbit: _sign_bit,
    aten.copysign: float_function(_copysign, 2),
    aten.special_ndtr: float_function(_ndtr),
    aten.hypot: float_function(_hypot, 2),
    aten.ldexp: float_function(lambda x, power, call: x * apply("pow", const(2.0), power), 2),
    aten.rad2deg: float_function(lambda x, call: x * (180 / math.pi)),
}  # fmt: skip
