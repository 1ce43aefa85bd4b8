"""Views: an element of the result is the element of the input that the index says, at every place of small tensors."""

from __future__ import annotations

import math
import operator

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from fusion.ir import integers
from fusion.ir.expr import coord
from fusion.passes.nodes import Unsupported
from fusion.passes.pullback import views
from tests.passes.graphs import Calls, at_every_place, element

aten = torch.ops.aten


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def exprs(shape) -> list:
    return [integers.integer(extent) for extent in shape]


@st.composite
def reshapes(draw) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements: the same factors, grouped in two ways, with ones in between."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), max_size=5))

    def grouped() -> list[int]:
        shape = [1]
        for factor in factors if draw(st.booleans()) else draw(st.permutations(factors)):
            if draw(st.booleans()):
                shape.append(factor)
            else:
                shape[-1] *= factor
        return shape

    return grouped(), grouped()


@hypothesis.given(reshapes())
@hypothesis.settings(max_examples=100)
def test_reshapes_are_those_of_torch(shapes):
    old, new = shapes
    index = tuple(coord(f"x{k}") for k in range(len(new)))
    bounds = dict(zip(index, exprs(new), strict=True))
    found = views.reshape_index(exprs(new), exprs(old), index, bounds)
    assert len(found) == len(old)
    places = [at_every_place(x, bounds) for x in found]
    assert torch.equal(numbered(*old)[tuple(places)], numbered(*old).reshape(new))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((2, 3, 8), (2, 3, 2, 4), "x0, x1, 4 * x2 + x3"),
        ((2, 3, 8), (6, 8), "x0 // 3, x0 % 3, x1"),
        ((2, 1, 8), (2, 8), "x0, 0, x1"),
    ],
)
def test_only_dimensions_that_are_split_or_merged_see_a_division(old, new, expected):
    index = tuple(coord(f"x{k}") for k in range(len(new)))
    found = views.reshape_index(exprs(new), exprs(old), index, dict(zip(index, exprs(new), strict=True)))
    assert ", ".join(map(str, found)) == expected


def test_reshapes_of_tensors_that_hold_nothing_are_refused():
    with pytest.raises(Unsupported, match=r"a reshape from \['0', '4'\] to \['2', '0'\], of empty tensors"):
        views.reshape_index(exprs((2, 0)), exprs((0, 4)), (coord("x0"), coord("x1")), {})


CALLS = {
    "clone": lambda g, x: g.call(aten.clone.default, x), "contiguous": lambda g, x: g.call(aten.contiguous.default, x),
    "alias": lambda g, x: g.call(aten.alias.default, x), "detach": lambda g, x: g.call(aten.detach.default, x),
    "lift_fresh": lambda g, x: g.call(aten.lift_fresh.default, x),
    "lift_fresh_copy": lambda g, x: g.call(aten.lift_fresh_copy.default, x),
    "to": lambda g, x: g.call(aten.to.dtype, x, torch.int64), "_to_copy": lambda g, x: g.call(aten._to_copy.default, x),
    "type_as": lambda g, x: g.call(aten.type_as.default, x, x),
    "view": lambda g, x: g.call(aten.view.default, x, [6, 4]),
    "reshape": lambda g, x: g.call(aten.reshape.default, x, [2, 12]),
    "_unsafe_view": lambda g, x: g.call(aten._unsafe_view.default, x, [4, 6]),
    "flatten": lambda g, x: g.call(aten.flatten.using_ints, x, 1), "unflatten": lambda g, x:
    g.call(aten.unflatten.int, x, 2, [2, 2]), "view_as": lambda g, x: g.call(aten.view_as.default, x,
    g.given(numbered(6, 4), "y")), "reshape_as": lambda g, x: g.call(aten.reshape_as.default, x,
    g.given(numbered(4, 6), "y")), "permute": lambda g, x: g.call(aten.permute.default, x, [1, -1, 0]),
    "transpose": lambda g, x: g.call(aten.transpose.int, x, 0, -1),
    "swapaxes": lambda g, x: g.call(aten.swapaxes.default, x, 0, 1),
    "swapdims": lambda g, x: g.call(aten.swapdims.default, x, -1, 1),
    "t": lambda g, x: g.call(aten.t.default, g.call(aten.select.int, x, 0, 1)),
    "numpy_T": lambda g, x: g.call(aten.numpy_T.default, x), "mT": lambda g, x: g.call(aten.mT.default, x),
    "adjoint": lambda g, x: g.call(aten.adjoint.default, x),
    "movedim": lambda g, x: g.call(aten.movedim.intlist, x, [0, 2], [2, 1]),
    "moveaxis": lambda g, x: g.call(aten.moveaxis.int, x, 0, -1),
    "unsqueeze": lambda g, x: g.call(aten.unsqueeze.default, x, -2),
    "squeeze": lambda g, x: g.call(aten.squeeze.dims, g.call(aten.unsqueeze.default, x, 1), [1, 2]),
    "expand": lambda g, x: g.call(aten.expand.default, g.call(aten.slice.Tensor, x, 1, 1, 2), [5, 2, 3, 4]),
    "expand_as": lambda g, x: g.call(aten.expand_as.default, g.call(aten.slice.Tensor, x, 1, 1, 2), x),
    "broadcast_to": lambda g, x: g.call(aten.broadcast_to.default, g.call(aten.slice.Tensor, x, 0, 0, 1), [2, 3, 4]),
    "last": lambda g, x: g.call(aten.slice.Tensor, x, 2, -3), "more than all": lambda g, x:
    g.call(aten.slice.Tensor, x, 1, -9), "more than all but one": lambda g, x: g.call(aten.slice.Tensor, x, 2, -9, -1),
    "slice": lambda g, x: g.call(aten.slice.Tensor, x, 2, -3, 4, 2), "narrow": lambda g, x:
    g.call(aten.narrow.default, x, 1, 1, 2), "select": lambda g, x: g.call(aten.select.int, x, -1, -2),
    "repeat": lambda g, x: g.call(aten.repeat.default, x, [2, 1, 2, 3]),
    "tile": lambda g, x: g.call(aten.tile.default, x, [2]),
    "repeat_interleave": lambda g, x: g.call(aten.repeat_interleave.self_int, x, 3, 1),
    "flip": lambda g, x: g.call(aten.flip.default, x, [0, -1]), "roll": lambda g, x: g.call(aten.roll.default, x,
    [5, -1], [1, 2]), "unfold": lambda g, x: g.call(aten.unfold.default, x, 2, 3, 1),
    "chunk": lambda g, x: g.call(operator.getitem, g.call(aten.chunk.default, x, 2, 1), 1),
    "split": lambda g, x: g.call(operator.getitem, g.call(aten.split.Tensor, x, 2, -1), -1),
    "unbind": lambda g, x: g.call(operator.getitem, g.call(aten.unbind.int, x, 1), 2),
}  # fmt: skip
ALSO = {"detach_"}
"""The same as another, in place."""


def test_every_rule_has_a_call():
    assert {str(rule).removeprefix("aten.") for rule in views._RULES} - set(CALLS) == ALSO


@pytest.mark.parametrize("name", CALLS)
def test_an_element_is_where_it_came_from(name):
    calls = Calls()
    node = CALLS[name](calls, calls.given(numbered(2, 3, 4)))
    index, bounds = element(node)
    assert (found := views.source(node, index, bounds)) is not None
    origin, moved = found
    got = origin.meta["val"][tuple(at_every_place(x, bounds) for x in moved)]
    assert torch.equal(got, node.meta["val"])


@pytest.mark.parametrize(
    "make",
    [
        lambda g, x: g.call(aten.view.dtype, x, torch.float64),
        lambda g, x: g.call(aten.to.dtype, x, torch.float32),
        lambda g, x: g.call(aten.roll.default, x, [1]),
        lambda g, x: g.call(aten.repeat_interleave.self_int, x, 2),
        lambda g, x: g.call(aten.reshape.default, g.call(aten.slice.Tensor, x, 0, 0, 0), [0]),
        lambda g, x: g.call(operator.getitem, g.call(aten.topk.default, x, 2), 0),
        lambda g, x: g.call(aten.neg.default, x),
        lambda g, x: x,
    ],
    ids=["bits", "cast", "roll", "repeats", "empty", "topk", "computed", "input"],
)
def test_what_is_no_view_is_not_looked_through(make):
    calls = Calls()
    node = make(calls, calls.given(numbered(2, 3, 4)))
    assert views.source(node, *element(node)) is None


def test_a_gradient_that_ends_is_not_looked_through():
    calls = Calls()
    node = calls.call(aten.detach.default, calls.given(numbered(3)))
    node.meta["stop_gradient"] = True
    assert views.source(node, *element(node)) is None
