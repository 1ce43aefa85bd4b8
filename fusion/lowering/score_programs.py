"""Score programs as kernels compute them: with a scale that costs nothing, a variant for full blocks, and guards.

A constant positive factor around the score is not multiplied in but goes into the exponential, which multiplies by
log2(e) anyway: `where(live, s * c, -inf)` is computed as `where(live, s, -inf)` in units of c. `dead_rows_matter` and
its neighbours say whether a row may be without a live key among those that a kernel visits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from fusion.ir import integers, ops, primitives
from fusion.ir.expr import SCORE, TRUE, Expr, I, J, Kind, const, contains, coordinates, rebuild, substitute, walk
from fusion.ir.mask_facts import LARGEST, in_units, is_dead
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.numbers import HUGE, feeding_comparisons, in_float32

_MOST, _LEAST = 1e6, 1e-6  # factors beyond these stay in the program


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePrograms:
    """Variants of a score program, in units of a scale.

    masked: the complete program
    full: the program where every key is live, or None where it is the same
    scale: the score is scale * program
    guarded: scores can be infinite or huge (`numbers.HUGE`), for whole rows
    fills: (constant in units of `scale`, constant) of the finite constants that change in a conversion to these units
        and back, because they are rounded or because they lie beyond float32 there and were clamped to its end
    """

    masked: Expr
    full: Expr | None
    scale: float = 1.0
    guarded: bool = False
    fills: tuple[tuple[float, float], ...] = ()


def score_programs(spec: AttentionSpec, folded: bool = False) -> ScorePrograms:
    """Variants of a spec's program. folded: constants are folded first, and any product with one gives its factor, not
    only that of the score: rounds differently from the original in the last place."""
    score, full = spec.score, None if spec.mask is None else spec.mask.full
    if folded:
        kept = frozenset(feeding_comparisons(score, full))
        score, full = _folded(score, kept), None if full is None else _folded(full, kept)
    if spec.normalizer is Normalizer.NONE:
        return ScorePrograms(masked=score, full=full)
    guarded = not is_tame(spec.score)
    plain = ScorePrograms(masked=score, full=full, guarded=guarded)
    scale = _factor(score, folded)
    if scale is None or (full is not None and _factor(full, folded) != scale):
        return plain
    constants = sorted(_constants(score))
    beyond = [value for value in constants if abs(value) / scale > LARGEST]
    masked, live = (None if part is None else _divided(part, scale, folded) for part in (score, full))
    if len(beyond) > 1 or masked is None or (live is None) != (full is None):  # several would become equal
        return plain
    inside = [(in_float32(max(-LARGEST, min(value / scale, LARGEST))), value) for value in constants]
    fills = tuple((unit, value) for unit, value in inside if in_float32(unit * in_float32(scale)) != in_float32(value))
    return ScorePrograms(masked=masked, full=live, scale=scale, guarded=guarded, fills=fills)


def is_tame(expr: Expr) -> bool:
    """Whether ordinary inputs give ordinary scores: nothing but small constants and smooth operations."""
    for part in walk(expr):
        if part.is_const and part.kind is Kind.FLOAT and abs(part.value) > HUGE / 8:
            return False
        divides = part.op == "div" and part.args[1].is_const and part.args[1].value != 0
        if part.kind is Kind.FLOAT and not primitives.is_tame(part.op) and not divides:
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _folded(expr: Expr, kept: frozenset[Expr]) -> Expr:
    """Divisions by constants as products, and products with several constants as one. kept: parts that stay."""

    def visit(part: Expr) -> Expr | None:
        if part in kept:
            return part
        if part.op == "div" and _is_factor(part.args[1]):
            return _folded(part.args[0] * (1.0 / part.args[1].value), kept)
        if part.op == "fmul":
            left, right = (_folded(arg, kept) for arg in part.args)
            if left.is_const:
                left, right = right, left
            if _is_factor(right) and left.op == "fmul" and _is_factor(left.args[1]):
                left, right = left.args[0], const(right.value * left.args[1].value)
            return left * right
        return None

    return rebuild(expr, visit)


def _is_factor(expr: Expr) -> bool:
    """A constant that neither over- nor underflows when folded."""
    return expr.is_const and expr.kind is Kind.FLOAT and _LEAST < abs(expr.value) < _MOST


def _split(expr: Expr) -> tuple[float, Expr] | None:
    """(positive constant, the rest) of a product with one or a quotient by one."""
    if expr.op == "fmul":
        for factor, rest in (expr.args, expr.args[::-1]):
            if _is_factor(factor) and factor.value > 0:
                return factor.value, rest
    if expr.op == "div" and _is_factor(expr.args[1]) and expr.args[1].value > 0:
        return 1 / expr.args[1].value, expr.args[0]
    return None


def plain_scale(score: Expr) -> float | None:
    """c where the program is the constant c times the score, else None."""
    if score is SCORE:
        return 1.0
    if score.op not in ("fmul", "div") or len(score.args) != 2:
        return None
    left, right = score.args
    if score.op == "fmul" and left.is_const:
        left, right = right, left
    if not right.is_const or (inner := plain_scale(left)) is None:
        return None
    if score.op == "fmul":
        return inner * right.value
    return inner / right.value if right.value else None


def _factor(expr: Expr, folded: bool) -> float | None:
    """The positive constant c such that the program is c times a simpler one, or None."""
    if expr is SCORE:
        return 1.0
    if (parts := _split(expr)) is not None:
        if parts[0] > 1 and may_overflow(parts[1]):
            return None
        inner = _factor(parts[1], folded)
        return parts[0] * (inner or 1.0) if folded or inner is not None else None
    if expr.op == "where" and not contains(expr.args[0], SCORE):
        _, then, otherwise = expr.args
        if is_dead(otherwise):
            return _factor(then, folded)
        return _factor(otherwise, folded) if is_dead(then) else None
    return None


def may_overflow(expr: Expr) -> bool:
    """Whether a value may be a fill that a factor above 1 takes beyond float32. A load over the keys may."""
    return any(
        1e30 < abs(part.value) < math.inf if part.is_const else part.op == "load" and "j" in coordinates(part)
        for part in walk(expr)
        if part.kind is Kind.FLOAT
    )


def _divided(expr: Expr, scale: float, folded: bool) -> Expr | None:
    """Program in units of the factor that `_factor` found; None where rows without a live key would change."""
    if expr is SCORE:
        return expr
    if is_dead(expr):
        return in_units(expr, scale, lambda part: _divided(part, scale, folded))
    if expr.op == "where":
        arms = [_divided(arm, scale, folded) for arm in expr.args[1:]]
        return None if None in arms else ops.where(expr.args[0], *arms)  # type: ignore[arg-type]
    if (parts := _split(expr)) is None:
        return None
    factor, rest = parts
    return rest if _factor(rest, folded) is None else _divided(rest, scale / factor, folded)


@functools.lru_cache(maxsize=4096)
def _constants(score: Expr) -> set[float]:
    """Finite constants among the alternatives of a program."""
    if score.op in ("where", "fadd"):
        return {value for arg in score.args for value in _constants(arg)}
    return {score.value} if score.is_const and score.kind is Kind.FLOAT and math.isfinite(score.value) else set()


def dead_rows_matter(spec: AttentionSpec) -> bool:
    """Whether a row may be without a live key, and then need the keys that its mask lets a kernel skip."""
    return spec.mask is not None and spec.mask.skips and dead_rows_need_keys(spec) and not rows_live(spec)


def dead_rows_need_keys(spec: AttentionSpec) -> bool:
    """Whether a row without a live key needs its dead ones.

    With a fill of -inf it does not: whether it sees them or not, its maximum is -inf and its sum 0. With a finite fill
    eager averages over all keys.
    """
    return spec.mask is not None and spec.mask.fill != -math.inf and spec.normalizer is not Normalizer.NONE


def rows_live(spec: AttentionSpec) -> bool:
    """Whether each row is known to have a live key (key 0, or key i where there are as many queries as keys), with an
    ordinary score, and the fill is far below all such scores: dead keys have no weight in any row."""
    mask = spec.mask
    if mask is None or mask.full is None or not mask.fill < -1e30:
        return False
    keys = [integers.integer(0)] + [I] * (spec.n_q is spec.n_k)
    return is_tame(mask.full) and any(substitute(mask.live, {J: key}) is TRUE for key in keys)


def first_key_lives(spec: AttentionSpec) -> bool:
    """Whether each row has key 0, with an ordinary score, among the keys that a kernel visits first."""
    mask = spec.mask
    if mask is None or mask.full is None or mask.key_lo is not None or mask.tile_live is not None:
        return False
    return substitute(mask.live, {J: integers.integer(0)}) is TRUE and mask.fill == -math.inf and is_tame(mask.full)
