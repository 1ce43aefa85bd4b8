"""Einsums are traced as what they are: sums, permutations, and products after a reshape."""

import pytest
import torch

from tests.numerics import assert_as_exact_as_eager
from tests.passes.exactness import EMITTERS, as_exact_as_eager


def tied_rows(q, k, v):
    """[rows, columns, batch, heads, d]: one softmax for all rows of an alignment (MSA Transformer)."""
    w = (torch.einsum("rinhd,rjnhd->hnij", q, k) * 0.1).softmax(-1)
    return torch.einsum("hnij,rjnhd->rinhd", w, v)


def tied_rows_behind_a_mask(q, k, v):
    s = torch.einsum("rinhd,rjnhd->hnij", q, k * 0.1)
    s = s.masked_fill(torch.arange(k.shape[1]) > k.shape[1] - 6, -10000)
    return torch.einsum("hnij,rjnhd->rinhd", s.softmax(-1), v)


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("function", [tied_rows, tied_rows_behind_a_mask])
def test_tied_rows_are_one_attention_whose_heads_are_wide(function, emitter):
    given = [torch.randn(3, n, 2, 2, 5) for n in (19, 23, 23)]
    (site,) = as_exact_as_eager(function, given, emitter, gradients=True)
    assert site.reason is None
    assert site.specs[0].d.integer == site.specs[0].d_v.integer == 15


def test_tied_rows_of_any_length_compile_once():
    compiled = torch.compile(tied_rows, backend="fusion", dynamic=True, options={"inner": "eager", "strict": True})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (19, 23, 40):
            given = [torch.randn(3, count, 2, 2, 5) for count in (n, n + 3, n + 3)]
            wide = [x.double() for x in given]
            assert_as_exact_as_eager(compiled(*given), tied_rows(*given), tied_rows(*wide))


def edges(q, k, e):
    """Each query has keys of its own, with what stands on its edges (graph transformers)."""
    s = torch.einsum("bid,bijd->bij", q, k[:, None] + e) * 0.3
    return torch.einsum("bij,bijd->bid", s.softmax(-1), e)


def pooling(q, k, v):
    """One query, which is a parameter."""
    return torch.einsum("bj,bjd->bd", torch.einsum("d,bjd->bj", q[0, 0], k).softmax(-1), v[:, 0])


def pooling_with_a_vector(q, k, v):
    return torch.softmax(k @ q[0, 0], -1).unsqueeze(1) @ v[:, 0]


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("function", [edges, pooling, pooling_with_a_vector])
def test_one_query_of_its_own_keys_needs_no_dimension(function, emitter):
    given = torch.randn(2, 19, 6), torch.randn(2, 23, 6), torch.randn(2, 19, 23, 6)
    (site,) = as_exact_as_eager(function, given, emitter, gradients=True)
    assert site.reason is None


def slots(x, queries, values):
    """Queries of two dimensions, of experts and of their slots, with keys in the middle (Soft MoE: Puigcerver et al.,
    2023). Its product with V is one of matrices whose rows are both."""
    s = torch.einsum("bnd,esd->bnes", x, queries).masked_fill(torch.arange(x.shape[1])[:, None, None] > 15, -1e9)
    return torch.einsum("bnd,bnes->besd", values, s.softmax(1))


def slots_first(x, queries, values):
    return torch.einsum("bnes,bnd->sbed", torch.einsum("bnd,esd->bnes", x, queries).softmax(1), values)


@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("function", [slots, slots_first])
def test_queries_of_two_dimensions_are_rows(function, emitter):
    given = torch.randn(2, 19, 6), torch.randn(3, 17, 6), torch.randn(2, 19, 8)
    (site,) = as_exact_as_eager(function, given, emitter, gradients=True)
    assert site.reason is None


def test_queries_of_two_dimensions_of_any_length_compile_once():
    compiled = torch.compile(slots, backend="fusion", dynamic=True, options={"inner": "eager", "strict": True})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (18, 23, 40):
            given = torch.randn(2, n, 6), torch.randn(3, n + 2, 6), torch.randn(2, n, 8)
            assert_as_exact_as_eager(compiled(*given), slots(*given), slots(*(x.double() for x in given)))
