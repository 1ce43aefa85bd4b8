"""Shifts of a softmax's scores: softmax(x - r) = softmax(x) for an r that is the same for all keys."""

from __future__ import annotations

import math

import torch

from fusion.ir.expr import Expr, Kind, const, walk
from fusion.ir.ops import apply, remake, where
from fusion.ir.primitives import ROUNDED

from .dead_rows import may_be_far, may_be_infinite, may_be_lowest


def has(expr: Expr, *ops: str) -> bool:
    return any(part.op in ops for part in walk(expr))


def free_of_keys(expr: Expr) -> bool:
    """Whether a value is the same for all keys j; a reduction binds j."""
    if expr.op in ("reduce", "row_max", "row_sum"):
        return True
    if expr.op in ("dot", "score", "softmax", "scaled_softmax") or (expr.op == "coord" and expr.attr == "j"):
        return False
    return all(free_of_keys(arg) for arg in expr.args)


def is_maximum(value: Expr, columns: tuple[Expr, ...], name: str = "max") -> bool:
    """Whether a value is the maximum (or another reduction) of exactly these columns."""
    if value.op != "reduce" or value.attr != name:
        return False
    return [_fill_last(arg) for arg in value.args] == [_fill_last(column) for column in columns]


def _fill_last(column: Expr) -> Expr:
    """(-inf if p else x) as (x if not p else -inf)."""
    if column.op == "where" and column.args[1].is_const:
        return where(apply("not", column.args[0]), column.args[2], column.args[1])
    return column


def without_shift(columns: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """softmax(x - r) = softmax(x) for an r that is the same for all keys, also scaled: softmax(c * (x - r))."""
    while (stripped := strip_shift(columns)) is not None:
        columns = stripped
    return columns


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
    scaled = apply(op, x, factor)
    if factor.is_const and factor.value > 0:
        return scaled
    return where(apply("flt", x, const(math.inf)), scaled, const(math.nan))


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
