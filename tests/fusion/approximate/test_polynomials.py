"""Polynomials close to the exponential: error bounds, degrees, and what minimax is worth over Taylor."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.approximate.cost import Polynomial, feature_count, least_row_error, minimax, relative_error
from tests.numerics import ROUNDING, assert_within


def of_powers(coefficients: np.ndarray, bound: float) -> Polynomial:
    return Polynomial(coefficients=tuple(coefficients), bound=bound, error=relative_error(coefficients, bound))


def taylor(degree: int, bound: float) -> Polynomial:
    """The Taylor polynomial at 0."""
    return of_powers(np.array([1 / math.factorial(g) for g in range(degree + 1)]), bound)


def chebyshev(degree: int, bound: float) -> Polynomial:
    """Interpolation of the exponential in the Chebyshev nodes of [-bound, bound]."""
    series = np.polynomial.Chebyshev.interpolate(np.exp, degree, [-bound, bound])
    return of_powers(series.convert(kind=np.polynomial.Polynomial).coef, bound)


def degree_for(bound: float, epsilon: float, make) -> int:
    """The least degree whose relative error on [-bound, bound] is at most epsilon."""
    return next(degree for degree in range(1, 17) if make(degree, bound).error <= epsilon)


@given(st.integers(1, 8), st.floats(0.01, 6))
def test_stated_error_holds_between_grid_points_and_minimax_is_best(degree, bound):
    x = np.random.default_rng(0).uniform(-bound, bound, 5000)
    errors = []
    for make in (minimax, chebyshev, taylor):
        found = make(degree, bound)
        values = np.polynomial.polynomial.polyval(x, found.coefficients)
        assert_within(np.abs(np.exp(-x) * values - 1), found.error + ROUNDING)
        errors.append(found.error)
    assert_within(errors[0], 1.001 * min(errors[1:]) + ROUNDING)  # the exchange stops that close to the best


@given(st.integers(1, 6), st.floats(0.01, 6), st.floats(1e-4, 1))
def test_stated_row_error_holds_for_every_distribution_of_scores(degree, bound, share):
    moment = share * bound**2
    found = minimax(degree, bound, moment)
    x = np.random.default_rng(0).uniform(-bound, bound, 5000)
    x[:3] = -bound, 0.0, bound
    off = np.abs(np.exp(x) - np.polynomial.polynomial.polyval(x, found.coefficients))
    assert_within(off, found.error * np.exp(x) + found.spread * x * x + ROUNDING * np.exp(bound))
    assert found.row_error(moment) == found.error + found.spread * moment
    assert least_row_error(degree, bound, moment) <= found.row_error(moment)
    assert least_row_error(degree, bound) <= minimax(degree, bound).error


@pytest.mark.parametrize(("degree", "gain"), [(1, 5), (2, 5), (3, 5)])
def test_a_moment_is_worth_half_a_degree_and_more(degree, gain):
    assert minimax(degree, 1.0, 1 / 32).row_error(1 / 32) * gain < minimax(degree, 1.0).error


def test_minimax_error_is_reached_at_degree_plus_two_points():
    found = minimax(3, 1.0)
    x = np.linspace(-1, 1, 20001)
    residual = np.exp(-x) * np.polynomial.polynomial.polyval(x, found.coefficients) - 1
    touching = np.abs(residual) > 0.999 * found.error
    signs = np.sign(residual[touching])
    assert 1 + np.count_nonzero(np.diff(signs)) == 5


@pytest.mark.parametrize(("bound", "degrees"), [(0.5, (2, 2, 3)), (1.0, (3, 4, 5)), (2.0, (5, 6, 8))])
def test_minimax_saves_degrees_over_taylor(bound, degrees):
    assert tuple(degree_for(bound, 1e-2, make) for make in (minimax, chebyshev, taylor)) == degrees


def test_a_degree_less_is_a_fraction_of_the_features():
    ours, theirs = (feature_count(32, degree_for(1.0, 1e-2, make)) for make in (minimax, taylor))
    assert ours * 60 < theirs
