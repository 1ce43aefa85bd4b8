"""Sums over heads in the weights or scores of an attention ("talking heads"), taken out of its programs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

from fusion.ir.expr import HEAD, SCORE, WEIGHT, Expr, contains, coord, coordinates, rebuild, substitute
from fusion.ir.integers import Bounds
from fusion.ir.ops import apply
from fusion.ir.records import mapped
from fusion.ir.spec import Mixing
from fusion.refusals import Reason

from ..nodes import Unsupported
from ..pullback.operands import Access
from .core import HeadMix, NormalizedScores, has


def split_weights(weight: Expr) -> tuple[HeadMix, Expr] | None:
    """(the sum over heads behind a softmax, the weights of one head), or None; raises `Unsupported`."""
    if (mix := _outermost(weight, "softmax", "scaled_softmax")) is None:
        return None
    then, adds = _without(weight, mix, WEIGHT)
    matrix, value, to, _ = mix.args
    if has(then, "dot", "softmax", "scaled_softmax", "reduce", "mix") or not has(value, "softmax", "scaled_softmax"):
        message = "after their heads are mixed, weights must be used pointwise"
        raise Unsupported(Reason.HEADS_MIXED, message, weight)
    return HeadMix(head=coord(str(mix.attr)), to=to, matrix=matrix, program=then, adds=adds), value


def split_scores(score: Expr) -> tuple[HeadMix, Expr] | None:
    """(the sum over heads before a softmax, the score program of what is summed up); None where there is none."""
    if (mix := _outermost(score)) is None:
        return None
    then, adds = _without(score, mix, SCORE)
    matrix, value, to, _ = mix.args
    if has(then, "dot", "mix") or has(value, "mix"):
        message = "after their heads are mixed, scores must be used pointwise, and mixed no second time"
        raise Unsupported(Reason.HEADS_MIXED, message, score)
    return HeadMix(head=coord(str(mix.attr)), to=to, matrix=matrix, program=value, adds=adds), then


def _without(expr: Expr, mix: Expr, leaf: Expr) -> tuple[Expr, bool]:
    """(the expression with `leaf` for a sum over heads, whether the head's own value is a part of it: x + mix(x))."""
    own_value, joined = mix.args[-1], []

    def whole(part: Expr) -> Expr | None:
        terms = _addends(part)
        if terms.count(mix) != 1 or own_value not in terms:
            return None
        terms.remove(own_value)
        joined.append(part)
        return functools.reduce(functools.partial(apply, "fadd"), (leaf if term is mix else term for term in terms))

    result = rebuild(expr, whole)
    if len(joined) == 1 and not contains(result, mix):
        return result, True
    return substitute(expr, {mix: leaf}), False


def _addends(expr: Expr) -> list[Expr]:
    return [term for arg in expr.args for term in _addends(arg)] if expr.op == "fadd" else [expr]


def _outermost(expr: Expr, *beyond: str) -> Expr | None:
    """First sum over heads from the root of an expression downwards, not below these operations."""
    stack, seen = [expr], set[Expr]()
    while stack:
        current = stack.pop()
        if current.op == "mix":
            return current
        if current not in seen and current.op not in beyond:
            seen.add(current)
            stack += current.args
    return None


def with_named_heads(
    core: NormalizedScores, accesses: Sequence[Access], bounds: Bounds
) -> tuple[NormalizedScores, Sequence[Access], Expr | None]:
    """The core and its operands Q, K and V with heads named as in `fusion.ir.spec.Mixing`, and the batch coordinate
    of the heads; None where none are mixed. Raises `Unsupported` where the heads are no batch coordinate."""
    every = [mixed for mixed in (core.mixed_weights, core.mixed_scores) if mixed is not None]
    if not every:
        return core, accesses, None
    query, key, value = accesses
    axis, inner = every[0].to, [*query.index, *key.index, *_of_one_head(core)]
    apart = any(before.head is not behind.to for before, behind in itertools.pairwise(every))
    if apart or any(axis.name in coordinates(entry) for entry in inner) or not axis.name.startswith("b"):
        raise Unsupported(
            Reason.HEADS_MIXED,
            "the heads that are mixed are not single heads, or not the same before and after the softmax",
        )
    if any(bounds[mixed.head] is not bounds[axis] for mixed in every):
        raise Unsupported(Reason.HEADS_MIXED, "mixing changes the number of heads")
    renaming = dict.fromkeys([mixed.head for mixed in every], axis)

    def of_head(expr: Expr) -> Expr:
        return substitute(expr, renaming)

    sums = {}
    for name in ("mixed_scores", "mixed_weights"):
        if (summed := getattr(core, name)) is not None:
            matrix = substitute(summed.matrix, renaming | {summed.head: HEAD})
            sums[name] = replace(summed, matrix=matrix, program=of_head(summed.program))
    query, key = (
        replace(access, index=tuple(map(of_head, access.index)), value=access.value and of_head(access.value))
        for access in (query, key)
    )
    return replace(mapped(core, of_head), **sums), (query, key, value), axis


def _of_one_head(core: NormalizedScores) -> list[Expr]:
    """Programs that are computed per head after the last sum over heads."""
    if core.mixed_weights is None:
        return [] if core.mixed_scores is None else [core.mixed_scores.program]
    scale = [] if core.row_scale is None else [core.row_scale]
    return [core.score, core.weight, *core.sinks, *scale]


def mixing_of(core: NormalizedScores, head: Expr) -> Mixing:
    """The sums over heads of a core whose heads have this name."""
    mixing, scores, weights = Mixing(head=head), core.mixed_scores, core.mixed_weights
    if scores is not None:
        mixing = replace(mixing, scores=scores.matrix, scored=scores.program, own_score=scores.adds)
    if weights is not None:
        mixing = replace(mixing, weights=weights.matrix, weighted=weights.program, own_weight=weights.adds)
    return mixing
