"""Operations that pick elements of other tensors or make tensors from nothing: each element, at every place."""

from __future__ import annotations

import pytest
import torch

from fusion.ir import integers
from fusion.passes.pullback import indexing
from fusion.passes.pullback.pullback import PullBack
from tests.numerics import assert_same
from tests.passes.graphs import Calls, at_every_place, element

aten = torch.ops.aten


def arange(g, *shape):
    """A tensor that is known element by element."""
    flat = g.call(aten.arange.default, torch.Size(shape).numel())
    return g.call(aten.view.default, flat, list(shape))


CALLS = {
    "tril": lambda g, x: g.call(aten.tril.default, x, 1), "triu": lambda g, x: g.call(aten.triu.default, x, -1),
    "cumsum": lambda g, x: g.call(aten.cumsum.default, g.call(aten.ones.default, [4, 5], dtype=torch.int64), 1),
    "diff": lambda g, x: g.call(aten.diff.default, arange(g, 4, 5)), "cat": lambda g, x: g.call(aten.slice.Tensor,
    g.call(aten.cat.default, [arange(g, 4, 5), arange(g, 4, 2)], 1), 1, 5, 7),
    "concat": lambda g, x: g.call(aten.slice.Tensor,
    g.call(aten.concat.default, [x, arange(g, 4, 2)], 1), 1, 0, 5), "stack": lambda g, x: g.call(aten.select.int,
    g.call(aten.stack.default, [x, arange(g, 4, 5)], 1), 1, 0),
    "cat of floats and integers": lambda g, x: g.call(aten.slice.Tensor,
    g.call(aten.cat.default, [x, arange(g, 4, 2)], 1), 1, 5, 7),
    "constant_pad_nd": lambda g, x: g.call(aten.constant_pad_nd.default, arange(g, 4, 5), [1, 2, 0, 1], 7),
    "pad": lambda g, x: g.call(aten.pad.default, arange(g, 4, 5), [-1, 2], "constant", 3),
    "index": lambda g, x: g.call(aten.index.Tensor, x, [arange(g, 4)]),
    "index_select": lambda g, x: g.call(aten.index_select.default, x, 1, arange(g, 3)),
    "gather": lambda g, x: g.call(aten.gather.default, x, 0, arange(g, 2, 2)),
    "index_put": lambda g, x: g.call(aten.index_put.default, x, [g.given(torch.rand(4, 5) < 0.5, "m")],
    g.call(aten.scalar_tensor.default, -2.0, dtype=torch.float64)),
    "copy": lambda g, x: g.call(aten.copy.default, x, arange(g, 4, 5)),
    "fill": lambda g, x: g.call(aten.fill.Scalar, x, 2.5),
    "select_scatter": lambda g, x: g.call(aten.select_scatter.default, arange(g, 4, 5), arange(g, 5), 0, 2),
    "slice_scatter": lambda g, x: g.call(aten.slice_scatter.default, arange(g, 4, 5), arange(g, 4, 2), 1, 1, 3),
    "zeros": lambda g, x: g.call(aten.zeros.default, [2, 3]), "full": lambda g, x: g.call(aten.full.default, [2, 3],
    -1.5), "ones_like": lambda g, x: g.call(aten.ones_like.default, x),
    "arange": lambda g, x: g.call(aten.arange.start_step, 2, 14, 3), "arange of floats": lambda g, x:
    g.call(aten.arange.start_step, 0.5, 3.0, 0.5), "eye": lambda g, x: g.call(aten.eye.m, 3, 4),
}  # fmt: skip


def test_every_operation_has_a_call():
    assert {str(kind).removeprefix("aten.") for kind in indexing.OPERATIONS} <= set(CALLS)


def pulled(make):
    """(node, the walk, its value, the value at every place)"""
    calls = Calls()
    node = make(calls, calls.given(torch.randn(4, 5, dtype=torch.float64)))
    index, bounds = element(node)
    pullback = PullBack(bounds, integers.integer(5))
    value = pullback.value(node, index)
    return node, pullback, at_every_place(value, bounds, pullback.loaded)


@pytest.mark.parametrize("name", CALLS)
def test_elements_are_known(name):
    node, pullback, value = pulled(CALLS[name])
    assert node not in pullback.loaded, "the tensor itself was read"
    assert_same(value.double(), node.meta["val"].double())


@pytest.mark.parametrize(
    "make",
    [
        lambda g, x: g.call(aten.cumsum.default, x, 1),
        lambda g, x: g.call(aten.diff.default, x),
        lambda g, x: g.call(aten.cat.default, [x, x], 1),
        lambda g, x: g.call(aten.stack.default, [x, x]),
        lambda g, x: g.call(aten.pad.default, x, [1, 1]),
        lambda g, x: g.call(aten.pad.default, x, [1, 1], "reflect"),
        lambda g, x: g.call(aten.index.Tensor, x, [g.given(torch.tensor([2, 0]), "places")]),
        lambda g, x: g.call(aten.index.Tensor, x, [g.call(aten.arange.start, -4, 0)]),
    ],
    ids=["sums", "differences", "both", "stacked", "padded", "reflected", "data", "negative"],
)
def test_what_is_not_known_element_by_element_is_read(make):
    """The tensor that the graph computes is, whatever is in it."""
    node, pullback, value = pulled(make)
    assert node in pullback.loaded
    assert_same(value, node.meta["val"])
