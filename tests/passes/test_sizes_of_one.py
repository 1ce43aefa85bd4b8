"""Extents that are 1 or 0 in some calls, and expressions of sizes: what is broadcast there is read at its one place."""

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.runtime.guards import failures_raised
from tests.numerics import assert_as_exact_as_eager
from tests.passes.exactness import EMITTERS


def padded(x):
    return F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4))


def all_blocks_of_queries_with_the_first_of_keys(q, k, v):
    q, k, v = padded(q), padded(k)[:, :1], padded(v)[:, :1]
    return (q @ k.mT * 0.3).softmax(-1) @ v


@pytest.mark.parametrize("emitter", EMITTERS)
def test_one_block_of_several_or_of_one(emitter):
    torch._dynamo.reset()
    function = all_blocks_of_queries_with_the_first_of_keys
    options = {"inner": "eager", "emitter": emitter}
    compiled = torch.compile(function, backend="fusion", dynamic=True, options=options)
    for batch, n_q, n_k in [(2, 16, 16), (3, 7, 16), (2, 1, 9), (1, 16, 3), (5, 33, 40)]:
        inputs = [torch.randn(batch, n, 16) for n in (n_q, n_k, n_k)]
        with fusion.collect_reports() as reports, failures_raised():
            actual = compiled(*inputs)
        assert all(report.fused == 1 for report in reports)
        assert_as_exact_as_eager(actual, function(*inputs), function(*(x.double() for x in inputs)))


def causal(q, k, v):
    later = torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None]
    return (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v


def causal_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("function", [causal, causal_sdpa])
def test_without_rows_or_keys_gradients_are_zero_and_not_missing(function, lengths):
    """That a comparison holds for all rows where there are none says nothing of the program."""
    n, m = lengths
    inputs = [torch.randn(2, 3, count, 8, requires_grad=True) for count in (n, m, m)]
    torch._dynamo.reset()
    with failures_raised():
        out = torch.compile(function, backend="fusion", options={"inner": "aot_eager"})(*inputs)
    found = torch.autograd.grad(out.sum(), inputs)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    for ours, eagers in zip(found, expected, strict=True):
        assert ours.shape == eagers.shape and torch.equal(ours, eagers)
