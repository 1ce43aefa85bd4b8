"""Gradients that autograd asks for in batches, outside of the compiled function."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

import fusion
from fusion.runtime.guards import failures_raised
from tests.numerics import assert_as_exact_as_eager


def attend(q, k, v, b):
    return torch.softmax(q @ k.mT / 3 + b, -1) @ v


def with_weights(q, k, v, b):
    w = torch.softmax(q @ k.mT / 3 + b, -1)
    return w @ v, w.square().sum(-1)


def with_padding(q, k, v, b):
    return torch.softmax((q @ k.mT).masked_fill(b[..., :1, :] < 0, -torch.inf), -1) @ v


def batched(function, x):
    """A batch of gradients, some of results that are not used."""
    outputs = function(*x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    arriving = [torch.randn(5, *y.shape, dtype=torch.float64, generator=torch.manual_seed(1)).to(y) for y in outputs]
    return torch.autograd.grad(outputs, x[:3], arriving, is_grads_batched=True)


def jacobians(function, x):
    return jacobian(function, tuple(y.detach() for y in x), vectorize=True)


def hessians(function, x):
    return hessian(lambda q: function(q, *x[1:])[..., :2].sin().sum(), x[0].detach()[:1, :1], vectorize=True)


@pytest.mark.parametrize(
    ("function", "of"),
    [(attend, batched), (with_weights, batched), (with_padding, batched), (attend, jacobians), (attend, hessians)],
    ids=lambda f: f.__name__,
)
def test_batches_of_gradients(function, of):
    def results(call, dtype):
        x = [torch.randn(s, generator=torch.manual_seed(0)).to(dtype) for s in [(2, 2, 7, 8)] * 3 + [(2, 1, 7, 7)]]
        return [*of(call, [y.requires_grad_() for y in x])]

    compiled = torch.compile(function, backend="fusion", options={"inner": "eager"})
    with fusion.collect_reports() as reports, failures_raised():
        actual = results(compiled, torch.float32)
    assert [report.fused for report in reports] == [1]
    assert_as_exact_as_eager(actual, results(function, torch.float32), results(function, torch.float64))
