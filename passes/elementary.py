"""Elementary functions and activations of one score that are rarer than those of `pointwise`, and second names.

Importing this module adds them to `pointwise.BUILDERS`. Forms are chosen such that nothing cancels and nothing
overflows where the function itself does not.
"""

from __future__ import annotations

import math

import torch

from fusion.ir.expr import Expr, Kind, const
from fusion.ir.ops import apply, where
from fusion.passes.pointwise import BUILDERS, Call, float_function, kind_of, not_above_zero, operand

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
    """log(|x| + sqrt(x^2 + 1)) = log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))), and log(2 |x|) where x^2 might overflow.

    |x| is a selection: its derivative at 0 is 1.
    """
    size = where(apply("flt", x, ZERO), apply("neg", x), x)
    large = apply("flt", const(1e8), size)
    usual = where(large, ONE, size)
    square = apply("fmul", usual, usual)
    root = apply("sqrt", apply("fadd", square, ONE))
    near = apply("log1p", apply("fadd", usual, apply("div", square, apply("fadd", root, ONE))))
    far = apply("fadd", apply("log", where(large, size, ONE)), const(math.log(2)))
    return _odd(x, where(large, far, near))


def _atanh(x: Expr, call: Call) -> Expr:
    return _times(apply("fsub", apply("log1p", x), apply("log1p", apply("neg", x))), 0.5)


def _acos(x: Expr, call: Call) -> Expr:
    """2 atan(sqrt((1 - x) / (1 + x)))."""
    quotient = apply("div", apply("fsub", ONE, x), apply("fadd", x, ONE))
    return _times(apply("atan", apply("sqrt", quotient)), 2.0)


def _asin(x: Expr, call: Call) -> Expr:
    square = apply("fmul", apply("fsub", ONE, x), apply("fadd", x, ONE))
    return apply("atan", apply("div", x, apply("sqrt", square)))


def _frac(x: Expr, call: Call) -> Expr:
    return apply("fsub", x, apply("trunc", x))


def _log_add_exp(call: Call) -> Expr | None:
    """max + log1p(exp(-|a - b|)), where a = b without a difference, which of infinities would be NaN."""
    if kind_of(call.dtype) is not Kind.FLOAT:
        return None
    a, b = (operand(arg, Kind.FLOAT) for arg in call.args[:2])
    above = where(apply("flt", a, b), apply("fsub", b, a), apply("fsub", a, b))
    highest = apply("maximum", a, b)
    apart = apply("fadd", highest, apply("log1p", apply("exp", apply("neg", above))))
    return where(apply("feq", a, b), apply("fadd", highest, const(math.log(2))), apart)


def _is(sign: float):
    return lambda call: apply("feq", operand(call.args[0], Kind.FLOAT), const(sign * math.inf))


def _is_finite(call: Call) -> Expr:
    return apply("flt", apply("abs", operand(call.args[0], Kind.FLOAT)), INFINITY)


BUILDERS.update(
    {
        aten.celu: float_function(_celu), aten.selu: float_function(_selu),
        aten.threshold: float_function(_threshold),
        aten.hardshrink: float_function(_hardshrink), aten.softshrink: float_function(_softshrink),
        aten.sinh: float_function(_sinh), aten.cosh: float_function(_cosh),
        aten.asinh: float_function(_asinh), aten.atanh: float_function(_atanh),
        aten.acos: float_function(_acos), aten.asin: float_function(_asin), aten.frac: float_function(_frac),
        aten.erfc: float_function(lambda x, call: apply("fsub", ONE, apply("erf", x))),
        aten.log10: float_function(lambda x, call: _times(apply("log", x), 1 / math.log(10))),
        aten.deg2rad: float_function(lambda x, call: _times(x, math.pi / 180)),
        aten.logaddexp: _log_add_exp,
        aten.isposinf: _is(1.0), aten.isneginf: _is(-1.0), aten.isfinite: _is_finite,
        aten.positive: lambda call: call.args[0],
    }
)  # fmt: skip
_SECOND_NAMES = {
    "multiply": "mul", "divide": "div", "subtract": "sub", "negative": "neg", "absolute": "abs", "fix": "trunc",
    "sgn": "sign", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arcsinh": "asinh", "arctanh": "atanh",
}  # fmt: skip
BUILDERS.update({getattr(aten, second): BUILDERS[getattr(aten, first)] for second, first in _SECOND_NAMES.items()})
