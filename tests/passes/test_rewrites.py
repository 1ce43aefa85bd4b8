"""Rewrites of single operations: which ones are rewritten, as what, and which are left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from fusion.passes import marks, nodes
from fusion.passes.trace.normalize import normalize
from fusion.passes.trace.rewrites import make_by_size, write_products
from tests.numerics import assert_same
from tests.passes.graphs import Calls

aten = torch.ops.aten
N = 6


def scores(calls: Calls) -> Node:
    q, k = (calls.given(torch.randn(2, N, 8), name) for name in "qk")
    return calls.call(aten.matmul.default, q, calls.call(aten.transpose.int, k, 1, 2))


@pytest.mark.parametrize(
    ("like", "made"),
    [
        (aten.zeros_like.default, aten.zeros.default),
        (aten.ones_like.default, aten.ones.default),
        (aten.rand_like.default, aten.rand.default),
        (aten.empty_like.default, aten.empty.memory_format),
    ],
)
def test_a_tensor_in_the_shape_of_scores_is_made_by_its_size(like: Any, made: Any) -> None:
    calls = Calls()
    node = calls.call(like, scores(calls), dtype=torch.float64)
    make_by_size(calls.graph)
    assert node.target is made and node.args == ([2, N, N],)
    assert node.kwargs == {"dtype": torch.float64, "device": torch.device("cpu")}


def test_a_view_in_the_shape_of_scores_is_one_of_a_size() -> None:
    calls = Calls()
    s, prior = scores(calls), calls.given(torch.randn(1, N), "prior")
    node = calls.call(aten.expand_as.default, prior, s)
    make_by_size(calls.graph)
    assert node.target is aten.expand.default and node.args == (prior, [2, N, N])


@pytest.mark.parametrize("reason", ["of an input", "in another order in memory", "of a DTensor"])
def test_other_tensors_keep_what_they_are_like(reason: str) -> None:
    calls = Calls()
    like = calls.given(torch.randn(3, 4)) if reason == "of an input" else scores(calls)
    if reason == "in another order in memory":
        like = calls.call(aten.transpose.int, like, 0, 1)
    node = calls.call(aten.zeros_like.default, like)
    marks.dtensor.set(node, reason == "of a DTensor")
    make_by_size(calls.graph)
    assert node.target is aten.zeros_like.default and node.args == (like,)


def linear(weight: torch.Tensor, *, parameter: bool, bias: bool = False) -> Node:
    calls = Calls()
    x, w = calls.given(torch.randn(2, N, 8)), calls.given(weight, "weight")
    w.meta["example_value"] = torch.nn.Parameter(weight) if parameter else weight
    args = (calls.given(torch.randn(len(weight)), "bias"),) if bias else ()
    node = calls.call(aten.linear.default, x, w, *args)
    expected = node.meta["val"]
    write_products(calls.graph)
    operands = torch.fx.map_arg(node.args, lambda arg: arg.meta["val"])
    assert_same(node.target(*operands), expected)  # type: ignore[operator]
    return node


def test_a_linear_function_of_data_is_a_product() -> None:
    assert linear(torch.randn(5, 8), parameter=False).target is aten.matmul.default


@pytest.mark.parametrize(("parameter", "bias"), [(True, False), (False, True)])
def test_a_linear_layer_stays_one(parameter: bool, bias: bool) -> None:
    assert linear(torch.randn(5, 8), parameter=parameter, bias=bias).target is aten.linear.default


def test_a_layer_over_heads_stays_one() -> None:
    calls = Calls()
    s = calls.call(aten.permute.default, scores(calls), [1, 2, 0])
    node = calls.call(aten.linear.default, s, calls.given(torch.randn(2, 2), "weight"))
    write_products(calls.graph)
    assert node.target is aten.linear.default


def normalized(function: Any, *inputs: Any) -> GraphModule:
    """Graph of a function whose sizes and floats are symbols."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        graphs.append(normalize(module, example_inputs))
        return module.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=False):
        torch.compile(function, backend=keep, fullgraph=True, dynamic=True)(*inputs)
    return graphs[0]


def test_a_float_that_differs_between_calls_is_read_as_a_tensor() -> None:
    graph = normalized(lambda x, scale: x * scale + x * (1 / x.shape[0]), torch.randn(3, 4), 0.3)
    factors = [node.args[1] for node in graph.graph.nodes if node.target is aten.mul.Tensor and node.args[1] != 1.0]
    read = [factor for factor in factors if isinstance(factor, Node) and marks.of_float(factor)]
    assert len(read) == 1 and nodes.fake(read[0]).shape == ()


def test_sizes_of_scores_are_those_of_inputs() -> None:
    """An einsum asks its operands for sizes that no input carries as they are."""

    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhij,bhj->bhi", F.relu(torch.einsum("ibhd,jbhd->bhij", q, k)), k.sum(-1).permute(1, 2, 0))

    graph = normalized(attend, torch.randn(5, 2, 2, 8), torch.randn(7, 2, 2, 8))
    asked = [node.args[0] for node in graph.graph.nodes if node.target is aten.sym_size.int and node.users]
    assert all(node.op == "placeholder" for node in asked)
