"""Elementary functions and activations of one float, as compositions of score-language primitives.

Forms are chosen such that nothing cancels and nothing overflows where the function itself does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fusion.ir.expr import Expr, Kind, const
from fusion.ir.ops import apply, where
from fusion.passes.casts import Builder, Call, float_function, operand

aten = torch.ops.aten
ONE, ZERO, INFINITY = const(1.0), const(0.0), const(math.inf)


def _times(x: Expr, factor: float) -> Expr:
    return apply("fmul", x, const(factor))


def _odd(x: Expr, of_magnitude: Expr) -> Expr:
    """An odd function from its values at |x|; NaN stays."""
    return where(apply("flt", x, ZERO), apply("neg", of_magnitude), of_magnitude)


def _celu(x: Expr, call: Call) -> Expr:
    alpha = operand(call.get(1, "alpha", 1.0), Kind.FLOAT)
    below = apply("fmul", alpha, apply("expm1", apply("div", not_above_zero(x), alpha)))
    return where(apply("flt", ZERO, x), x, below)


def _selu(x: Expr, call: Call) -> Expr:
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return _times(where(apply("flt", ZERO, x), x, _times(apply("expm1", not_above_zero(x)), alpha)), scale)


def _threshold(x: Expr, call: Call) -> Expr:
    limit, value = operand(call.args[1], Kind.FLOAT), operand(call.args[2], Kind.FLOAT)
    return where(apply("fle", x, limit), value, x)


def _hardshrink(x: Expr, call: Call) -> Expr:
    limit = operand(call.get(1, "lambd", 0.5), Kind.FLOAT)
    return where(apply("fle", apply("abs", x), limit), ZERO, x)


def _softshrink(x: Expr, call: Call) -> Expr:
    limit = operand(call.get(1, "lambd", 0.5), Kind.FLOAT)
    rest = where(apply("flt", x, apply("neg", limit)), apply("fadd", x, limit), _times(x, 0.0))
    return where(apply("flt", limit, x), apply("fsub", x, limit), rest)


def _leaky_relu(x: Expr, call: Call) -> Expr:
    slope = operand(call.get(1, "negative_slope", 0.01), Kind.FLOAT)
    return where(apply("flt", ZERO, x), x, apply("fmul", x, slope))


def _softplus(x: Expr, call: Call) -> Expr:
    beta = operand(call.get(1, "beta", 1.0), Kind.FLOAT)
    threshold = operand(call.get(2, "threshold", 20.0), Kind.FLOAT)
    scaled = apply("fmul", x, beta)
    linear = apply("flt", threshold, scaled)
    soft = apply("div", apply("log1p", apply("exp", where(linear, ZERO, scaled))), beta)
    return where(linear, x, soft)


def _gelu(x: Expr, call: Call) -> Expr:
    half = apply("fmul", x, const(0.5))
    if call.kwargs.get("approximate", "none") == "tanh":
        cube = apply("fmul", apply("fmul", x, x), x)
        inner = apply("fadd", x, apply("fmul", cube, const(0.044715)))
        bump = apply("tanh", apply("fmul", inner, const(math.sqrt(2 / math.pi))))
    else:
        bump = apply("erf", apply("fmul", x, const(math.sqrt(0.5))))
    return apply("fmul", half, apply("fadd", const(1.0), bump))


def _elu(x: Expr, call: Call) -> Expr:
    alpha, scale, input_scale = (operand(call.get(k, n, 1.0), Kind.FLOAT) for k, n in
                                 ((1, "alpha"), (2, "scale"), (3, "input_scale")))  # fmt: skip
    below = apply("fmul", alpha, apply("expm1", apply("fmul", not_above_zero(x), input_scale)))
    return apply("fmul", scale, where(apply("flt", ZERO, x), x, below))


def not_above_zero(x: Expr) -> Expr:
    """x, or 0 where it is above. What a selection does not take must not overflow: its gradient would be 0 * inf."""
    return where(apply("flt", ZERO, x), ZERO, x)


def _sign(x: Expr, call: Call) -> Expr:
    negative = where(apply("flt", x, ZERO), const(-1.0), ZERO)
    return where(apply("flt", ZERO, x), const(1.0), negative)


def _hardtanh(x: Expr, call: Call) -> Expr:
    low, high = (operand(call.get(k, n, d), Kind.FLOAT) for k, n, d in ((1, "min_val", -1.0), (2, "max_val", 1.0)))
    return _between(x, low, high)


def _between(x: Expr, low: Expr, high: Expr) -> Expr:
    """x clamped, without a gradient at the bounds (torch's `hardtanh`; its `clamp` has one there)."""
    return where(apply("fle", x, low), low, where(apply("fle", high, x), high, x))


def _up_to_six(x: Expr) -> Expr:
    return _between(apply("fadd", x, const(3.0)), ZERO, const(6.0))


def _nan_to_num(x: Expr, call: Call) -> Expr:
    limits = torch.finfo(call.dtype)
    replace_nan = call.get(1, "nan")
    high, low = call.get(2, "posinf"), call.get(3, "neginf")
    high = limits.max if high is None else high
    low = limits.min if low is None else low
    value = where(apply("fne", x, x), const(float(replace_nan or 0.0)), x)
    value = where(apply("feq", value, const(math.inf)), const(float(high)), value)
    return where(apply("feq", value, const(-math.inf)), const(float(low)), value)


def _halves(x: Expr) -> tuple[Expr, Expr]:
    """(sinh(x / 2), cosh(x / 2)), neither of which overflows where a product of two does not."""
    up, down = apply("expm1", _times(x, 0.5)), apply("expm1", _times(x, -0.5))
    return _times(apply("fsub", up, down), 0.5), apply("fadd", _times(apply("fadd", up, down), 0.5), ONE)


def _sinh(x: Expr, call: Call) -> Expr:
    sine, cosine = _halves(x)
    return _times(apply("fmul", sine, cosine), 2.0)


def _cosh(x: Expr, call: Call) -> Expr:
    sine, _ = _halves(x)
    return apply("fadd", _times(apply("fmul", sine, sine), 2.0), ONE)


def _asinh(x: Expr, call: Call) -> Expr:
    """log(|x| + sqrt(x^2 + 1)) = log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))), and log(2 |x|) where x^2 might overflow. |x|
    is a selection: its derivative at 0 is 1."""
    size = where(apply("flt", x, ZERO), apply("neg", x), x)
    large = apply("flt", const(1e8), size)
    usual = where(large, ONE, size)
    square = apply("fmul", usual, usual)
    root = apply("sqrt", apply("fadd", square, ONE))
    near = apply("log1p", apply("fadd", usual, apply("div", square, apply("fadd", root, ONE))))
    far = apply("fadd", apply("log", where(large, size, ONE)), const(math.log(2)))
    return _odd(x, where(large, far, near))


def _acos_of_magnitude(size: Expr) -> Expr:
    """acos of 0 to 1: 2 atan(sqrt((1 - x) / 2) / sqrt((1 + x) / 2)), infinitely steep at 1."""
    half = _times(apply("fsub", ONE, size), 0.5)
    quotient = apply("div", apply("sqrt", half), apply("sqrt", apply("fsub", ONE, half)))
    return _times(apply("atan", quotient), 2.0)


def _acos(x: Expr, call: Call) -> Expr:
    negative = apply("flt", x, ZERO)
    near = _acos_of_magnitude(where(negative, apply("neg", x), x))
    return where(negative, apply("fsub", const(math.pi), near), near)


def _asin(x: Expr, call: Call) -> Expr:
    """atan(x / sqrt(1 - x^2)), and from 1/2 on, where its derivative would be 0 * inf at the end, by acos."""
    size = apply("abs", x)
    small = apply("fle", size, const(0.5))
    inner = where(small, x, ZERO)
    square = apply("fmul", apply("fsub", ONE, inner), apply("fadd", inner, ONE))
    outer = _odd(x, apply("fsub", const(math.pi / 2), _acos_of_magnitude(where(small, const(0.5), size))))
    return where(small, apply("atan", apply("div", inner, apply("sqrt", square))), outer)


def _log_add_exp(a: Expr, b: Expr, call: Call) -> Expr:
    """max + log1p(exp(-|a - b|)), where a = b without a difference, which of infinities would be NaN."""
    above = where(apply("flt", a, b), apply("fsub", b, a), apply("fsub", a, b))
    highest = apply("maximum", a, b)
    apart = apply("fadd", highest, apply("log1p", apply("exp", apply("neg", above))))
    return where(apply("feq", a, b), apply("fadd", highest, const(math.log(2))), apart)


def _is(sign: float):
    return lambda call: apply("feq", operand(call.args[0], Kind.FLOAT), const(sign * math.inf))


_FLOAT_FUNCTIONS: dict[Any, Callable[[Expr, Call], Expr | None]] = {
    aten.celu: _celu, aten.elu: _elu, aten.selu: _selu, aten.gelu: _gelu, aten.softplus: _softplus,
    aten.leaky_relu: _leaky_relu, aten.threshold: _threshold, aten.hardshrink: _hardshrink,
    aten.softshrink: _softshrink, aten.hardtanh: _hardtanh, aten.sinh: _sinh, aten.cosh: _cosh, aten.asinh: _asinh,
    aten.acos: _acos, aten.asin: _asin, aten.sign: _sign, aten.nan_to_num: _nan_to_num,
    aten.atanh: lambda x, call: _times(apply("fsub", apply("log1p", x), apply("log1p", apply("neg", x))), 0.5),
    aten.frac: lambda x, call: apply("fsub", x, apply("trunc", x)),
    aten.erfc: lambda x, call: apply("fsub", ONE, apply("erf", x)),
    aten.log10: lambda x, call: _times(apply("log", x), 1 / math.log(10)),
    aten.log2: lambda x, call: _times(apply("log", x), 1 / math.log(2)),
    aten.exp2: lambda x, call: apply("exp", _times(x, math.log(2))),
    aten.deg2rad: lambda x, call: _times(x, math.pi / 180),
    aten.tan: lambda x, call: apply("div", apply("sin", x), apply("cos", x)),
    aten.relu: lambda x, call: where(apply("fle", x, ZERO), ZERO, x),  # no gradient at 0
    aten.relu6: lambda x, call: _between(x, ZERO, const(6.0)),
    aten.silu: lambda x, call: apply("fmul", x, apply("sigmoid", x)),
    aten.mish: lambda x, call: apply("fmul", x, apply("tanh", _softplus(x, call))),
    aten.hardsigmoid: lambda x, call: apply("div", _up_to_six(x), const(6.0)),
    aten.hardswish: lambda x, call: apply("div", apply("fmul", x, _up_to_six(x)), const(6.0)),
    aten.log_sigmoid: lambda x, call: apply("neg", _softplus(apply("neg", x), call)),
    aten.round: lambda x, call: apply("round", x) if call.get(1, "decimals", 0) == 0 else None,
}  # fmt: skip
ELEMENTARY: dict[Any, Builder] = {packet: float_function(compose) for packet, compose in _FLOAT_FUNCTIONS.items()} | {
    aten.logaddexp: float_function(_log_add_exp, 2),
    aten.isposinf: _is(1.0), aten.isneginf: _is(-1.0),
    aten.isfinite: lambda call: apply("flt", apply("abs", operand(call.args[0], Kind.FLOAT)), INFINITY),
    aten.positive: lambda call: call.args[0],
}  # fmt: skip
