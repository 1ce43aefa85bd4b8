"""Parts of the pull-back of a pointwise call: the call itself, its kinds, casts, and sums with fills of masks.

Floating casts vanish where the model computes in the dtype (kernels compute in float32, at least as exact as the
model), except on constants, where a cast can change the meaning: float32's finfo.min is -inf in float16. A cast to a
dtype that is coarser than that of the product of weights and V is a rounding that the model asks for (`roundings`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion.ir.expr import Expr, Kind, const, walk
from fusion.ir.ops import apply, as_bool, as_float, as_int, rounded, where
from fusion.ir.primitives import ROUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a pointwise operation: values of its arguments (an Expr, a Python scalar, a dtype, None).

    target: the overload, where a graph has one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    target: Any = None

    def get(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Builder = Callable[[Call], Expr | None]


def float_function(compose: Callable[..., Expr | None], count: int = 1) -> Builder:
    """Builder of a function of a number of floats, from its composition, which takes these and the call."""

    def builder(call: Call) -> Expr | None:
        if kind_of(call.dtype) is not Kind.FLOAT:
            return None
        return compose(*(operand(arg, Kind.FLOAT) for arg in call.args[:count]), call)

    return builder


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


def common_integer(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """Dtype in which an operation of integers computes: numbers, and tensors of one element, wrap around in it."""
    if not tensors or any(kind_of(tensor.dtype) is not Kind.INT for tensor in tensors):
        return None
    return torch.result_type(tensors[0], tensors[-1])


def cast(value: Expr, dtype: torch.dtype) -> Expr | None:
    """`value.to(dtype)`; constants (also those selected by a mask) are rounded as the dtype rounds them."""
    kind = kind_of(dtype)
    if kind is None:
        return None
    value = operand(value, kind)
    return round_constants(value, dtype) if kind is Kind.FLOAT else value


def round_constants(value: Expr, dtype: torch.dtype) -> Expr:
    """Constants, also those selected by a mask, rounded to `dtype`, and sums with a fill rounded to it."""
    if value.op == "const":
        return const(rounded(value.value, dtype))
    if value.op == "where":
        condition, then, otherwise = value.args
        return where(condition, round_constants(then, dtype), round_constants(otherwise, dtype))
    if value.op != "fadd":
        return value
    for term, mask in (value.args, value.args[::-1]):  # a fill that only this dtype is too coarse for
        if (masked := _add_hard_mask(term, mask, dtype)) is not None:
            return masked
    # A sum with a fill may have another value in the dtype than in float32.
    fills = [arg.value for arg in value.args if arg.is_const and -arg.value < _EXACT_FILL]
    coarse = dtype in ROUNDED and any(swallows(fill, dtype) for fill in fills)
    return apply(ROUNDED[dtype], value) if coarse else value


FILL = -1e3
"""Numbers up to this may be fills of masks."""
_EXACT_FILL = 2.0**64
"""A sum with a fill beyond this is the fill, or overflows, in float32 as in any narrower dtype."""


def float_arithmetic(name: str, left: Expr, right: Expr, dtype: torch.dtype) -> Expr:
    if any(part.op == "reduce" for part in walk(left, right)):  # a shift, which `recognize` takes off as it is
        return apply(name, left, right)
    if name == "fsub" and (_is_hard_mask(left, dtype) or right.op == "where"):
        name, right = "fadd", -right
    if name == "fadd":
        for value, mask in ((left, right), (right, left)):
            if (masked := _add_hard_mask(value, mask, dtype)) is not None:
                return masked
    result = apply(name, left, right)
    return round_constants(result, dtype) if result.op in ("const", "where") else result


def _add_hard_mask(value: Expr, mask: Expr, dtype: torch.dtype) -> Expr | None:
    """x + (y if p else c) = (x + y if p else x + c) where c swallows every score that occurs in `dtype`.

    c is that large when half its spacing in `dtype` is at least 16: finfo.min and -inf in every dtype, -1e9 in float32,
    -1e4 in bfloat16. Such a key is dead in a row with a live one. In a row without, eager averages over the rounded
    values of x + c, and the gradient passes through the sum.
    """
    if not _is_hard_mask(mask, dtype):
        return None
    condition, *arms = mask.args
    then, otherwise = (round_constants(float_arithmetic("fadd", value, arm, dtype), dtype) for arm in arms)
    return where(condition, then, otherwise)


def _is_hard_mask(value: Expr, dtype: torch.dtype) -> bool:
    """Whether a value, or one of the alternatives of a selection, is a fill that swallows scores."""
    arms = value.args[1:] if value.op == "where" else ()
    return any(_is_hard_mask(arm, dtype) or (arm.is_const and swallows(arm.value, dtype)) for arm in arms)


def swallows(fill: float, dtype: torch.dtype) -> bool:
    """Whether adding a score of ordinary size (|s| < 16) to `fill` gives `fill` again in `dtype`."""
    if fill >= 0 or math.isnan(fill):
        return False
    if math.isinf(fill):
        return True
    exponent = math.frexp(fill)[1] - 1
    return 2.0**exponent * torch.finfo(dtype).eps / 2 >= 16
