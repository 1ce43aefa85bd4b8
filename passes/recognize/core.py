"""Results of the analysis of one attention's weights, before they become a spec."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.ir.expr import Expr
from fusion.ir.spec import Normalizer


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
