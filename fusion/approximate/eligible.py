"""Attentions that may be approximated: plain scaled scores under a softmax, unmasked or causal."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.ir.expr import I, J, Kind, const, node
from fusion.ir.mask_facts import is_dead
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import plain_scale

DEAD = -1e30
"""A fill below this has no weight beside any score that float32 can hold the exponential of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Scores scale * q.k under a softmax; causal: key j is live for query i where j <= i."""

    scale: float
    causal: bool


def plain(spec: AttentionSpec) -> Plain | str:
    """Plain form of a spec, or the reason why it has none."""
    if spec.mixing is not None:
        return "heads are mixed"
    if spec.aux_outputs:
        return "its weights are used elsewhere, and must be those of exact attention"
    if spec.normalizer is Normalizer.NONE:
        return "the weights have no softmax"
    if spec.weight is not const(1.0) or spec.sinks:
        return "the weights are changed after the softmax, or it has sinks"
    if spec.scales_rows:
        return "rows are scaled by something else than their sum"
    if any(o.dtype not in ("float32", "bfloat16", "float16") for o in spec.operands[:3]):
        return "Q, K and V must be float32, bfloat16 or float16"
    if spec.tables or any(value is not None for value in spec.values):
        return "K and V are read through a table, or converted from a stored form"
    score, causal = spec.score, False
    if spec.mask is not None:
        if spec.mask.live is not node("ile", (J, I), Kind.BOOL):
            return "it has a mask that is not causal from the first key on"
        if spec.mask.fill > DEAD:
            return "masked scores are not far enough below the others"
        if score.op == "where":  # of which one branch holds the score
            score = score.args[1] if is_dead(score.args[2]) else score.args[2]
        causal = True
    scale = plain_scale(score)
    if scale is None:
        return "the score program is not a constant times the score"
    return Plain(scale=scale, causal=causal)
