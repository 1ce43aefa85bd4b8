"""Scores through which, in training, no gradient flows on one of several ways."""

import math

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.refusals import Reason
from tests.passes.exactness import WAYS, as_exact_as_eager, padded

LENGTH = 37


def scores(q, k, pad):
    causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT * 0.3).masked_fill(~(pad[:, None, None] & causal), -math.inf)


def finite(q, k, pad):
    return (q @ k.mT * 0.3).masked_fill(~pad[:, None, None], torch.finfo(q.dtype).min)


def less_the_largest_of_the_detached(q, k, v, pad):
    s = scores(q, k, pad)
    return (s - s.detach().amax(-1, keepdim=True)).softmax(-1) @ v


def less_the_detached_largest(q, k, v, pad):
    s = finite(q, k, pad)
    return (s - s.amax(-1, keepdim=True).detach()).softmax(-1) @ v


def less_the_largest_without_grad(q, k, v, pad):
    s = finite(q, k, pad)
    with torch.no_grad():
        top = s.amax(-1, keepdim=True)
    return (s - top).softmax(-1) @ v


def by_hand(q, k, v, pad):
    s = scores(q, k, pad)
    e = (s - s.detach().max(-1, keepdim=True).values).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def by_hand_with_a_clamped_shift(q, k, v, pad):
    s = finite(q, k, pad)
    e = (s - s.amax(-1, keepdim=True).clamp(min=-5.0).detach()).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def more_of_the_detached(q, k, v, pad):
    s = scores(q, k, pad)
    return (s + 0.5 * s.detach()).softmax(-1) @ v


def more_of_the_detached_and_finite(q, k, v, pad):
    s = finite(q, k, pad)
    return (s * 0.5 + s.detach() * 0.25).softmax(-1) @ v


def gated_by_the_detached(q, k, v, pad):
    s = q @ k.mT * 0.3
    return (s * torch.sigmoid(s.detach())).masked_fill(~pad[:, None, None], -1e4).softmax(-1) @ v


def straight_through(q, k, v, pad):
    """The value is rounded, the gradient is not."""
    s = q @ k.mT
    return (s + (s.round() - s).detach()).masked_fill(~pad[:, None, None], -1e4).softmax(-1) @ v


def without_grad(q, k, v, pad):
    s = q @ k.mT * 0.3
    with torch.no_grad():
        twice = s * 2
    return (s + twice).softmax(-1) @ v


def largest_in_the_normaliser(q, k, v, pad):
    s = q @ k.mT
    e = (s - s.detach().amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-2)) @ v


def clamped_largest_in_the_normaliser(q, k, v, pad):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True).clamp(min=0).detach()).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-2)) @ v


def weights_alone(q, k, v, pad):
    """As those of the layers before a frozen one: Q and K have a gradient by other ways."""
    return scores(q, k, pad).softmax(-1).detach() @ v + q * 0.5 + k.mean()


def scaled_and_dropped_weights(q, k, v, pad):
    w = scores(q, k, pad).softmax(-1) * pad[:, None, None].cumsum(-1)
    return (w * 0.5).detach() @ v + q * 0.5 + k.mean()


def detached_weights(q, k, v, pad):
    """Two attentions, one of which has no gradient but that of V."""
    w = (q @ k.mT).softmax(-1)
    return (w + w.detach()) @ v


FUSED = [detached_weights, weights_alone, scaled_and_dropped_weights, less_the_largest_of_the_detached,
         less_the_detached_largest, less_the_largest_without_grad, by_hand, by_hand_with_a_clamped_shift,
         more_of_the_detached, more_of_the_detached_and_finite, gated_by_the_detached, straight_through,
         without_grad, largest_in_the_normaliser, clamped_largest_in_the_normaliser]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dtype", "emitter"), WAYS)
@pytest.mark.parametrize("function", FUSED, ids=lambda f: f.__name__)
def test_is_fused_in_training(function, dtype, emitter):
    (site,) = as_exact_as_eager(function, padded(dtype, LENGTH), emitter, gradients=True)
    assert site.reason is None


def detached_sum(q, k, v, pad):
    e = (q @ k.mT * 0.3).exp()
    return (e / e.sum(-1, keepdim=True).detach()) @ v


def sum_of_the_detached(q, k, v, pad):
    e = (q @ k.mT * 0.3).exp()
    return (e / e.detach().sum(-1, keepdim=True)) @ v


def partly_detached_largest_in_the_normaliser(q, k, v, pad):
    s = q @ k.mT
    s = s + 0.5 * s.detach()
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-2)) @ v


def first_of_the_largest_in_the_normaliser(q, k, v, pad):
    """Integers, so that some scores are equal: amax shares its gradient between them, max(dim) does not."""
    s = (q * 0 + 1 + q.detach().round()) @ k.round().mT
    e = (s - s.max(-1, keepdim=True)[0]).exp()
    return (e / (e.sum(-1, keepdim=True) + 1.0)) @ v


LEFT = [first_of_the_largest_in_the_normaliser, partly_detached_largest_in_the_normaliser, detached_sum,
        sum_of_the_detached]  # fmt: skip


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_is_left_alone_where_the_gradient_would_differ(function):
    (site,) = as_exact_as_eager(function, padded(torch.float32, LENGTH), gradients=True)
    assert not site.fused and site.refusal.kind is not Reason.DEFECT


def from_detached(q, k, v, pad):
    return F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), pad[:, None, None])


def from_views_of_the_detached(q, k, v, pad):
    q, k, v = (x.detach().transpose(1, 2).flatten(2) for x in (q, k, v))
    return (q @ k.mT * 0.3).softmax(-1) @ v


def from_data(q, k, v, pad):
    return scores(q.data, k.data, pad).softmax(-1) @ v.data


def bias_alone_is_trained(q, k, v, pad):
    return (q.detach() @ k.detach().mT + v[..., :1, :1]).masked_fill(~pad[:, None, None], -1e4).softmax(-1) @ v.detach()


def beside_a_trained_tensor(q, k, v, pad):
    return from_detached(q, k, v, pad), q * 2


def below_no_grad(q, k, v, pad):
    with torch.no_grad():
        return scores(q, k, pad).softmax(-1) @ v


DETACHED = [from_detached, from_views_of_the_detached, from_data, bias_alone_is_trained, beside_a_trained_tensor,
            below_no_grad]  # fmt: skip


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("function", DETACHED, ids=lambda f: f.__name__)
def test_operands_that_are_detached_have_no_gradient(function, inner):
    """None, and not zero, of every operand and output that has none in eager mode."""
    inputs = [x.requires_grad_(x.is_floating_point()) for x in padded(torch.float32, LENGTH)]
    with fusion.collect_reports() as reports:
        outputs = torch.compile(function, backend="fusion", options={"inner": inner})(*inputs)
    assert [report.fused for report in reports] == [1]
    expected = function(*inputs)
    if not isinstance(expected, tuple):
        outputs, expected = [outputs], [expected]
    for ours, eager in zip(outputs, expected, strict=True):
        assert ours.requires_grad is eager.requires_grad
        if eager.requires_grad:
            found, wanted = (torch.autograd.grad(out.sum(), inputs[:3], allow_unused=True) for out in (ours, eager))
            assert [x is None for x in found] == [x is None for x in wanted]
