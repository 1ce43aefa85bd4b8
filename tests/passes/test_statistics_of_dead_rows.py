"""Statistics of rows without a live key, in programs as users write them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.numerics import assert_as_exact_as_eager

LIVE = (torch.arange(33)[:, None] > 6) & (torch.arange(33) < 30)


def _sum(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp().sum(-1)


def _masked(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(~LIVE, -torch.inf)


def softmax_and_sum(q: Tensor, k: Tensor, v: Tensor):
    s = _masked(q, k)
    return s.softmax(-1) @ v, _sum(s)


def safe_softmax_and_sum(q: Tensor, k: Tensor, v: Tensor):
    s = _masked(q, k)
    return torch.ops.aten._safe_softmax(s, -1) @ v, _sum(s)


def factor_around_fill(q: Tensor, k: Tensor, v: Tensor):
    s = (q @ k.mT * 0.25 + torch.zeros(33, 33, dtype=q.dtype).masked_fill(~LIVE, -1e4)) * 30
    return s.softmax(-1) @ v, s.amax(-1), s.logsumexp(-1)


@pytest.mark.parametrize(
    ("function", "fused"), [(softmax_and_sum, 1), (safe_softmax_and_sum, 0), (factor_around_fill, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics(function: Callable, fused: int, dtype: torch.dtype) -> None:
    counters.clear()
    inputs = [torch.randn(2, 3, 33, 16).to(dtype) for _ in range(3)]
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager"})
    found = compiled(*inputs)
    assert counters["fusion"]["fused"] == fused
    assert_as_exact_as_eager(found, function(*inputs), function(*(x.double() for x in inputs)), dtype)
