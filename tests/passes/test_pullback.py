"""The pull-back: what one element of a tensor is, in terms of products, positions and loads; and what stays a load."""

from __future__ import annotations

import pytest
import torch

from fusion.ir import integers
from fusion.ir.expr import Expr, I, J, coord, walk
from fusion.passes.nodes import Unsupported
from fusion.passes.pullback.pullback import PullBack
from tests.numerics import assert_same_in_float64
from tests.passes.graphs import Calls, at_every_place, element

aten = torch.ops.aten
B0, H = coord("b0"), coord("b1")
SIZES = {B0: 2, H: 3, I: 5, J: 6}


def scores(calls: Calls):
    """Q, K and their product, [2, 3, 5, 6]."""
    q = calls.given(torch.randn(2, 3, 5, 4), "q")
    k = calls.given(torch.randn(2, 3, 6, 4), "k")
    return q, k, calls.call(aten.matmul.default, q, calls.call(aten.transpose.int, k, -2, -1))


def walked(node) -> tuple[PullBack, Expr]:
    bounds = {x: integers.integer(n) for x, n in SIZES.items()}
    pullback = PullBack(bounds, bounds[J])
    return pullback, pullback.value(node, (B0, H, I, J))


def test_a_product_of_rows_and_columns_is_a_leaf():
    calls = Calls()
    q, k, s = scores(calls)
    pullback, value = walked(calls.call(aten.tanh.default, s))
    (product,) = pullback.products
    assert value.op == "tanh" and value.args[0].op == "dot"
    assert (product.query.node, product.key.node) == (q, k)
    assert I in product.query.index and J in product.key.index and J not in product.query.index
    assert not pullback.loaded


def test_a_softmax_and_a_sum_over_the_keys_bind_them():
    calls = Calls()
    *_, s = scores(calls)
    _, value = walked(calls.call(aten.softmax.int, s, -1))
    assert value.op == "softmax" and value.attr == "softmax"
    total = calls.call(aten.sum.dim_IntList, calls.call(aten.exp.default, s), [-1], True)
    _, value = walked(calls.call(aten.expand.default, total, [2, 3, 5, 6]))
    assert value.op == "reduce" and value.attr == "sum"


def test_a_softmax_over_another_dimension_is_read():
    calls = Calls()
    *_, s = scores(calls)
    weights = calls.call(aten.softmax.int, s, -2)
    pullback, value = walked(weights)
    assert value.op == "load" and pullback.loaded == [weights]


def test_views_and_pointwise_operations_are_followed_to_what_they_read():
    calls = Calls()
    x = calls.given(torch.randn(7, 3, dtype=torch.float64))
    gathered = calls.call(aten.transpose.int, calls.call(aten.slice.Tensor, x, 0, 2, 7), 0, 1)
    node = calls.call(aten.mul.Tensor, calls.call(aten.abs.default, gathered), -2.0)
    index, bounds = element(node)
    pullback = PullBack(bounds, integers.integer(5))
    value = pullback.value(node, index)
    assert pullback.loaded == [x] and {part.op for part in walk(value)} >= {"abs", "fmul", "load"}
    assert_same_in_float64(at_every_place(value, bounds, pullback.loaded), node.meta["val"])


def test_what_is_dear_to_compute_again_is_read():
    """Of a tensor that the graph computes anyway: a few exponentials for every score cost more than a load."""
    calls = Calls()
    x = calls.given(torch.randn(2, 3, 5, 6))
    powers = [x := calls.call(aten.exp.default, x) for _ in range(4)]
    pullback, value = walked(powers[-1])
    assert powers[2] in pullback.loaded and value.op == "exp" and value.args[0].op == "load"


def test_tensors_that_are_changed_in_place_are_read_as_they_are():
    calls = Calls()
    x = calls.given(torch.randn(5))
    node = calls.call(aten.abs.default, x)
    node.meta["mutations"] = [x]
    index, bounds = element(node)
    pullback = PullBack(bounds, integers.integer(5))
    assert pullback.value(node, index).op == "load" and pullback.loaded == [node]


def test_values_without_a_kind_are_refused():
    calls = Calls()
    node = calls.given(torch.randn(3, dtype=torch.complex64))
    index, bounds = element(node)
    with pytest.raises(Unsupported, match="values of dtype torch.complex64") as raised:
        PullBack(bounds, integers.integer(3)).value(node, index)
    assert raised.value.node is node


def test_scalars_of_data_are_refused():
    calls = Calls()
    scalar = calls.given(torch.tensor(2.0), "scale")
    number = calls.graph.call_function(aten.item.default, (scalar,))
    number.meta["val"] = object()  # a number that is known at run time only
    x = calls.given(torch.randn(3))
    node = calls.graph.call_function(aten.mul.Tensor, (x, number))
    node.meta["val"] = torch.randn(3)
    index, bounds = element(node)
    with pytest.raises(Unsupported, match="a scalar that is computed at run time"):
        PullBack(bounds, integers.integer(3)).value(node, index)
