"""Checkpointed parts of a graph: found, their seeds made inputs, kept as calls; and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.passes.checkpointing import Checkpoints, bodies, lift_seeds
from fusion.passes.nodes import Unsupported
from fusion.passes.normalize import normalize
from tests.numerics import assert_as_exact_as_eager, assert_same
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


class Scaled(torch.nn.Module):
    """With numbers of Python's in it: tensors without a dimension, where they may change."""

    def __init__(self):
        super().__init__()
        self.scale, self.smallest = 0.3, 1e-6

    def forward(self, q, k, v):
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + self.smallest)
        return torch.softmax(q @ k.mT * self.scale, -1) @ v


class ScaledTwice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Scaled(), Scaled()])

    def forward(self, q, k, v):
        for layer in self.layers:
            q = checkpoint(layer.__call__, q, k, v, use_reentrant=False)
        return q


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_of_a_module(dynamic):
    torch._dynamo.reset()
    given, module = [torch.randn(2, 3, 40, 16, requires_grad=True) for _ in range(3)], ScaledTwice()
    wide = [x.detach().double().requires_grad_() for x in given]
    with fusion.collect_reports() as reports:
        compiled = torch.compile(module, backend="fusion", options={"inner": "eager"}, dynamic=dynamic)
        results = [
            (out := run(*inputs), *torch.autograd.grad(out.square().sum(), inputs))
            for run, inputs in ((compiled, given), (module, given), (module, wide))
        ]
    assert [report.fused for report in reports] == [2]
    assert_as_exact_as_eager(*results)


def test_a_call_outside_of_a_trace_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    module = captured(function, x)
    ((body, _),) = bodies(module).values()
    with pytest.raises(Unsupported, match="a checkpointed part outside of a trace"):
        Checkpoints(module, {}).call((body, x), {})
