"""Polynomials close to the exponential on [-B, B] in *relative* error, which is what attention weights need.

A common factor of all weights cancels in the softmax, so the error that counts is that of exp(-x) p(x) against 1. The
best polynomial under that weight (minimax) is found by Remez's exchange; the Taylor and Chebyshev series are here to be
compared with. Coefficients are of powers of x, lowest first.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from fusion.errors import ApproximationError

MAX_DEGREE = 16
GRID = 4001


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """coefficients: c_0, c_1, ... of powers of x. bound: B. error: max over |x| <= B of |exp(-x) p(x) - 1|."""

    coefficients: tuple[float, ...]
    bound: float
    error: float

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    def magnitude(self, low: int = 0, high: int | None = None) -> float:
        """sum of |c_g| B^g over the degrees low <= g < high: what all monomials of these degrees can add up to."""
        return sum(abs(c) * self.bound**g for g, c in list(enumerate(self.coefficients))[low:high])


def relative_error(coefficients: np.ndarray, bound: float) -> float:
    """max over |x| <= bound of |exp(-x) p(x) - 1|, from a grid and a bound on what lies between its points."""
    x = bound * np.cos(np.linspace(0, math.pi, GRID))
    powers = np.polynomial.polynomial
    p = powers.polyval(x, coefficients)
    found = float(np.abs(np.exp(-x) * p - 1).max(initial=0.0))
    # Between two points of distance h the function leaves its chord by at most h^2/8 times its second derivative.
    first, second = (powers.polyval(x, powers.polyder(coefficients, k)) for k in (1, 2))
    curvature = float(np.abs(np.exp(-x) * (second - 2 * first + p)).max(initial=0.0))
    step = bound * math.pi / (GRID - 1)
    return found + 2 * curvature * step**2 / 8 + 1e-15


def taylor(degree: int, bound: float) -> Polynomial:
    """The Taylor polynomial at 0."""
    return _polynomial(np.array([1 / math.factorial(g) for g in range(degree + 1)]), bound)


def chebyshev(degree: int, bound: float) -> Polynomial:
    """Interpolation of the exponential in the Chebyshev nodes of [-bound, bound]."""
    nodes = np.cos((np.arange(degree + 1) + 0.5) * math.pi / (degree + 1))
    series = np.polynomial.chebyshev.chebfit(nodes, np.exp(bound * nodes), degree)
    return _polynomial(_unscaled(series, bound), bound)


@functools.lru_cache(maxsize=1024)
def minimax(degree: int, bound: float) -> Polynomial:
    """The polynomial of least relative error on [-bound, bound] (Remez)."""
    if bound == 0:
        return Polynomial(coefficients=(1.0,) + (0.0,) * degree, bound=0.0, error=0.0)
    t = np.cos(np.linspace(0, math.pi, GRID))
    nodes = np.cos(np.arange(degree + 2) * math.pi / (degree + 1))
    weight, basis = np.exp(-bound * t), np.polynomial.chebyshev.chebvander(t, degree)
    best: Polynomial | None = None
    for _ in range(30):
        system = np.polynomial.chebyshev.chebvander(nodes, degree) * np.exp(-bound * nodes)[:, None]
        signs = (-1.0) ** np.arange(degree + 2)
        solved = np.linalg.solve(np.column_stack([system, signs]), np.ones(degree + 2))
        found = _polynomial(_unscaled(solved[:-1], bound), bound)
        if best is None or found.error < best.error:
            best = found
        residual = weight * (basis @ solved[:-1]) - 1
        if np.abs(residual).max() <= abs(solved[-1]) * (1 + 1e-9) + 1e-14:
            break
        exchanged = _extrema(t, residual, degree + 2)
        if exchanged is None:
            break
        nodes = exchanged
    assert best is not None
    return best


def _extrema(t: np.ndarray, residual: np.ndarray, count: int) -> np.ndarray | None:
    """`count` points of alternating sign with the largest residuals, or None where there are fewer."""
    edges = np.flatnonzero(np.diff(np.sign(residual))) + 1
    pieces = np.split(np.arange(len(t)), edges)
    peaks = [piece[np.abs(residual[piece]).argmax()] for piece in pieces]
    while len(peaks) > count:
        peaks = peaks[1:] if abs(residual[peaks[0]]) < abs(residual[peaks[-1]]) else peaks[:-1]
    return t[peaks] if len(peaks) == count else None


def _unscaled(series: np.ndarray, bound: float) -> np.ndarray:
    """A Chebyshev series in x / bound as coefficients of powers of x."""
    powers = np.polynomial.chebyshev.cheb2poly(series)
    return powers / bound ** np.arange(len(powers))


def _polynomial(coefficients: np.ndarray, bound: float) -> Polynomial:
    return Polynomial(
        coefficients=tuple(float(c) for c in coefficients), bound=bound, error=relative_error(coefficients, bound)
    )


def degree_for(bound: float, epsilon: float, kind: str = "minimax") -> int:
    """The least degree (at least 1) whose relative error on [-bound, bound] is at most epsilon.

    kind: minimax, chebyshev or taylor. Raises ApproximationError where MAX_DEGREE does not reach it.
    """
    make = {"minimax": minimax, "chebyshev": chebyshev, "taylor": taylor}[kind]
    for degree in range(1, MAX_DEGREE + 1):
        if make(degree, bound).error <= epsilon:
            return degree
    raise ApproximationError(
        f"no polynomial of degree {MAX_DEGREE} or less is within {epsilon:g} of exp on [-{bound:g}, {bound:g}]; "
        f"allow a larger epsilon, or run exact attention"
    )


def feature_count(d: int, degree: int) -> int:
    """r, the number of monomials of up to `degree` in d coordinates: binomial(d + degree, degree)."""
    return math.comb(d + degree, degree)
