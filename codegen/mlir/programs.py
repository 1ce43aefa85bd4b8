"""What the score program of a spec becomes in the kernel: variants for masked and for full blocks, and a scale that
costs nothing.

A constant positive factor around the score is not multiplied in but goes into the exponential, which multiplies by
log2(e) anyway: `where(live, s * c, -inf)` is computed as `where(live, s, -inf)` in units of c.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.ir import ops
from fusion.ir.expr import SCORE, Expr, Kind, const, contains, rebuild
from fusion.ir.fills import in_units, is_dead
from fusion.ir.spec import AttentionSpec, Normalizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """masked: the whole program. full: that of `MaskFacts.full`, or None. Both are in units of `scale`: the score is
    scale * program."""

    masked: Expr
    full: Expr | None
    scale: float


def programs_of(spec: AttentionSpec) -> Programs:
    """The variants of a spec's program."""
    score, full = spec.score, None if spec.mask is None else spec.mask.full
    score, full = simplified(score), None if full is None else simplified(full)
    scale = 1.0 if spec.normalizer is Normalizer.NONE else _factor(score)
    masked, live = _divide(score, scale), None if full is None else _divide(full, scale)
    if scale == 1.0 or masked is None or (full is not None and (live is None or _factor(full) != scale)):
        return Programs(masked=score, full=full, scale=1.0)
    return Programs(masked=masked, full=live, scale=scale)


def simplified(expr: Expr) -> Expr:
    """Divisions by constants as products, and products with several constants as one. Rounds differently from the
    original in the last place."""

    def visit(part: Expr) -> Expr | None:
        if part.op == "div" and _is_factor(part.args[1]):
            return simplified(ops.apply("fmul", part.args[0], const(1.0 / float(part.args[1].attr))))  # type: ignore[arg-type]
        if part.op == "fmul":
            left, right = (rebuild(arg, visit) for arg in part.args)
            if left.op == "const":
                left, right = right, left
            if _is_factor(right) and left.op == "fmul" and _is_factor(left.args[1]):
                product = float(right.attr) * float(left.args[1].attr)  # type: ignore[arg-type]
                left, right = left.args[0], const(product)
            return ops.apply("fmul", left, right)
        return None

    return rebuild(expr, visit)


def _is_factor(expr: Expr) -> bool:
    """A constant that neither over- nor underflows when folded."""
    return expr.op == "const" and expr.kind is Kind.FLOAT and 1e-6 < abs(float(expr.attr)) < 1e6  # type: ignore[arg-type]


def _factor(expr: Expr) -> float:
    """The positive constant c such that the (simplified) program is c times another, or 1."""
    if expr.op == "fmul" and _is_factor(expr.args[1]) and float(expr.args[1].attr) > 0:  # type: ignore[arg-type]
        return float(expr.args[1].attr)  # type: ignore[arg-type]
    if expr.op == "where" and not contains(expr.args[0], SCORE):
        then, otherwise = expr.args[1:]
        if is_dead(otherwise):
            return _factor(then)
        return _factor(otherwise) if is_dead(then) else 1.0
    return 1.0


def _divide(expr: Expr, scale: float) -> Expr | None:
    """The program in units of the factor that `_factor` found; None where rows without a live key would change."""

    def divide(part: Expr) -> Expr | None:
        if is_dead(part):
            return in_units(part, scale, divide)
        if part.op == "where":
            arms = [divide(arm) for arm in part.args[1:]]
            return None if None in arms else ops.where(part.args[0], *arms)  # type: ignore[arg-type]
        return part.args[0] if part.op == "fmul" else None

    return divide(expr)
