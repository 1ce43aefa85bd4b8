"""Fills of masks as numbers: how they are rounded, what is beyond float32, beside infinite scores and sinks."""

import math

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager, assert_as_exact_over_draws, assert_same_in_float64
from tests.passes.test_dead_rows import keep


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mask_added_by_addcmul_swallows_scores_as_one_that_is_added(dtype):
    """Half precision has no room for scores beside its lowest value: eager averages all keys of a dead row."""

    def function(q, k, v):
        lowest = torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype)
        return torch.addcmul(q @ k.mT, (~keep(q, k)).to(q.dtype), lowest).softmax(-1) @ v

    given = [torch.randn(2, 2, 21, 8, dtype=dtype) for _ in range(3)]
    with torch.no_grad():
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": "reference"})
        actual, eager, exact = compiled(*given), function(*given), function(*(x.double() for x in given))
    assert_as_exact_as_eager(actual, eager, exact)


@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_the_distance_to_an_infinite_maximum(emitter, infinity):
    """max(s) - s is NaN or infinite where s is infinite, and so is the row."""

    def farthest(q, k, v):
        s = q @ k.mT
        return (s.amax(-1, keepdim=True) - s).softmax(-1) @ v

    given = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    given[0][0, 0, 3, 0], given[1][..., 0] = infinity, 1.0
    with fusion.collect_reports() as reports:
        actual = torch.compile(farthest, backend="fusion", options={"inner": "eager", "emitter": emitter})(*given)
    assert reports[0].fused == 1
    assert_as_exact_as_eager(actual, farthest(*given), farthest(*(x.double() for x in given)))


@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("factor", [-0.5, 0.5])
def test_an_infinite_score_less_an_infinite_maximum(emitter, factor):
    """(s - max(s)) * c is NaN where s is +inf; s * c would be -inf, a key that is masked, where c is negative."""

    def scaled(q, k, v, c):
        s = q @ k.mT
        return ((s - s.amax(-1, keepdim=True)) * c).softmax(-1) @ v

    given = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    given[0][..., 0], given[1][0, 0, 4, 0] = 1.0, math.inf
    given.append(torch.tensor(factor))
    with fusion.collect_reports() as reports, torch.no_grad():
        actual = torch.compile(scaled, backend="fusion", options={"inner": "eager", "emitter": emitter})(*given)
    assert reports[0].fused == 1
    assert_as_exact_as_eager(actual, scaled(*given), scaled(*(x.double() for x in given)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("level", [0.0, 80.0, 300.0])
@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min, -math.inf])
def test_gradients_of_sinks_far_above_all_scores(fill, level, emitter):
    """A row without a live key gives all its weight to the sink, and so does one whose scores are far below it."""

    def sunken(q, k, v, sink):
        s = (q @ k.mT).masked_fill(~keep(q, k), fill)
        p = torch.cat([s, sink.view(-1, 1, 1).expand(*s.shape[:-1], 1)], -1).softmax(-1)
        return p[..., :-1] @ v

    def gradients(function, inputs):
        return torch.autograd.grad(function(*inputs).square().sum(), inputs)

    def drawn():
        given = [torch.randn(2, 2, 21, 8, requires_grad=True) for _ in range(3)]
        given.append(torch.tensor([level, level / 2], requires_grad=True))
        wide = [x.detach().double().requires_grad_() for x in given]
        return gradients(compiled, given), gradients(sunken, given), gradients(sunken, wide)

    compiled = torch.compile(sunken, backend="fusion", options={"inner": "eager", "emitter": emitter})
    assert_as_exact_over_draws(drawn)


BEYOND_FLOAT32 = torch.finfo(torch.float64).min


def multiplied_by_lowest(q, k, v):
    return (q @ k.mT + (~keep(q, k)).double() * BEYOND_FLOAT32).softmax(-1) @ v


def lowest_by_addcmul(q, k, v):
    return torch.addcmul(q @ k.mT, ~keep(q, k), torch.full([], BEYOND_FLOAT32, dtype=q.dtype)).softmax(-1) @ v


def lowest_where(q, k, v):
    return torch.where(keep(q, k), q @ k.mT, torch.full([], BEYOND_FLOAT32, dtype=q.dtype)).softmax(-1) @ v


def lowest_added(q, k, v):
    return (q @ k.mT + torch.zeros_like(keep(q, k), dtype=q.dtype).masked_fill(~keep(q, k), BEYOND_FLOAT32)).softmax(
        -1
    ) @ v


@pytest.mark.parametrize("function", [multiplied_by_lowest, lowest_by_addcmul, lowest_where, lowest_added])
def test_fills_beyond_float32_are_finite_in_float64(function):
    given = [torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3)]
    with fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": "reference"})(*given)
    assert reports[0].sites[0].fused
    assert_same_in_float64(actual, function(*given))


def test_a_fill_times_a_factor_rounds_as_in_eager():
    """The product lies between two numbers, and what is added to it says which where both are rounded at once."""
    fill, factor = -(2.0**23 + 1) * 2.0**60, torch.full((24, 1), 1.5)
    factor[::2] = -1.5

    def function(q, k, v, factor, bias):
        return (torch.where(keep(q, k), q @ k.mT, fill) * factor + bias).softmax(-1) @ v

    torch.manual_seed(0)
    inputs = [*(torch.randn(1, 2, 24, 8) for _ in range(3)), factor, torch.randn(24)]
    report = fusion.explain(function, *inputs)
    assert [site.fused for site in report.sites] == [True]
    actual = torch.compile(function, backend="fusion", options={"inner": "eager"})(*inputs)
    assert_as_exact_as_eager(actual, function(*inputs), function(*(x.double() for x in inputs)))
