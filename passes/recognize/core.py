"""What analysis makes of the weights of one attention, before it becomes a spec."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.ir.expr import Expr
from fusion.ir.spec import Normalizer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMix:
    """A sum over heads in the weights or scores of an attention.

    head, to: the coordinate that is summed over, and that of the result.
    matrix: what each head is multiplied by.
    program: of scores what is mixed; of weights what becomes of the sum, in WEIGHT.
    adds: whether what is mixed of head `to` itself is added to the sum.
    """

    head: Expr
    to: Expr
    matrix: Expr
    program: Expr
    adds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizedScores:
    """A normalised function of scores: the fields are those of `AttentionSpec`, with "dot" leaves for products.

    mixed_scores, mixed_weights: the sums over heads that the score program takes for the score, and behind the
        normalised scores; None where there are none.
    origin: the normalised score as it was found.
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
