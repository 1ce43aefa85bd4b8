"""Index expressions of rows in memory: distances of rows and columns, as far as they are known before a call."""

from __future__ import annotations

import math

from fusion.ir import integers
from fusion.ir.expr import Expr, coord, coordinates, loads, rebuild, substitute, walk
from fusion.ir.ops import evaluate

BLOCK, LANE = coord("c_block"), coord("c_lane")
"""A column is lanes * BLOCK + LANE."""


def in_line(index: tuple[Expr, ...], row: Expr) -> bool:
    """Whether rows are at one distance from each other, as far as is known before a call."""
    result = [integers.linear(dim, row) for dim in index]
    return all(part is not None and row.name not in coordinates(part[0]) for part in result)


def runs(index: tuple[Expr, ...], row: Expr) -> tuple[int, tuple[Expr, ...]]:
    """(n, steps): rows from a multiple of n on, n of them, are `steps` apart from each other, by dimension, as those of
    a page are whose rows a table finds. (1, ()) where rows may lie anywhere."""
    page, own = coord("page"), coord("own")
    divisions = [part for part in walk(*index) if part.op in ("floordiv", "mod") and part.args[0] is row]
    if not divisions or not all(part.args[1].is_const for part in divisions):
        return 1, ()
    within = {part: page if part.op == "floordiv" else integers.add(page, own) for part in divisions}
    linear = [integers.linear(substitute(entry, within | {row: integers.add(page, own)}), own) for entry in index]
    steps = tuple(part[0] for part in linear if part is not None)
    if len(steps) < len(index) or not all(name.startswith("b") for step in steps for name in coordinates(step)):
        return 1, ()
    return math.gcd(*(part.args[1].integer for part in divisions)), steps


def by_blocks(expr: Expr, column: Expr, lanes: int) -> Expr:
    """An expression in which the column is lanes * BLOCK + LANE."""
    whole, bounds = integers.add(integers.mul(lanes, BLOCK), LANE), {LANE: integers.integer(lanes)}

    def leaf(part: Expr) -> Expr | None:
        if part is column:
            return whole
        if part.op not in ("floordiv", "mod") or column.name not in coordinates(part.args[0]):
            return None
        value, divisor = rebuild(part.args[0], leaf), part.args[1]
        division = integers.floordiv if part.op == "floordiv" else integers.mod
        blocks, rest = integers.floordiv(value, lanes, bounds), integers.mod(value, lanes, bounds)
        if divisor.is_const and divisor.integer % lanes == 0 and LANE.name not in coordinates(blocks):
            quotient = division(blocks, divisor.integer // lanes, bounds)
            return quotient if part.op == "floordiv" else integers.add(integers.mul(lanes, quotient), rest)
        return division(value, divisor, bounds)

    return rebuild(expr, leaf)


def along_lanes(part: Expr) -> list[int]:
    return [dim for dim, index in enumerate(part.args) if LANE.name in coordinates(index)]


def lane_pattern(index: Expr, lanes: int) -> tuple[Expr, list[int]] | None:
    """(the part of an index that is the same for all lanes, the offset of each lane); None where that is not known."""
    same, own = {}, {}
    for monomial, coefficient in integers.terms(index).items():
        names = {name for atom in monomial for name in coordinates(atom)}
        (own if LANE.name in names else same)[monomial] = coefficient
    varying = integers.from_terms(own)
    if coordinates(varying) != {LANE.name} or loads(varying):
        return None
    return integers.from_terms(same), lane_values(varying, lanes)


def lane_values(expr: Expr, lanes: int) -> list[int]:
    """An integer that depends on the lane alone."""
    import torch

    numbers = torch.arange(lanes)
    return torch.as_tensor(evaluate(expr, lambda leaf: numbers)).expand(lanes).tolist()
