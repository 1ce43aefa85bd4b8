"""Functions of one or two floats, activations among them, as compositions of score-language primitives.

Forms are chosen such that nothing cancels and nothing overflows where the function itself does not. Where torch's
gradient at a special point is no limit of the function's own gradient, a term without a value adds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import torch

from fusion.ir.expr import ONE, ZERO, Expr, Kind, const
from fusion.ir.ops import apply, where
from fusion.ir.printing import ARGUMENTS, COMPOSITIONS

from .casts import Builder, Call, float_function, kind_of, operand

aten = torch.ops.aten


INFINITY = const(math.inf)


def _odd(x: Expr, of_magnitude: Expr) -> Expr:
    """An odd function from its values at |x|; NaN stays."""
    return where(apply("flt", x, ZERO), -of_magnitude, of_magnitude)


def _given(call: Call, position: int, name: str, default: float) -> Expr:
    """Parameter of a function."""
    return operand(call.get(position, name, default), Kind.FLOAT)


def _celu(x: Expr, call: Call) -> Expr:
    alpha = _given(call, 1, "alpha", 1.0)
    return where(apply("flt", ZERO, x), x, alpha * apply("expm1", not_above_zero(x) / alpha))


def _selu(x: Expr, call: Call) -> Expr:
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return where(apply("flt", ZERO, x), x, apply("expm1", not_above_zero(x)) * alpha) * scale


def _threshold(x: Expr, call: Call) -> Expr:
    limit, value = (operand(arg, Kind.FLOAT) for arg in call.args[1:3])
    return where(apply("fle", x, limit), value, x)


def _hardshrink(x: Expr, call: Call) -> Expr:
    return where(apply("fle", apply("abs", x), _given(call, 1, "lambd", 0.5)), ZERO, apply("detach_nan", x))


def _softshrink(x: Expr, call: Call) -> Expr:
    limit = _given(call, 1, "lambd", 0.5)
    rest = where(apply("fle", apply("abs", x), limit), ZERO, apply("detach_nan", x))
    return where(apply("flt", limit, x), x - limit, where(apply("flt", x, -limit), x + limit, rest))


def _softplus(x: Expr, call: Call) -> Expr:
    beta, threshold = _given(call, 1, "beta", 1.0), _given(call, 2, "threshold", 20.0)
    scaled = x * beta
    linear = apply("flt", threshold, scaled)
    return where(linear, x, apply("log1p", apply("exp", where(linear, ZERO, scaled))) / beta)


def _gelu(x: Expr, call: Call) -> Expr:
    if call.kwargs.get("approximate", "none") == "tanh":
        bump = apply("tanh", (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi))
    else:
        bump = apply("erf", x * math.sqrt(0.5))
    return x * 0.5 * (ONE + bump)


def _elu(x: Expr, call: Call) -> Expr:
    alpha, scale, input_scale = (_given(call, 1 + k, name, 1.0) for k, name in
                                 enumerate(("alpha", "scale", "input_scale")))  # fmt: skip
    below = alpha * apply("expm1", not_above_zero(x) * input_scale)
    return scale * where(apply("flt", ZERO, x), x, below)


def not_above_zero(x: Expr) -> Expr:
    """x, or 0 where x is above 0. A branch that a selection drops must not overflow: its gradient would be 0 * inf."""
    return where(apply("flt", ZERO, x), ZERO, x)


def _hardtanh(x: Expr, call: Call) -> Expr:
    return _between(x, _given(call, 1, "min_val", -1.0), _given(call, 2, "max_val", 1.0))


def _between(x: Expr, low: Expr, high: Expr) -> Expr:
    """x clamped, without a gradient at the bounds (as torch's `hardtanh`; its `clamp` has one there) and none for
    NaN."""
    x = apply("detach_nan", x)
    return where(apply("fle", x, low), low, where(apply("fle", high, x), high, x))


def _hardswish(x: Expr, call: Call) -> Expr:
    below, above = apply("fle", x, const(-3.0)), apply("fle", const(3.0), x)
    rising = where(apply("or", below, above), ZERO, x)
    return where(below, apply("detach", x) * 0.0, where(above, x * 6.0 / 6.0, rising * (rising + 3.0) / 6.0))


def _nan_to_num(x: Expr, call: Call) -> Expr:
    nan, high, low = (call.get(1 + k, name) for k, name in enumerate(("nan", "posinf", "neginf")))
    limits = torch.finfo(call.dtype)
    value = where(apply("fne", x, x), const(float(nan or 0.0)), x)
    value = where(apply("feq", value, INFINITY), const(float(limits.max if high is None else high)), value)
    return where(apply("feq", value, -INFINITY), const(float(limits.min if low is None else low)), value)


def _halves(x: Expr) -> tuple[Expr, Expr]:
    """(sinh(x / 2), cosh(x / 2)), neither of which overflows where a product of two does not."""
    up, down = (apply("expm1", x * half) for half in (0.5, -0.5))
    return (up - down) * 0.5, (up + down) * 0.5 + 1.0


def _sinh(x: Expr, call: Call) -> Expr:
    sine, cosine = _halves(x)
    return sine * cosine * 2.0


def _cosh(x: Expr, call: Call) -> Expr:
    sine, _ = _halves(x)
    return sine * sine * 2.0 + 1.0


def _asinh(x: Expr, call: Call) -> Expr:
    """log(|x| + sqrt(x^2 + 1)) = log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))), and log(2 |x|) where x^2 might overflow. |x|
    is a selection: its derivative at 0 is 1."""
    size = where(apply("flt", x, ZERO), -x, x)
    large = apply("flt", const(1e8), size)
    usual = where(large, ONE, size)
    square = usual * usual
    near = apply("log1p", usual + square / (apply("sqrt", square + 1.0) + 1.0))
    far = apply("log", where(large, size, ONE)) + math.log(2)
    return _odd(x, where(large, far, near))


def _acos_of_magnitude(size: Expr) -> Expr:
    """acos of 0 to 1: 2 atan(sqrt((1 - x) / 2) / sqrt((1 + x) / 2)), infinitely steep at 1."""
    half = (1.0 - size) * 0.5
    return apply("atan", apply("sqrt", half) / apply("sqrt", 1.0 - half)) * 2.0


def _acos(x: Expr, call: Call) -> Expr:
    negative = apply("flt", x, ZERO)
    near = _acos_of_magnitude(where(negative, -x, x))
    return where(negative, math.pi - near, near)


def _asin(x: Expr, call: Call) -> Expr:
    """atan(x / sqrt(1 - x^2)), and from 1/2 on, where its derivative would be 0 * inf at the end, by acos."""
    size = where(apply("flt", x, ZERO), -x, x)  # whose derivative at NaN is not 0, as that of |x| is
    small = apply("fle", size, const(0.5))
    inner = where(small, x, ZERO)
    outer = _odd(x, math.pi / 2 - _acos_of_magnitude(where(small, const(0.5), size)))
    return where(small, apply("atan", inner / apply("sqrt", (1.0 - inner) * (inner + 1.0))), outer)


def _log_add_exp(a: Expr, b: Expr, call: Call) -> Expr:
    """max + log1p(exp(-|a - b|)), where a = b without a difference, which of infinities would be NaN."""
    highest = apply("maximum", a, b)
    apart = highest + apply("log1p", apply("exp", -where(apply("flt", a, b), b - a, a - b)))
    return where(apply("feq", a, b), highest + math.log(2), apart)


def _is(value: float) -> Builder:
    return lambda call: apply("feq", operand(call.args[0], Kind.FLOAT), const(value))


_FLOAT_FUNCTIONS: dict[Any, Callable[[Expr, Call], Expr | None]] = {
    aten.celu: _celu, aten.elu: _elu, aten.selu: _selu, aten.gelu: _gelu, aten.softplus: _softplus,
    aten.leaky_relu: lambda x, call: where(apply("flt", ZERO, x), x, x * _given(call, 1, "negative_slope", 0.01)),
    aten.threshold: _threshold, aten.hardshrink: _hardshrink,
    aten.softshrink: _softshrink, aten.hardtanh: _hardtanh, aten.sinh: _sinh, aten.cosh: _cosh, aten.asinh: _asinh,
    aten.acos: _acos, aten.asin: _asin,
    aten.sign: lambda x, call: where(apply("flt", ZERO, x), ONE, where(apply("flt", x, ZERO), -ONE, ZERO)),
    aten.nan_to_num: _nan_to_num,
    aten.atanh: lambda x, call: (apply("log1p", x) - apply("log1p", -x)) * 0.5,
    aten.frac: lambda x, call: x - apply("trunc", x),
    aten.erfc: lambda x, call: 1.0 - apply("erf", x),
    aten.log10: lambda x, call: apply("log", x) * (1 / math.log(10)),
    aten.log2: lambda x, call: apply("log", x) * (1 / math.log(2)),
    aten.exp2: lambda x, call: apply("exp", x * math.log(2)),
    aten.deg2rad: lambda x, call: x * (math.pi / 180),
    aten.tan: lambda x, call: apply("sin", x) / apply("cos", x),
    aten.relu: lambda x, call: where(apply("fle", x, ZERO), ZERO, x),  # no gradient at 0
    aten.relu6: lambda x, call: _between(x, ZERO, const(6.0)),
    aten.silu: lambda x, call: x * apply("sigmoid", x),
    aten.mish: lambda x, call: x * apply("tanh", _softplus(x, call)),
    aten.hardsigmoid: lambda x, call: _between(x + 3.0, ZERO, const(6.0)) / 6.0,
    aten.hardswish: _hardswish,
    aten.log_sigmoid: lambda x, call: -_softplus(-x, call),
}  # fmt: skip
ELEMENTARY: dict[Any, Builder] = {packet: float_function(compose) for packet, compose in _FLOAT_FUNCTIONS.items()} | {
    aten.logaddexp: float_function(_log_add_exp, 2),
    aten.isposinf: _is(math.inf), aten.isneginf: _is(-math.inf),
    aten.isfinite: lambda call: apply("flt", apply("abs", operand(call.args[0], Kind.FLOAT)), INFINITY),
    aten.positive: lambda call: call.args[0],
}  # fmt: skip


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


def _extremum_of_numbers(order: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr, Call], Expr]:
    """fmax and fmin: for a number and NaN the number, for equal numbers the first."""

    def compose(a: Expr, b: Expr, call: Call) -> Expr:
        return where(apply("or", order(b, a), apply("fne", b, b)), a, b)

    return compose


def _log_add_exp_2(a: Expr, b: Expr, call: Call) -> Expr:
    """log2(2^a + 2^b), built like `_log_add_exp`."""
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
    at_least_zero = apply("fle", ZERO, x)
    turned = apply("or", apply("and", negative, at_least_zero), apply("not", apply("or", negative, at_least_zero)))
    factor = where(turned, -ONE, ONE)
    endless = where(infinite, x, ONE)
    result = where(infinite, endless * (factor + ZERO * (ONE / endless)), x * factor)
    return where(zero, where(negative, const(-0.0), ZERO), result)


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
    aten._prelu_kernel: float_function(
        lambda x, slope, call: where(apply("flt", ZERO, x), x, slope * not_above_zero(x)), 2
    ),
    aten.fmax: float_function(_extremum_of_numbers(lambda a, b: apply("fle", a, b)), 2),
    aten.fmin: float_function(_extremum_of_numbers(lambda a, b: apply("fle", b, a)), 2),
    aten.logaddexp2: float_function(_log_add_exp_2, 2),
    aten.round: float_function(_round), aten.special_round: float_function(_round),
    aten.sinc: float_function(_sinc), aten.special_sinc: float_function(_sinc),
    aten.signbit: _sign_bit,
    aten.copysign: float_function(_copysign, 2),
    aten.special_ndtr: float_function(lambda x, call: (apply("erf", x * math.sqrt(0.5)) + 1.0) * 0.5),
    aten.hypot: float_function(_hypot, 2),
    aten.ldexp: float_function(lambda x, power, call: x * apply("pow", const(2.0), power), 2),
    aten.rad2deg: float_function(lambda x, call: x * (180 / math.pi)),
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def _composition(name: str, count: int) -> Expr:
    """A function's expression, of its first arguments; parameters are torch's defaults."""
    call = Call(args=ARGUMENTS[:count], kwargs={}, dtype=torch.float32)
    form = (ELEMENTARY | SPECIAL)[getattr(aten, name)](call)
    assert form is not None
    return form


for _count, _names in (
    (1, "acos asin asinh acosh atanh sinh cosh tan erfc log10 log2 exp2 frac sinc logit silu mish softplus"),
    (1, "log_sigmoid gelu elu selu leaky_relu hardswish hardsigmoid nan_to_num"),
    (2, "logaddexp logaddexp2 hypot copysign"),
):
    for _name in _names.split():
        COMPOSITIONS[_name] = functools.partial(_composition, _name, _count)
