"""Attention with a Strassen product: its result, its count, and the bound it cannot pass."""

import math

import numpy as np
import pytest

from examples.io_model import bounds
from examples.simulate.memory import TwoLevelMemory
from examples.simulate.strassen import product_io, strassen
from fusion.errors import ProblemError
from tests.numerics import assert_same_in_float64

TILE = {"B_o": 2, "B_p": 1, "B_e": 2}


def memory_for(n_q, n_k, d, capacity):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((n_q, d), (n_k, d), (n_k, 3)))
    memory = TwoLevelMemory(capacity, Q=q, K=k, V=v)
    memory.reserve("O", (n_q, 3))
    memory.reserve("L", (n_q,))
    return memory


@pytest.mark.parametrize("d", [1, 2, 4, 8])
@pytest.mark.parametrize("capacity", [12, 48, 64, 256])
def test_result_and_count(d, capacity):
    memory = memory_for(16, 24, d, capacity)
    q, k, v = (memory.result(name).copy() for name in "QKV")
    moved = strassen(memory, (16, d, 24, 3), TILE)
    weights = np.exp(q @ k.T / math.sqrt(d))
    assert_same_in_float64(memory.result("O"), weights / weights.sum(axis=1, keepdims=True) @ v)
    assert moved == product_io(16, 24, d, capacity)
    assert memory.peak <= capacity
    if capacity >= d * d:
        assert moved >= bounds.evaluate("any_product", n_q=16, n_k=24, d=d, d_v=3, capacity=capacity)


def test_seven_products_a_level():
    assert product_io(64, 64, 64, 3 * 64 * 64) == 3 * 64 * 64
    assert product_io(64, 64, 64, 3 * 32 * 32) == 7 * 3 * 32 * 32 + 62 * 32 * 32


def test_shapes_it_cannot_halve_are_refused():
    with pytest.raises(ProblemError, match="power of two"):
        strassen(memory_for(12, 12, 6, 100), (12, 6, 12, 3), TILE)
    with pytest.raises(ProblemError, match="at least 3"):
        strassen(memory_for(4, 4, 4, 2), (4, 4, 4, 3), TILE)
