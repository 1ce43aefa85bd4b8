"""Function transforms and autograd Functions stay as they are, and the attentions around them are fused."""

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager


class Doubled(torch.autograd.Function):
    """Twice the input, with a gradient that no rule would derive."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, upstream):
        return upstream * 3


def mapped(x):
    return torch.vmap(lambda row, other: row.exp() * other + row.sum())(x, x)


def mapped_out(x):
    return torch.vmap(lambda row: row * 2, in_dims=1, out_dims=1)(x)


def gradient(x):
    return torch.func.grad(lambda y: y.exp().sum())(x)


def tangent(x):
    return torch.func.jvp(lambda y: y.sin(), (x,), (x,))[1]


def custom(x):
    return Doubled.apply(x)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", [mapped, mapped_out, gradient, tangent, custom], ids=lambda f: f.__name__)
def test_the_attention_beside_a_transform_is_fused(transform, inner, dynamic):
    def function(x, q, k, v):
        return torch.softmax(q @ k.mT * transform(x).mean(), -1) @ v

    def run(call, dtype):
        torch.manual_seed(0)
        inputs = [torch.randn(3, 5), *(torch.randn(1, 2, 8, 4) for _ in range(3))]
        inputs = [x.to(dtype).requires_grad_() for x in inputs]
        out = call(*inputs)
        out.sin().sum().backward()
        return [out.detach(), *(x.grad for x in inputs)]

    with fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": inner}, dynamic=dynamic)
        actual = run(compiled, torch.float32)
    assert [site.fused for report in reports for site in report.sites] == [True]
    assert_as_exact_as_eager(actual, run(function, torch.float32), run(function, torch.float64), torch.float32)


def test_a_transform_that_writes_leaves_the_graph():
    def function(x, q, k, v):
        def inner(row):
            x.add_(1)
            return row * 2

        return torch.softmax(q @ k.mT + torch.vmap(inner)(q).mean(), -1) @ v

    inputs = [torch.zeros(3), *(torch.randn(2, 8, 4) for _ in range(3))]
    (note,) = fusion.explain(function, *inputs).notes
    assert "changes a tensor in place" in note
