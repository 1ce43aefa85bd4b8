"""What the score program of a spec becomes in the kernel: variants for masked and for full blocks, and a scale that costs nothing.

A constant positive factor around the score is not multiplied in but goes into the exponential, which multiplies by log2(e) anyway:
`where(live, s * c, -inf)` is computed as `where(live, s, -inf)` in units of c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusion.ir import ops
from fusion.ir.expr import SCORE, TRUE, Expr, Kind, const, contains, substitute
from fusion.ir.spec import AttentionSpec, Normalizer

_LARGEST = 3.4028234663852886e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """masked: the whole program. full: the program where every key is live, or None where it is the same. Both in units of `scale`:
    the score is scale * program."""

    masked: Expr
    full: Expr | None
    scale: float


def programs_of(spec: AttentionSpec) -> Programs:
    """The variants of a spec's program."""
    score, full = spec.score, None
    if spec.mask is not None and spec.mask.full_lo is not None and spec.mask.full_hi is not None:
        live = {part: TRUE for part in ops.conjuncts(spec.mask.live)}
        full = substitute(score, live | {spec.mask.live: TRUE})
        full = None if full is score else full
    if spec.normalizer is Normalizer.NONE:
        return Programs(masked=score, full=full, scale=1.0)
    scale = _factor(score)
    if scale is None or (full is not None and _factor(full) != scale):
        return Programs(masked=score, full=full, scale=1.0)
    return Programs(masked=_divide(score, scale), full=None if full is None else _divide(full, scale), scale=scale)


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
