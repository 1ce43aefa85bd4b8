"""Scores made from several products: each enters with its own scale, once, whichever of them the kernel computes."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.exactness import EMITTERS, as_exact_as_eager


def einsum_of_scaled_queries(q, k, v, r):
    q = q * 0.35
    return ((q @ k.mT) + torch.einsum("bhid,jd->bhij", q, r[0, 0])).softmax(-1) @ v


def wider_first(q, k, v, r):
    return (((q * 0.3) @ (k * 0.5).mT) + (q[..., :4] * 2.0) @ (r[..., :4] / 3.0).mT).softmax(-1) @ v


def wider_last(q, k, v, r):
    return ((q[..., :4] * 2.0) @ (r[..., :4] / 3.0).mT + ((q * 0.3) @ (k * 0.5).mT)).softmax(-1) @ v


def gated_by_a_product(q, k, v, r):
    return ((q * 0.5) @ k.mT * torch.sigmoid((q * 0.25) @ (r * 2.0).mT)).softmax(-1) @ v


def _flat(x):
    return x.flatten(0, 1)


def second_baddbmm(q, k, v, r):
    s = q @ k.mT
    added = torch.baddbmm(_flat(s), _flat(q), _flat(r).mT, beta=0.5, alpha=0.25)
    return (added.unflatten(0, s.shape[:2])).softmax(-1) @ v


def baddbmm_without_added(q, k, v, r):
    empty = torch.zeros(1, 1, 1, dtype=q.dtype)
    second = torch.baddbmm(empty, _flat(q), _flat(r).mT, beta=0, alpha=0.25)
    return (q @ k.mT * 0.3 + second.unflatten(0, q.shape[:2])).softmax(-1) @ v


def baddbmm_with_bias_and_wider_product(q, k, v, r):
    bias = torch.arange(k.shape[2], dtype=q.dtype).expand(q.shape[0] * q.shape[1], q.shape[2], -1) / 16
    first = torch.baddbmm(bias, _flat(q[..., :4]), _flat(k[..., :4]).mT, beta=2.0, alpha=0.5)
    return (first.unflatten(0, q.shape[:2]) + (q * 0.5) @ r.mT).softmax(-1) @ v


def mask_made_from_a_product(q, k, v, r):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(q * 0.5) @ (r * 0.5).mT)


def mask_made_from_a_wider_product(q, k, v, r):
    return F.scaled_dot_product_attention(q[..., :4], k[..., :4], v, attn_mask=(q * 0.5) @ r.mT)


def three_products(q, k, v, r):
    return (((q * 0.3) @ k.mT - (q * 0.5) @ r.mT) + (r * 0.25) @ (k * 0.5).mT).softmax(-1) @ v


def differential(q, k, v, r):
    q = q * 0.5
    return ((q @ k.mT).softmax(-1) - 0.3 * (q @ r.mT + (q * 0.5) @ k.mT).softmax(-1)) @ v


FUNCTIONS = [einsum_of_scaled_queries, wider_first, wider_last, gated_by_a_product, second_baddbmm,
             baddbmm_without_added, baddbmm_with_bias_and_wider_product, mask_made_from_a_product,
             mask_made_from_a_wider_product, three_products, differential]  # fmt: skip


def two_baddbmms_with_bias(q, k, v, r):
    bias = torch.arange(k.shape[2], dtype=q.dtype).expand(q.shape[0] * q.shape[1], q.shape[2], -1) / 16
    first = torch.baddbmm(bias, _flat(q), _flat(k).mT, beta=2.0, alpha=0.5)
    second = torch.baddbmm(bias, _flat(q), _flat(r).mT, beta=0.5, alpha=0.25)
    return (first + second).unflatten(0, q.shape[:2]).softmax(-1) @ v


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_each_product_has_its_own_scale(function, emitter):
    given = [torch.randn(2, 2, 19, 8) for _ in range(4)]
    sites = as_exact_as_eager(function, given, emitter, gradients=True)
    assert all(site.reason is None for site in sites) and sites


@pytest.mark.parametrize("function", FUNCTIONS[:4], ids=lambda f: f.__name__)
def test_also_in_bfloat16(function):
    sites = as_exact_as_eager(function, [torch.randn(2, 2, 19, 8, dtype=torch.bfloat16) for _ in range(4)])
    assert all(site.reason is None for site in sites) and sites


def test_two_products_with_something_added_are_left_alone():
    (site,) = as_exact_as_eager(two_baddbmms_with_bias, [torch.randn(2, 2, 19, 8) for _ in range(4)])
    assert "two products to which something is added" in site.reason


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("apart", [False, True])
def test_scales_that_keep_scores_from_overflowing_stay_with_their_operand(apart, emitter):
    def function(q, k, v):
        small = (q * 1e-5).reshape(2, 3, 9, 8) * 1e-5 if apart else q * 1e-10
        return torch.softmax((small @ k.mT) * 1e-28, -1) @ v

    q, k, v = (torch.randn(2, 3, 9, 8) for _ in range(3))
    as_exact_as_eager(function, [q * 1e19, k * 1e20, v], emitter)
