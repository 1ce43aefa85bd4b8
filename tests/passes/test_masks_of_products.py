"""Masks of `scaled_dot_product_attention` that are made of another product: by a reduction over its rows they are read
from the graph, which makes them."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.passes.exactness import as_exact_as_eager

N = 18


def no_row_is_dead(q, k, v):
    """Mask2Former's: a query that would see nothing sees everything."""
    dead = torch.einsum("bhqc,bhnc->bhqn", v, k).sigmoid() < 0.5
    dead = dead & (dead.sum(-1, keepdim=True) != N)
    return sdpa(q, k, v, attn_mask=~dead)


def less_its_maximum(q, k, v):
    b = q @ k.mT
    return sdpa(q, k, v, attn_mask=b - b.amax(-1, keepdim=True))


def log_probabilities(q, k, v):
    return sdpa(q, k, v, attn_mask=(v @ k.mT).log_softmax(-1))


def probabilities_of_queries(q, k, v):
    return sdpa(q, k, v, attn_mask=(v @ k.mT).softmax(-2) * 3)


def plain(q, k, v):
    return sdpa(q, k, v, attn_mask=v @ k.mT * 0.2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize(
    "function", [no_row_is_dead, less_its_maximum, log_probabilities, probabilities_of_queries, plain]
)
def test_masks_of_another_product(function, emitter, gradients):
    torch.manual_seed(0)
    given = [torch.randn(2, 2, N, 8) for _ in range(3)]
    (site,) = as_exact_as_eager(function, given, emitter, gradients)
    assert site.fused, site.reason
