"""Gradients of scores that select: 0 * inf is met where eager meets it, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.exactness import EMITTERS, as_exact_as_eager


def attention_of(program):
    def attend(q, k, v):
        return program(q @ k.mT).softmax(-1) @ v

    return attend


PROGRAMS = {
    "root of what is clamped below": lambda s: (s.relu() + 1e-6).sqrt(),
    "exponential of what is clamped above": lambda s: (60 * s).clamp(max=2).exp(),
    "root of a selection": lambda s: torch.where(s > 0, s, 1.0).sqrt(),
    "logarithm of a selection": lambda s: torch.where(s > 0.5, s, 1.0).log(),
    "selection of a root": lambda s: torch.where(s > 0, s.sqrt(), 0.0),
    "selection of an exponential": lambda s: torch.where(s < 1, (100 * s).exp(), 2.0),
    "reciprocal of a selection": lambda s: 1.0 / torch.where(s.abs() > 0.1, s, torch.ones_like(s)),
    "power of a selection": lambda s: torch.where(s > 0, s, 0.0) ** 0.5,
    "masked fill, then a root": lambda s: s.masked_fill(s <= 0, 4.0).sqrt(),
    "large scores of activations": lambda s: F.softplus(60 * s) * 0.01 + F.elu(90 * s) * 0.01 + F.mish(50 * s) * 0.01,
    "more of them": lambda s: F.celu(90 * s) * 0.01 + F.selu(90 * s) * 0.01 - F.logsigmoid(90 * s) * 0.01,
    "clamped square root": lambda s: s.clamp(min=0).sqrt(),
    "absolute value, then a root": lambda s: s.abs().sqrt(),
    "sum of exponentials of equals": lambda s: torch.logaddexp(s, s.clamp(min=0.0)),
    "interpolation": lambda s: torch.lerp(s, s * s, 0.75),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_selections(name, emitter):
    given = [torch.randn(1, 2, 19, 8) for _ in range(3)]
    sites = as_exact_as_eager(attention_of(PROGRAMS[name]), given, emitter, gradients=True)
    assert [site.reason for site in sites] == [None]


def lerp_towards_other_scores(q, k, v, mask):
    s, other = q @ k.mT, q @ (k * 0.5).mT
    return torch.lerp(torch.where(mask, s, float("-inf")), other, 0.6).softmax(-1) @ v


@pytest.mark.parametrize("emitter", EMITTERS)
def test_interpolation_from_minus_infinity(emitter):
    given = [*(torch.randn(1, 2, 19, 8) for _ in range(3)), torch.rand(19, 19) > 0.3]
    assert as_exact_as_eager(lerp_towards_other_scores, given, emitter)
