"""Sizes that no one knows before the model runs: what `nonzero` finds, and what a user marks as such."""

import math

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager, wide


def attend(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def causal(q, k, v):
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    s = (q @ k.mT / 4).masked_fill(keys > rows, -math.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2).flatten(2)


def some_keys(q, k, v, keep):
    at = keep.nonzero().squeeze(-1)
    return attend(q, k[:, :, at], v[:, :, at])


def some_rows(q, k, v, keep):
    at = keep.nonzero().squeeze(-1)
    return causal(q[:, :, at], k[:, :, at], v[:, :, at])


def given(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(3)]


def check(compiled, function, *inputs):
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    exact = [x.requires_grad_() if x.is_floating_point() else x for x in wide(inputs)]

    def results(run, tensors):
        out = run(*tensors)
        gradients = torch.autograd.grad(out.square().sum(), [x for x in tensors if x.requires_grad])
        with torch.no_grad():
            return [out, run(*tensors), *gradients]

    assert_as_exact_as_eager(results(compiled, leaves), results(function, leaves), results(function, exact))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("function", [some_keys, some_rows])
def test_what_is_found_in_data(function, inner):
    """Also nothing, and one."""
    options = {"inner": inner, "strict": True}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options=options, fullgraph=True)
        for kept in (torch.arange(40) % 3 == 0, torch.arange(40) == 7, torch.zeros(40, dtype=torch.bool)):
            check(compiled, function, *given(2, 3, 40, 16), kept)
    assert [report.fused for report in reports] == [1, 1]
    assert reports[0].sites[0].validated.startswith("values in")


@pytest.mark.parametrize("function", [attend, causal])
def test_sizes_that_are_marked(function):
    options = {"inner": "aot_eager", "strict": True}
    compiled = torch.compile(function, backend="fusion", options=options, fullgraph=True)
    with fusion.collect_reports() as reports:
        for number, (batch, length) in enumerate(((2, 24), (3, 50), (1, 1))):
            inputs = given(batch, 3, length, 16)
            for tensor in inputs if not number else ():
                torch._dynamo.decorators.mark_unbacked(tensor, 2)
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            with torch.no_grad():
                found = compiled(*inputs)
                assert_as_exact_as_eager(found, function(*inputs), function(*wide(inputs)))
    assert [report.fused for report in reports] == [1]
