"""`scaled_dot_product_attention`, the one spelling of attention that needs no recognition."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import C, E, Expr, I, J, Kind, const, walk
from fusion.ir.ops import apply, where
from fusion.ir.spec import Normalizer
from fusion.refusals import Reason

from .. import marks, nodes
from ..nodes import Unsupported, arguments, packet, shape
from ..pullback import casts, pointwise
from ..pullback.operands import Access, locate, scale_of_values
from ..pullback.pullback import Product, PullBack
from ..pullback.views import Index, broadcast_index
from .core import Attention, NormalizedScores

aten = torch.ops.aten
_OF_WHOLE_ROWS = ("reduce", "softmax", "log_softmax", "mix")
"""Operations that a mask may be made of in a graph, and no score program has."""


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
