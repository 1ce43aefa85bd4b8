"""Results lie in memory as in eager mode, whatever the layout of Q, K and V, and however small a dimension."""

import pytest
import torch
from torch.nn import functional as F

import fusion
from tests.numerics import assert_as_exact_as_eager


def weights(q, k):
    return (q @ k.mT).softmax(-1)


def plain(q, k, v):
    return weights(q, k) @ v


def transposed(q, k, v):
    return plain(q, k, v).transpose(1, 2)


def merged(q, k, v):
    return transposed(q, k, v).reshape(q.shape[0], q.shape[2], -1)


def copied(q, k, v):
    return transposed(q, k, v).contiguous()


def further(q, k, v):
    return plain(q, k, v) + 1


def called(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def called_and_transposed(q, k, v):
    return called(q, k, v).transpose(1, 2)


def einsums(q, k, v):
    s = torch.einsum("bhid,bhjd->bhij", q, k)
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)


def einsums_heads_inside(q, k, v):
    return torch.einsum("bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


def einsums_permuted(q, k, v):
    return torch.einsum("bhij,bhjd->hbdi", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


def divided_later(q, k, v):
    e = (q @ k.mT).exp()
    return torch.einsum("bhij,bhjd->bihd", e, v) / e.sum(-1).transpose(1, 2)[..., None]


def values_first(q, k, v):
    return (v.mT @ weights(q, k).mT).mT


def batches_of_matrices(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


def converted(q, k, v):
    return plain(q, k, v).bfloat16().transpose(0, 1)


FUNCTIONS = [plain, transposed, merged, copied, further, called, called_and_transposed, einsums, einsums_heads_inside,
             einsums_permuted, divided_later, values_first, batches_of_matrices, converted]  # fmt: skip
LAYOUTS = {"bhnd": (0, 1, 2, 3), "bnhd": (0, 2, 1, 3), "nbhd": (2, 0, 1, 3), "hbnd": (1, 0, 2, 3), "bhdn": (0, 1, 3, 2)}
"""Dimensions of memory, the slowest first."""
EXTENTS = [(2, 3, 7, 7), (2, 3, 1, 7), (2, 3, 7, 1), (2, 3, 1, 1), (1, 3, 7, 7), (2, 1, 7, 7), (1, 1, 1, 7)]
"""Batches, heads, queries, keys."""


def given(layout, extents, width=8):
    b, h, n, m = extents
    order = LAYOUTS[layout]
    for rows in (n, m, m):
        shape = (b, h, rows, width)
        yield torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def has_strides_of_eager(function, layout, extents, inner, trained=False):
    torch._dynamo.reset()
    operands = [x.requires_grad_(trained) for x in given(layout, extents)]
    with torch.set_grad_enabled(trained), fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", dynamic=False, options={"inner": inner})
        actual = compiled(*operands)
    eager, exact = function(*operands), function(*(x.double() for x in operands))
    assert_as_exact_as_eager(actual, eager, exact, check_strides=True)
    assert [site.reason for report in reports for site in report.sites] == [None]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_in_eager_mode(function, layout):
    """Pairs of a function with a layout, and of both with extents; all of them in the long set."""
    place = FUNCTIONS.index(function) + 2 * list(LAYOUTS).index(layout)
    for step in (0, 1):
        has_strides_of_eager(function, layout, EXTENTS[(place + step) % len(EXTENTS)], "eager")


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_all_extents_in_eager_mode(function, layout):
    for extents in EXTENTS:
        has_strides_of_eager(function, layout, extents, "eager")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("layout", ["bhnd", "nbhd"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_under_aot_eager(function, layout, trained):
    has_strides_of_eager(function, layout, EXTENTS[0], "aot_eager", trained)


@pytest.mark.parametrize("function", [plain, transposed, called, einsums_permuted], ids=lambda f: f.__name__)
def test_under_inductor(function):
    has_strides_of_eager(function, "bnhd", EXTENTS[0], "inductor")
