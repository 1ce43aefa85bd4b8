"""Results of the analysis of one attention's weights, before they become a spec; sums over heads in them; and
`scaled_dot_product_attention`, the one spelling that needs no recognition."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import (
    HEAD,
    SCORE,
    WEIGHT,
    C,
    E,
    Expr,
    I,
    J,
    Kind,
    const,
    contains,
    coord,
    coordinates,
    rebuild,
    substitute,
    walk,
)
from fusion.ir.ops import apply, where
from fusion.ir.records import mapped
from fusion.ir.spec import Normalizer
from fusion.refusals import Reason

from .. import marks, nodes
from ..nodes import Unsupported, arguments, packet, shape
from ..pullback import casts, pointwise
from ..pullback.operands import Access, locate, scale_of_values
from ..pullback.pullback import Product, PullBack
from ..pullback.views import Index, broadcast_index


def has(expr: Expr, *ops: str) -> bool:
    return any(part.op in ops for part in walk(expr))


@functools.lru_cache(maxsize=4096)
def free_of_keys(expr: Expr) -> bool:
    """Whether a value is the same for all keys j; a reduction binds j."""
    if expr.op in ("reduce", "row_max", "row_sum"):
        return True
    if expr.op in ("dot", "score", "softmax", "scaled_softmax") or (expr.op == "coord" and expr.attr == "j"):
        return False
    return all(free_of_keys(arg) for arg in expr.args)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMix:
    """A sum over heads in the weights or scores of an attention.

    head, to: the coordinate that is summed over, and that of the result.
    matrix: the factor of each head.
    program: for scores the function that is mixed; for weights a function of the sum, which is WEIGHT in it.
    adds: whether the value of head `to` itself is added to the sum.
    """

    head: Expr
    to: Expr
    matrix: Expr
    program: Expr
    adds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizedScores:
    """A normalised function of scores: the fields are those of `AttentionSpec`, with "dot" leaves for products.

    mixed_scores, mixed_weights: the sums over heads that the score program reads as the score, and those of the
        normalised scores; None where there are none.
    origin: the normalised score before simplification.
    """

    score: Expr
    normalizer: Normalizer
    weight: Expr
    sinks: tuple[Expr, ...] = ()
    row_scale: Expr | None = None
    mixed_scores: HeadMix | None = None
    mixed_weights: HeadMix | None = None
    origin: Expr | None = None

    @property
    def mixes_heads(self) -> bool:
        """Whether there is any sum over heads."""
        return self.mixed_scores is not None or self.mixed_weights is not None


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
    core: NormalizedScores, accesses: Sequence[Access], bounds: integers.Bounds
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


aten = torch.ops.aten
_OF_WHOLE_ROWS = ("reduce", "softmax", "log_softmax", "mix")
"""Operations that a mask may be made of in a graph, and no score program has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention of a product with V, still in terms of graph nodes; where there are several, their weights add up.

    value, value_scale: the tensor that V is read from, and the factor of its rows.
    """

    core: NormalizedScores
    value: Access
    value_scale: Expr
    pullback: PullBack
    keys: Expr
    d_v: Expr


def is_sdpa(here: Node) -> bool:
    """Whether this node is a call of `scaled_dot_product_attention`."""
    return here.op == "call_function" and packet(here) is aten.scaled_dot_product_attention


def pull_back_sdpa(anchor: Node, index: Index, bounds: dict[Expr, Expr], reads_mask: bool = False) -> Attention:
    """Attention of an SDPA call at `index` of its result. reads_mask: the mask is loaded as the graph computes it."""
    args = arguments(anchor)
    query, key, value = args["query"], args["key"], args["value"]
    nodes.specialize(nodes.fake(query).shape[-1])
    keys, d = shape(key)[-2], shape(query)[-1]
    pullback = PullBack(bounds | {J: keys}, keys, anchor)
    heads = shape(query)[-3] if len(shape(query)) > 2 else None
    if args["enable_gqa"]:  # the group size is part of the kernel
        for tensor in (query, key):
            nodes.specialize(nodes.fake(tensor).shape[-3])

    def access(tensor: Node, row: Expr, column: Expr, extent: Expr, *accept) -> tuple[Access, Expr]:
        batch = _batch_index(tensor, index[:-2], shape(anchor)[:-2], args["enable_gqa"], heads, bounds)
        return locate(pullback, tensor, (*batch, row, column), row, column, extent, *accept)

    (q, q_scale), (k, k_scale) = access(query, I, C, d), access(key, J, C, d)
    trained = bool(marks.requires_grad(anchor))
    v, v_scale = access(value, J, E, bounds[E], scale_of_values(value, Normalizer.SAFE_SOFTMAX, trained))
    scale = q_scale * k_scale * _scale(args["scale"], d)
    score = pullback.product(Product(node=anchor, index=index, query=q, key=k, extent=d, scale=scale, is_value=False))
    if args["is_causal"]:
        score = where(apply("ile", J, I), score, const(-math.inf))
    if args["attn_mask"] is not None:
        extents = (*shape(anchor)[:-1], keys)
        at = broadcast_index(extents, shape(args["attn_mask"]), (*index[:-1], J))
        mask = (pullback.load if reads_mask else pullback.value)(args["attn_mask"], at)
        if any(part.op in _OF_WHOLE_ROWS for part in walk(mask)):
            return pull_back_sdpa(anchor, index, bounds, reads_mask=True)
        score = _masked(score, mask, anchor)
    weight = const(1.0)
    if args["dropout_p"] != 0:
        weight = pullback.dropout_factor(anchor, args["dropout_p"], (*index[:-1], J), (*shape(anchor)[:-1], keys))
    core = NormalizedScores(score=score, normalizer=Normalizer.SAFE_SOFTMAX, weight=weight)
    return Attention(core=core, value=v, value_scale=v_scale, pullback=pullback, keys=keys, d_v=bounds[E])


def _scale(scale: Any, d: Expr) -> Expr:
    if scale is not None and (number := nodes.scalar(scale)) is not None:
        return casts.operand(number, Kind.FLOAT)
    if scale is not None or not d.is_const:
        raise Unsupported(Reason.RUN_TIME_SCALAR, "a scale or head dimension that is computed at run time")
    return const(1 / math.sqrt(d.integer) if d.integer else 1.0)


def _batch_index(tensor: Node, batch: Index, extents: Index, grouped: bool, heads: Expr | None, bounds) -> Index:
    tensor_batch = shape(tensor)[:-2]
    at = broadcast_index(extents, tensor_batch, batch)
    if grouped and heads is not None and tensor_batch[-1] is not heads:
        group = heads.integer // tensor_batch[-1].integer
        at = (*at[:-1], integers.floordiv(batch[-1], group, bounds))
    return at


def _masked(score: Expr, mask: Expr, anchor: Node) -> Expr:
    if mask.kind is Kind.BOOL:
        return where(mask, score, const(-math.inf))
    call = casts.Call(args=(score, mask), kwargs={}, dtype=nodes.dtype(anchor))
    added = pointwise.build(aten.add, call)
    assert added is not None
    return added
