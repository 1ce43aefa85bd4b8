"""Equal forms of a softmax: its value in rows without a live key, and shifts of its scores.

Softmax of a row of nothing but -inf is NaN. Models remove it: `softmax(scores).masked_fill(dead, 0)` selects and does
not multiply, and `exp(x) / (exp(x).sum() + eps)` is 0 / eps. Both are 0 in such a row, as `Normalizer.SAFE_SOFTMAX` has
it, provided that nothing is selected in such rows.

softmax(x - r) = softmax(x) for an r that is the same for all keys, unless it is infinite, or x is scaled.
"""

from __future__ import annotations

import functools
import math

import torch

from fusion.ir.expr import ROW_MAX, ROW_SUM, ZERO, Expr, Kind, const, is_number, node, rebuild, walk
from fusion.ir.ops import apply, conjuncts, remake, where
from fusion.ir.primitives import ROUNDED
from fusion.refusals import Reason

from ..nodes import Unsupported
from .core import free_of_keys, has
from .infinities import is_negated, may_be_infinite, may_be_nan

_LOW, _VANISHES = -1e3, -200.0
"""Constants that are not above the first are fills of masks; exp of what is below the second is 0."""


def selected_softmax(core: Expr, condition: Expr) -> Expr | None:
    """Softmax with the same values where `condition` holds, the only ones that are read, and with correct dead rows. A
    dead row is NaN if any of its keys is selected, else 0. That is a softmax where scores are -inf under the condition
    only, and a safe one where they never are under it; None where neither can be shown."""
    columns = core.args[1:] if core.op == "scaled_softmax" else core.args
    if may_be_nan(columns[0]):  # a weight of NaN that is not selected is 0, and not a product with 0
        return None
    if core.attr != "softmax":
        return core
    if not may_be_infinite(columns[0], conjuncts(apply("not", condition))):
        return core
    if may_be_infinite(columns[0], conjuncts(condition)):
        return None
    return node(core.op, core.args, Kind.FLOAT, "safe_softmax")


def quotient_kind(shift: Expr, denominator: Expr) -> str:
    """Kind of softmax that exp(x - shift) / denominator is, with the denominator in terms of ROW_MAX and ROW_SUM. Where
    all x are -inf the exponentials are 0, unless the shift is -inf as well, and so is the quotient, unless the
    denominator is 0 as well."""
    shift, denominator = (_in_dead_rows(value) for value in (shift, denominator))
    dead = shift.is_const and shift.value == -math.inf
    empty = denominator.is_const and not abs(denominator.value) > 0
    return "softmax" if dead or empty or ROW_MAX in (shift, denominator) else "safe_softmax"


def as_exponents(columns: tuple[Expr, ...], shift: Expr) -> tuple[Expr, ...]:
    """Scores x of exp(x - shift) / (sum of exp(x - shift)), as those of a softmax. A softmax of a row of nothing but a
    low finite fill is its mean. So is the quotient where the shift is the fill, as the row's maximum is; with any other
    shift every exponential is 0, as if the fill were -inf."""
    reduced = (column for part in walk(shift) if part.op == "reduce" for column in part.args)
    if any(map(may_be_high, reduced)):
        message = "exponentials less a maximum that a mask's fill takes far above the scores"
        raise Unsupported(Reason.SOFTMAX_BY_HAND, message)
    if shift is ROW_MAX or not any(map(may_be_lowest, columns)):
        return columns
    if any(may_be_lowest(part) for part in walk(shift, *columns) if part.op in ("load", "reduce")):
        raise Unsupported(Reason.SOFTMAX_BY_HAND, "a softmax by hand whose fully masked rows depend on a mask tensor")
    exponents = tuple(_with_vanishing_fills(column, shift, 1.0) for column in columns)
    if any(map(may_be_lowest, exponents)):
        raise Unsupported(Reason.SOFTMAX_BY_HAND, "a softmax by hand under a mask whose fill value cannot be followed")
    return exponents


def _with_vanishing_fills(column: Expr, shift: Expr, factor: float) -> Expr:
    """Column with -inf for each fill whose exponential vanishes, since column times `factor` less the shift is far
    below 0."""
    if column.op == "fmul" and column.args[1].is_const and column.args[1].value > 0:
        inner = _with_vanishing_fills(column.args[0], shift, factor * column.args[1].value)
        return remake(column, (inner, column.args[1]))
    if column.op in ("where", "fadd", *ROUNDED.values()):
        args = (arg if arg.kind is not Kind.FLOAT else _with_vanishing_fills(arg, shift, factor) for arg in column.args)
        return remake(column, tuple(args))
    if not _is_low(column):
        return column
    fill = const(column.value * factor)
    there = rebuild(shift, lambda part: fill if part is ROW_MAX else None)
    distance = fill - there
    if distance.is_const and distance.value >= _VANISHES or (there is not shift and not there.is_const):
        message = "a softmax by hand that subtracts a value which depends on a mask's finite fill"
        raise Unsupported(Reason.SOFTMAX_BY_HAND, message, column)
    return const(-math.inf)


@functools.lru_cache(maxsize=4096)
def may_be_lowest(value: Expr) -> bool:
    """Whether a value may be a finite fill: such a constant or a load, if need be in a sum, selection or multiple."""
    if value.kind is not Kind.FLOAT or value.op in ("dot", "score"):
        return False
    if value.op in ("fmul", "div") and not any(arg.is_const for arg in value.args):
        return any(may_be_lowest(arg) for arg in value.args if not _is_function_of_load(arg))
    return _is_low(value) or value.op == "load" or any(map(may_be_lowest, value.args))


@functools.lru_cache(maxsize=4096)
def may_be_high(value: Expr, sign: float = 1.0) -> bool:
    """Whether a value, or with a sign of -1 its negative, may be a finite constant far above all scores."""
    if value.is_const:
        return value.kind is Kind.FLOAT and -_LOW <= sign * value.value < math.inf
    if is_negated(value):
        return may_be_high(value.args[0], -sign)
    if value.op == "fsub":
        return may_be_high(value.args[0], sign) or may_be_high(value.args[1], -sign)
    passes_on = ("where", "fadd", "fmul", "div", "minimum", "maximum", *ROUNDED.values())
    return value.op in passes_on and any(may_be_high(arg, sign) for arg in value.args)


def _is_function_of_load(value: Expr) -> bool:
    return value.op == "load" or (len(value.args) == 1 and _is_function_of_load(value.args[0]))


def may_be_far(value: Expr) -> bool:
    """Whether a value may be a mask's finite fill, or a function of one: also one far above all scores."""
    above = (arg.is_const and arg.kind is Kind.FLOAT and -_LOW <= arg.value < math.inf
             for part in walk(value) if part.op in ("where", "fadd", "fsub") for arg in part.args)  # fmt: skip
    return may_be_lowest(value) or any(above)


def _is_low(part: Expr) -> bool:
    return part.is_const and part.kind is Kind.FLOAT and -math.inf < part.value <= _LOW


@functools.lru_cache(maxsize=4096)
def _in_dead_rows(value: Expr) -> Expr:
    if value in (ROW_MAX, ROW_SUM):
        return const(-math.inf if value is ROW_MAX else 0.0)
    args = tuple(_in_dead_rows(arg) for arg in value.args)
    if value.op == "fmul" and const(0.0) in args:
        return const(0.0)
    return value if args == value.args else remake(value, args)


def is_maximum(value: Expr, columns: tuple[Expr, ...], name: str = "max") -> bool:
    """Whether a value is the maximum (or another reduction) of exactly these columns."""
    is_reduced = value.op == "reduce" and value.attr == name
    return is_reduced and [*map(_fill_last, value.args)] == [*map(_fill_last, columns)]


def _fill_last(column: Expr) -> Expr:
    """(-inf if p else x) as (x if not p else -inf)."""
    if column.op == "where" and column.args[1].is_const:
        return where(apply("not", column.args[0]), column.args[2], column.args[1])
    return column


def strip_shift(columns: tuple[Expr, ...]) -> tuple[Expr, ...] | None:
    """Columns without the reduction that is subtracted from or added to all of them; None where there is none, or where
    it has to stay: it may be infinite, or a scale may overflow without it."""
    ops = {column.op for column in columns}
    if ops == {"fsub"} and (shift := _common(columns, 0)) is not None and has(shift, "reduce"):
        rest = tuple(column.args[1] for column in columns)
        # x - x is 0, or NaN where x is infinite: there r - x is NaN, or +inf, and so is eager's row.
        turned = (x - x - x for x in rest)
        return tuple(turned) if _is_ignored(shift, rest) else None
    if ops in ({"fsub"}, {"fadd"}):
        if (shift := _common(columns, 1)) is None or not has(shift, "reduce"):
            return None
        rest = tuple(column.args[0] for column in columns)
        taken = shift if ops == {"fsub"} else -shift
        return rest if _is_ignored(taken, rest) else None
    if ops not in ({"fmul"}, {"div"}):
        return None
    for position in (1, 0) if ops == {"fmul"} else (1,):
        factor = _common(columns, position)
        if factor is None or has(factor, "reduce"):
            continue
        rest = strip_shift(tuple(column.args[1 - position] for column in columns))
        if rest is None:
            continue
        scale = _scale(columns[0].op, factor)
        undone = [y for x in rest if (y := _undone(scale, x)) is not None]
        if len(undone) == len(rest):
            return tuple(undone)
        if abs(scale) <= 1 or not any(map(may_be_far, rest)):
            return tuple(_scaled_or_nan(columns[0].op, x, factor) for x in rest)
    return None


def _scaled_or_nan(op: str, x: Expr, factor: Expr) -> Expr:
    """x * factor (or x / factor) for (x - max of x) * factor: NaN where x is +inf, where a negative factor gives 0."""
    scaled, is_positive = apply(op, x, factor), factor.is_const and factor.value > 0
    return scaled if is_positive else where(apply("flt", x, const(math.inf)), scaled, const(math.nan))


def _common(columns: tuple[Expr, ...], position: int) -> Expr | None:
    """Argument that all columns have in one position, where it is the same for all keys."""
    arguments = {column.args[position] for column in columns}
    value = arguments.pop()
    return value if not arguments and free_of_keys(value) else None


def _is_ignored(shift: Expr, columns: tuple[Expr, ...]) -> bool:
    """Whether softmax(x - shift) is that of x in every row, rows of -inf or finfo.min included: the shift is the
    largest or the log-sum of x, is clamped to a constant, or is an ordinary number."""
    if shift.op in ("detach_nan", *ROUNDED.values()):
        return _is_ignored(shift.args[0], columns)
    if any(is_maximum(shift, columns, name) for name in ("max", "detached max", "logsumexp")):
        return True
    if shift.op in ("where", "maximum", "minimum"):
        return all(_is_ignored(arg, columns) for arg in shift.args if arg.kind is Kind.FLOAT)
    if shift.op == "neg" and shift.args[0].op == "neg":
        return _is_ignored(shift.args[0].args[0], columns)
    return not may_be_lowest(shift) and not may_be_infinite(shift)


def _scale(op: str, factor: Expr) -> float:
    """Number that x * factor, or x / factor, multiplies x with; infinity where it is no constant."""
    if not factor.is_const:
        return math.inf
    return factor.value if op == "fmul" else 1 / factor.value if factor.value else math.inf


def _undone(scale: float, column: Expr) -> Expr | None:
    """Column times a scale above 1 that at most undoes an earlier scale below 1, by a power of two, so that nothing
    overflows. One example is x / 32 in (x / 32 - max of x / 32) * 32, which keeps scores of half precision small
    (CogView, 2105.13290, section 2.4). None for others."""
    if column.op == "where":
        arms = [y for arm in column.args[1:] if (y := _undone(scale, arm)) is not None]
        return remake(column, (column.args[0], *arms)) if len(arms) == 2 else None
    if column.is_const:
        value = column.value * scale
        return const(value) if abs(value) <= torch.finfo(torch.float32).max else None
    down = _scale(column.op, column.args[1]) if column.op in ("fmul", "div") else 1.0
    if math.frexp(down)[0] != 0.5 or not 1 < scale <= 1 / down:
        return None
    return column.args[0] * (down * scale)


def exponent_and_shift(value: Expr) -> tuple[Expr, Expr | None] | None:
    """(x, r) with value = exp(x - r), r free of keys (ZERO where nothing is subtracted); r is None if any r will do. A
    weight masked after the exponential, exp(x) * mask, is exp(x if mask else x - inf): the gradient of a product is NaN
    where that of the weight is."""
    if value.op == "exp":
        exponent = value.args[0]
        if exponent.op == "where":
            condition, *arms = exponent.args
            return _selected_exponent(condition, *(apply("exp", arm) for arm in arms)) or (exponent, ZERO)
        if (shifted := _shifted(exponent)) is not None:
            return shifted
        for x, added in (exponent.args, exponent.args[::-1]) if exponent.op == "fadd" else ():
            if has(added, "reduce") and free_of_keys(added):
                return x, -added
        return exponent, ZERO
    if is_number(value, 0.0):
        return const(-math.inf), None
    if value.op == "where":
        return _selected_exponent(*value.args)
    if value.op != "fmul" or not any(map(_is_indicator, value.args)):
        return None
    indicator, other = value.args if _is_indicator(value.args[0]) else value.args[::-1]
    if (pair := exponent_and_shift(other)) is None:
        return None
    if pair[1] is ZERO and may_be_high(pair[0]):
        message = "exponentials of a mask's fill far above the scores, which may be infinite times 0"
        raise Unsupported(Reason.SOFTMAX_BY_HAND, message, value)
    condition, factor, _ = indicator.args
    dead = pair[0] + -math.inf
    arms = (dead, pair[0]) if is_number(factor, 0.0) else (pair[0], dead)
    return where(condition, *arms), pair[1]


def _shifted(exponent: Expr) -> tuple[Expr, Expr] | None:
    """(x, r) with exponent = x - r, or c * x - c * r of c * (x - r), as exp2 has it; None where nothing is subtracted.
    A c > 1 could take a finite fill of x to -inf, and the row's weights from a mean to NaN: then x stays as it is."""
    if exponent.op == "fsub" and free_of_keys(exponent.args[1]):
        return exponent.args[0], exponent.args[1]
    if exponent.op != "fmul":
        return None
    inner, factor = sorted(exponent.args, key=lambda arg: arg.is_const)
    if not factor.is_const or not 0 < factor.value < math.inf or (inner_pair := _shifted(inner)) is None:
        return None
    x, shift = inner_pair
    if factor.value > 1 and may_be_far(x):
        return None
    if shift.op == "reduce" and shift.attr in ("max", "detached max"):  # rounding is monotone: the largest stays it
        columns = tuple(column * factor for column in shift.args)
        return x * factor, node("reduce", columns, Kind.FLOAT, shift.attr)
    return x * factor, shift * factor


def _selected_exponent(condition: Expr, then: Expr, otherwise: Expr) -> tuple[Expr, Expr | None] | None:
    """`exponent_and_shift` of (then if condition else otherwise)."""
    left, right = exponent_and_shift(then), exponent_and_shift(otherwise)
    if left is None or right is None or (left[1] is not right[1] and None not in (left[1], right[1])):
        return None
    return where(condition, left[0], right[0]), left[1] if left[1] is not None else right[1]


def _is_indicator(value: Expr) -> bool:
    """Whether a value is 1 where a predicate holds and 0 elsewhere, or the reverse."""
    return value.op == "where" and {arg.attr for arg in value.args[1:] if arg.is_const} == {0.0, 1.0}
