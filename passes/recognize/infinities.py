"""Infinite scores and NaN: where masks make them, and what pointwise functions make of them. Q and K count as finite;
"may" is also the answer where nothing is known."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from fusion.ir.expr import Expr, Kind, coordinates, is_number, walk
from fusion.ir.ops import apply, conjuncts
from fusion.ir.primitives import ROUNDED, is_bounded, is_tame

from ..pullback.roundings import first_infinite
from .core import free_of_keys, has

_SATURATING = ("sigmoid", "tanh", "erf", "atan")
_ROUNDED_TO = {name: dtype for dtype, name in ROUNDED.items()}
_KEEPING = ("neg", "abs", "detach", "detach_nan", "minimum", "maximum", "reduce", *_ROUNDED_TO)
"""Operations whose result is as large as an argument."""


def may_be_infinite(value: Expr, known: Sequence[Expr] = ()) -> bool:
    """Whether a value may be infinite where all of `known` holds and Q and K are finite. A load over keys or queries
    may be: it may be a mask. So may a sum or a product of fills that are finite."""
    return _bound(value, known) == math.inf


def _bound(value: Expr, known: Sequence[Expr]) -> float:
    return _largest(value, _relevant(known, value))


def _relevant(known: Sequence[Expr], value: Expr) -> tuple[Expr, ...]:
    """Those of `known` that decide a selection in a value. Without the others a value that is read in many ways is
    looked at once."""
    decisive = _conditions(value)
    return tuple(dict.fromkeys(fact for fact in known if fact in decisive or apply("not", fact) in decisive))


@functools.lru_cache(maxsize=4096)
def _conditions(value: Expr) -> frozenset[Expr]:
    """Conditions of all selections in a value, and their parts."""
    selections = (part.args[0] for part in walk(value) if part.op == "where")
    return frozenset(part for part in walk(*selections) if part.kind is Kind.BOOL)


def may_be_nan(value: Expr, known: Sequence[Expr] = ()) -> bool:
    """Whether a score may be NaN at one key where all of `known` holds and Q and K are finite: as a difference of two
    infinities is, or an infinity times a factor that is 0 there (silu, a mask). Of a row's maximum there is only
    one: in a row of nothing but -inf, which is NaN as a whole."""
    return _may_be_nan(value, _relevant(known, value))


@functools.lru_cache(maxsize=4096)
def _may_be_nan(value: Expr, known: tuple[Expr, ...]) -> bool:
    if value.is_const:
        return value.kind is Kind.FLOAT and math.isnan(value.value)
    if value.op == "where":
        condition, then, otherwise = value.args
        if condition.op == "flt" and is_number(condition.args[1], math.inf):  # by `softmaxes.strip_shift`
            return may_be_nan(then, known)
        sides = (condition, then), (apply("not", condition), otherwise)
        return any(may_be_nan(side, (*known, *conjuncts(holds))) for holds, side in sides)
    infinite = [arg for arg in value.args if arg.kind is Kind.FLOAT and may_be_infinite(arg, known)]
    opposed = value.op == "fsub" or value.op == "fadd" and len({*map(is_negated, value.args)}) == 2
    if opposed and len(infinite) == 2 and not any(map(free_of_keys, infinite)):
        return True
    if infinite and (value.op in ("sin", "cos") or value.op == "div" and all(has(arg, "dot") for arg in value.args)):
        return True
    if value.op == "fmul" and any(_differs_by_score(b) for a, b in (value.args, value.args[::-1]) if a in infinite):
        return True
    return any(may_be_nan(arg, known) for arg in value.args if arg.kind is Kind.FLOAT)


def _differs_by_score(factor: Expr) -> bool:
    """Whether a factor depends on the row and key, so that it may be 0 at some; a constant or one per head is not."""
    return has(factor, "dot") or bool({"i", "j"} & {*coordinates(factor)})


def is_negated(value: Expr) -> bool:
    """Whether a value is one that is negated or multiplied by a negative number."""
    return value.op == "neg" or (value.op in ("fmul", "div") and value.args[1].is_const and value.args[1].value < 0)


@functools.lru_cache(maxsize=4096)
def _largest(value: Expr, known: tuple[Expr, ...]) -> float:
    """Bound of a value's magnitude, in which scores and tensors count as 1; infinity where it may be infinite."""
    if value.op == "const":
        return abs(value.value) if math.isfinite(value.value) else math.inf
    if value.kind is not Kind.FLOAT or value.op in ("dot", "score") or is_bounded(value.op):
        return 1.0
    if value.op == "load":
        return math.inf if {"i", "j"} & {*coordinates(value)} else 1.0
    if value.op == "where":
        condition, then, otherwise = value.args
        outcome, opposite = _outcome(condition, known), apply("not", condition)
        return max(
            0.0 if outcome is False else _bound(then, (*known, *conjuncts(condition))),
            0.0 if outcome is True else _bound(otherwise, (*known, *conjuncts(opposite))),
        )
    sizes = [_bound(arg, known) for arg in value.args if arg.kind is Kind.FLOAT]
    if math.inf in sizes or value.op in ("log", "log_softmax"):
        return math.inf
    if value.op in ("fadd", "fsub", "fmul"):
        bound = math.prod(sizes) if value.op == "fmul" else sum(sizes)
    elif value.op == "div" and value.args[1].is_const:
        bound = sizes[0] / sizes[1] if sizes[1] else math.inf
    else:  # functions that grow count as ordinary
        bound = max(sizes) if value.op in _KEEPING else 1.0
    return bound if bound < first_infinite(_ROUNDED_TO.get(value.op, torch.float32)) else math.inf


@functools.lru_cache(maxsize=4096)
def stays_finite(value: Expr) -> bool:
    """Whether a function of scores is finite at masked keys, too, if Q and K are. A tensor that is loaded per key or
    query may be a mask."""
    if value.kind is not Kind.FLOAT or value.op == "dot":
        return True
    if value.op in _SATURATING:
        return not may_be_nan(value)
    divides = value.op == "div" and value.args[1].is_const
    grows = not (divides or value.op == "load" or is_tame(value.op))
    return not grows and not may_be_infinite(value) and all(map(stays_finite, value.args))


def filled_by_selection(value: Expr) -> bool:
    """Whether scores are infinite exactly where a selection fills them, if Q and K are finite. No gradient passes
    through such a row's scores, whatever it is."""
    if value.op != "where":
        return False
    condition, then, otherwise = value.args
    scores, live = (then, condition) if otherwise.is_const else (otherwise, apply("not", condition))
    fill = otherwise if scores is then else then
    return fill.is_const and fill.value == -math.inf and not may_be_infinite(scores, conjuncts(live))


def _outcome(condition: Expr, known: Sequence[Expr]) -> bool | None:
    """Truth value of a predicate where all of `known` hold; None where it does not follow."""
    if condition.is_const:
        return bool(condition.attr)
    if condition in known:
        return True
    if apply("not", condition) in known:
        return False
    if condition.op not in ("and", "or"):
        return None
    outcomes = {_outcome(arg, known) for arg in condition.args}
    absorbing = condition.op == "or"
    if absorbing in outcomes:
        return absorbing
    return None if None in outcomes else not absorbing
