"""Linear attention: no normaliser, and a mask or a decay of rows and keys between the two products."""

import pytest
import torch

import fusion
from tests.passes.exactness import EMITTERS, as_exact_as_eager

N = 70


def distance() -> torch.Tensor:
    return torch.arange(N)[:, None] - torch.arange(N)


def causal(q, k, v, decay):
    return (q @ k.mT).tril() @ (v * decay[0, :, :1])


def retention(q, k, v, decay):
    powers = decay.clamp(0.5, 0.99)[..., :1] ** distance().clamp(min=0)
    return (q @ k.mT * torch.where(distance() >= 0, powers, 0.0)) @ v


def decay_of_positions(q, k, v, decay):
    rate = decay[..., :1].abs()
    return (q @ k.mT).masked_fill(distance() < 0, 0) * torch.exp(-rate * distance().abs()) @ v


def table(q, k, v, decay):
    return (decay * (q @ k.mT)) @ v


def weights_on_the_right(q, k, v, decay):
    return v.mT @ (k @ q.mT * decay.mT)


def features(q, k, v, decay):
    q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    return (q @ k.mT * (distance() >= 0)) @ (v * decay[0, :, :1])


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize(
    "function", [causal, retention, decay_of_positions, table, weights_on_the_right, features], ids=lambda f: f.__name__
)
def test_a_mask_or_decay_makes_two_products_attention(function, emitter):
    given = [*(torch.randn(2, 2, N, 8) for _ in range(3)), torch.randn(2, N, N)]
    sites = as_exact_as_eager(function, given, emitter, gradients=True)
    assert [site.reason for site in sites] == [None]


def test_infinite_scores_are_multiplied_by_a_decay_of_zero():
    """0 * inf is NaN, so that tiles of zeros are not skipped."""
    q, k, v = torch.randn(3, 1, 1, N, 8)
    q[..., 3, :] = torch.inf

    def function(q, k, v):
        return (q @ k.mT * (distance() >= 0).float()) @ v

    as_exact_as_eager(function, [q, k, v])


def chain(q, k, v, decay):
    return (q @ k.mT * 0.3) @ v


def factors_of_rows_and_keys(q, k, v, decay):
    return (q @ k.mT * decay[..., :, :1] * decay[..., :1, :]) @ v


def gated_layers(q, k, v, decay):
    return (q @ k[0, 0].mT * (q @ v[0, 0].mT)) @ v[0, 0]


@pytest.mark.parametrize("function", [chain, factors_of_rows_and_keys, gated_layers], ids=lambda f: f.__name__)
def test_products_that_are_better_taken_in_another_order_are_none(function):
    given = [*(torch.randn(2, 2, N, 8) for _ in range(3)), torch.randn(2, N, N)]
    assert fusion.explain(function, *given).sites == []
