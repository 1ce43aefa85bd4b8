"""Weights that are NaN and set to zero after the softmax, in any spelling: rows without a live key, and rows whose
scores are NaN or infinite themselves."""

import math

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.refusals import Reason
from tests.numerics import assert_as_exact_as_eager
from tests.passes.exactness import WAYS, as_exact_as_eager, padded

LENGTH = 37


def weights(q, k, pad):
    causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT * 0.3).masked_fill(~(pad[:, None, None] & causal), -math.inf).softmax(-1)


def replaced(q, k, v, pad):
    return weights(q, k, pad).nan_to_num() @ v


def replaced_by_a_number(q, k, v, pad):
    return torch.nan_to_num(weights(q, k, pad), 0.0, 1.0, 0.0) @ v


def filled(q, k, v, pad):
    w = weights(q, k, pad)
    return w.masked_fill(w.isnan(), 0.0) @ v


def selected(q, k, v, pad):
    w = weights(q, k, pad)
    return torch.where(torch.isnan(w), torch.zeros_like(w), w) @ v


def equal_to_itself(q, k, v, pad):
    w = weights(q, k, pad)
    return torch.where(w == w, w, 0.0) @ v


def then_dropped(q, k, v, pad):
    keep = torch.arange(k.shape[-2]) % 3 > 0
    return (weights(q, k, pad).nan_to_num() * keep) @ v


def added_mask(q, k, v, pad):
    mask = torch.zeros(pad.shape, dtype=q.dtype).masked_fill(~pad, -math.inf)
    return (q @ k.mT * 0.3 + mask[:, None, None]).softmax(-1).nan_to_num() @ v


def in_float32(q, k, v, pad):
    w = (q @ k.mT).float().masked_fill(~pad[:, None, None], -math.inf).softmax(-1)
    return w.nan_to_num().to(q.dtype) @ v


def by_hand(q, k, v, pad):
    s = (q @ k.mT * 0.3).masked_fill(~pad[:, None, None], -math.inf)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).nan_to_num() @ v


def less_the_logarithm(q, k, v, pad):
    s = (q @ k.mT * 0.3 + v[..., :1, :1]).float().masked_fill(~pad[:, None, None], -math.inf)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)).nan_to_num().to(v.dtype) @ v


FUNCTIONS = [replaced, replaced_by_a_number, filled, selected, equal_to_itself, then_dropped, added_mask, in_float32,
             by_hand, less_the_logarithm]  # fmt: skip


def given(dtype, special):
    """Of a batch of four, three are padded; special: what an element of a query and of a key of the last is."""
    q, k, v, pad = padded(dtype, LENGTH, batch=4)
    q[3, 0, 5, 2], k[3, 1, 30, 3] = special, special
    return [q, k, v, pad]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("special", [1.0, math.nan, math.inf])
@pytest.mark.parametrize(("dtype", "emitter"), WAYS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_rows_of_nan_are_zero(function, dtype, special, emitter):
    (site,) = as_exact_as_eager(function, given(dtype, special), emitter)
    assert site.fused


def replaced_by_one(q, k, v, pad):
    return weights(q, k, pad).nan_to_num(1.0) @ v


def replaced_by_one_of_another(q, k, v, pad):
    """Zero where the weights without the padding are NaN, which they are not where those with it are."""
    other = (q @ k.mT * 0.3).softmax(-1)
    return weights(q, k, pad).masked_fill(other.isnan(), 0.0) @ v


def exponentials_that_overflow(q, k, v, pad):
    e = (q @ k.mT * 40).exp()
    return (e / e.sum(-1, keepdim=True)).nan_to_num() @ v


@pytest.mark.parametrize(
    "function", [replaced_by_one, replaced_by_one_of_another, exponentials_that_overflow], ids=lambda f: f.__name__
)
def test_other_replacements_are_left_alone(function):
    (site,) = as_exact_as_eager(function, given(torch.float32, math.nan))
    assert not site.fused


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dtype", "emitter"), WAYS)
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f not in (added_mask, less_the_logarithm)])
def test_in_training_a_selection_keeps_gradients_from_the_scores(function, dtype, emitter):
    (site,) = as_exact_as_eager(function, given(dtype, 1.0), emitter, gradients=True)
    assert site.fused, site.reason


def test_in_training_it_is_left_alone():
    """The gradient of such a row is NaN before the mask, whatever its weights are set to."""
    q, k, v, pad = given(torch.float32, 1.0)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with fusion.collect_reports() as reports:
        out = torch.compile(added_mask, backend="fusion", options={"inner": "eager"})(q, k, v, pad)
    (site,) = reports[0].sites
    assert site.refusal.kind is Reason.NAN_GRADIENT
    eager = added_mask(q, k, v, pad)
    ours, theirs = (torch.autograd.grad(x.sum(), leaves) for x in (out, eager))
    exact = torch.autograd.grad(added_mask(*(x.double() for x in leaves), pad).sum(), leaves)
    assert_as_exact_as_eager(ours, theirs, exact)


def cleaned_then_masked(q, k, v, pad):
    return (q @ k.mT).nan_to_num().masked_fill(~pad[:, None, None], -math.inf).softmax(-1) @ v


def large_or_masked(q, k, v, pad):
    s = q @ k.mT
    return s.masked_fill((s < 0) | ~pad[:, None, None], -math.inf).softmax(-1) @ v


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, LENGTH])
@pytest.mark.parametrize("special", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("function", [cleaned_then_masked, large_or_masked], ids=lambda f: f.__name__)
def test_masks_of_data_and_of_scores(function, special, rows):
    """Kernels for few rows look which keys are live before they know scores."""
    q, k, v, pad = given(torch.float32, special)
    (site,) = as_exact_as_eager(function, [q[:, :, 5 : 5 + rows], k, v, pad])
    assert site.fused


def lerped(q, k, v, pad):
    """NaN where a key is masked, as -inf less -inf is."""
    live = pad[:, None, None]
    s = (q @ k.mT * 0.3).masked_fill(~live, -math.inf)
    near = torch.arange(LENGTH) <= torch.arange(LENGTH)[:, None]
    p = torch.lerp(torch.where(near, s, -10000.0), s, 0.3).softmax(-1)
    return torch.where(live, p, 0.0) @ v


def a_difference_of_masks(q, k, v, pad):
    live = pad[:, None, None]
    s = (q @ k.mT * 0.3).masked_fill(~live, -math.inf)
    return (2 * s - torch.where(live, 0.5, -math.inf)).softmax(-1).masked_fill(~live, 0.0) @ v


def a_negated_mask(q, k, v, pad):
    live = pad[:, None, None]
    s = (q @ k.mT * 0.3).masked_fill(~live, -math.inf)
    return (s + -1.0 * torch.where(live, 0.5, -math.inf)).softmax(-1).masked_fill(~live, 0.0) @ v


def masked_then_silu(q, k, v, pad):
    """silu(-inf) is -inf * 0."""
    live = pad[:, None, None]
    return F.silu((q @ k.mT).masked_fill(~live, -math.inf)).softmax(-1).masked_fill(~live, 0.0) @ v


def masked_then_a_wave(q, k, v, pad):
    live = pad[:, None, None]
    return torch.sin((q @ k.mT).masked_fill(~live, -math.inf)).softmax(-1).masked_fill(~live, 0.0) @ v


def masked_by_a_logarithm_then_by_a_product(q, k, v, pad):
    causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    s = q @ k.mT + torch.log(pad[:, None, None].to(q.dtype))
    return (s * causal - 1e9 * ~causal).softmax(-1).masked_fill(~pad[:, None, None], 0.0) @ v


UNSELECTED = [lerped, a_difference_of_masks, a_negated_mask, masked_then_silu, masked_then_a_wave,
              masked_by_a_logarithm_then_by_a_product]  # fmt: skip


@pytest.mark.parametrize("function", UNSELECTED, ids=lambda f: f.__name__)
def test_weights_of_nan_that_are_not_selected_are_zero(function):
    """In a product with 0, as a kernel has it, they would be NaN, and the gradient of V there, too."""
    (site,) = as_exact_as_eager(function, given(torch.float32, 1.0), gradients=True)
    assert not site.fused and site.refusal.kind is Reason.MASKED_AFTER


def two_masks(q, k, v, pad):
    live = pad[:, None, None]
    s = (q @ k.mT * 0.3).masked_fill(~live, -math.inf) + torch.where(live, 0.0, -math.inf)
    return (s - s.amax(-1, keepdim=True)).softmax(-1).masked_fill(~live, 0.0) @ v


def scaled_below_the_maximum(q, k, v, pad):
    live = pad[:, None, None]
    s = (q @ k.mT * 0.3).masked_fill(~live, -math.inf)
    return ((s - s.amax(-1, keepdim=True)) * v[:1, :1, :1, :1].exp()).softmax(-1).masked_fill(~live, 0.0) @ v


@pytest.mark.parametrize(("function", "gradients"), [(two_masks, True), (scaled_below_the_maximum, False)])
def test_other_infinities_are_no_reason(function, gradients):
    (site,) = as_exact_as_eager(function, given(torch.float32, 1.0), gradients=gradients)
    assert site.fused, site.reason


def times_a_gate_of_nan(q, k, v, pad):
    s = F.silu((q @ k.mT).masked_fill(~pad[:, None, None], -math.inf))
    return (s.softmax(-1).nan_to_num() * torch.tanh(s)) @ v


def test_a_weight_that_was_cleaned_is_nan_times_a_gate_of_nan():
    """Kernels have 0 in rows of NaN, whatever the gate is."""
    (site,) = as_exact_as_eager(times_a_gate_of_nan, given(torch.float32, 1.0))
    assert not site.fused and site.refusal.kind is Reason.NOT_LINEAR
