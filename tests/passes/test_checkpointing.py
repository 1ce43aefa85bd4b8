"""Checkpointed parts of a graph: found, their seeds made inputs, kept as calls; and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fusion.passes.checkpointing import Checkpoints, bodies, lift_seeds
from fusion.passes.nodes import Unsupported
from fusion.passes.normalize import normalize
from tests.numerics import assert_same
from tests.passes.graphs import captured


def part(x):
    return F.dropout(torch.softmax(x @ x.mT, -1), 0.5) @ x


def function(x):
    return checkpoint(part, x.sin(), use_reentrant=False).cos()


def test_a_checkpointed_part_is_found_with_what_it_is_called_with():
    x = torch.randn(3, 4, requires_grad=True)
    ((body, given),) = bodies(captured(function, x)).values()
    assert any("softmax" in str(node.target) for node in body.graph.nodes)
    assert {tuple(value.shape) for value in given if isinstance(value, torch.Tensor)} <= {(3, 4), (4, 3)} and given


def test_a_graph_without_one_has_none():
    assert not bodies(captured(torch.sin, torch.randn(3)))


def test_seeds_become_inputs():
    x = torch.randn(3, 4, requires_grad=True)
    ((body, given),) = bodies(captured(function, x)).values()
    traced = normalize(body, given)
    seeds = [node for node in traced.graph.nodes if node.meta.get("is_seed")]
    assert len(seeds) == 1 and seeds[0].op != "placeholder"
    lift_seeds(traced)
    traced.graph.lint()
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    assert inputs[-1].meta.get("is_seed") and sum(bool(n.meta.get("is_seed")) for n in traced.graph.nodes) == 1


def test_the_call_stays_in_the_graph():
    x = torch.randn(3, 4, requires_grad=True)

    def plain(x):
        return checkpoint(torch.tanh, x * 2, use_reentrant=False)

    module = captured(plain, x)
    traced = normalize(module, [x])
    assert len(bodies(traced)) == 1
    assert_same(traced(x)[0], plain(x))


def test_a_call_outside_of_a_trace_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    module = captured(function, x)
    ((body, _),) = bodies(module).values()
    with pytest.raises(Unsupported, match="a checkpointed part outside of a trace"):
        Checkpoints(module, {}).call((body, x), {})
