"""Tensors that are made in the shape of scores need none of these."""

import math

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager

SINGLE = torch.float32  # in which the numbers of the float64 reference are drawn, too


def noise(q, k, v):
    s = q @ k.mT
    return (s + torch.randn_like(s, dtype=SINGLE)).softmax(-1) @ v


def dropout_by_hand(q, k, v):
    w = (q @ k.mT).softmax(-1)
    return (w * (torch.rand_like(w, dtype=SINGLE) > 0.1) / 0.9) @ v


def drawn_weights(q, k, v):
    w = (q @ k.mT).softmax(-1)
    return (w * torch.bernoulli(torch.full_like(w, 0.9, dtype=SINGLE))) @ v


def gumbel(q, k, v):
    """As torch.nn.functional.gumbel_softmax."""
    s = q @ k.mT
    drawn = torch.empty_like(s, dtype=SINGLE, memory_format=torch.contiguous_format).exponential_()
    return ((s - drawn.log()) / 0.7).softmax(-1) @ v


def mask_of_ones(q, k, v):
    s = q @ k.mT
    mask = torch.ones_like(s, dtype=torch.bool).cumsum(-1) > 3
    return s.masked_fill(mask, -math.inf).softmax(-1) @ v


def of_scores_in_another_order(q, k, v):
    s = (k @ q.mT).mT
    return (s + torch.randn_like(s, dtype=SINGLE)).softmax(-1) @ v


FUSED = [noise, dropout_by_hand, drawn_weights, gumbel, mask_of_ones]


def run(function, given):
    torch.manual_seed(3)
    out = function(*given)
    return [out, *(torch.autograd.grad(out.square().sum(), given) if out.requires_grad else ())]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("function", [*FUSED, of_scores_in_another_order])
def test_the_numbers_are_those_of_eager_mode(function, trained):
    torch.manual_seed(1)
    given = [torch.randn(2, 3, 12, 8, requires_grad=trained) for _ in range(3)]
    exact = run(function, [x.detach().double().requires_grad_(trained) for x in given])
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": "reference"})
    with fusion.collect_reports() as reports:
        actual = run(compiled, given)
    assert_as_exact_as_eager(actual, run(function, given), exact)
    (site,) = reports[0].sites
    assert site.fused == (function is not of_scores_in_another_order), site.reason


@pytest.mark.parametrize("function", FUSED)
def test_lengths_that_change(function):
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True}, dynamic=True)
    for length in (9, 14):
        inputs = [torch.randn(1, 2, length, 16) for _ in range(3)]
        exact = run(function, [x.double() for x in inputs])
        assert_as_exact_as_eager(run(compiled, inputs), run(function, inputs), exact)


def expanded(q, k, v):
    w = (q @ k.mT).softmax(-1)
    prior = torch.linspace(0, 1, q.shape[-2] * k.shape[-2], dtype=q.dtype).view(q.shape[-2], k.shape[-2])
    return w @ v, torch.nn.functional.mse_loss(w, prior.expand_as(w))


def viewed(q, k, v):
    w = (q @ k.mT).softmax(-1)
    flat = torch.linspace(0, 1, w.numel(), dtype=q.dtype)
    return (w * flat.view_as(w)) @ v, (w * flat.reshape_as(w)).sum(-1)


@pytest.mark.parametrize("function", [expanded, viewed])
def test_views_in_the_shape_of_weights(function):
    """Beside another attention, which is fused as well."""

    def both(q, k, v):
        return *function(q, k, v), torch.nn.functional.scaled_dot_product_attention(v, k, q)

    torch.manual_seed(0)
    given = [torch.randn(2, 2, 9, 8) for _ in range(3)]
    with fusion.collect_reports() as reports:
        compiled = torch.compile(both, backend="fusion", options={"inner": "eager"})
        actual = compiled(*given)
    assert_as_exact_as_eager(actual, both(*given), both(*(t.double() for t in given)))
    assert [site.fused for site in reports[0].sites] == [True, True]
    assert not reports[0].notes
