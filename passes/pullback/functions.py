"""Functions of one or two floats, activations among them, as compositions of score-language primitives.

Forms are chosen such that nothing cancels and nothing overflows where the function itself does not. Where torch's
gradient at a special point is no limit of the function's own gradient, a term without a value adds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from fusion.ir.expr import ONE, ZERO, Expr, Kind, const
from fusion.ir.ops import apply, where
from fusion.ir.printing import ARGUMENTS, COMPOSITIONS

from .casts import Builder, Call, float_function, operand

aten = torch.ops.aten


INFINITY = const(math.inf)


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
    return x * ((ONE + bump) * 0.5)


def _elu(x: Expr, call: Call) -> Expr:
    alpha, scale, input_scale = (_given(call, 1 + k, name, 1.0) for k, name in
                                 enumerate(("alpha", "scale", "input_scale")))  # fmt: skip
    below = alpha * apply("expm1", not_above_zero(x) * input_scale)
    return scale * where(apply("flt", ZERO, x), x, below)


def not_above_zero(x: Expr) -> Expr:
    """x, or 0 where x is above 0. A branch that a selection drops must not overflow: its gradient would be 0 * inf."""
    return where(apply("flt", ZERO, x), ZERO, x)


def _between(x: Expr, low: Expr, high: Expr) -> Expr:
    """x clamped, without a gradient at the bounds (as torch's `hardtanh`; `clamp` has one there) and none for NaN."""
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
    aten.threshold: _threshold, aten.hardshrink: _hardshrink, aten.softshrink: _softshrink,
    aten.hardtanh: lambda x, call: _between(x, _given(call, 1, "min_val", -1.0), _given(call, 2, "max_val", 1.0)),
    aten.sign: lambda x, call: where(apply("flt", ZERO, x), ONE, where(apply("flt", x, ZERO), -ONE, ZERO)),
    aten.nan_to_num: _nan_to_num,
    aten.atanh: lambda x, call: (apply("log1p", x) - apply("log1p", -x)) * 0.5,
    aten.frac: lambda x, call: x - apply("trunc", x),
    aten.erfc: lambda x, call: 1.0 - apply("erf", x),
    aten.log10: lambda x, call: apply("log", x) * (1 / math.log(10)),
    aten.log2: lambda x, call: apply("log", x) * (1 / math.log(2)),
    aten.exp2: lambda x, call: apply("exp", x * math.log(2)),
    aten.deg2rad: lambda x, call: x * (math.pi / 180),
    aten.rad2deg: lambda x, call: x * (180 / math.pi),
    aten.special_ndtr: lambda x, call: (apply("erf", x * math.sqrt(0.5)) + 1.0) * 0.5,
    aten.round: lambda x, call: None if call.get(1, "decimals", 0) else apply("round", x),
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
    aten.ldexp: float_function(lambda x, power, call: x * apply("pow", const(2.0), power), 2),
    aten._prelu_kernel: float_function(
        lambda x, slope, call: where(apply("flt", ZERO, x), x, slope * not_above_zero(x)), 2
    ),
    aten.isposinf: _is(math.inf), aten.isneginf: _is(-math.inf),
    aten.isfinite: lambda call: apply("flt", apply("abs", operand(call.args[0], Kind.FLOAT)), INFINITY),
    aten.positive: lambda call: call.args[0],
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def _composition(name: str, count: int) -> Expr:
    """A function's expression, of its first arguments; parameters are torch's defaults."""
    call = Call(args=ARGUMENTS[:count], kwargs={}, dtype=torch.float32)
    form = ELEMENTARY[getattr(aten, name)](call)
    assert form is not None
    return form


for _count, _names in (
    (1, "atanh tan erfc log10 log2 exp2 frac silu mish softplus log_sigmoid gelu elu selu leaky_relu hardswish"),
    (1, "hardsigmoid nan_to_num"),
    (2, "logaddexp"),
):
    for _name in _names.split():
        COMPOSITIONS[_name] = functools.partial(_composition, _name, _count)
