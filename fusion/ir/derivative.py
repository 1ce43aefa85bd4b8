"""Derivatives of expressions, by reverse accumulation: from the gradient of a score program to those of the score and
of its tensors.

`adjoints(program, seed, targets)` takes the gradient that arrives at the program's value (an expression, usually a
leaf) and returns the gradient at each target. The derivative of each primitive stands in its entry of
`fusion.ir.primitives`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusion.ir.expr import ZERO, Expr, Kind, node, walk
from fusion.ir.primitives import PRIMITIVES

UPSTREAM = node("upstream", (), Kind.FLOAT)
"""The leaf that stands for the gradient arriving at a score program's value."""

WEIGHT_UPSTREAM = node("upstream", (), Kind.FLOAT, "weight")
"""Likewise for the weight program."""

AUX_UPSTREAM = node("upstream", (), Kind.FLOAT, "auxiliary")
"""What the gradients of auxiliary outputs are multiplied by: one, or zero where they are to be left out."""

SINK_UPSTREAM = node("upstream", (), Kind.FLOAT, "row")
"""Likewise for a sink."""


def adjoints(program: Expr, seed: Expr, targets: Iterable[Expr]) -> dict[Expr, Expr]:
    """The gradient at each target (leaves or loads) for the gradient `seed` at `program`; ZERO where there is none."""
    order = list(walk(program))
    arriving: dict[Expr, Expr] = {program: seed}
    for part in reversed(order):
        gradient = arriving.get(part)
        derivative = PRIMITIVES[part.op].derivative if part.op in PRIMITIVES else None
        if gradient is None or derivative is None:
            continue
        terms = derivative(gradient, part, *part.args)
        for arg, term in zip(part.args, terms if isinstance(terms, tuple) else (terms,), strict=True):
            if term is not None and arg.kind is Kind.FLOAT and not arg.is_const:
                arriving[arg] = arriving[arg] + term if arg in arriving else term
    return {target: arriving.get(target, ZERO) for target in targets}


def reached(*programs: Expr) -> set[Expr]:
    """Expressions that gradients at the programs' values may flow to, which excludes arguments of `detach`, comparisons
    and indices."""
    seen, todo = set[Expr](), list(programs)
    while todo:
        expr = todo.pop()
        if expr in seen or expr.kind is not Kind.FLOAT:
            continue
        seen.add(expr)
        if expr.op != "detach":
            todo += expr.args
    return seen
