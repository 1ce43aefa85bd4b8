"""Lower bounds on the I/O of attention, with the range in which each holds and its source.

The theorems give orders (Omega); the expressions have the constant 1. That constant is what the
counting argument of the standard-product bound suggests: while M elements are moved at most 2M are within reach, of
which M/d rows of Q and as many of K meet in (M/d)^2 scores, so N_q N_k scores need N_q N_k d^2 / M transfers. Ratios
to these bounds are therefore ratios to an order, and the claim that is tested is that they stay under one constant.
`trivial` alone is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import sympy

from .schedule import M, N_k, N_q, d, d_v, s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound in elements for one attention problem. valid: the condition on M and d under which the theorem
    speaks."""

    name: str
    expression: sympy.Expr
    source: str
    valid: sympy.Basic = sympy.true

    def __str__(self) -> str:
        where = "" if self.valid is sympy.true else f" where {self.valid}"
        return f"{self.name}: {self.expression}{where} ({self.source})"


_LARGE, _SMALL = N_q * N_k * d**2 / M, N_q * N_k * d / sympy.sqrt(M)  # they cross at M = d^2
_PAIRS, _MEAN = N_q * N_k, sympy.sqrt(N_q * N_k)

BOUNDS = {
    bound.name: bound
    for bound in (
        # Every input is read and every output written once.
        Bound(name="trivial", expression=N_q * (d + d_v) + N_k * (d + d_v), source="all"),
        # Any schedule that forms Q K^T by the standard product, in a fast memory of at least d^2.
        Bound(name="standard_product", expression=_LARGE, valid=sympy.Ge(M, d**2), source="2402.07443"),
        # In a fast memory below d^2 attention is as hard as the rectangular product Q K^T.
        Bound(name="small_cache", expression=_SMALL, valid=sympy.Lt(M, d**2), source="2402.07443"),
        # Standard products, any M.
        Bound(name="both_regimes", expression=sympy.Min(_LARGE, _SMALL), source="2402.07443"),
        # Any way of multiplying matrices, fast ones included.
        Bound(name="any_product", expression=sympy.Min(_LARGE, _PAIRS), valid=sympy.Ge(M, d**2), source="2402.07443"),
        # The gradient of attention by standard products (N = sqrt(N_q N_k) where they differ).
        Bound(
            name="backward",
            expression=sympy.Min((_PAIRS * d**2 + _MEAN * d**3) / M, (_PAIRS * d + _MEAN * d**2) / sympy.sqrt(M)),
            source="2410.09397",
        ),
        # Only a share s of the scores is wanted: the counting argument applied to s N_q N_k scores.
        Bound(name="sparse", expression=s * sympy.Min(_LARGE, _SMALL), source="derived here, after 2402.07443"),
    )
}


@functools.lru_cache(maxsize=64)
def _compiled(name: str) -> Callable[..., float]:
    return sympy.lambdify((N_q, N_k, d, d_v, M, s), BOUNDS[name].expression, modules="math")


def evaluate(name: str, *, n_q: int, n_k: int, d: int, d_v: int, capacity: float, share: float = 1.0) -> float:
    """The bound of that name in elements, for one problem; `capacity` is M in elements."""
    return float(_compiled(name)(n_q, n_k, d, d_v, capacity, share))
