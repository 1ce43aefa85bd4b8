"""Pointwise ATen operations as compositions of score-language primitives.

This table is the one place to extend when a model uses a pointwise operation that the pull-back does not know: a new
entry composes primitives of `fusion.ir.primitives`, so no emitter changes.

Floating casts vanish (kernels compute in float32, at least as exact as the model), except on constants, where a cast
can change the meaning: float32's finfo.min is -inf in float16.

One file over the usual length: it is one table with its builders.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion.ir import integers
from fusion.ir.expr import Expr, Kind, const, walk
from fusion.ir.ops import apply, as_bool, as_float, as_int, rounded, where
from fusion.ir.primitives import ROUNDED

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a pointwise operation: values of its arguments (an Expr, a Python scalar, a dtype, None)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype

    def get(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Builder = Callable[[Call], Expr | None]
BUILDERS: dict[Any, Builder] = {}
"""Overload packet -> builder. A builder returns None where it cannot express the call."""


def build(packet: Any, call: Call) -> Expr | None:
    """The value of one element of a pointwise call, or None if the operation or the call is not expressible."""
    builder = BUILDERS.get(packet)
    return None if builder is None else builder(call)


def operand(value: Any, kind: Kind) -> Expr:
    """An argument (expression or Python scalar) as an expression of `kind`."""
    if not isinstance(value, Expr):
        value = const(value)
    return {Kind.FLOAT: as_float, Kind.INT: as_int, Kind.BOOL: as_bool}[kind](value)


def kind_of(dtype: torch.dtype) -> Kind | None:
    """The kind in which a dtype is computed; None for complex."""
    if dtype is torch.bool:
        return Kind.BOOL
    if dtype.is_complex:
        return None
    return Kind.FLOAT if dtype.is_floating_point else Kind.INT


def cast(value: Expr, dtype: torch.dtype) -> Expr | None:
    """`value.to(dtype)`; constants (also those selected by a mask) are rounded as the dtype rounds them."""
    kind = kind_of(dtype)
    if kind is None:
        return None
    value = operand(value, kind)
    if kind is not Kind.FLOAT or dtype in (torch.float64, torch.float32):
        return _round_constants(value, torch.float32) if kind is Kind.FLOAT else value
    return _round_constants(value, dtype)


def _round_constants(value: Expr, dtype: torch.dtype) -> Expr:
    """Constants, also those selected by a mask, as `dtype` holds them, and sums with a fill rounded to it."""
    if value.op == "const":
        return const(rounded(float(value.attr), dtype))  # type: ignore[arg-type]
    if value.op == "where":
        condition, then, otherwise = value.args
        return where(condition, _round_constants(then, dtype), _round_constants(otherwise, dtype))
    if value.op != "fadd":
        return value
    for term, mask in (value.args, value.args[::-1]):  # a fill that only this dtype is too coarse for
        if (masked := _add_hard_mask(term, mask, dtype)) is not None:
            return masked
    coarse = any(arg.is_const and _is_coarse(arg.value, dtype) for arg in value.args)
    return apply(ROUNDED[dtype], value) if coarse else value


_EXACT_FILL = 2.0**64
"""A sum with a fill beyond this is the fill, or overflows, in float32 as in any narrower dtype."""


def _is_coarse(fill: float, dtype: torch.dtype) -> bool:
    """Whether a sum with a fill is another number in `dtype` than in float32."""
    return dtype in ROUNDED and swallows(fill, dtype) and -fill < _EXACT_FILL


# --- arithmetic -------------------------------------------------------------------------------------------------


def _arithmetic(on_float: str, on_integer: Callable[[Expr, Expr], Expr] | None) -> Builder:
    def builder(call: Call) -> Expr | None:
        left, right = call.args[:2]
        alpha = call.kwargs.get("alpha", 1)
        kind = kind_of(call.dtype)
        if kind is Kind.INT and on_integer is not None:
            right = operand(right, Kind.INT) if alpha == 1 else integers.mul(operand(right, Kind.INT), alpha)
            return on_integer(operand(left, Kind.INT), right)
        if kind is not Kind.FLOAT:
            return None
        right = operand(right, Kind.FLOAT)
        if alpha != 1:
            right = apply("fmul", right, const(float(alpha)))
        return _float_arithmetic(on_float, operand(left, Kind.FLOAT), right, call.dtype)

    return builder


def _float_arithmetic(name: str, left: Expr, right: Expr, dtype: torch.dtype) -> Expr:
    if _has_reduction(left) or _has_reduction(right):  # a row's shift, which `recognize` takes off as it stands
        return apply(name, left, right)
    if name == "fsub" and (_is_hard_mask(left, dtype) or right.op == "where"):
        name, right = "fadd", apply("neg", right)
    if name == "fadd":
        for value, mask in ((left, right), (right, left)):
            if (masked := _add_hard_mask(value, mask, dtype)) is not None:
                return masked
    result = apply(name, left, right)
    return _round_constants(result, dtype) if result.op in ("const", "where") else result


def _add_hard_mask(value: Expr, mask: Expr, dtype: torch.dtype) -> Expr | None:
    """x + (y if p else c) = (x + y if p else x + c) where c swallows every score that occurs in `dtype`.

    c is that large when half its spacing in `dtype` is at least 16: finfo.min and -inf in every dtype, -1e9 in float32,
    -1e4 in bfloat16. Such a key is dead in a row with a live one. In a row without, eager averages over what x + c is
    rounded to, and the gradient passes through the sum.
    """
    if not _is_hard_mask(mask, dtype):
        return None
    condition, *arms = mask.args
    then, otherwise = (_round_constants(_float_arithmetic("fadd", value, arm, dtype), dtype) for arm in arms)
    return where(condition, then, otherwise)


def _is_hard_mask(value: Expr, dtype: torch.dtype) -> bool:
    """Whether a value is, in one of the alternatives that are selected between, a fill that swallows scores."""
    if value.op == "where":
        return any(_is_hard_mask(arm, dtype) or _is_fill(arm, dtype) for arm in value.args[1:])
    return False


def _is_fill(value: Expr, dtype: torch.dtype) -> bool:
    return value.is_const and swallows(value.value, dtype)


def _has_reduction(value: Expr) -> bool:
    return any(part.op == "reduce" for part in walk(value))


def swallows(fill: float, dtype: torch.dtype) -> bool:
    """Whether adding a score of ordinary size (|s| < 16) to `fill` gives `fill` again in `dtype`."""
    if fill >= 0 or math.isnan(fill):
        return False
    if math.isinf(fill):
        return True
    exponent = math.floor(math.log2(-fill))
    return 2.0**exponent * torch.finfo(dtype).eps / 2 >= 16


def _divide(call: Call) -> Expr | None:
    mode = call.kwargs.get("rounding_mode")
    left, right = call.args[:2]
    if mode is None:
        if kind_of(call.dtype) is not Kind.FLOAT:
            return None
        left, right = operand(left, Kind.FLOAT), operand(right, Kind.FLOAT)
        return apply("div", left, right)
    if kind_of(call.dtype) is Kind.INT:
        right = operand(right, Kind.INT)
        # Only a positive constant divisor and, for truncation, a non-negative dividend are the same as floor division.
        if not (right.is_const and int(right.attr) > 0):  # type: ignore[arg-type]
            return None
        left = operand(left, Kind.INT)
        return integers.floordiv(left, right) if mode == "floor" or integers.is_nonnegative(left) else None
    left, right = operand(left, Kind.FLOAT), operand(right, Kind.FLOAT)
    if mode == "floor":
        return None  # torch goes by the remainder: 1 // 0.1 is 9, but 1 / 0.1 rounds to 10
    return apply(mode, apply("div", left, right))


def _is_power_of_two(value: Expr) -> bool:
    """Whether a value is a constant that can be divided by without rounding."""
    return value.is_const and math.isfinite(number := float(value.attr)) and abs(math.frexp(number)[0]) == 0.5  # type: ignore[arg-type]


def _floor_divide(call: Call) -> Expr | None:
    return _divide(Call(args=call.args, kwargs={"rounding_mode": "floor"}, dtype=call.dtype))


def _remainder(call: Call) -> Expr | None:
    left, right = call.args[:2]
    if kind_of(call.dtype) is Kind.INT:
        right = operand(right, Kind.INT)
        positive = right.is_const and int(right.attr) > 0  # type: ignore[arg-type]
        return integers.mod(operand(left, Kind.INT), right) if positive else None
    left, right = operand(left, Kind.FLOAT), operand(right, Kind.FLOAT)
    if not _is_power_of_two(right):
        return None  # a rounded quotient can be off by one, or by any number where it is large
    return apply("fsub", left, apply("fmul", right, apply("floor", apply("div", left, right))))


def _power(call: Call) -> Expr | None:
    if kind_of(call.dtype) is not Kind.FLOAT:
        return None
    base, exponent = operand(call.args[0], Kind.FLOAT), operand(call.args[1], Kind.FLOAT)
    if not exponent.is_const:
        return apply("pow", base, exponent)
    value = float(exponent.attr)  # type: ignore[arg-type]
    if value == 0.5:
        return apply("sqrt", base)
    if value == -0.5:
        return apply("rsqrt", base)
    if value == -1.0:
        return apply("div", const(1.0), base)
    if value in _PRODUCTS:
        product = base
        for _ in range(int(value) - 1):
            product = apply("fmul", product, base)
        return product
    return apply("pow", base, exponent)


_PRODUCTS = range(1, 9)
"""Exponents of powers that are computed as products, which costs less."""


def _unary(name: str) -> Builder:
    def builder(call: Call) -> Expr | None:
        if kind_of(call.dtype) is not Kind.FLOAT:
            return None
        return apply(name, operand(call.args[0], Kind.FLOAT))

    return builder


def _either(on_float: Callable[[Expr], Expr], on_integer: Callable[[Expr], Expr]) -> Builder:
    def builder(call: Call) -> Expr | None:
        kind = kind_of(call.dtype)
        if kind is None or kind is Kind.BOOL:
            return None
        value = operand(call.args[0], kind)
        return on_float(value) if kind is Kind.FLOAT else on_integer(value)

    return builder


# --- comparisons and logic --------------------------------------------------------------------------------------


def _compare(name: str, swap: bool = False) -> Builder:
    def builder(call: Call) -> Expr | None:
        left, right = call.args[:2]
        if swap:
            left, right = right, left
        kinds = {x.kind if isinstance(x, Expr) else const(x).kind for x in (left, right)}
        kind = Kind.FLOAT if Kind.FLOAT in kinds else Kind.INT
        return apply(("f" if kind is Kind.FLOAT else "i") + name, operand(left, kind), operand(right, kind))

    return builder


def _logical(combine: Callable[..., Expr], any_dtype: bool) -> Builder:
    """logical_* take any dtype; bitwise_* and the operators are logic on bools only."""

    def builder(call: Call) -> Expr | None:
        if not any_dtype and call.dtype is not torch.bool:
            return None
        return combine(*(operand(arg, Kind.BOOL) for arg in call.args))

    return builder


def _exclusive_or(left: Expr, right: Expr) -> Expr:
    return apply("or", apply("and", left, apply("not", right)), apply("and", apply("not", left), right))


def _select(condition: Any, then: Any, otherwise: Any, dtype: torch.dtype) -> Expr | None:
    kind = kind_of(dtype)
    if kind is None:
        return None
    condition, then, otherwise = operand(condition, Kind.BOOL), operand(then, kind), operand(otherwise, kind)
    if kind is Kind.BOOL:
        return apply("or", apply("and", condition, then), apply("and", apply("not", condition), otherwise))
    result = where(condition, then, otherwise)
    return _round_constants(result, dtype) if kind is Kind.FLOAT else result


def _where(call: Call) -> Expr | None:
    return _select(*call.args[:3], call.dtype) if len(call.args) == 3 else None


def _masked_fill(call: Call) -> Expr | None:
    value, mask, fill = call.args[:3]
    return _select(mask, fill, value, call.dtype)


def _extremum(on_float: str, on_integer: str) -> Builder:
    def builder(call: Call) -> Expr | None:
        kind = kind_of(call.dtype)
        if kind not in (Kind.FLOAT, Kind.INT):
            return None
        name = on_float if kind is Kind.FLOAT else on_integer
        return apply(name, operand(call.args[0], kind), operand(call.args[1], kind))

    return builder


def _binary_extremum(on_float: str, on_integer: str) -> Builder:
    """max.other and min.other; their other overloads are reductions."""
    combine = _extremum(on_float, on_integer)
    return lambda call: combine(call) if len(call.args) == 2 and isinstance(call.args[1], Expr) else None


def _clamp(call: Call) -> Expr | None:
    kind = kind_of(call.dtype)
    if kind not in (Kind.FLOAT, Kind.INT):
        return None
    value = operand(call.args[0], kind)
    low, high = (None if x is None else operand(x, kind) for x in (call.get(1, "min"), call.get(2, "max")))
    if kind is Kind.INT:
        value = value if low is None else apply("imax", value, low)
        return value if high is None else apply("imin", value, high)
    # Selections and not extrema, as those split the gradient between equal sides: here the value gets it all.
    value = value if low is None else where(_or_nan(apply("flt", value, low), low), low, value)
    return value if high is None else where(_or_nan(apply("flt", high, value), high), high, value)


def _or_nan(predicate: Expr, bound: Expr) -> Expr:
    """Or the bound is NaN, which it passes on."""
    return apply("or", predicate, apply("fne", bound, bound))


def _clamp_one(side: str) -> Builder:
    def builder(call: Call) -> Expr | None:
        return _clamp(Call(args=call.args[:1], kwargs={side: call.get(1, side)}, dtype=call.dtype))

    return builder


# --- activations, composed --------------------------------------------------------------------------------------


def float_function(compose: Callable[[Expr, Call], Expr | None]) -> Builder:
    """The builder of a function of one float, from its composition."""

    def builder(call: Call) -> Expr | None:
        if kind_of(call.dtype) is not Kind.FLOAT:
            return None
        return compose(operand(call.args[0], Kind.FLOAT), call)

    return builder


def _relu(x: Expr, call: Call) -> Expr:
    return where(apply("fle", x, const(0.0)), const(0.0), x)  # no gradient at 0


def _leaky_relu(x: Expr, call: Call) -> Expr:
    slope = operand(call.get(1, "negative_slope", 0.01), Kind.FLOAT)
    return where(apply("flt", const(0.0), x), x, apply("fmul", x, slope))


def _silu(x: Expr, call: Call) -> Expr:
    return apply("fmul", x, apply("sigmoid", x))


def _softplus(x: Expr, call: Call) -> Expr:
    beta = operand(call.get(1, "beta", 1.0), Kind.FLOAT)
    threshold = operand(call.get(2, "threshold", 20.0), Kind.FLOAT)
    scaled = apply("fmul", x, beta)
    linear = apply("flt", threshold, scaled)
    soft = apply("div", apply("log1p", apply("exp", where(linear, const(0.0), scaled))), beta)
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
    return apply("fmul", scale, where(apply("flt", const(0.0), x), x, below))


def not_above_zero(x: Expr) -> Expr:
    """x, or 0 where it is above. What a selection does not take must not overflow: its gradient would be 0 * inf."""
    return where(apply("flt", const(0.0), x), const(0.0), x)


def _round(x: Expr, call: Call) -> Expr | None:
    return apply("round", x) if call.get(1, "decimals", 0) == 0 else None


def _sign(x: Expr, call: Call) -> Expr:
    negative = where(apply("flt", x, const(0.0)), const(-1.0), const(0.0))
    return where(apply("flt", const(0.0), x), const(1.0), negative)


def _hardsigmoid(x: Expr, call: Call) -> Expr:
    return apply("div", _between(apply("fadd", x, const(3.0)), const(0.0), const(6.0)), const(6.0))


def _hardswish(x: Expr, call: Call) -> Expr:
    return apply("div", apply("fmul", x, _between(apply("fadd", x, const(3.0)), const(0.0), const(6.0))), const(6.0))


def _hardtanh(x: Expr, call: Call) -> Expr:
    low, high = (operand(call.get(k, n, d), Kind.FLOAT) for k, n, d in ((1, "min_val", -1.0), (2, "max_val", 1.0)))
    return _between(x, low, high)


def _between(x: Expr, low: Expr, high: Expr) -> Expr:
    """x clamped, without a gradient at the bounds (torch's `hardtanh`; its `clamp` has one there)."""
    return where(apply("fle", x, low), low, where(apply("fle", high, x), high, x))


def _lerp(call: Call) -> Expr | None:
    if kind_of(call.dtype) is not Kind.FLOAT:
        return None
    start, end, weight = (operand(arg, Kind.FLOAT) for arg in call.args[:3])
    distance = apply("fsub", end, start)
    near_start = apply("fadd", start, apply("fmul", weight, distance))
    near_end = apply("fsub", end, apply("fmul", distance, apply("fsub", const(1.0), weight)))
    return where(apply("flt", apply("abs", weight), const(0.5)), near_start, near_end)


def _addcmul(name: str) -> Builder:
    def builder(call: Call) -> Expr | None:
        if kind_of(call.dtype) is not Kind.FLOAT:
            return None
        base, left, right = (operand(arg, Kind.FLOAT) for arg in call.args[:3])
        factor = const(float(call.kwargs.get("value", 1)))
        return _float_arithmetic("fadd", base, apply(name, apply("fmul", factor, left), right), call.dtype)

    return builder


def _reverse_subtract(call: Call) -> Expr | None:
    return BUILDERS[aten.sub](Call(args=(call.args[1], call.args[0]), kwargs=call.kwargs, dtype=call.dtype))


def _nan_to_num(x: Expr, call: Call) -> Expr:
    limits = torch.finfo(call.dtype)
    replace_nan = call.get(1, "nan")
    high, low = call.get(2, "posinf"), call.get(3, "neginf")
    high = limits.max if high is None else high
    low = limits.min if low is None else low
    value = where(apply("fne", x, x), const(float(replace_nan or 0.0)), x)
    value = where(apply("feq", value, const(math.inf)), const(float(high)), value)
    return where(apply("feq", value, const(-math.inf)), const(float(low)), value)


def _is_nan(call: Call) -> Expr:
    value = operand(call.args[0], Kind.FLOAT)
    return apply("fne", value, value)


def _is_inf(call: Call) -> Expr:
    return apply("feq", apply("abs", operand(call.args[0], Kind.FLOAT)), const(math.inf))


_ADD = _arithmetic("fadd", lambda left, right: integers.add(left, right))
_SUB = _arithmetic("fsub", integers.sub)
_MUL = _arithmetic("fmul", lambda left, right: integers.mul(left, right))


def _multiply(call: Call) -> Expr | None:
    """A product of bools is their conjunction."""
    if call.dtype is torch.bool:
        return apply("and", operand(call.args[0], Kind.BOOL), operand(call.args[1], Kind.BOOL))
    return _MUL(call)


def _add(call: Call) -> Expr | None:
    if call.dtype is torch.bool:
        return apply("or", operand(call.args[0], Kind.BOOL), operand(call.args[1], Kind.BOOL))
    return _ADD(call)


def _and(left: Expr, right: Expr) -> Expr:
    return apply("and", left, right)


def _or(left: Expr, right: Expr) -> Expr:
    return apply("or", left, right)


def _not(value: Expr) -> Expr:
    return apply("not", value)


BUILDERS.update(
    {
        aten.add: _add, aten.sub: _SUB, aten.rsub: _reverse_subtract, aten.mul: _multiply,
        aten.div: _divide, aten.true_divide: _divide, aten.floor_divide: _floor_divide, aten.remainder: _remainder,
        aten.pow: _power, aten.neg: _either(lambda x: apply("neg", x), integers.neg),
        aten.abs: _either(lambda x: apply("abs", x), lambda x: apply("iabs", x)),
        aten.square: float_function(lambda x, call: apply("fmul", x, x)),
        aten.reciprocal: float_function(lambda x, call: apply("div", const(1.0), x)),
        aten.eq: _compare("eq"), aten.ne: _compare("ne"), aten.lt: _compare("lt"), aten.le: _compare("le"),
        aten.gt: _compare("lt", swap=True), aten.ge: _compare("le", swap=True),
        aten.less: _compare("lt"), aten.less_equal: _compare("le"), aten.not_equal: _compare("ne"),
        aten.greater: _compare("lt", swap=True), aten.greater_equal: _compare("le", swap=True),
        aten.logical_and: _logical(_and, True), aten.logical_or: _logical(_or, True),
        aten.logical_not: _logical(_not, True), aten.logical_xor: _logical(_exclusive_or, True),
        aten.bitwise_and: _logical(_and, False), aten.bitwise_or: _logical(_or, False),
        aten.bitwise_not: _logical(_not, False), aten.bitwise_xor: _logical(_exclusive_or, False),
        aten.__and__: _logical(_and, False), aten.__or__: _logical(_or, False),
        aten.__xor__: _logical(_exclusive_or, False),
        aten.where: _where, aten.masked_fill: _masked_fill,
        aten.minimum: _extremum("minimum", "imin"), aten.maximum: _extremum("maximum", "imax"),
        aten.max: _binary_extremum("maximum", "imax"), aten.min: _binary_extremum("minimum", "imin"),
        aten.clamp: _clamp, aten.clip: _clamp, aten.clamp_min: _clamp_one("min"), aten.clamp_max: _clamp_one("max"),
        aten.relu: float_function(_relu), aten.leaky_relu: float_function(_leaky_relu),
        aten.silu: float_function(_silu), aten.softplus: float_function(_softplus),
        aten.gelu: float_function(_gelu), aten.elu: float_function(_elu), aten.sign: float_function(_sign),
        aten.hardsigmoid: float_function(_hardsigmoid), aten.hardtanh: float_function(_hardtanh),
        aten.mish: float_function(lambda x, call: apply("fmul", x, apply("tanh", _softplus(x, call)))),
        aten.hardswish: float_function(_hardswish),
        aten.relu6: float_function(lambda x, call: _between(x, const(0.0), const(6.0))),
        aten.log_sigmoid: float_function(lambda x, call: apply("neg", _softplus(apply("neg", x), call))),
        aten.log2: float_function(lambda x, call: apply("fmul", apply("log", x), const(1 / math.log(2)))),
        aten.exp2: float_function(lambda x, call: apply("exp", apply("fmul", x, const(math.log(2))))),
        aten.tan: float_function(lambda x, call: apply("div", apply("sin", x), apply("cos", x))),
        aten.round: float_function(_round), aten.nan_to_num: float_function(_nan_to_num),
        aten.isnan: _is_nan, aten.isinf: _is_inf,
        aten.lerp: _lerp, aten.addcmul: _addcmul("fmul"), aten.addcdiv: _addcmul("div"),
    }
)  # fmt: skip
_NAMESAKES = "floor ceil trunc sqrt rsqrt exp log log1p expm1 sin cos tanh sigmoid erf atan"
BUILDERS.update({getattr(aten, name): _unary(name) for name in _NAMESAKES.split()})
BUILDERS[aten.special_expit] = BUILDERS[aten.sigmoid]
BUILDERS[aten.special_erf] = BUILDERS[aten.erf]
