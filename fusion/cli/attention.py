"""The attention of a problem that was given by its sizes: what a model that writes it out would be recognised as."""

from __future__ import annotations

from fusion.ir.expr import SCORE, C, E, I, J, const, coord
from fusion.ir.integers import add, floordiv, integer
from fusion.ir.ops import apply, where
from fusion.ir.spec import AttentionSpec, Normalizer, Operand, Output
from fusion.passes.masks import understand
from fusion.planning.problem import Problem


def attention_of(problem: Problem) -> AttentionSpec:
    """softmax(q k^T / sqrt(d)) v with the problem's heads, and its causal and window masks."""
    batch, head = coord("b0"), coord("b1")
    row, score = add(I, problem.diagonal), SCORE * problem.d**-0.5
    dead = const(float("-inf"))
    if problem.causal:
        score = where(apply("ile", J, row), score, dead)
    if problem.window is not None:
        score = where(apply("ilt", add(row, -problem.window), J), score, dead)
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
        score=score,
        mask=understand(score),
        normalizer=Normalizer.SOFTMAX,
        dtype=problem.dtype,
        out_dtype=problem.dtype,
        output=Output(dims=dims, order=dims),
    )
