"""What a spec's score program becomes in a kernel: a scale that costs nothing, the variant for full blocks, and what
must be guarded.

A constant positive factor around the score is not multiplied in but goes into the exponential, which multiplies by
log2(e) anyway: `where(live, s * c, -inf)` is computed as `where(live, s, -inf)` in units of c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusion.ir import integers, ops
from fusion.ir.expr import SCORE, TRUE, Expr, I, J, Kind, contains, substitute, walk
from fusion.ir.fills import LARGEST, in_units, is_dead
from fusion.ir.ops import ROUNDED
from fusion.ir.spec import AttentionSpec, Normalizer

_MOST, _LEAST = 1e6, 1e-6  # factors beyond these stay in the program
_TAME = frozenset("fadd fmul fsub neg tanh sigmoid sin cos erf minimum maximum abs where to_float".split()) | set(
    ROUNDED.values()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """masked: the whole program. full: the program where every key is live, or None where it is the same; both in
    units of `scale`.

    clamped: the finite constant that is beyond float32 in units of `scale` and was brought to its end, if there is one.
    guarded: scores can be -inf or so large that their product with log2(e) overflows, for whole rows.
    """

    masked: Expr
    full: Expr | None
    scale: float
    guarded: bool
    clamped: float | None = None


def programs_of(spec: AttentionSpec) -> Programs:
    """The variants of a spec's program."""
    score = spec.score
    full = None if spec.mask is None else spec.mask.full
    if spec.normalizer is Normalizer.NONE:
        return Programs(masked=score, full=full, scale=1.0, guarded=False)
    guarded = not _tame(score)
    scale = factor_of(score)
    if scale is None or (full is not None and factor_of(full) != scale):
        return Programs(masked=score, full=full, scale=1.0, guarded=guarded)
    beyond = _beyond(score, scale)
    if len(beyond) > 1:  # they would become equal
        return Programs(masked=score, full=full, scale=1.0, guarded=guarded)
    masked = divided(score, scale)
    if masked is None:
        return Programs(masked=score, full=full, scale=1.0, guarded=guarded)
    return Programs(
        masked=masked,
        full=None if full is None else divided(full, scale),
        scale=scale,
        guarded=guarded,
        clamped=next(iter(beyond), None),
    )


def dead_rows_matter(spec: AttentionSpec) -> bool:
    """Whether a row may need the keys that its mask lets a kernel skip.

    With a fill of -inf it never does: whether it sees them or not, a row without a live key has the maximum -inf and
    the sum 0. With a finite fill eager averages over all keys, unless each row is known to have a live key (key 0, or
    key i where there are as many queries as keys) and the fill is beyond what ordinary scores can be.
    """
    mask = spec.mask
    if mask is None or not mask.skips or spec.normalizer is Normalizer.NONE or mask.fill == -math.inf:
        return False
    keys = [integers.integer(0)] + [I] * (spec.n_q is spec.n_k)
    lives = any(substitute(mask.live, {J: key}) is TRUE for key in keys)
    return not (lives and mask.fill < -1e30 and mask.full is not None and _tame(mask.full))


def _beyond(score: Expr, scale: float) -> set[float]:
    """Finite constants among the alternatives of a program that do not fit float32 in units of `scale`."""
    if score.op in ("where", "fadd"):
        return {value for arg in score.args for value in _beyond(arg, scale)}
    value = float(score.attr) if score.op == "const" else 0.0  # type: ignore[arg-type]
    return {value} if math.isfinite(value) and abs(value) / scale > LARGEST else set()


def _tame(expr: Expr) -> bool:
    """Whether ordinary inputs give ordinary scores: nothing but small constants and smooth operations."""
    for part in walk(expr):
        if part.op == "const" and part.kind is Kind.FLOAT and abs(float(part.attr)) > 1e30:  # type: ignore[arg-type]
            return False
        if part.kind is Kind.FLOAT and part.op not in _TAME | {"const", "score"} and not _divides_by_constant(part):
            return False
    return True


def _divides_by_constant(expr: Expr) -> bool:
    return expr.op == "div" and expr.args[1].op == "const" and expr.args[1].attr != 0


def factor_of(expr: Expr) -> float | None:
    """The positive constant c such that the program is c times a simpler one, or None."""
    if expr is SCORE:
        return 1.0
    if expr.op == "fmul":
        for factor, rest in (expr.args, expr.args[::-1]):
            if factor.op == "const" and _LEAST < float(factor.attr) < _MOST and (inner := factor_of(rest)) is not None:  # type: ignore[arg-type]
                return float(factor.attr) * inner  # type: ignore[arg-type]
        return None
    if expr.op == "div" and expr.args[1].op == "const" and _LEAST < float(expr.args[1].attr) < _MOST:  # type: ignore[arg-type]
        inner = factor_of(expr.args[0])
        return None if inner is None else inner / float(expr.args[1].attr)  # type: ignore[arg-type]
    if expr.op == "where" and not contains(expr.args[0], SCORE):
        _, then, otherwise = expr.args
        if is_dead(otherwise):
            return factor_of(then)
        return factor_of(otherwise) if is_dead(then) else None
    return None


def divided(expr: Expr, scale: float) -> Expr | None:
    """The program in units of the factor that `factor_of` found; None where rows without a live key would change."""
    if expr is SCORE:
        return expr
    if is_dead(expr):
        return in_units(expr, scale, lambda part: divided(part, scale))
    if expr.op == "where":
        arms = [divided(arm, scale) for arm in expr.args[1:]]
        return None if None in arms else ops.where(expr.args[0], *arms)  # type: ignore[arg-type]
    rest = [arg for arg in expr.args if arg.op != "const"]
    return divided(rest[0], scale)
