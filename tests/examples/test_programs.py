"""Every schedule, run on the simulated memory, computes attention and moves exactly what its formula says."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.io_model import SCHEDULES, counts, schedule
from examples.io_model.schedule import SmallMemoryError, sizes_of
from examples.io_model.tiles import least_io
from examples.simulate.memory import FastMemoryError
from examples.simulate.schedules import run
from examples.simulate.schedules_backward import run_backward
from fusion.planning.problem import Problem
from tests.numerics import ROUNDING, assert_same_in_float64, assert_within

FORWARD = [name for name, item in SCHEDULES.items() if item.direction == "forward" and item.exact]
BACKWARD = [name for name, item in SCHEDULES.items() if item.direction == "backward"]


def attention(q, k, v, live=None):
    scores = q @ k.T / math.sqrt(q.shape[1])
    scores = scores if live is None else np.where(live, scores, -np.inf)
    total = np.logaddexp.reduce(scores, axis=1)
    weights = np.exp(scores - total[:, None])
    return weights @ v, total, weights


def gradients(q, k, v, grad):
    _, _, p = attention(q, k, v)
    dp = grad @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) / math.sqrt(q.shape[1])
    return {"dQ": ds @ k, "dK": ds.T @ q, "dV": p.T @ grad}


sizes = st.integers(1, 21)
widths = st.integers(1, 7)


@st.composite
def cases(draw, name):
    """Inputs, a tile with sizes from 1 to beyond what they cut, and a capacity from just enough to ample."""
    n_q, n_k, d, d_v = draw(sizes), draw(sizes), draw(widths), draw(widths)
    tile = {key: draw(st.integers(1, 3 if key == "stages" else 8)) for key in schedule(name).tile}
    problem = Problem(n_q=n_q, n_k=n_k, d=d, d_v=d_v)
    needed = int(counts(name, sizes_of(problem, 1), tile).footprint)
    capacity = needed + draw(st.sampled_from([0, 1, 7, 40]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    arrays = [rng.normal(size=shape) for shape in ((n_q, d), (n_k, d), (n_k, d_v), (n_q, d_v))]
    return problem, tile, capacity, arrays


def check_counts(memory, name, problem, tile, capacity, share=1.0, features=1):
    predicted = counts(name, sizes_of(problem, capacity, share, features), tile)
    assert memory.loads == round(float(predicted.reads))
    assert memory.stores == round(float(predicted.writes))
    assert memory.peak <= predicted.footprint <= capacity


@pytest.mark.parametrize("name", FORWARD)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_forward_counts_equal_the_formula(name, data):
    problem, tile, capacity, (q, k, v, _) = data.draw(cases(name))
    memory = run(name, q, k, v, capacity=capacity, tile=tile)
    expected, total, _ = attention(q, k, v)
    assert_same_in_float64(memory.result("O"), expected, terms=v)
    if name not in ("materialized", "key_stationary"):  # these leave no log-sum-exp
        assert_same_in_float64(memory.result("L"), total, terms=1)
    check_counts(memory, name, problem, tile, capacity)


@pytest.mark.parametrize("name", BACKWARD)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_backward_counts_equal_the_formula(name, data):
    problem, tile, capacity, (q, k, v, grad) = data.draw(cases(name))
    output, total, weights = attention(q, k, v)
    arrays = {"Q": q, "K": k, "V": v, "O": output, "dO": grad, "L": total, "P": weights}
    memory = run_backward(name, arrays, capacity=capacity, tile=tile)
    for target, expected in gradients(q, k, v, grad).items():
        assert_same_in_float64(memory.result(target), expected, terms=1)
    check_counts(memory, name, problem, tile, capacity)


@pytest.mark.parametrize("name", ["block_sparse", "split_k"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_sparse_schedules_count_live_tiles_only(name, data):
    problem, tile, capacity, (q, k, v, _) = data.draw(cases(name))
    if name == "split_k":  # splits of whole tiles
        tile["B_s"] *= tile["B_c"]
    blocks = -(-problem.n_q // tile["B_r"]), -(-problem.n_k // tile["B_c"])
    live = np.random.default_rng(data.draw(st.integers(0, 99))).random(blocks) < 0.5
    live[:, -1] = True  # a row with no live key has no softmax
    dense = np.repeat(np.repeat(live, tile["B_r"], 0), tile["B_c"], 1)[: problem.n_q, : problem.n_k]
    given = live if name == "block_sparse" else dense[:: tile["B_r"]]
    memory = run(name, q, k, v, capacity=capacity, tile=tile, live=given)
    assert_same_in_float64(memory.result("O"), attention(q, k, v, dense)[0], terms=v)
    share = dense[:: tile["B_r"]].sum() / (blocks[0] * problem.n_k)
    check_counts(memory, name, problem, tile, capacity, share)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), degree=st.integers(1, 4))
def test_polynomial_counts_and_approximates(data, degree):
    problem, tile, capacity, (q, k, v, _) = data.draw(cases("polynomial"))
    q, k = 0.3 * q / np.abs(q).sum(axis=1).max(), k / np.abs(k).max()
    memory = run("polynomial", q, k, v, capacity=capacity, tile=tile, degree=degree)
    largest = abs(q @ k.T).max() / math.sqrt(problem.d)
    relative = largest ** (degree + 1) / math.factorial(degree + 1) * math.exp(2 * largest)
    allowed = 2 * relative / (1 - relative) * np.linalg.norm(v, axis=1).max()
    error = np.linalg.norm(memory.result("O") - attention(q, k, v)[0], axis=1)
    assert_within(error, allowed + ROUNDING)
    features = math.comb(problem.d + degree, degree)
    check_counts(memory, "polynomial", problem, tile, capacity, features=features)


def test_polynomial_moves_what_grows_linearly_with_n():
    """At fixed r and M: I/O per row between N = 2**10 and N = 2**15 within 2 %, counted and by the formula."""
    rng, d, degree, capacity = np.random.default_rng(0), 3, 2, 20000
    features, moved = math.comb(d + degree, degree), []
    for n in (2**10, 2**15):
        q, k, v = (0.1 * rng.normal(size=(n, d)) for _ in range(3))
        tile = {"B_f": 4, "B_c": 1024, "B_r": 1024}
        memory = run("polynomial", q, k, v, capacity=capacity, tile=tile, degree=degree)
        problem = Problem(n_q=n, n_k=n, d=d, d_v=d)
        check_counts(memory, "polynomial", problem, tile, capacity, features=features)
        moved.append(memory.io / n)
    assert max(moved) / min(moved) < 1.02
    smaller, larger = (
        least_io_of("polynomial", Problem(n_q=n, n_k=n, d=d, d_v=d), 400, features) / n for n in (2**10, 2**15)
    )
    assert abs(larger / smaller - 1) < 0.02


def least_io_of(name, problem, capacity, features):
    """Elements moved at the best tile."""
    tile = least_io(schedule(name), problem, capacity, 1.0, features)
    return float(counts(name, sizes_of(problem, capacity, 1.0, features), tile).io)


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_a_full_tile_fills_its_footprint_and_one_element_less_is_refused(name):
    rng = np.random.default_rng(0)
    d = 4
    tile = {"B_r": 4, "B_c": 2, "B_d": 2, "B_o": 4, "B_p": 2, "B_e": 4, "B_s": 4, "stages": 2}
    tile = {key: tile[key] for key in schedule(name).tile}
    problem = Problem(n_q=8, n_k=8, d=d, d_v=d)
    footprint = int(counts(name, sizes_of(problem, 9), tile).footprint)

    def go(capacity):
        q, k, v, grad = (rng.normal(size=(8, d)) for _ in range(4))
        if name in FORWARD:
            return run(name, q, k, v, capacity=capacity, tile=tile)
        output, total, weights = attention(q, k, v)
        arrays = {"Q": q, "K": k, "V": v, "O": output, "dO": grad, "L": total, "P": weights}
        return run_backward(name, arrays, capacity=capacity, tile=tile)

    assert go(footprint).peak == footprint
    with pytest.raises(FastMemoryError, match="does not fit"):
        go(footprint - 1)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@pytest.mark.parametrize("d", [4, 8])
@pytest.mark.parametrize("share", [1 / 4, 1 / 2, 1, 2, 4])
def test_counts_at_the_best_tile_on_both_sides_of_d_squared(name, d, share):
    problem, capacity = Problem(n_q=19, n_k=26, d=d, d_v=d), int(share * d * d)
    try:
        tile = least_io(schedule(name), problem, capacity)
    except SmallMemoryError as error:
        assert f"M={capacity}" in str(error) and share <= 2
        return
    rng = np.random.default_rng(1)
    q, k, v, grad = (rng.normal(size=shape) for shape in ((19, d), (26, d), (26, d), (19, d)))
    output, total, weights = attention(q, k, v)
    if name in FORWARD:
        memory = run(name, q, k, v, capacity=capacity, tile=tile)
        assert_same_in_float64(memory.result("O"), output)
    else:
        arrays = {"Q": q, "K": k, "V": v, "O": output, "dO": grad, "L": total, "P": weights}
        memory = run_backward(name, arrays, capacity=capacity, tile=tile)
    check_counts(memory, name, problem, tile, capacity)
