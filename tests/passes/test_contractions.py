"""Products of two tensors, taken apart: the sum of the factors' elements is the element of the product."""

from __future__ import annotations

import pytest
import torch

from fusion.ir.expr import C
from fusion.passes.nodes import Unsupported
from fusion.passes.pullback.contractions import factors, is_contraction, strip_scale
from tests.passes.graphs import Calls, at_every_place, element

aten = torch.ops.aten


def whole(*shape: int) -> torch.Tensor:
    """Small integers, of which products and sums are exact."""
    return torch.randint(-4, 5, shape).double()


def einsum(equation, *shapes):
    return lambda g: g.call(aten.einsum.default, equation, [g.given(whole(*s), f"x{k}") for k, s in enumerate(shapes)])


def product(target, *shapes):
    return lambda g: g.call(target, *(g.given(whole(*s), f"x{k}") for k, s in enumerate(shapes)))


PRODUCTS = {
    "matmul": product(aten.matmul.default, (2, 3, 4, 5), (2, 3, 5, 6)),
    "matmul of a matrix": product(aten.matmul.default, (2, 3, 4, 5), (5, 6)),
    "matmul, broadcast": product(aten.matmul.default, (2, 1, 4, 5), (3, 5, 6)),
    "matmul, with a vector": product(aten.matmul.default, (2, 4, 5), (5,)),
    "matmul of a vector": product(aten.matmul.default, (5,), (2, 3, 5, 6)),
    "matmul of two vectors": product(aten.matmul.default, (5,), (5,)),
    "bmm": product(aten.bmm.default, (3, 4, 5), (3, 5, 6)),
    "mm": product(aten.mm.default, (4, 5), (5, 6)),
    "einsum": einsum("bhic,bhjc->bhij", (2, 3, 4, 5), (2, 3, 6, 5)),
    "einsum, permuted": einsum("bihc, bjhc -> bhij", (2, 4, 3, 5), (2, 6, 3, 5)),
    "einsum, implicit": einsum("bic,cj", (2, 4, 5), (5, 6)),
    "einsum, dots": einsum("...ic,...jc->...ij", (2, 3, 4, 5), (3, 6, 5)),
    "einsum, broadcast": einsum("bhic,bhjc->bhij", (2, 3, 4, 5), (2, 1, 6, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_factors_sum_to_the_product(name):
    node = PRODUCTS[name](Calls())
    assert is_contraction(node)
    index, bounds = element(node)
    found = factors(node, index, C)
    bounds |= {C: found.extent}
    left, right = (
        held.meta["val"][tuple(at_every_place(x, bounds) for x in places)]
        for held, places in ((found.left, found.left_index), (found.right, found.right_index))
    )
    assert torch.equal((left * right).sum(-1), node.meta["val"])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (einsum("ic,jc,j->ij", (4, 5), (6, 5), (6,)), "an einsum of 3 operands"),
        (einsum("icd,jcd->ij", (4, 5, 2), (6, 5, 2)), "does not sum over exactly one index of both operands"),
        (einsum("ic,jd->ij", (4, 5), (6, 2)), "does not sum over exactly one index of both operands"),
        (einsum("ii,ij->j", (4, 4), (4, 6)), "does not sum over exactly one index of both operands"),
        (einsum("ij,ij->ij", (4, 5), (4, 5)), "does not sum over exactly one index of both operands"),
    ],
)
def test_other_products_are_refused(make, reason):
    node = make(Calls())
    with pytest.raises(Unsupported, match=reason):
        factors(node, element(node)[0], C)


def test_what_is_no_product():
    calls = Calls()
    assert not is_contraction(calls.call(aten.mul.Tensor, calls.given(whole(3)), 2.0))
    assert not is_contraction(calls.given(whole(3), "y"))


def test_constant_scales_are_passed_over():
    calls = Calls()
    x = calls.given(whole(3))
    scaled = calls.call(aten.div.Tensor, calls.call(aten.mul.Tensor, x, 6.0), 3.0)
    assert strip_scale(scaled) == (x, 2.0)


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan"), 1e-30, -1e30])
def test_scales_that_lose_numbers_stay(factor):
    calls = Calls()
    node = calls.call(aten.mul.Tensor, calls.given(whole(3)), factor)
    assert strip_scale(node) == (node, 1.0)
