"""What the score program of a spec becomes in the kernel: variants for masked and for full blocks, and a scale that
costs nothing.

A constant positive factor around the score is not multiplied in but goes into the exponential, which multiplies by
log2(e) anyway: `where(live, s * c, -inf)` is computed as `where(live, s, -inf)` in units of c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusion.ir import integers, ops
from fusion.ir.expr import SCORE, TRUE, Expr, I, J, Kind, const, contains, coord, substitute, walk
from fusion.ir.spec import AttentionSpec, Normalizer

I0, I1, J0, J1 = (coord(name) for name in ("i0", "i1", "j0", "j1"))
_LARGEST = 3.4028234663852886e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """masked: the whole program. full: the program for blocks where the integer conditions of the mask hold everywhere,
    or None. margins: INT expressions in b.., i0, i1, j0, j1 (first and last row and key), none negative where that is
    so. Programs are in units of `scale`: the score is scale * program."""

    masked: Expr
    full: Expr | None
    margins: tuple[Expr, ...]
    scale: float


def programs_of(spec: AttentionSpec) -> Programs:
    """The variants of a spec's program."""
    score, full = spec.score, None
    margins: tuple[Expr, ...] = ()
    if spec.mask is not None:
        decided = {part: margin for part in ops.conjuncts(spec.mask.live) if (margin := _margin(part)) is not None}
        full = substitute(score, dict.fromkeys(decided, TRUE))
        full, margins = (None, ()) if full is score else (full, tuple(decided.values()))
    scale = None if spec.normalizer is Normalizer.NONE else _factor(score)
    if scale is None or (full is not None and _factor(full) != scale):
        return Programs(masked=score, full=full, margins=margins, scale=1.0)
    parts = [None if part is None else _divide(part, scale) for part in (score, full)]
    assert parts[0] is not None
    return Programs(masked=parts[0], full=parts[1], margins=margins, scale=scale)


def _margin(predicate: Expr) -> Expr | None:
    """The least value over a block of right - left (less one for `<`) of a comparison linear in row and key; None for
    others."""
    if predicate.op not in ("ile", "ilt") or any(part.op in ("load", "to_int") for part in walk(predicate)):
        return None
    left, right = predicate.args
    rest = integers.sub(right, left)
    least = integers.integer(-1 if predicate.op == "ilt" else 0)
    for position, first, last in ((I, I0, I1), (J, J0, J1)):
        parts = integers.linear(rest, position)
        if parts is None or not parts[0].is_const:
            return None
        coefficient, rest = int(parts[0].attr), parts[1]  # type: ignore[arg-type]
        least = integers.add(least, integers.mul(coefficient, first if coefficient > 0 else last))
    return integers.add(least, rest)


def _factor(expr: Expr) -> float | None:
    """The positive constant c such that the program is c times a simpler one, or None."""
    if expr is SCORE:
        return 1.0
    if expr.op == "fmul":
        left, right = expr.args
        for factor, rest in ((left, right), (right, left)):
            if factor.op == "const" and 1e-6 < float(factor.attr) < 1e6 and (inner := _factor(rest)) is not None:  # type: ignore[arg-type]
                return float(factor.attr) * inner  # type: ignore[arg-type]
        return None
    if expr.op == "div" and expr.args[1].op == "const" and 1e-6 < float(expr.args[1].attr) < 1e6:  # type: ignore[arg-type]
        inner = _factor(expr.args[0])
        return None if inner is None else inner / float(expr.args[1].attr)  # type: ignore[arg-type]
    if expr.op == "where" and not contains(expr.args[0], SCORE):
        then, otherwise = expr.args[1:]
        if otherwise.op == "const":
            return _factor(then)
        return _factor(otherwise) if then.op == "const" else None
    return None


def _divide(expr: Expr, scale: float) -> Expr:
    """The program in units of the factor that `_factor` found."""
    if expr is SCORE:
        return expr
    if expr.op == "const":
        value = float(expr.attr) / scale  # type: ignore[arg-type]
        if math.isfinite(float(expr.attr)):  # type: ignore[arg-type]
            value = max(-_LARGEST, min(_LARGEST, value))  # a finite fill stays finite
        return const(value, Kind.FLOAT)
    if expr.op == "where":
        return ops.where(expr.args[0], _divide(expr.args[1], scale), _divide(expr.args[2], scale))
    rest = [arg for arg in expr.args if arg.op != "const"]
    return _divide(rest[0], scale)
