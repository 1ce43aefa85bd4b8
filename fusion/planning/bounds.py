"""Lower bounds on the I/O of attention, with the range in which each holds and its source.

The theorems give orders (Omega); the functions return the expression with constant 1. That constant is what the
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

from fusion.planning.symbols import M, N_k, N_q, d, d_v, s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound in elements for one attention problem. valid: the condition on M and d under which the theorem
    speaks."""

    name: str
    expression: sympy.Expr
    valid: sympy.Basic
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.expression} where {self.valid} ({self.source})"


def trivial() -> Bound:
    """Every input is read and every output written once."""
    return Bound(name="trivial", expression=N_q * (d + d_v) + N_k * (d + d_v), valid=sympy.true, source="all")


def standard_product() -> Bound:
    """Any schedule that forms Q K^T by the standard product, in a fast memory of at least d^2."""
    return Bound(name="standard_product", expression=N_q * N_k * d**2 / M, valid=sympy.Ge(M, d**2), source="2402.07443")


def small_cache() -> Bound:
    """In a fast memory below d^2 attention is as hard as the rectangular product Q K^T."""
    return Bound(
        name="small_cache", expression=N_q * N_k * d / sympy.sqrt(M), valid=sympy.Lt(M, d**2), source="2402.07443"
    )


def both_regimes() -> Bound:
    """Standard products, any M: the smaller of the two, which cross at M = d^2."""
    expression = sympy.Min(standard_product().expression, small_cache().expression)
    return Bound(name="both_regimes", expression=expression, valid=sympy.true, source="2402.07443")


def any_product() -> Bound:
    """Any way of multiplying matrices, fast ones included."""
    expression = sympy.Min(N_q * N_k * d**2 / M, N_q * N_k)
    return Bound(name="any_product", expression=expression, valid=sympy.Ge(M, d**2), source="2402.07443")


def backward() -> Bound:
    """The gradient of attention by standard products (N = sqrt(N_q N_k) where they differ)."""
    pairs, mean = N_q * N_k, sympy.sqrt(N_q * N_k)
    expression = sympy.Min((pairs * d**2 + mean * d**3) / M, (pairs * d + mean * d**2) / sympy.sqrt(M))
    return Bound(name="backward", expression=expression, valid=sympy.true, source="2410.09397")


def sparse() -> Bound:
    """Only a share s of the scores is wanted: the counting argument applied to s N_q N_k scores (derived here)."""
    return Bound(
        name="sparse",
        expression=s * both_regimes().expression,
        valid=sympy.true,
        source="derived here, after 2402.07443",
    )


BOUNDS: dict[str, Callable[[], Bound]] = {
    bound.__name__: bound
    for bound in (trivial, standard_product, small_cache, both_regimes, any_product, backward, sparse)
}


@functools.cache
def _compiled(name: str) -> Callable[..., float]:
    return sympy.lambdify((N_q, N_k, d, d_v, M, s), BOUNDS[name]().expression, modules="math")


def evaluate(name: str, *, n_q: int, n_k: int, d: int, d_v: int, capacity: float, share: float = 1.0) -> float:
    """The bound of that name in elements, for one problem; `capacity` is M in elements."""
    return float(_compiled(name)(n_q, n_k, d, d_v, capacity, share))
