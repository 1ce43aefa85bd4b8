"""Grids of test cases of which a normal run takes the diagonals."""

import itertools
from collections.abc import Iterable

import pytest


def one_in(n: int, *axes: Iterable) -> list:
    """All combinations of a value of each axis, for `parametrize`; those off every n-th diagonal are long. Each value
    of an axis occurs on a diagonal if another axis has n values or more."""
    combinations = itertools.product(*map(enumerate, axes))
    marks = [pytest.mark.long]
    return [
        pytest.param(*(value for _, value in chosen), marks=marks if sum(k for k, _ in chosen) % n else [])
        for chosen in combinations
    ]
