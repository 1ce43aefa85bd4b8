"""Masks that are added to scores: rows without a live key average as in eager mode, which depends on how often each key
is masked, and gradients pass through what is added to."""

import math

import pytest
import torch

from tests.passes.exactness import as_exact_as_eager, padded

LENGTH = 37


def lowest(x):
    return torch.finfo(x.dtype).min


def causal(q, k):
    return torch.arange(k.shape[-2]) <= torch.arange(q.shape[-2])[:, None]


def added(keep, fill, like):
    return torch.zeros(keep.shape, dtype=like.dtype).masked_fill(~keep, fill)


def padding_and_causal(q, k, v, pad):
    mask = added(pad[:, None, None], lowest(q), q) + added(causal(q, k), lowest(q), q)
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def one_after_the_other(q, k, v, pad):
    s = q @ k.mT * 0.3 + added(pad[:, None, None], lowest(q), q)
    return (s + added(causal(q, k), lowest(q), q)).softmax(-1) @ v


def selection_and_padding(q, k, v, pad):
    """GPT-2."""
    s = torch.where(causal(q, k), q @ k.mT / 2.0, torch.full([], lowest(q), dtype=q.dtype))
    return (s + added(pad[:, None, None], lowest(q), q)).softmax(-1) @ v


def padding_then_selection(q, k, v, pad):
    s = q @ k.mT / 2.0 + added(pad[:, None, None], lowest(q), q)
    return s.masked_fill(~causal(q, k), lowest(q)).softmax(-1) @ v


def infinite_and_large(q, k, v, pad):
    s = (q @ k.mT * 0.3).masked_fill(~pad[:, None, None], -math.inf)
    return (s + (~causal(q, k)).to(q.dtype) * -1e4).softmax(-1) @ v


def large_twice(q, k, v, pad):
    s = q @ k.mT * 0.3 + (1.0 - pad[:, None, None].to(q.dtype)) * -1e9
    return (s + (1.0 - causal(q, k).to(q.dtype)) * -1e9).softmax(-1) @ v


def three_masks(q, k, v, pad):
    window = (torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])).abs() < 9
    s = q @ k.mT * 0.3 + added(pad[:, None, None], lowest(q), q)
    s = s + added(causal(q, k), lowest(q), q)
    return (s + added(window, -1e4, q)).softmax(-1) @ v


def loaded_and_causal(q, k, v, pad):
    mask = added(pad, lowest(q), q).cumsum(-1).clamp(min=lowest(q))  # no expression of a position
    return (q @ k.mT * 0.3 + mask[:, None, None] + added(causal(q, k), lowest(q), q)).softmax(-1) @ v


def scaled_by_more_than_one(q, k, v, pad):
    s = q @ k.mT * 3.0 + added(pad[:, None, None], lowest(q), q)
    return (s + added(causal(q, k), lowest(q), q)).softmax(-1) @ v


def subtracted(q, k, v, pad):
    return (q @ k.mT * 0.3 - (~pad[:, None, None]).to(q.dtype) * 1e9).softmax(-1) @ v


def infinite_where_dead(q, k, v, pad):
    return (q @ k.mT * 0.3 + added(pad[:, None, None], -math.inf, q)).softmax(-1) @ v


def moderate(q, k, v, pad):
    return (q @ k.mT * 0.3 + added(pad[:, None, None], -1e4, q)).softmax(-1) @ v


def large_scores(q, k, v, pad):
    """Some of 64 and more, which -1e9 does not swallow."""
    return (q @ k.mT * 12.0 + added(pad[:, None, None] & causal(q, k), max(-1e9, lowest(q)), q)).softmax(-1) @ v


def in_float32(q, k, v, pad):
    s = (q @ k.mT).float() * 0.3 + added(pad[:, None, None] & causal(q, k), lowest(q), q).float()
    return s.softmax(-1).to(q.dtype) @ v


FUNCTIONS = [padding_and_causal, one_after_the_other, selection_and_padding, padding_then_selection, infinite_and_large,
             large_twice, three_masks, loaded_and_causal, scaled_by_more_than_one, subtracted, infinite_where_dead,
             moderate, large_scores, in_float32]  # fmt: skip


NARROW = [padding_and_causal, three_masks, loaded_and_causal]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_added_masks_are_as_in_eager_mode(function, dtype):
    (site,) = as_exact_as_eager(function, padded(dtype, LENGTH), "reference", gradients=True)
    assert site.reason is None


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_in_kernels_too(function):
    (site,) = as_exact_as_eager(function, padded(torch.float32, LENGTH), gradients=True)
    assert site.fused


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", NARROW, ids=lambda f: f.__name__)
def test_in_kernels_of_narrow_dtypes(function, dtype):
    (site,) = as_exact_as_eager(function, padded(dtype, LENGTH), gradients=True)
    assert site.fused
