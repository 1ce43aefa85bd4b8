"""Extents that are 1 in some calls, and expressions of sizes: what is broadcast there is read at its one place."""

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
