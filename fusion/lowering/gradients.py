"""Gradients that a backward computes, as expressions of what arrives at a score.

The gradient of a load is a sum over all scores that read the same element. `summed_over` says which these are: a load
that is free of the key is read by all scores of its row, and so on. What an emitter makes of that (sums in registers,
atomic additions, a buffer per thread) is its own.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from fusion.ir.derivative import UPSTREAM, WEIGHT_UPSTREAM, adjoints
from fusion.ir.expr import SCORE, Expr, Kind, coordinates, loads


class Axes(enum.Enum):
    """The axes of the matrix of scores over which the gradient of a load is summed."""

    NEITHER = frozenset[str]()
    KEYS = frozenset("j")
    QUERIES = frozenset("i")
    BOTH = frozenset("ij")


def summed_over(load: Expr) -> Axes:
    """The axes on which a load does not depend."""
    return Axes(frozenset("ij") - coordinates(load))


def wanted_loads(needs: Sequence[bool], *exprs: Expr) -> list[Expr]:
    """The loads below the expressions whose operands `needs` marks, each once."""
    return [load for load in loads(*exprs) if load.kind is Kind.FLOAT and needs[load.operand]]


def of_score(program: Expr, targets: Iterable[Expr]) -> dict[Expr, Expr]:
    """Gradients of the raw score and of loads through a score program, in UPSTREAM."""
    return adjoints(program, UPSTREAM, [SCORE, *targets])


def of_weight(program: Expr, targets: Iterable[Expr]) -> dict[Expr, Expr]:
    """Gradients of loads through a weight program, in WEIGHT_UPSTREAM."""
    return adjoints(program, WEIGHT_UPSTREAM, list(targets))
