"""Sums over heads before and after the softmax."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.ir.expr import SCORE, WEIGHT, Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Sums over heads before and after the softmax ("talking heads", 2003.02436, section 3): for head g

        s[g] = sum over h of scores[g, h] * scored(s[h])      the score that the score program reads
        w[g] = weighted(sum over h of weights[g, h] * w[h])   the factor of V

    head: the batch coordinate that is the head; its extent is a constant.
    scores, weights: FLOAT expressions in b.. and HEAD; None where there is no such sum.
    scored: a program in SCORE, b.., i and j of a single head.
    weighted: one in WEIGHT.
    own_score, own_weight: whether the value of head g itself is added to its sum.
    """

    head: Expr
    scores: Expr | None = None
    scored: Expr = SCORE
    weights: Expr | None = None
    weighted: Expr = WEIGHT
    own_score: bool = False
    own_weight: bool = False

    @property
    def axis(self) -> int:
        """The number of the batch coordinate."""
        return int(self.head.name[1:])
