"""Pointwise ATen operations as compositions of score-language primitives.

This table is the one place to extend when a model uses a pointwise operation that the pull-back does not know: a new
entry composes primitives of `fusion.ir.primitives`, so no emitter changes.

Arithmetic, comparisons, logic and selections are built here, functions of one float in `passes.pullback.functions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial, reduce
from typing import Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import ONE, Expr, Kind, const, walk
from fusion.ir.ops import apply, rounding_to, where
from fusion.ir.primitives import ROUNDED
from fusion.torch_private.operators import OpOverload, schema

from ..nodes import packet
from .casts import FILL, Builder, Call, float_arithmetic, float_function, kind_of, operand, round_constants
from .functions import ELEMENTARY, INFINITY
from .views import CASTS

aten = torch.ops.aten


def _arithmetic(on_float: str, on_integer: Callable[[Expr, Expr], Expr], on_bool: str | None = None) -> Builder:
    """Builder of arithmetic. on_bool: a sum of bools is their disjunction, a product their conjunction."""

    def builder(call: Call) -> Expr | None:
        left, right, *rest = call.args
        alpha = rest[0] if rest else call.kwargs.get("alpha", 1)  # the former where a number is added
        kind = kind_of(call.dtype)
        if kind is Kind.BOOL and on_bool is not None:
            return apply(on_bool, operand(left, Kind.BOOL), operand(right, Kind.BOOL))
        if kind is Kind.INT:
            right = operand(right, Kind.INT) if alpha == 1 else integers.mul(operand(right, Kind.INT), alpha)
            return on_integer(operand(left, Kind.INT), right)
        if kind is not Kind.FLOAT:
            return None
        right = operand(right, Kind.FLOAT)
        if alpha != 1:
            right = right * float(alpha)
        return float_arithmetic(on_float, operand(left, Kind.FLOAT), right, call.dtype)

    return builder


def _divide(call: Call) -> Expr | None:
    mode, kind = call.kwargs.get("rounding_mode"), kind_of(call.dtype)
    if kind is Kind.INT and mode is not None:
        left, right = (operand(arg, Kind.INT) for arg in call.args[:2])
        # Only a positive constant divisor and, for truncation, a non-negative dividend are the same as floor division.
        same = right.is_const and right.integer > 0 and (mode == "floor" or integers.is_nonnegative(left))
        return integers.floordiv(left, right) if same else None
    if kind is not Kind.FLOAT or mode == "floor":
        return None  # torch goes by the remainder: 1 // 0.1 is 9, but 1 / 0.1 rounds to 10
    quotient = apply("div", *(operand(arg, Kind.FLOAT) for arg in call.args[:2]))
    return quotient if mode is None else apply(mode, quotient)


def _remainder(call: Call) -> Expr | None:
    kind = Kind.INT if kind_of(call.dtype) is Kind.INT else Kind.FLOAT
    left, right = (operand(arg, kind) for arg in call.args[:2])
    if kind is Kind.INT:
        return integers.mod(left, right) if right.is_const and right.integer > 0 else None
    if not (right.is_const and math.isfinite(right.value) and abs(math.frexp(right.value)[0]) == 0.5):  # a power of two
        return None  # a rounded quotient can be off by one, or by any number where it is large
    return left - right * apply("floor", left / right)


def _power(base: Expr, exponent: Expr, call: Call) -> Expr:
    if not exponent.is_const:
        return apply("pow", base, exponent)
    value = exponent.value
    if value in (0.5, -0.5):
        return apply("sqrt" if value > 0 else "rsqrt", base)
    if value == -1.0:
        return ONE / base
    if value in _PRODUCTS:
        return reduce(partial(apply, "fmul"), [base] * int(value))
    return apply("pow", base, exponent)


_PRODUCTS = range(1, 9)
"""Exponents of powers that are computed as products, which costs less."""


def _either(on_float: Callable[[Expr], Expr], on_integer: Callable[[Expr], Expr]) -> Builder:
    def builder(call: Call) -> Expr | None:
        kind = kind_of(call.dtype)
        if kind is None or kind is Kind.BOOL:
            return None
        value = operand(call.args[0], kind)
        return on_float(value) if kind is Kind.FLOAT else on_integer(value)

    return builder


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


def _bitwise_and(call: Call) -> Expr | None:
    """Bitwise "and" of bools, and of integers with a constant whose bits are the lowest, or all but the lowest: a
    remainder, or the rest without it. Negative numbers have ones without end."""
    if call.dtype is torch.bool:
        return apply("and", *(operand(arg, Kind.BOOL) for arg in call.args))
    value, mask = (operand(arg, Kind.INT) for arg in call.args)
    value, mask = (mask, value) if value.is_const else (value, mask)
    if not mask.is_const:
        return None
    bits, limits = mask.integer, torch.iinfo(call.dtype)
    if bits > 0 and bits & (bits + 1) == 0:
        return integers.mod(value, bits + 1)
    dropped = -bits if bits < 0 else limits.max + 1 - bits if limits.min == 0 else 0
    return integers.sub(value, integers.mod(value, dropped)) if dropped and dropped & (dropped - 1) == 0 else None


def _shift(left: bool) -> Builder:
    """Builder of shifts by a constant number of bits; to the right arithmetically, which keeps the sign."""

    def builder(call: Call) -> Expr | None:
        value, by = call.args
        if kind_of(call.dtype) is not Kind.INT or isinstance(value, (int, float)):
            return None
        by = operand(by, Kind.INT)
        if not by.is_const or not 0 <= by.integer < torch.iinfo(call.dtype).bits:
            return None
        value = operand(value, Kind.INT)
        return integers.mul(value, 1 << by.integer) if left else integers.floordiv(value, 1 << by.integer)

    return builder


_and, _or, _not = (partial(apply, name) for name in ("and", "or", "not"))


def _exclusive_or(left: Expr, right: Expr) -> Expr:
    return apply("or", apply("and", left, apply("not", right)), apply("and", apply("not", left), right))


def _select(condition: Any, then: Any, otherwise: Any, dtype: torch.dtype) -> Expr | None:
    kind = kind_of(dtype)
    if kind is None:
        return None
    result = where(operand(condition, Kind.BOOL), operand(then, kind), operand(otherwise, kind))
    return round_constants(result, dtype) if kind is Kind.FLOAT else result


def _extremum(on_float: str, on_integer: str) -> Builder:
    """Builder of the extremum of two values; other overloads of max and min are reductions."""

    def builder(call: Call) -> Expr | None:
        kind = kind_of(call.dtype)
        if kind not in (Kind.FLOAT, Kind.INT) or len(call.args) != 2 or not isinstance(call.args[1], Expr):
            return None
        return apply(on_float if kind is Kind.FLOAT else on_integer, *(operand(arg, kind) for arg in call.args))

    return builder


def _clamp(call: Call) -> Expr | None:
    """Value between two bounds, of which one may be missing."""
    kind = kind_of(call.dtype)
    if kind not in (Kind.FLOAT, Kind.INT):
        return None
    value, given = operand(call.args[0], kind), (call.get(1, "min"), call.get(2, "max"))
    if kind is Kind.INT and not any(isinstance(x, Expr) for x in given):
        if (given := _bounds(call.dtype, *given)) is None:
            return None
    low, high = (None if x is None else operand(x, kind) for x in given)
    if kind is Kind.FLOAT:
        return _clamped(value, low, high, _share_on_bound(_has_tensors_for_bounds(call)))
    value = value if low is None else apply("imax", value, low)
    return value if high is None else apply("imin", value, high)


_CLAMPS_OF_TENSORS = (aten.clamp.Tensor, aten.clip.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor)


def _has_tensors_for_bounds(call: Call) -> bool:
    if call.target is not None:
        return call.target in _CLAMPS_OF_TENSORS
    return any(isinstance(call.get(k, name), Expr) for k, name in ((1, "min"), (2, "max")))


@lru_cache(maxsize=2)
def _share_on_bound(tensors: bool) -> float:
    """Share of the gradient that torch's `clamp` passes to a value that is on its bound, a tensor or a number: all up
    to torch 2.13, half or nothing since. Torch is asked in another thread, which has none of the modes of the
    compilation."""

    def share() -> float:
        value = torch.zeros((), dtype=torch.float32, requires_grad=True)
        (slope,) = torch.autograd.grad(value.clamp(value.detach() if tensors else 0.0), value)
        return slope.item()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(share).result()


@lru_cache(maxsize=1024)
def _bounds(dtype: torch.dtype, low: int | None, high: int | None) -> tuple[int | None, int | None] | None:
    """Bounds that integers of a dtype are clamped to, by torch where one is beyond the dtype; None where it refuses."""
    limits = torch.iinfo(dtype)
    try:
        low, high = torch.tensor([limits.min, limits.max], dtype=dtype).clamp(low, high).tolist()
    except RuntimeError:
        return None
    return (None if low == limits.min else low), (None if high == limits.max else high)


def _clamped(value: Expr, low: Expr | None, high: Expr | None, share: float) -> Expr:
    """Float between two bounds. share: of the gradient for a value on its bound.

    Selections give the gradient to one side alone: a NaN gets none, nor does a lower bound that is no lower than the
    upper one."""
    if share not in (0.0, 1.0):
        return _clamped_by_halves(value, low, high)
    less = "flt" if share else "fle"
    value = apply("detach_nan", value)
    low, high = (None if x is None else apply("detach_nan", x) for x in (low, high))
    if low is not None:
        bound = low if high is None else where(apply("flt", low, high), low, apply("detach", low))
        value = where(_or_nan(apply(less, value, low), low), bound, value)
    return value if high is None else where(_or_nan(apply(less, high, value), high), high, value)


def _clamped_by_halves(value: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """A value on its bound shares the gradient with it, unless there are two bounds that are not apart."""
    raised = value if low is None else apply("maximum", value, low)
    between = raised if high is None else apply("minimum", raised, high)
    if low is None or high is None:
        return between
    below, above, number = apply("flt", value, low), apply("flt", high, value), apply("feq", value, value)
    equal = where(below, low, where(above, high, value))
    crossed = where(number, high, apply("minimum", value, high))
    unordered = where(apply("or", below, above), apply("detach", value), value) + math.nan
    apart = where(apply("feq", low, high), equal, where(apply("flt", high, low), crossed, unordered))
    return where(apply("flt", low, high), where(number, between, value), apart)


def _or_nan(predicate: Expr, bound: Expr) -> Expr:
    """Condition extended to bounds that are NaN, which pass on their NaN."""
    return apply("or", predicate, apply("fne", bound, bound))


def _lerp(start: Expr, end: Expr, weight: Expr, call: Call) -> Expr:
    distance = end - start
    near_start, near_end = start + weight * distance, end - distance * (1.0 - weight)
    mixed = where(apply("flt", apply("abs", weight), const(0.5)), near_start, near_end)
    # Rounded once, as torch does: beside a part of a fill a score is lost.
    fills = (part.is_const and -math.inf < part.value <= FILL for part in walk(start, end) if part.kind is Kind.FLOAT)
    return apply(ROUNDED[call.dtype], mixed) if call.dtype in ROUNDED and any(fills) else mixed


def _addcmul(name: str) -> Builder:
    def compose(base: Expr, left: Expr, right: Expr, call: Call) -> Expr:
        factor = const(float(call.kwargs.get("value", 1)))
        return float_arithmetic("fadd", base, apply(name, factor * left, right), call.dtype)

    return float_function(compose, 3)


def _is_nan(call: Call) -> Expr:
    value = operand(call.args[0], Kind.FLOAT)
    return apply("fne", value, value)


def _tanh(x: Expr, call: Call) -> Expr:
    value = apply("tanh", x)
    return rounding_to(value, "bfloat16") if call.dtype is torch.bfloat16 else value


BUILDERS: dict[Any, Builder] = ELEMENTARY | {
    aten.add: _arithmetic("fadd", integers.add, "or"), aten.mul: _arithmetic("fmul", integers.mul, "and"),
    aten.sub: _arithmetic("fsub", integers.sub),
    aten.rsub: lambda call: BUILDERS[aten.sub](replace(call, args=(call.args[1], call.args[0], *call.args[2:]))),
    aten.div: _divide, aten.remainder: _remainder,
    aten.floor_divide: lambda call: _divide(replace(call, kwargs={"rounding_mode": "floor"})),
    aten.pow: float_function(_power, 2), aten.neg: _either(lambda x: -x, integers.neg),
    aten.abs: _either(partial(apply, "abs"), partial(apply, "iabs")),
    aten.square: float_function(lambda x, call: x * x),
    aten.reciprocal: float_function(lambda x, call: ONE / x),
    aten.eq: _compare("eq"), aten.ne: _compare("ne"), aten.lt: _compare("lt"), aten.le: _compare("le"),
    aten.gt: _compare("lt", swap=True), aten.ge: _compare("le", swap=True),
    aten.logical_and: _logical(_and, True), aten.logical_or: _logical(_or, True),
    aten.logical_not: _logical(_not, True), aten.logical_xor: _logical(_exclusive_or, True),
    aten.bitwise_and: _bitwise_and, aten.bitwise_left_shift: _shift(True), aten.bitwise_right_shift: _shift(False),
    aten.bitwise_or: _logical(_or, False), aten.bitwise_not: _logical(_not, False),
    aten.bitwise_xor: _logical(_exclusive_or, False),
    aten.where: lambda call: _select(*call.args, call.dtype) if len(call.args) == 3 else None,
    aten.masked_fill: lambda call: _select(call.args[1], call.args[2], call.args[0], call.dtype),
    aten.minimum: _extremum("minimum", "imin"), aten.maximum: _extremum("maximum", "imax"),
    aten.max: _extremum("maximum", "imax"), aten.min: _extremum("minimum", "imin"),
    aten.clamp: _clamp, aten.clip: _clamp,
    aten.clamp_min: lambda call: _clamp(replace(call, args=call.args[:1], kwargs={"min": call.get(1, "min")})),
    aten.clamp_max: lambda call: _clamp(replace(call, args=call.args[:1], kwargs={"max": call.get(1, "max")})),
    aten.isinf: lambda call: apply("feq", apply("abs", operand(call.args[0], Kind.FLOAT)), INFINITY),
    aten.isnan: _is_nan,
    aten.lerp: float_function(_lerp, 3), aten.addcmul: _addcmul("fmul"), aten.addcdiv: _addcmul("div"),
}  # fmt: skip
"""Overload packet -> builder. A builder returns None where it cannot express the call."""
CLAMPS = (aten.clamp, aten.clip, aten.clamp_min, aten.clamp_max)
_NAMESAKES = "floor ceil trunc sqrt rsqrt exp log log1p expm1 sin cos tanh sigmoid erf atan"
for _name in _NAMESAKES.split():
    BUILDERS[getattr(aten, _name)] = float_function(lambda x, call, name=_name: apply(name, x))
BUILDERS[aten.tanh] = float_function(_tanh)
_SECOND_NAMES = {
    "multiply": "mul", "divide": "div", "subtract": "sub", "negative": "neg", "absolute": "abs", "fix": "trunc",
    "sgn": "sign", "special_round": "round", "arctan": "atan", "arctanh": "atanh",
    "special_expit": "sigmoid", "special_erf": "erf", "true_divide": "div", "less": "lt",
    "less_equal": "le", "not_equal": "ne", "greater": "gt", "greater_equal": "ge", "__and__": "bitwise_and",
    "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
}  # fmt: skip
BUILDERS.update({getattr(aten, second): BUILDERS[getattr(aten, first)] for second, first in _SECOND_NAMES.items()})


def build(packet: Any, call: Call) -> Expr | None:
    """Value of one element of a pointwise call, or None if the operation or the call is not expressible."""
    builder = BUILDERS.get(packet)
    return None if builder is None else builder(call)


_ELEMENTWISE = (*CASTS, aten.contiguous, aten.detach, aten.__and__, aten.__or__, aten.multiply, aten.divide,
                aten.subtract, aten.hardswish, aten.log_sigmoid)  # fmt: skip
"""Operations that torch does not tag as working element by element."""


def is_pointwise(node: Node) -> bool:
    """Whether a node works element by element on operands that are broadcast with each other."""
    target = node.target
    if packet(node) in _ELEMENTWISE:
        return True
    return isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not schema(target).is_mutable
    )
