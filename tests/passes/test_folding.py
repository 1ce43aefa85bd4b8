"""Masks computed by detours from positions alone are known at compile time; what may change between calls is not."""

import math

import pytest
import torch

import fusion
from fusion.ir.expr import I, J, loads
from fusion.ir.ops import apply
from tests.numerics import assert_as_exact_as_eager

N = 40


def _positions(q):
    return torch.arange(q.shape[-2])[None].expand(q.shape[0], -1)


def packed_check(q, k, v):
    """As decoders of `transformers` look for packed sequences: here there are none."""
    positions = _positions(q)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    documents = (steps != 1).cumsum(-1)
    keep = (documents[:, :, None] == documents[:, None, :])[:, None] & (positions[:, None, :, None] >= positions[0])
    return torch.softmax((q @ k.mT).masked_fill(~keep, -math.inf), -1) @ v


def counted(q, k, v):
    """Positions as sums of ones."""
    i = torch.ones(N, dtype=torch.int64).cumsum(0) - 1
    return torch.softmax((q @ k.mT).masked_fill(i[:, None] < i, -math.inf), -1) @ v


def found_positions(q, k, v):
    i = torch.bucketize(torch.arange(N), torch.arange(N))
    return torch.softmax((q @ k.mT).masked_fill(i[:, None] < i, -math.inf), -1) @ v


def _spec(function, *inputs, **options):
    torch._dynamo.reset()
    with torch.no_grad(), fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True}, **options)
        actual = compiled(*inputs)
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert_as_exact_as_eager(actual, function(*inputs), exact, torch.float32)
    return reports[0].sites[0].spec


@pytest.mark.parametrize("function", [packed_check, counted, found_positions])
def test_what_depends_on_sizes_alone_is_folded(function):
    spec = _spec(function, *(torch.randn(2, 3, N, 8) for _ in range(3)))
    assert spec.mask.live is apply("ile", J, I)
    assert len(spec.operands) == 3


def test_differences_of_positions_are_known_at_any_length():
    inputs = [torch.randn(2, 3, N, 8) for _ in range(3)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    spec = _spec(packed_check, *inputs)
    assert spec.mask.live is apply("ile", J, I)
    assert spec.n_q.op == "size" and not loads(spec.score)


def test_data_and_what_is_not_affine_are_loaded():
    def by_data(q, k, v, starts):
        documents = starts.cumsum(-1)
        return torch.softmax((q @ k.mT).masked_fill(documents[:, None] != documents, -math.inf), -1) @ v

    def squares(q, k, v):
        i = torch.arange(N).cumsum(0)
        return torch.softmax((q @ k.mT).masked_fill(i[:, None] // 9 < i // 7, -math.inf), -1) @ v

    inputs = [torch.randn(2, 3, N, 8) for _ in range(3)]
    assert loads(_spec(by_data, *inputs, torch.randint(0, 2, (N,))).score)
    assert loads(_spec(squares, *inputs).score)


def test_random_values_are_drawn_at_every_call():
    def random(q, k, v):
        offset = torch.randint(0, 5, (1,)).expand(N)
        i = torch.arange(N) + offset
        return torch.softmax((q @ k.mT).masked_fill(i[:, None] < torch.arange(N), -math.inf), -1) @ v

    inputs = [torch.randn(2, 3, N, 8) for _ in range(3)]
    report = fusion.explain(random, *inputs)
    assert report.sites[0].fused and loads(report.sites[0].spec.score)
