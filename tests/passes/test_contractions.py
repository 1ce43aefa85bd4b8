"""Products of two tensors, taken apart: the sum of the factors' elements is the element of the product."""

from __future__ import annotations

import pytest
import torch

from fusion.ir.expr import C
from fusion.passes.pullback.contractions import factors, is_contraction, strip_scale
from tests.passes.graphs import Calls, at_every_place, element

aten = torch.ops.aten


def whole(*shape: int) -> torch.Tensor:
    """Small integers, of which products and sums are exact."""
    return torch.randint(-4, 5, shape).double()


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
