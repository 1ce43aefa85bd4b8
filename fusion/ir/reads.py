"""Dependence of parts of a score program on row and key: on their distance alone, or as tensors with an element for
each pair."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.ir import integers
from fusion.ir.expr import Expr, I, J, Kind, const, coord, coordinates, load, loads, substitute, walk
from fusion.ir.primitives import cost

_WORTH = 4
"""Operations that are worth a table where none of them costs more than an instruction."""
_SHIFT = coord("shift")
_COMPARISONS = ("ilt", "ile", "ieq", "ine")


def distance_parts(*programs: Expr | None) -> list[Expr]:
    """Largest subexpressions (FLOAT or BOOL) that depend on i - j and batch coordinates only, and are worth a table."""
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()

    def visit(expr: Expr) -> None:
        if expr in seen:
            return
        seen.add(expr)
        if {"i", "j"} <= coordinates(expr) and expr.kind is not Kind.INT and _is_worth(expr) and is_shift_free(expr):
            found[expr] = None
            return
        for arg in expr.args:
            visit(arg)

    for program in programs:
        if program is not None:
            visit(program)
    return list(found)


def _is_worth(expr: Expr) -> bool:
    operations = [part for part in walk(expr) if part.args and {"i", "j"} & coordinates(part)]
    if any(part.op == "load" or cost(part.op) for part in operations):
        return True
    return len(operations) >= _WORTH and expr.kind is not Kind.BOOL


def is_shift_free(expr: Expr) -> bool:
    """Whether the value stays the same when row and key are moved by the same amount."""
    if not {"i", "j"} & coordinates(expr):
        return True
    if expr.op in ("score", "row_max", "row_sum"):
        return False
    if expr.op in _COMPARISONS:
        return is_shift_free(integers.sub(*expr.args))
    if expr.op in ("add", "mul", "coord"):
        return _is_polynomial_shift_free(expr)
    return all(map(is_shift_free, expr.args))


def _is_polynomial_shift_free(expr: Expr) -> bool:
    moved = integers.integer(0)
    for monomial, coefficient in integers.terms(expr).items():
        term = integers.integer(coefficient)
        for atom in monomial:
            if atom not in (I, J) and not is_shift_free(atom):
                return False
            term = integers.mul(term, integers.add(atom, _SHIFT) if atom in (I, J) else atom)
        moved = integers.add(moved, term)
    return moved is expr


def dense_loads(*programs: Expr | None, but: Sequence[Expr] = ()) -> list[Expr]:
    """Loads at indices linear in row and key; without integers, which are gathered, and loads that only `but`
    contains."""
    leaves = {part: load(-1 - number, (), part.kind) for number, part in enumerate(but)}  # which depend on nothing
    found = {e: None for p in programs if p is not None for e in loads(substitute(p, leaves))}
    return [e for e in found if {"i", "j"} <= coordinates(e) and e.kind is not Kind.INT and _is_dense(e)]


def key_dimension(expr: Expr) -> int | None:
    """Dimension of a load along which keys follow one another: its index alone contains the key, plus other terms."""
    columns = [dim for dim, index in enumerate(expr.args) if "j" in coordinates(index)]
    parts = integers.linear(expr.args[columns[0]], J) if len(columns) == 1 else None
    return columns[0] if parts is not None and parts[0] is const(1) else None


def _is_dense(expr: Expr) -> bool:
    for index in expr.args:
        row = integers.linear(index, I)
        column = integers.linear(row[1], J) if row else None
        if row is None or column is None or coordinates(row[0]) & {"i", "j"} or coordinates(column[0]) & {"i", "j"}:
            return False
        if any(part.op == "load" for part in (row[0], column[0])):
            return False
    return True
