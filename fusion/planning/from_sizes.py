"""The attention of a problem that was given by its sizes: what a model that writes it out would be recognised as."""

from __future__ import annotations

import functools
import math

from fusion.ir.expr import I0, I1, SCORE, C, E, Expr, I, J, const, coord
from fusion.ir.integers import add, floordiv, integer
from fusion.ir.mask_facts import MaskFacts
from fusion.ir.ops import apply, where
from fusion.ir.spec import AttentionSpec, Normalizer, Operand, Output
from fusion.planning.problem import Problem


def attention_of(problem: Problem) -> AttentionSpec:
    """softmax(q k^T / sqrt(d)) v with the problem's heads, and its causal and window masks."""
    batch, head = coord("b0"), coord("b1")
    scaled = SCORE * problem.d**-0.5
    live = _live(problem)
    key_head = floordiv(head, problem.heads // problem.heads_kv)
    dims = ("b0", "b1", "i", "e")
    return AttentionSpec(
        sizes=(),
        batch=(integer(problem.batch), integer(problem.heads)),
        n_q=integer(problem.n_q),
        n_k=integer(problem.n_k),
        d=integer(problem.d),
        d_v=integer(problem.d_v),
        operands=tuple(Operand(name=name, dtype=problem.dtype, rank=4) for name in "qkv"),
        q=(batch, head, I, C),
        k=(batch, key_head, J, C),
        v=(batch, key_head, J, E),
        score=functools.reduce(lambda score, part: where(part, score, const(-math.inf)), live, scaled),
        mask=_mask(problem, live, scaled),
        normalizer=Normalizer.SOFTMAX,
        dtype=problem.dtype,
        out_dtype=problem.dtype,
        output=Output(dims=dims, order=dims),
    )


def _live(problem: Problem) -> list[Expr]:
    """Conditions under which key j is live for row i."""
    conditions = []
    if problem.causal:
        conditions.append(apply("ile", J, add(I, problem.diagonal)))
    if problem.window is not None:
        conditions.append(apply("ilt", add(I, problem.diagonal - problem.window), J))
    return conditions


def _mask(problem: Problem, live: list[Expr], scaled: Expr) -> MaskFacts | None:
    """The closed form of the mask, as `passes.masks.understand` finds it in the scores."""
    if not live:
        return None
    window = problem.window
    low = lambda row: None if window is None else add(row, problem.diagonal - window + 1)
    high = lambda row: add(row, problem.diagonal + 1) if problem.causal else None
    return MaskFacts(
        live=functools.reduce(functools.partial(apply, "and"), reversed(live)),
        key_lo=low(I0),
        key_hi=high(I1),
        full=scaled,
        full_lo=low(I1),
        full_hi=high(I0),
        fill=-math.inf,
    )
