"""Products that are written as a multiplication and a sum, and distances, which are no products but listed."""

import math

import pytest
import torch

import fusion
from fusion.refusals import Reason
from tests.passes.exactness import EMITTERS, as_exact_as_eager, padded

LENGTH = 23


def weights(s, pad):
    return (s * 0.3).masked_fill(~pad[:, None, None], -1e4).softmax(-1)


def scores_by_a_sum(q, k, v, pad):
    return weights((q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1), pad) @ v


def kept_dimension(q, k, v, pad):
    s = (q[:, :, :, None] * k[:, :, None]).sum(-1, keepdim=True)
    return weights(s[..., 0], pad) @ v


def features_in_front(q, k, v, pad):
    s = (q.permute(3, 0, 1, 2)[..., None] * k.permute(3, 0, 1, 2)[..., None, :]).sum(0)
    return weights(s, pad) @ v


def scores_by_vecdot(q, k, v, pad):
    return weights(torch.linalg.vecdot(q.unsqueeze(-2), k.unsqueeze(-3)), pad) @ v


def values_by_a_sum(q, k, v, pad):
    return (weights(q @ k.mT, pad).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def both_by_sums(q, k, v, pad):
    s = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1).masked_fill(~pad[:, None, None], -math.inf)
    return (s.softmax(-1)[..., None] * v[..., None, :, :]).sum(3)


def keys_of_all_heads(q, k, v, pad):
    """One head of keys, broadcast as well."""
    return weights((q.unsqueeze(-2) * k[:, :1].unsqueeze(-3)).sum(-1), pad) @ v


def exponentials_by_einsums(q, k, v, pad):
    e = (q @ k.mT * 0.3).exp() * pad[:, None, None]
    return torch.einsum("bhid,bhi->bihd", torch.einsum("bhij,bhjd->bhid", e, v), 1 / (e.sum(-1) + 1.0))


def sum_of_exponentials_by_an_einsum(q, k, v, pad):
    s = q @ k.mT * 0.3
    e = (s - s.amax(-1, keepdim=True)).exp()
    return torch.einsum("bhij,bhjd->bihd", e, v) / torch.einsum("bhij->bih", e)[..., None] * pad.any()


FUSED = [scores_by_a_sum, kept_dimension, features_in_front, scores_by_vecdot, values_by_a_sum, both_by_sums,
         keys_of_all_heads, exponentials_by_einsums, sum_of_exponentials_by_an_einsum]  # fmt: skip


@pytest.mark.parametrize("function", FUSED, ids=lambda f: f.__name__)
def test_is_fused_with_as_many_keys_as_columns(function):
    """A sum over columns, of which validation takes a few, is then as long as one over keys."""
    q, k, v = (torch.randn(3, 2, 8, 8) for _ in range(3))
    (site,) = as_exact_as_eager(function, [q, k, v, torch.arange(8) < torch.tensor([[8], [5], [1]])])
    assert site.fused, site.refusal


@pytest.mark.one_in(4)
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", FUSED, ids=lambda f: f.__name__)
def test_is_fused(function, dtype, emitter):
    (site,) = as_exact_as_eager(function, padded(dtype, LENGTH), emitter, gradients=True)
    assert site.reason is None


def cdist(q, k, v, pad):
    return weights(-torch.cdist(q, k), pad) @ v


def squared_cdist(q, k, v, pad):
    return weights(-(torch.cdist(q, k) ** 2), pad) @ v


def squared_differences(q, k, v, pad):
    return weights(-(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1), pad) @ v


def norms_of_differences(q, k, v, pad):
    return weights(-torch.linalg.vector_norm(q.unsqueeze(-2) - k.unsqueeze(-3), dim=-1), pad) @ v


def sums_of_magnitudes(q, k, v, pad):
    return weights(-(q[:, :, :, None] - k[:, :, None]).abs().sum(-1), pad) @ v


DISTANCES = [cdist, squared_cdist, squared_differences, norms_of_differences, sums_of_magnitudes]


@pytest.mark.parametrize("function", DISTANCES, ids=lambda f: f.__name__)
def test_distances_are_listed(function):
    (site,) = as_exact_as_eager(function, padded(torch.float32, LENGTH))
    assert site.refusal.kind is Reason.DISTANCES


def with_a_distance(q, k, v, pad):
    """Beside a product, a distance is a tensor like any other."""
    where = q[:, :1, :, :2]
    return weights(q @ k.mT - torch.cdist(where, where), pad) @ v


def test_a_bias_of_distances_is_read():
    (site,) = as_exact_as_eager(with_a_distance, padded(torch.float32, LENGTH))
    assert site.fused


def one_query(q, k, v):
    return ((q * k).sum(-1).softmax(-1).unsqueeze(-1) * v).sum(-2)


def one_query_of_a_product(q, k, v):
    return ((q @ k.mT).softmax(-1).mT * v).sum(-2)


def one_query_with_values_by_matmul(q, k, v):
    return (q * k).sum(-1).softmax(-1).unsqueeze(-2) @ v


@pytest.mark.parametrize("function", [one_query, one_query_of_a_product, one_query_with_values_by_matmul])
def test_products_with_one_query_are_listed(function):
    q, k, v, _ = padded(torch.float32, LENGTH)
    (site,) = as_exact_as_eager(function, [q[..., :1, :], k, v])
    assert not site.fused and site.refusal.kind in (Reason.PRODUCT_FORM, Reason.NOT_POINTWISE)


def masked_again(q, k, v, pad):
    """A sum of masked weights is no product with V."""
    w = weights(q @ k.mT, pad) * pad[:, None, None].to(q.dtype)
    return (w / w.sum(-1, keepdim=True).clamp(min=0.5)) @ v


def test_sums_of_masked_weights_are_not_listed():
    (site,) = as_exact_as_eager(masked_again, padded(torch.float32, LENGTH))
    assert site.refusal is None or site.refusal.kind is not Reason.PRODUCT_FORM


def test_sums_of_elements_are_no_products():
    """The entropy of weights, and a norm: nothing is broadcast."""

    def function(x, y):
        w = torch.softmax(x * y, -1)
        return (w * w.log()).sum(-1), (x * x).sum(-1, keepdim=True).sqrt(), (w * y[:1]).sum()

    with fusion.collect_reports() as reports:
        torch.compile(function, backend="fusion", options={"inner": "eager"})(torch.rand(4, 5), torch.rand(4, 5))
    assert not [site for report in reports for site in report.sites]
