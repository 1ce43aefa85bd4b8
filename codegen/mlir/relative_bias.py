"""Parts of a score program that depend on the distance i - j only (relative-position bias, ALiBi): computed once per
distance instead of once per pair.

Over a tile of R rows and K keys there are R + K - 1 distances. Their values are written to a small table, with the
distance as the lane coordinate; for a key and L consecutive rows the values are L consecutive entries of it.
"""

from __future__ import annotations

from fusion.codegen.mlir.builder import Value, vector_of
from fusion.codegen.mlir.scope import Context, Lanes, Scope
from fusion.ir import integers
from fusion.ir.expr import Expr, I, J, Kind, coord, coordinates, load, substitute, walk
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


def without_parts(program: Expr | None, parts: list[Expr]) -> Expr | None:
    """The program with every part replaced by a leaf that depends on nothing."""
    if program is None:
        return None
    leaves = {part: load(-1 - number, (), part.kind) for number, part in enumerate(parts)}
    return substitute(program, leaves)


class DistanceTable:
    """The table of one part. `area` has room for a tile's distances. Make it in the item's scope."""

    def __init__(self, context: Context, part: Expr, area: Value):
        self.context, self.part, self.area, self.b = context, part, area, context.b
        self.scalar = "i32" if part.kind is Kind.BOOL else "f32"

    def fill(self, scope: Scope, first_row: Value, last_row: Value, first_key: Value, last_key: Value) -> None:
        """Write the values of a tile's distances: the last key against rows that go on beyond the last one."""
        b, lanes = self.b, self.context.lanes
        count = b.add(b.sub(b.sub(last_row, first_key), b.sub(first_row, last_key)), 1)
        with b.loop(0, count, lanes, hint="at") as at:
            remaining = b.least(b.sub(count, at), lanes)
            limit = b.op(f"arith.trunci {remaining} : i64 to i32", "i32", "limit")
            order = b.dense(range(lanes), vector_of("i32", lanes), "lane")
            valid = b.compare("slt", order, b.broadcast(limit, lanes), "valid")
            lane = Lanes(coord=I, first=b.add(first_row, at), count=lanes, valid=valid)
            here = Scope(context=self.context, parent=scope, lanes=lane, known={J: last_key})
            value = here.vector(self.part)
            if self.scalar == "i32":
                value = b.convert("arith.extui", value, "i32")
            b.store(value, b.at(self.area, at, self.scalar))

    def read(self, row: Value, key: Value) -> Value:
        """The values of L rows from `row` on, at a key; `row` counted from the tile's first, `key` from its last."""
        b = self.b
        value = b.load(
            b.at(self.area, b.sub(row, key), self.scalar), vector_of(self.scalar, self.context.lanes), "by_distance"
        )
        return b.compare("ne", value, 0) if self.scalar == "i32" else value
