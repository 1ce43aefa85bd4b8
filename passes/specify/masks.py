"""Analysis of masks: split the score program into a live predicate and its fill, and bound the live keys.

For the keys of a block of query rows i0..i1 a closed-form range is solved from every integer comparison of the
predicate, so that causal, window, prefix and chunked masks and their conjunctions skip dead tiles without reading
anything. Predicates that load data (padding, documents) give no bound.
"""

from __future__ import annotations

import enum
import functools
import math

from fusion.ir import integers
from fusion.ir.expr import (
    FALSE,
    I0,
    I1,
    TRUE,
    Expr,
    I,
    J,
    const,
    contains,
    coordinates,
    loads,
    rebuild,
    substitute,
    walk,
)  # fmt: skip
from fusion.ir.mask_facts import MaskFacts, fill_of
from fusion.ir.ops import apply, conjuncts, remake
from fusion.ir.ranges import may_be_moved
from fusion.ir.spec import Normalizer

MOST_EXTREMA = 8
"""Extrema of a comparison whose keys are solved for: each doubles what there is to solve."""
LEAST_FILL = -1e4
"""Fills above this are treated as ordinary biases: a score could come near them."""


def fold_comparisons(expr: Expr, bounds: integers.Bounds) -> Expr:
    """`expr` with the outcome of every integer comparison that the bounds of the coordinates decide."""

    def leaf(part: Expr) -> Expr | None:
        if part.op not in ("ile", "ilt") or not may_be_moved(*part.args):
            return None
        low, high = part.args
        outcome = integers.always_at_most(integers.add(low, 1) if part.op == "ilt" else low, high, bounds)
        return None if outcome is None else const(outcome)

    return rebuild(expr, leaf)


def understand(score: Expr, normalizer: Normalizer = Normalizer.SOFTMAX) -> MaskFacts | None:
    """Facts about the mask in a score program; None if it has none (or it is not that of a softmax)."""
    if normalizer is Normalizer.NONE:
        live, fill = _zero_weights(score), 0.0
    else:
        live, fill = _split(score)
    if live is TRUE:
        return None
    low, high = _range(live, Side.ANY)
    full_low, full_high, known = full_range(live)
    full: Expr | None = substitute(score, holding(known))
    if full is score:
        full = full_low = full_high = None
    return MaskFacts(live=live, key_lo=low, key_hi=high, full_lo=full_low, full_hi=full_high, full=full, fill=fill)


def holding(predicates: list[Expr]) -> dict[Expr, Expr]:
    """Substitution of TRUE for predicates that hold, and of FALSE for their negations."""
    return dict.fromkeys(predicates, TRUE) | {apply("not", part): FALSE for part in predicates}


def _split(score: Expr) -> tuple[Expr, float]:
    """(predicate, fill): where the predicate is false, the score is at most the fill plus ordinary scores."""
    if score.op != "where":
        return TRUE, -math.inf
    condition, then, otherwise = score.args
    if (top := fill_of(otherwise)) <= LEAST_FILL:
        live, fill = _split(then)
        return apply("and", condition, live), max(top, fill)
    if (top := fill_of(then)) <= LEAST_FILL:
        live, fill = _split(otherwise)
        return apply("and", apply("not", condition), live), max(top, fill)
    return TRUE, -math.inf


def _zero_weights(weight: Expr) -> Expr:
    """Live predicate of weights without a normaliser: keys are dead where the weight is zero, as the sigmoid of a score
    of -inf is. A score that is multiplied by 0 is not, which may be NaN."""
    selection, around = weight, list[Expr]()
    while selection.op != "where":  # below functions of it and of constants
        varying = {arg for arg in selection.args if not arg.is_const}
        if len(varying) != 1:
            return TRUE
        around.append(selection)
        (selection,) = varying
    condition, *arms = selection.args
    for function in reversed(around):
        arms = [remake(function, tuple(arg if arg.is_const else arm for arg in function.args)) for arm in arms]
    then, otherwise = arms
    if otherwise.is_const and otherwise.value == 0.0:
        return apply("and", condition, _zero_weights(then))
    if then.is_const and then.value == 0.0:
        return apply("and", apply("not", condition), _zero_weights(otherwise))
    return TRUE


Ends = tuple[Expr | None, Expr | None]
"""(lo, hi) of lo <= j < hi; None where unbounded."""


class Side(enum.Enum):
    """Quantifier over the rows i0..i1 of a block."""

    ANY = "any"
    """The range holds every key for which the predicate is true in some row."""
    ALL = "all"
    """For every key of the range the predicate is true in all rows."""


def full_range(live: Expr) -> tuple[Expr | None, Expr | None, list[Expr]]:
    """(lo, hi, conjuncts): a range of keys in which these conjuncts hold for all rows of a block."""
    bounded = [(part, ends) for part in conjuncts(live) if (ends := _bound(part, Side.ALL)) != (None, None)]
    return *_joined([ends for _, ends in bounded], Side.ALL), [part for part, _ in bounded]


def _range(live: Expr, side: Side) -> Ends:
    """The range of a conjunction."""
    return _joined([_bound(part, side) for part in conjuncts(live)], side)


def _joined(ends: list[Ends], side: Side) -> Ends:
    """Key range of a conjunction. ANY: the intersection. ALL: none where a part has none."""
    if side is Side.ALL and (None, None) in ends:
        return None, None
    lows, highs = ([end[k] for end in ends if end[k] is not None] for k in (0, 1))
    return _extreme("imax", lows), _extreme("imin", highs)  # type: ignore[arg-type]


def _extreme(name: str, values: list[Expr]) -> Expr | None:
    return functools.reduce(functools.partial(apply, name), values) if values else None


def _bound(part: Expr, side: Side) -> Ends:
    """The key range of a predicate. (None, None): for ANY all keys may be live, for ALL no range is known."""
    if loads(part):
        return None, None
    if part.op == "or":
        return _either(*(_range(arg, side) for arg in part.args), side)
    if part.op == "and":
        return _range(part, side)
    if part.op not in ("ieq", "ile", "ilt") or not may_be_moved(*part.args):
        return None, None
    if sum(inner.op in ("imax", "imin") for inner in walk(part)) > MOST_EXTREMA:
        return None, None
    if part.op == "ieq":
        return _joined([_at_most(*pair, side) for pair in (part.args, part.args[::-1])], side)
    if part.op == "ile":
        return _at_most(*part.args, side)
    return _at_most(integers.add(part.args[0], 1), part.args[1], side)


def _either(left: Ends, right: Ends, side: Side) -> Ends:
    """Key range of a disjunction. ANY: the hull. ALL: the union of half-lines to the same side, else one of the two."""
    if side is Side.ANY:
        low = None if left[0] is None or right[0] is None else apply("imin", left[0], right[0])
        return low, None if left[1] is None or right[1] is None else apply("imax", left[1], right[1])
    for k, name in ((1, "imax"), (0, "imin")):
        one, other = left[k], right[k]
        if one is not None and other is not None and left[1 - k] is None and right[1 - k] is None:
            joined = apply(name, one, other)
            return (None, joined) if k else (joined, None)
    return right if left == (None, None) else left


def _at_most(left: Expr, right: Expr, side: Side) -> Ends:
    """Keys with left <= right, i.e. g = right - left >= 0, where j occurs in a single, affine term of g."""
    if left.op == "iabs":  # |x| <= y is x <= y and -x <= y
        return _joined([_at_most(arm, right, side) for arm in (left.args[0], integers.neg(left.args[0]))], side)
    difference = integers.sub(right, left)
    if (ends := _of_extremum(difference, side)) is not None:
        return ends
    holder, coefficient, rest = _isolate(difference)
    if holder is None or not coefficient:
        return None, None
    if (rest := _at_extreme_row(rest, side)) is None:
        return None, None
    if coefficient < 0:  # holder <= rest / -coefficient
        return None, _first_key(holder, integers.add(integers.floordiv(rest, -coefficient), 1))
    return _first_key(holder, integers.neg(integers.floordiv(rest, coefficient))), None


def _of_extremum(difference: Expr, side: Side) -> Ends | None:
    """Keys with difference >= 0 where a maximum or minimum that varies is a term of it: x + max(a, b) >= 0 is x + a >=
    0 or x + b >= 0, and a minimum needs both. None where there is no such term."""
    for monomial, coefficient in integers.terms(difference).items():
        if len(monomial) == 1 and monomial[0].op in ("imax", "imin") and coordinates(monomial[0]) & {"i", "j"}:
            (atom,), zero = monomial, integers.integer(0)
            arms = (integers.sub(difference, integers.mul(coefficient, integers.sub(atom, arm))) for arm in atom.args)
            ends = [_at_most(zero, arm, side) for arm in arms]
            return _either(*ends, side) if (atom.op == "imax") == (coefficient > 0) else _joined(ends, side)
    return None


def _isolate(difference: Expr) -> tuple[Expr | None, int, Expr]:
    """(the atom that holds j, its integer coefficient, everything else)."""
    holding = [(m, c) for m, c in integers.terms(difference).items() if any(contains(a, J) for a in m)]
    if len(holding) != 1 or len(holding[0][0]) != 1:
        return None, 0, difference
    (atom,), coefficient = holding[0]
    return atom, coefficient, integers.sub(difference, integers.mul(coefficient, atom))


def _first_key(holder: Expr, limit: Expr) -> Expr | None:
    """First key with holder >= limit."""
    if holder is J:
        return limit
    if holder.op == "floordiv" and (inner := _affine(holder)) is not None:  # (j + r) // m >= t from j = m t - r on
        divisor, rest = inner
        return integers.sub(integers.mul(divisor, limit), rest)
    return None


def _affine(quotient: Expr) -> tuple[Expr, Expr] | None:
    """(m, r) of (j + r) // m, both free of rows and keys."""
    parts = integers.linear(quotient.args[0], J)
    if parts is None or parts[0] is not integers.integer(1):
        return None
    if coordinates(parts[1]) & {"i", "j"} or coordinates(quotient.args[1]) & {"i", "j"}:
        return None
    return quotient.args[1], parts[1]


def _at_extreme_row(expr: Expr, side: Side) -> Expr | None:
    """Maximum (ANY) or minimum (ALL) over rows i0..i1, monotone term by term; None where it is unknown."""
    total = integers.integer(0)
    for monomial, coefficient in integers.terms(expr).items():
        holding = [atom for atom in monomial if contains(atom, I)]
        if len(holding) > 1:
            return None
        row = I1 if (coefficient > 0) == (side is Side.ANY) else I0
        term = integers.integer(coefficient)
        for atom in monomial:
            term = integers.mul(term, atom if atom not in holding else substitute(atom, {I: row}))
        if holding and not _monotone(holding[0], monomial):
            return None
        total = integers.add(total, term)
    return total


def _monotone(atom: Expr, monomial: tuple[Expr, ...]) -> bool:
    """Whether a term grows with i: i itself or a floor division of a growing term, times a factor >= 0."""
    if any(other is not atom and not integers.is_nonnegative(other) for other in monomial):
        return False
    if atom is I:
        return True
    if atom.op != "floordiv" or contains(atom.args[1], I):
        return False
    inner = integers.linear(atom.args[0], I)
    return inner is not None and inner[0].is_const and int(inner[0].attr) > 0  # type: ignore[arg-type]
