"""Results of the analysis of one attention's weights, before they become a spec."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fusion.ir.expr import Expr, walk
from fusion.ir.spec import Normalizer

from ..pullback.operands import Access
from ..pullback.pullback import PullBack


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
