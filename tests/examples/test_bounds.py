"""Lower bounds, and the ratio of counted I/O to them over the whole range of shapes."""

import math

import numpy as np
import pytest
import sympy

from examples.io_model import bounds
from examples.io_model.schedule import M, d
from examples.io_model.tiles import optimum
from examples.io_model.two_level import least, weigh_one
from examples.simulate.schedules import run
from fusion.planning.problem import Problem

# The constant of the claim "counted I/O is within a constant of the lower bound": stated in docs/cost-model.md.
CONSTANT = 9


def test_both_regimes_cross_at_d_squared():
    large, small = bounds.BOUNDS["standard_product"], bounds.BOUNDS["small_cache"]
    assert sympy.solve(sympy.Eq(large.expression, small.expression), M) == [d**2]
    assert large.valid.subs({M: 4096, d: 64}) == sympy.true
    assert small.valid.subs({M: 4096, d: 64}) == sympy.false


def test_values():
    sizes = {"n_q": 1000, "n_k": 500, "d": 64, "d_v": 32}
    assert bounds.evaluate("trivial", **sizes, capacity=1) == 1500 * 96
    assert bounds.evaluate("both_regimes", **sizes, capacity=1024) == 1000 * 500 * 64 / 32
    assert bounds.evaluate("both_regimes", **sizes, capacity=8192) == 1000 * 500 * 64**2 / 8192
    assert bounds.evaluate("any_product", **sizes, capacity=1024) == 1000 * 500
    assert bounds.evaluate("sparse", **sizes, capacity=8192, share=0.25) == 1000 * 500 * 64**2 / 8192 / 4
    assert bounds.evaluate("backward", n_q=64, n_k=64, d=64, d_v=64, capacity=4096) == 2 * 64 * 64


@pytest.mark.parametrize("name", bounds.BOUNDS)
def test_every_bound_prints_its_source(name):
    bound = bounds.BOUNDS[name]
    assert bound.source and bound.source in str(bound) and str(bound.expression) in str(bound)


def capacities(n, width):
    capacity = max(4, width * width // 64)
    while capacity <= n * width:
        yield capacity
        capacity *= 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [2**power for power in range(8, 14)])
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_the_planned_io_is_within_a_constant_of_the_bound(n, width):
    for capacity in capacities(n, width):
        chosen = least(Problem(n_q=n, n_k=n, d=width, d_v=width), capacity)
        assert 1 <= chosen.ratio <= CONSTANT, chosen
        if capacity < 0.66 * width * width:
            assert chosen.schedule == "small_cache", chosen
        if capacity >= 1.1 * width * width:
            assert chosen.schedule in ("flash", "materialized"), chosen


@pytest.mark.parametrize("capacity", [16, 64, 256, 1024, 4096])
def test_the_same_ratio_counted_on_the_simulated_memory(capacity):
    n, width = 256, 16
    chosen = least(Problem(n_q=n, n_k=n, d=width, d_v=width), capacity)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, width)) for _ in range(3))
    memory = run(chosen.schedule, q, k, v, capacity=capacity, tile=dict(chosen.tile))
    assert memory.io == chosen.io
    assert memory.io / chosen.bound <= CONSTANT


@pytest.mark.parametrize("width", [128, 256, 512])
@pytest.mark.parametrize("share", [1 / 8, 1 / 4, 1 / 2])
def test_small_cache_beats_flash_by_root_m_over_d(width, share):
    """The factor is sqrt(M) / d; with the constants of the derived optima, (1 + 4 d / sqrt(M)) / (4 d^2 / M)."""
    problem, capacity = Problem(n_q=4096, n_k=4096, d=width, d_v=width), int(width * width * share)
    small = weigh_one(problem, capacity, "small_cache")
    flash = weigh_one(problem, capacity, "flash")
    factor, theory = small.io / flash.io, math.sqrt(share)
    assert 0.5 * theory <= factor <= 1.5 * theory
    leading = [optimum(name).leading.subs({M: capacity, d: width}) for name in ("small_cache", "flash")]
    assert factor == pytest.approx(float(leading[0] / leading[1]), rel=0.25)
    assert least(problem, capacity).schedule == "small_cache"
