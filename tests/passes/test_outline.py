"""Function transforms and autograd Functions stay as they are, and the attentions around them are fused."""

from __future__ import annotations

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


@pytest.mark.one_in(3)
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


class Halves(torch.Tensor):
    """A weight that holds another, at twice its size; products with it are plain tensors."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Halves:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Halves:
        return Halves(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, operation, kinds, args=(), kwargs=None):
        if operation is torch.ops.aten.detach.default:
            return Halves(args[0].held)
        plain = [a.held / 2 if isinstance(a, Halves) else a for a in args]
        return operation(*plain, **(kwargs or {}))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_attention_beside_a_weight_that_holds_another(inner):
    """Only the product with it stays as it is, and what it holds is read at every call."""

    def function(x, w):
        return torch.softmax((x @ w) @ x.mT, -1) @ x

    def run(call, x, w):
        x = x.clone().requires_grad_()
        out = call(x, w)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x])]

    x, held = torch.randn(2, 20, 16), torch.randn(16, 16)
    compiled = torch.compile(function, backend="fusion", options={"inner": inner, "strict": True})
    with fusion.collect_reports() as reports:
        for weight in (held, held * 3):
            eager, exact = run(function, x, weight / 2), run(function, x.double(), weight.double() / 2)
            assert_as_exact_as_eager(run(compiled, x, Halves(weight)), eager, exact)
    assert [report.fused for report in reports] == [1]
