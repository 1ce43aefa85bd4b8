"""From the pulled-back weight of one element to attention: softmax, its hand-written forms, and sums of attentions.

`attentions(weight)` writes the weight as a sum of terms `coefficient * core`, where a core is one normalised (or
pointwise) function of scores and the coefficient is free of scores, or finite whatever these are. More than one term is
differential attention: by linearity each is an attention of its own with the same V.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusion.ir.expr import (
    LOG_WEIGHT,
    ONE,
    ROW_MAX,
    ROW_SUM,
    WEIGHT,
    ZERO,
    Expr,
    Kind,
    const,
    is_number,
    node,
    substitute,
    walk,
)
from fusion.ir.ops import apply, remake, where
from fusion.ir.primitives import ROUNDED
from fusion.ir.spec import Normalizer
from fusion.refusals import Reason

from ..nodes import Unsupported
from .core import NormalizedScores, free_of_keys, has
from .infinities import filled_by_selection, stays_finite
from .mixed_heads import split_scores, split_weights
from .softmaxes import (
    as_exponents,
    exponent_and_shift,
    is_maximum,
    may_be_far,
    quotient_kind,
    selected_softmax,
    strip_shift,
)

_DETACHED = apply("detach", ROW_MAX)
_LOG_SUM = ROW_MAX + apply("log", ROW_SUM)


def _without_shift(columns: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """softmax(x - r) = softmax(x) for an r that is the same for all keys, also scaled: softmax(c * (x - r))."""
    while has(columns[0], "reduce") and (stripped := strip_shift(columns)) is not None:
        columns = stripped
    return columns


def attentions(weight: Expr) -> list[NormalizedScores]:
    """Attentions whose weights sum to `weight`; raises `Unsupported` with the reason where there are none."""
    weight = _fold_softmax(weight)
    if not has(weight, "dot"):
        message = "the weights do not come from a product of queries and keys by pointwise operations"
        raise Unsupported(Reason.NOT_POINTWISE, message)
    if (outer := split_weights(weight)) is not None:
        mixed, inner = outer
        (core, *others) = attentions(inner)
        if others or core.mixed_weights is not None or core.normalizer is Normalizer.NONE:
            raise Unsupported(Reason.HEADS_MIXED, "the mixed heads are not the weights of one softmax", weight)
        return [replace(core, mixed_weights=mixed)]
    if not has(weight, "softmax", "scaled_softmax"):
        return [_pointwise_core(weight)]
    return [_core(coefficient, core) for coefficient, core in _terms(weight)]


def in_terms_of(value: Expr, core: NormalizedScores) -> Expr | None:
    """Value in WEIGHT, LOG_WEIGHT, ROW_MAX and ROW_SUM of a core; None where it depends on scores otherwise."""
    value, columns = _fold_softmax(value), (core.score, *core.sinks)
    origin = core.origin
    known = {} if origin is None else {origin: WEIGHT, node("log_softmax", (origin,), Kind.FLOAT): LOG_WEIGHT}
    infinite = apply("feq", apply("abs", ROW_MAX), const(math.inf))
    known |= _statistics(columns, value, log_sum=where(infinite, ROW_MAX, _LOG_SUM))
    known |= {part: ROW_SUM for part in walk(value) if _is_sum_below_maximum(part, columns)}
    result = substitute(value, known)
    beyond = ("row_max", "row_sum") if core.normalizer is Normalizer.NONE else ()
    return None if has(result, "dot", "softmax", "scaled_softmax", "reduce", *beyond) else result


def _is_sum_below_maximum(value: Expr, columns: tuple[Expr, ...]) -> bool:
    """Whether a value is the sum of exp(x - m), m the maximum of the columns x."""
    if value.op != "reduce" or value.attr != "sum" or len(value.args) != len(columns):
        return False
    exponents = [arg.args[0] for arg in value.args if arg.op == "exp" and arg.args[0].op == "fsub"]
    return tuple(e.args[0] for e in exponents) == columns and all(is_maximum(e.args[1], columns) for e in exponents)


def _fold_softmax(expr: Expr) -> Expr:
    """Replace exp(x - r) / g(sum of exp(x - r)), and exp(x - logsumexp(x)), by softmax nodes, from the leaves up."""
    folded: dict[Expr, Expr] = {}
    for part in walk(expr):
        args = tuple(folded[arg] for arg in part.args)
        rebuilt = part if args == part.args else remake(part, args)
        folded[part] = _as_softmax(rebuilt, part) or rebuilt
    return folded[expr]


def _as_softmax(expr: Expr, spelled: Expr) -> Expr | None:
    """Softmax node equal to a quotient or exponential, or None. spelled: the expression before replacements."""
    if expr.op == "exp":
        return _from_logsumexp(expr)
    if expr.op == "div":
        return _from_quotient(*expr.args)
    if expr.op in ("where", "feq"):
        return _without_nan(expr, spelled)
    if expr.op == "fmul":
        for numerator, factor in (expr.args, expr.args[::-1]):
            if factor.op == "div" and is_number(factor.args[0], 1.0):
                if (softmax := _from_quotient(numerator, factor.args[1])) is not None:
                    return softmax
    return None


def _from_logsumexp(expr: Expr) -> Expr | None:
    exponent = expr.args[0]
    if exponent.op in ("log", "log_softmax") and exponent.args[0].op == "softmax":
        return exponent.args[0]
    if exponent.op != "fsub":
        return None
    x, shift = exponent.args
    sums = [p for p in walk(shift) if p.op == "reduce" and p.attr == "logsumexp" and p.args[0] is x]
    if len(sums) != 1 or not free_of_keys(shift):
        return None
    columns = sums[0].args
    if shift.op in ROUNDED.values():
        message = "a log-sum-exp that is rounded to a narrow dtype, under a mask with a finite fill"
        raise Unsupported(Reason.SOFTMAX_BY_HAND, message, shift)
    if shift is not sums[0]:
        shift = substitute(shift, {**_statistics(columns, shift), sums[0]: _LOG_SUM})
        scale = apply("exp", ROW_MAX - shift)
        kind = quotient_kind(shift, ONE)
        return None if has(scale, "reduce", "dot") else node("scaled_softmax", (scale, *columns), Kind.FLOAT, kind)
    if not any(may_be_far(arg) or has(arg, "load") for arg in columns):
        return node("softmax", columns, Kind.FLOAT, "softmax")
    return node("scaled_softmax", (_BY_LOG_SUM, *columns), Kind.FLOAT, "softmax")


_BY_LOG_SUM = apply("exp", ROW_MAX - _LOG_SUM)
"""1 / ROW_SUM, but 1 in a row of nothing but large fills, where the logarithm of the sum is lost."""
_SHIFTS = ("max", "detached max", "logsumexp")
"""Reductions after which exponentials do not overflow."""


def _without_nan(expr: Expr, spelled: Expr) -> Expr | None:
    """nan_to_num(w) of a softmax w: (0 if w is NaN else w), and whether w is infinite, which it never is. Exponentials
    without a maximum overflow, and their quotient is NaN: weights of the fused softmax must not be used there."""
    if expr.op == "feq":
        weight, bound = expr.args
        return const(False) if _is_at_most_one(weight) and bound.is_const and math.isinf(bound.value) else None
    condition, fill, weight_or_nan = expr.args
    if condition.op == "feq":
        fill, weight_or_nan = weight_or_nan, fill
    is_nan = condition.op in ("feq", "fne") and condition.args[0] is condition.args[1] is weight_or_nan
    if not is_nan or not _is_at_most_one(weight_or_nan) or not is_number(fill, 0.0):
        return None
    if not has(spelled, "softmax") and not any(part.attr in _SHIFTS for part in walk(spelled) if part.op == "reduce"):
        return None
    return node(weight_or_nan.op, weight_or_nan.args, Kind.FLOAT, Normalizer.ZERO_SOFTMAX.value)


def _is_at_most_one(weight: Expr) -> bool:
    """Whether a weight is a number up to 1, or NaN with its whole row."""
    return weight.op == "softmax" or (weight.op == "scaled_softmax" and weight.args[0] is _BY_LOG_SUM)


def _from_quotient(numerator: Expr, denominator: Expr) -> Expr | None:
    """Softmax for exp(x - r) / g(S), S = sum of exp(x - r), r and g free of keys; g may scale the rows otherwise."""
    sums = [p for p in walk(denominator) if p.op == "reduce" and p.attr == "sum" and p.args[0] is numerator]
    if len(sums) != 1 or not free_of_keys(denominator):
        return None
    total = sums[0]
    split = [exponent_and_shift(column) for column in total.args]
    if any(part is None for part in split):
        return None
    columns, shifts = zip(*(part for part in split if part is not None), strict=True)
    if len({shift for shift in shifts if shift is not None}) > 1:
        return None
    shift = next((shift for shift in shifts if shift is not None), ZERO)
    maximum = _statistics(columns, shift, denominator)
    shift = substitute(shift, maximum)
    attached = {_DETACHED: ROW_MAX}
    if not (shift.is_const and strip_shift(columns) is not None):  # exp(x - max of x - 1)
        columns = as_exponents(columns, substitute(shift, attached))
    if denominator is total:
        return node("softmax", columns, Kind.FLOAT, "softmax")
    # In terms of m = max of x and l = sum of exp(x - m): S = l * exp(m - r), and the quotient is exp(x - m) / u.
    further = ZERO if shift is ROW_MAX else ROW_MAX - shift
    scale = ONE / _less(substitute(denominator, maximum | {total: ROW_SUM}), further)
    if has(scale, "reduce", "dot"):
        return None
    kind = quotient_kind(*(substitute(e, maximum | attached | {total: ROW_SUM}) for e in (shift, denominator)))
    return node("scaled_softmax", (scale, *columns), Kind.FLOAT, kind)


def _less(value: Expr, further: Expr) -> Expr:
    """value / exp(further), where value has ROW_SUM in the place of ROW_SUM * exp(further). The exponential is
    cancelled where possible: it overflows together with eager's, and the quotient need not."""
    if value is ROW_SUM or further is ZERO or is_number(value, 0.0):
        return value
    with_exponential = {ROW_SUM: ROW_SUM * apply("exp", further)}
    depends = [ROW_SUM in walk(arg) for arg in value.args]
    if value.op in ("fadd", "fsub", "neg", "maximum", "minimum"):
        return remake(value, tuple(_less(arg, further) for arg in value.args))
    if value.op in ("fmul", "div") and sum(depends) == 1 and (depends[0] or value.op == "fmul"):
        args = (
            _less(arg, further) if depends_on_sum else arg
            for arg, depends_on_sum in zip(value.args, depends, strict=True)
        )
        return remake(value, tuple(args))
    if value.op == "where":
        arms = (_less(arg, further) for arg in value.args[1:])
        return where(substitute(value.args[0], with_exponential), *arms)
    if value.op == "exp" and not any(depends):
        return apply("exp", value.args[0] - further)
    # In two steps: the exponential may be beyond float32 where its product with a small number is not.
    half = apply("exp", further * -0.5)
    return substitute(value, with_exponential) * half * half


def _statistics(columns: tuple[Expr, ...], *values: Expr, log_sum: Expr | None = None) -> dict[Expr, Expr]:
    """Replacements of the maxima of exactly these columns that occur in some values; log_sum: the value that replaces
    their log-sum-exp."""
    known = {"max": ROW_MAX, "detached max": _DETACHED} | ({} if log_sum is None else {"logsumexp": log_sum})
    parts = walk(*values)
    return {part: statistic for part in parts for name, statistic in known.items() if is_maximum(part, columns, name)}


def _terms(expr: Expr) -> list[tuple[Expr, Expr]]:
    """Terms coefficient * softmax node of a sum."""
    if expr.op in ("softmax", "scaled_softmax"):
        return [(ONE, expr)]
    if is_number(expr, 0.0):
        return []
    if expr.op in ("fadd", "fsub"):
        for arg in expr.args:
            if not is_number(arg, 0.0) and not has(arg, "softmax", "scaled_softmax"):
                message = f"values that do not depend on the softmax are added to the weights: {arg}"
                raise Unsupported(Reason.WEIGHTS_ADDED, message, expr)
        left, right = (_terms(arg) for arg in expr.args)
        return left + (right if expr.op == "fadd" else [(-c, core) for c, core in right])
    if expr.op == "neg":
        return [(-c, core) for c, core in _terms(expr.args[0])]
    if expr.op in ("fmul", "div"):
        for inner, factor in (expr.args, expr.args[::-1]) if expr.op == "fmul" else (expr.args,):
            if not has(factor, "softmax", "scaled_softmax", "reduce") and (
                not has(factor, "dot") or stays_finite(factor)
            ):
                return [(apply(expr.op, c, factor), core) for c, core in _terms(inner)]
            if has(factor, "reduce") and free_of_keys(factor):
                return [(c, _scaled(core, expr.op, factor)) for c, core in _terms(inner)]
    if expr.op == "where" and not has(expr.args[0], "softmax", "scaled_softmax", "dot", "reduce"):
        condition, then, otherwise = expr.args
        for arg in (then, otherwise):
            if not is_number(arg, 0.0) and not has(arg, "softmax", "scaled_softmax"):
                message = f"weights are replaced by values that do not depend on the softmax: {arg}"
                raise Unsupported(Reason.WEIGHTS_REPLACED, message, expr)
        inverse = apply("not", condition)
        terms = [(where(condition, c, ZERO), _selected(core, condition)) for c, core in _terms(then)]
        return terms + [(where(condition, ZERO, c), _selected(core, inverse)) for c, core in _terms(otherwise)]
    if expr.op == "where" and (terms := _without_dead_rows(*expr.args)) is not None:
        return terms
    raise Unsupported(Reason.NOT_LINEAR, "the softmax is followed by an operation that is not linear in it", expr)


def _without_dead_rows(condition: Expr, then: Expr, otherwise: Expr) -> list[tuple[Expr, Expr]] | None:
    """Terms of (0 if all scores are -inf else terms of softmaxes of these scores), which are safe softmaxes; None for
    another selection."""
    if condition.op == "not":
        condition, then, otherwise = condition.args[0], otherwise, then
    if condition.op != "reduce" or not is_number(then, 0.0):
        return None
    terms = _terms(otherwise)
    for _, core in terms:
        dead = tuple(apply("feq", column, const(-math.inf)) for column in core.args)
        if core.op != "softmax" or condition.args != dead or not filled_by_selection(core.args[0]):
            return None
    return [(c, node("softmax", core.args, Kind.FLOAT, "safe_softmax")) for c, core in terms]


def _selected(core: Expr, condition: Expr) -> Expr:
    """Softmax with the same values where `condition` holds, the only ones that are read. The scores of rows in which
    nothing is selected become 0: a NaN there would show through a weight of 0."""
    if (softmax := selected_softmax(core, condition)) is not None:
        return softmax
    score, *sinks = _without_shift(core.args)
    if core.op != "softmax" or not free_of_keys(condition) or not filled_by_selection(score):
        message = "the weights are masked after the softmax, and scores may be -inf where this mask does not say so"
        raise Unsupported(Reason.MASKED_AFTER, message, core)
    return node("softmax", (where(condition, score, ZERO), *sinks), Kind.FLOAT, core.attr)


def _scaled(core: Expr, op: str, factor: Expr) -> Expr:
    """Softmax whose rows are multiplied (or divided) by a function of the sum and the maximum of its own scores."""
    if core.op == "scaled_softmax":
        scale, *columns = core.args
    else:
        scale, columns = ONE / ROW_SUM, _without_shift(core.args)
    columns = tuple(columns)
    factor = substitute(factor, _statistics(columns, factor, log_sum=_LOG_SUM))
    if core.attr != "softmax" or has(factor, "reduce", "dot", "softmax", "scaled_softmax"):
        raise Unsupported(Reason.FURTHER_REDUCTION, "the result is scaled by another reduction over the keys", factor)
    return node("scaled_softmax", (apply(op, scale, factor), *columns), Kind.FLOAT, core.attr)


def _core(coefficient: Expr, core: Expr) -> NormalizedScores:
    scale = core.args[0] if core.op == "scaled_softmax" else None
    score, *sinks = _without_shift(core.args) if scale is None else core.args[1:]
    if not has(score, "dot"):
        message = "the softmax is not of a pointwise function of a product of queries and keys"
        raise Unsupported(Reason.NOT_POINTWISE, message)
    if inner := next((part for part in walk(score) if part.op in ("softmax", "scaled_softmax", "reduce")), None):
        message = "the scores of the softmax contain another reduction over the keys"
        raise Unsupported(Reason.FURTHER_REDUCTION, message, inner)
    mixed, score = split_scores(score) or (None, score)
    if column := next((sink for sink in sinks if not free_of_keys(sink)), None):
        raise Unsupported(Reason.COLUMN_OF_SCORES, "a column concatenated to the scores depends on scores", column)
    return NormalizedScores(
        score=score, normalizer=Normalizer(core.attr), weight=coefficient, sinks=tuple(sinks), row_scale=scale,
        mixed_scores=mixed, origin=core,
    )  # fmt: skip


def _pointwise_core(weight: Expr) -> NormalizedScores:
    """Weights that are a pointwise function of the score, with no normaliser."""
    if has(weight, "mix"):
        raise Unsupported(Reason.HEADS_MIXED, "the mixed heads are of weights without a softmax", weight)
    if inner := next((part for part in walk(weight) if part.op == "reduce"), None):
        message = "the weights are normalised in a way that is not a softmax over the keys"
        raise Unsupported(Reason.OTHER_NORMALISER, message, inner)
    linear = ("dot", "fmul", "div", "fadd", "fsub", "neg", "where")
    if not any(part.op not in linear and has(part, "dot") for part in walk(weight)):
        message = "there is no normaliser, and nothing but linear operations, between the two products"
        raise Unsupported(Reason.NO_NORMALISER, message)
    return NormalizedScores(score=weight, normalizer=Normalizer.NONE, weight=const(1.0), origin=weight)
