"""Polynomials close to the exponential on [-B, B] in *relative* error, which is the error of attention weights.

A common factor of all weights cancels in the softmax, so the error that counts is that of exp(-x) p(x) against 1. The
best polynomial under that weight (minimax) is computed by Remez's exchange. Coefficients are of powers of x, lowest
first.

A row needs less than that: its errors *summed* over the keys, against the sum of its weights. Where the mean square of
the row's scores is known to be at most m (cheap to bound from the data), a bound of the form

    |exp(x) - p(x)| <= error * exp(x) + spread * x^2        for |x| <= B

makes that sum at most error + spread * m of the weights, provided that these add up to at least the number of keys.
`minimax` with a moment m minimises it: scores near the limit B may be off by more, since there are few of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

GRID = 4001
TOLERANCE = 1e-4
"""Relative distance from the best polynomial at which exchanges end."""
FLOOR = 0.15
"""error / spread of a polynomial for a moment, in units of the moment: within 10 % of the best where the moment is far
below B squared. (Where it is not, little is gained over the polynomial of least relative error.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """Polynomial with its certified error.

    coefficients: c_0, c_1, ... of powers of x.
    bound: B.
    error, spread: |exp(x) - p(x)| <= error * exp(x) + spread * x^2 over |x| <= B (spread 0: a bound on the relative
    error of
        every single weight).
    """

    coefficients: tuple[float, ...]
    bound: float
    error: float
    spread: float = 0.0

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    def row_error(self, moment: float) -> float:
        """Error of the weights of a row, relative to their sum, if its mean square score is at most `moment`."""
        return self.error + self.spread * moment

    def magnitude(self, low: int = 0, high: int | None = None) -> float:
        """Sum of |c_g| B^g over the degrees low <= g < high, an upper bound of the sum of all monomials of these
        degrees."""
        return sum(abs(c) * self.bound**g for g, c in list(enumerate(self.coefficients))[low:high])


def relative_error(coefficients: np.ndarray, bound: float, floor: float | None = None) -> float:
    """An upper bound on |exp(-x) p(x) - 1| over |x| <= bound, divided by floor + x^2 exp(-x) where `floor` is given."""
    x = bound * np.cos(np.linspace(0, math.pi, GRID))
    powers = np.polynomial.polynomial
    p = powers.polyval(x, coefficients)
    decay = np.exp(-x)
    result = np.abs(decay * p - 1)
    # Between two points of distance h the function leaves its chord by at most h^2/8 times its second derivative.
    first, second = (powers.polyval(x, powers.polyder(coefficients, k)) for k in (1, 2))
    curvature = float(np.abs(decay * (second - 2 * first + p)).max(initial=0.0))
    step = bound * math.pi / (GRID - 1)
    result = np.maximum(result[1:], result[:-1]) + 2 * curvature * step**2 / 8 + 1e-15
    if floor is not None:
        nearest = np.where(x[1:] * x[:-1] > 0, np.minimum(np.abs(x[1:]), np.abs(x[:-1])), 0.0)
        result /= floor + nearest**2 * np.minimum(decay[1:], decay[:-1])
    return float(result.max(initial=0.0))


@functools.lru_cache(maxsize=4096)
def minimax(degree: int, bound: float, moment: float | None = None) -> Polynomial:
    """The polynomial of least relative error on [-bound, bound] (Remez); with a moment, of least `row_error`."""
    if bound == 0:
        return Polynomial(coefficients=(1.0,) + (0.0,) * degree, bound=0.0, error=0.0)
    floor = None if moment is None else FLOOR * moment
    t = np.cos(np.linspace(0, math.pi, GRID))
    nodes = _first_nodes(degree)
    weight, basis = np.exp(-bound * t), np.polynomial.chebyshev.chebvander(t, degree)
    allowed = _allowed(t, bound, floor)
    best: Polynomial | None = None
    for _ in range(30):
        solved = _levelled(nodes, bound, floor)
        candidate = _polynomial(_unscaled(solved[:-1], bound), bound, floor)
        if best is None or candidate.error < best.error:
            best = candidate
        residual = (weight * (basis @ solved[:-1]) - 1) / allowed
        if np.abs(residual).max() <= abs(solved[-1]) * (1 + TOLERANCE) + 1e-14:
            break
        exchanged = _extrema(t, residual, degree + 2)
        if exchanged is None:
            break
        nodes = exchanged
    assert best is not None
    return best


def least_row_error(degree: int, bound: float, moment: float | None = None) -> float:
    """A lower bound of `minimax(..).row_error(moment)` (de la Vallee Poussin), for one small linear system."""
    if bound == 0:
        return 0.0
    floor = None if moment is None else FLOOR * moment
    level = abs(_levelled(_first_nodes(degree), bound, floor)[-1]) * (1 - 1e-6) - 1e-14
    return level if moment is None else level * (1 + FLOOR) * moment


def _first_nodes(degree: int) -> np.ndarray:
    return np.cos(np.arange(degree + 2) * math.pi / (degree + 1))


def _levelled(nodes: np.ndarray, bound: float, floor: float | None) -> np.ndarray:
    """Chebyshev coefficients of the polynomial whose errors in these nodes alternate and are equal, and their size."""
    degree = len(nodes) - 2
    system = np.polynomial.chebyshev.chebvander(nodes, degree) * np.exp(-bound * nodes)[:, None]
    signs = (-1.0) ** np.arange(degree + 2) * _allowed(nodes, bound, floor)
    return np.linalg.solve(np.column_stack([system, signs]), np.ones(degree + 2))


def _allowed(t: np.ndarray, bound: float, floor: float | None) -> np.ndarray:
    """Allowed distance of exp(-x) p(x) from 1 at x = bound * t, up to a factor."""
    x = bound * t
    return np.ones_like(t) if floor is None else floor + x * x * np.exp(-x)


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


def _polynomial(coefficients: np.ndarray, bound: float, floor: float | None = None) -> Polynomial:
    level, powers = relative_error(coefficients, bound, floor), tuple(float(c) for c in coefficients)
    if floor is None:
        return Polynomial(coefficients=powers, bound=bound, error=level)
    return Polynomial(coefficients=powers, bound=bound, error=level * floor, spread=level)


def feature_count(d: int, degree: int) -> int:
    """r, the number of monomials of up to `degree` in d coordinates: binomial(d + degree, degree)."""
    return math.comb(d + degree, degree)
