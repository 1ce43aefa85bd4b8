"""Einsums that are no product of matrices run as what they are: sums, permutations, and products after a reshape."""

import pytest
import torch

from fusion.passes.trace.decompositions import decomposed_einsum
from tests.numerics import assert_as_exact_as_eager, assert_same
from tests.passes.exactness import EMITTERS, as_exact_as_eager


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhij->bih", [(2, 3, 4, 5)]),
        ("abc -> ca", [(2, 3, 4)]),
        ("abc->cab", [(2, 3, 4)]),
        ("bhid,bhi->bihd", [(2, 3, 4, 5), (2, 3, 4)]),
        ("i,j->ji", [(4,), (5,)]),
        ("ab,ba->ab", [(2, 3), (3, 2)]),
        ("ab,ab->ab", [(2, 3), (1, 3)]),
    ],
)
def test_einsums_decomposed_einsum(equation, shapes):
    operands = [torch.randn(shape) for shape in shapes]
    found, eager = decomposed_einsum(equation, *operands), torch.einsum(equation, *operands)
    assert_same(found, eager)
    assert found.stride() == eager.stride()


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("ij,jk->ik", [(2, 3), (3, 4)]), ("...i->...", [(2, 3)]), ("ii->i", [(3, 3)]), ("ij->", [(3, 3)]),
        ("i,i,i->i", [(3,), (3,), (3,)]), ("ij", [(2, 3)]), ("ia,ib->i", [(2, 3), (2, 3)]),
        ("icd,jcd->ij", [(2, 3, 4), (5, 3, 1)]), ("bxd,byvd->bxyv", [(2, 3, 4), (2, 5, 6, 4)]),
        ("iacd,jcd->ij", [(2, 3, 4, 5), (3, 4, 5)]), ("bid,bid->bi", [(2, 3, 4), (2, 3, 4)]),
    ],
)  # fmt: skip
def test_others_stay(equation, shapes):
    assert decomposed_einsum(equation, *(torch.randn(shape) for shape in shapes)) is NotImplemented


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("rinhd,rjnhd->hnij", [(5, 7, 2, 3, 4), (5, 6, 2, 3, 4)]),
        ("hnij,rjnhd->rinhd", [(3, 2, 7, 6), (5, 6, 2, 3, 4)]),
        ("icd,jcd->ij", [(7, 3, 4), (6, 3, 4)]),
        ("abc,abd->cd", [(2, 3, 4), (2, 3, 5)]),
        ("bjhde,bhij->bihde", [(2, 6, 3, 4, 5), (2, 3, 7, 6)]),
        ("bijc,bjcd->bid", [(2, 7, 6, 5), (2, 6, 5, 8)]),
        ("icd,jcd->ij", [(7, 3, 0), (6, 3, 0)]),
        ("bid,bijd->bij", [(2, 3, 4), (2, 3, 5, 4)]),
        ("bijd,bij->bid", [(2, 3, 5, 4), (2, 3, 5)]),
        ("j,jd->d", [(5,), (5, 4)]),
        ("jd,d->j", [(5, 4), (4,)]),
        ("ijd,jd->i", [(2, 3, 4), (3, 4)]),
    ],
)
def test_with_fewer_dimensions(equation, shapes):
    operands = [torch.randn(shape) for shape in shapes]
    found, eager = decomposed_einsum(equation, *operands), torch.einsum(equation, *operands)
    assert_as_exact_as_eager(found, eager, torch.einsum(equation, *(x.double() for x in operands)))
    assert found.stride() == eager.stride()


def tied_rows(q, k, v):
    """[rows, columns, batch, heads, d]: one softmax for all rows of an alignment (MSA Transformer)."""
    w = (torch.einsum("rinhd,rjnhd->hnij", q, k) * 0.1).softmax(-1)
    return torch.einsum("hnij,rjnhd->rinhd", w, v)


def tied_rows_behind_a_mask(q, k, v):
    s = torch.einsum("rinhd,rjnhd->hnij", q, k * 0.1)
    s = s.masked_fill(torch.arange(k.shape[1]) > k.shape[1] - 6, -10000)
    return torch.einsum("hnij,rjnhd->rinhd", s.softmax(-1), v)


@pytest.mark.one_in(2)
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
def test_of_queries_of_two_dimensions_the_outer_is_one_of_the_batch(function, emitter):
    given = torch.randn(2, 19, 6), torch.randn(3, 17, 6), torch.randn(2, 19, 8)
    (site,) = as_exact_as_eager(function, given, emitter, gradients=True)
    assert site.reason is None
    assert len(site.specs[0].batch) == 2


def test_queries_of_two_dimensions_of_any_length_compile_once():
    compiled = torch.compile(slots, backend="fusion", dynamic=True, options={"inner": "eager", "strict": True})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (18, 23, 40):
            given = torch.randn(2, n, 6), torch.randn(3, n + 2, 6), torch.randn(2, n, 8)
            assert_as_exact_as_eager(compiled(*given), slots(*given), slots(*(x.double() for x in given)))
