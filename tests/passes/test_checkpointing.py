"""Checkpointed parts of a graph: found, their seeds made inputs, kept as calls; and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.errors import OperandError
from fusion.passes.nodes import Unsupported
from fusion.passes.subgraphs import _record_checkpointed, bodies, lift_seeds
from fusion.passes.trace.normalize import normalize
from tests.numerics import assert_as_exact_as_eager, assert_same
from tests.passes.graphs import captured


def part(x):
    return F.dropout(torch.softmax(x @ x.mT, -1), 0.5) @ x


def function(x):
    return checkpoint(part, x.sin(), use_reentrant=False).cos()


def test_a_checkpointed_part_is_found_with_what_it_is_called_with():
    x = torch.randn(3, 4, requires_grad=True)
    (body,) = bodies(captured(function, x)).values()
    assert any("softmax" in str(node.target) for node in body.graph.graph.nodes)
    given = [value for value in body.values if isinstance(value, torch.Tensor)]
    assert {tuple(value.shape) for value in given} <= {(3, 4), (4, 3)} and given and body.around == ()


def test_a_graph_without_one_has_none():
    assert not bodies(captured(torch.sin, torch.randn(3)))


def test_seeds_become_inputs():
    x = torch.randn(3, 4, requires_grad=True)
    (body,) = bodies(captured(function, x)).values()
    traced = normalize(body.graph, body.values)
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


def masked_in_place(q, k, v):
    s = q @ k.mT
    s += torch.full_like(s, -torch.inf).triu(1)
    return torch.nan_to_num(s.softmax(-1)) @ v


def written_as_a_function(q, k, v):
    s = q @ k.mT
    F.relu(s, inplace=True)
    return torch.nan_to_num(s.softmax(-1)) @ v


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("body", [masked_in_place, written_as_a_function])
def test_writes_in_a_part_that_is_not_fused_stay(body, beside):
    """Weights whose NaN become 0 are not fused in training where no selection masks them. beside: whether something
    else in the graph is."""
    torch._dynamo.reset()
    given = [torch.randn(2, 3, 40, 16, requires_grad=True) for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in given]

    def function(q, k, v):
        out = checkpoint(body, q, k, v, use_reentrant=False)
        return out + Scaled()(q, k, v) if beside else out

    with fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager"})
        results = [
            (out := run(*inputs), *torch.autograd.grad(out.square().sum(), inputs))
            for run, inputs in ((compiled, given), (function, given), (function, wide))
        ]
    assert [(report.fused, len(report.sites)) for report in reports] == [(int(beside), 1 + beside)]
    assert_as_exact_as_eager(*results)


def test_a_checkpointed_part_beside_a_vmap():
    """Whose part of the graph has no checkpointed one."""
    given = [torch.randn(2, 3, 20, 16) for _ in range(3)]

    def function(q, k, v):
        return torch.vmap(torch.vmap(Scaled()))(checkpoint(Scaled(), q, k, v, use_reentrant=False), k, v)

    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True})(*given)
        assert_as_exact_as_eager(actual, function(*given), function(*(x.double() for x in given)))
    assert [report.fused for report in reports] == [2]


def test_a_call_outside_of_a_trace_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    module = captured(function, x)
    (body,) = bodies(module).values()
    with pytest.raises(Unsupported, match="a checkpointed part outside of a trace"):
        _record_checkpointed(body.graph, [x], {})


def attention(x, w):
    q, k, v = (x @ w).chunk(3, -1)
    return torch.softmax(q @ k.mT / 4, -1) @ v


def under_autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(attention, x, w, use_reentrant=False).float()


def in_two_regions(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        inner = checkpoint(attention, x, w, use_reentrant=False)
        with torch.autocast("cpu", enabled=False):
            return checkpoint(attention, x, w, use_reentrant=False) + inner.float()


def in_the_ambient_region_and_out_of_it(x, w):
    with torch.autocast("cpu", enabled=False):
        inner = checkpoint(attention, x, w, use_reentrant=False)
    return inner, checkpoint(attention, x, w, use_reentrant=False)


def with_a_region_inside(x, w):
    def part(x, w):
        with torch.autocast("cpu", enabled=False):
            return attention(F.linear(x, w[:, :48].T), w)

    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(part, x, w, use_reentrant=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "function", [under_autocast, in_two_regions, in_the_ambient_region_and_out_of_it, with_a_region_inside]
)
def test_regions_of_autocast_around_a_call(function, trained):
    """A kernel that took a region for float32 would read bfloat16 beyond its memory."""
    torch._dynamo.reset()
    x, w = torch.randn(3, 200, 48, requires_grad=trained), torch.randn(48, 144) / 20
    ambient = torch.autocast("cpu", torch.bfloat16, enabled=function is in_the_ambient_region_and_out_of_it)

    def results(run, x, w):
        with ambient:
            outputs = run(x, w)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if not trained:
            return outputs
        return *outputs, *torch.autograd.grad(sum(out.float().square().sum() for out in outputs), [x])

    with fusion.collect_reports() as reports:
        got = results(torch.compile(function, backend="fusion", options={"inner": "aot_eager"}), x, w)
    want, exact = results(function, x, w), results(function, *(t.detach().double().requires_grad_() for t in (x, w)))
    assert not torch.is_autocast_enabled("cpu")
    assert reports[0].fused and [y.dtype for y in got] == [y.dtype for y in want]
    assert_as_exact_as_eager(got, want, exact, torch.bfloat16)


def test_a_kernel_that_reads_another_dtype_is_not_compiled():
    """Whatever changes the graph after the analysis."""
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    spec, narrow = fusion.explain(F.scaled_dot_product_attention, q, k, v).sites[0].spec, k.bfloat16()
    with FakeTensorMode() as mode, pytest.raises(OperandError, match="is bfloat16, and its kernel reads float32"):
        operands = [mode.from_tensor(x) for x in (q, narrow, v)]
        torch.ops.fusion.attention(operands, [1, 2, 8, 8], spec.to_json(), "auto")


def test_what_is_called_in_other_regions_stays():
    x = torch.randn(3, 4)

    def twice(x):
        inner = checkpoint(part, x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16):
            return inner, checkpoint(part, x, use_reentrant=False)

    module = captured(twice, x)
    calls = [node for node in module.graph.nodes if node.target is tag_activation_checkpoint]
    calls[1].args = (calls[0].args[0], *calls[1].args[1:])  # as Dynamo would write it, did it know that they are equal
    assert [body.around for body in bodies(module).values()] == [None]
