"""Dynamo's graph retraced to ATen: the same numbers, values on every node, nothing in place; and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusion.passes.trace.normalize import drop_seeds, normalize
from tests.numerics import assert_same
from tests.passes.graphs import captured


def normalized(function, *inputs):
    module = captured(function, *inputs)
    before = module.code
    traced = normalize(module, inputs)
    assert module.code == before, "the argument was changed"
    return traced


def targets(traced) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]


def attend(q, k, v):
    return torch.softmax(torch.einsum("bic,bjc->bij", q, k) * 0.5, -1) @ v


def test_composite_operations_stay_whole():
    given = [torch.randn(2, n, 4) for n in (5, 6, 6)]
    traced = normalized(attend, *given)
    assert targets(traced) == ["aten.einsum.default", "aten.mul.Tensor", "aten.softmax.int", "aten.matmul.default"]
    assert all("val" in node.meta for node in traced.graph.nodes if node.op != "output")
    assert all("return torch.softmax" in node.stack_trace for node in traced.graph.nodes if node.op == "call_function")
    assert_same(traced(*given)[0], attend(*given))


def test_what_is_written_in_place_on_temporaries_becomes_functional():
    def function(x):
        y = x * 2
        return y.add_(1).clamp_(max=1.5)

    x = torch.randn(3, 4)
    traced = normalized(function, x)
    assert not any(name.split(".")[1].endswith("_") for name in targets(traced)), targets(traced)
    assert_same(traced(x)[0], function(x))


def test_inputs_that_are_changed_stay_changed():
    def function(x):
        x.mul_(2)
        return x + 1

    x = torch.randn(3)
    traced = normalized(function, x.clone())
    ours, theirs = x.clone(), x.clone()
    assert_same(traced(ours)[0], function(theirs))
    assert_same(ours, theirs)


def test_inactive_dropout_is_gone_and_active_has_a_seed():
    x = torch.randn(3, 4)
    assert "dropout" not in str(targets(normalized(lambda x: F.dropout(x, 0.5, training=False) + 1, x)))
    assert "dropout" not in str(targets(normalized(lambda x: F.dropout(x + 1, 0.0, inplace=True), x)))
    traced = normalized(lambda x: F.dropout(x, 0.5) + 1, x)
    (seed,) = (node for node in traced.graph.nodes if node.meta.get("is_seed"))
    (dropout,) = (node for node in traced.graph.nodes if "seed" in node.meta)
    assert dropout.meta["seed"] is seed
    drop_seeds(traced.graph)
    assert not any(node.meta.get("is_seed") for node in traced.graph.nodes), "nothing reads it"


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_attention_that_nothing_uses_is_gone_unless_it_draws_random_numbers(p):
    def function(x):
        F.scaled_dot_product_attention(x, x, x, dropout_p=p)
        return x + 1

    traced = normalized(function, torch.randn(1, 2, 8, 16))
    assert ("aten.scaled_dot_product_attention.default" in targets(traced)) == (p > 0)


def test_casts_of_autocast_are_written_out():
    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    x = torch.randn(4, 4)
    traced = normalized(function, x)
    assert any(name == "aten.to.dtype" for name in targets(traced))
    (product,) = (node for node in traced.graph.nodes if "matmul" in str(node.target) or "mm" in str(node.target))
    assert product.meta["val"].dtype is torch.bfloat16
