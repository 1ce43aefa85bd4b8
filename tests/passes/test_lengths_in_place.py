"""A length that is added to in place around an attention, as that of a static cache."""

import math

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager


def of_its_own_length(length, q, keys, values):
    """As static caches do: the mask is of a length that is added to before the attention reads the cache."""
    positions = torch.arange(q.shape[-2]) + length
    mask = torch.arange(keys.shape[-2]) <= positions[:, None]
    length.add_(q.shape[-2])
    return (q @ keys.mT * 0.25).masked_fill(~mask, -math.inf).softmax(-1) @ values, mask


def read_before_and_after(length, q, keys, values):
    before = torch.arange(keys.shape[-2]) < length
    length.add_(q.shape[-2])
    after = torch.arange(keys.shape[-2]) < length
    scores = (q @ keys.mT * 0.25).masked_fill(before, -math.inf).masked_fill(~after, -math.inf)
    return scores.softmax(-1) @ values, before


def seen_through_a_view(length, q, keys, values):
    view = length.expand(keys.shape[-2])
    s = q @ keys.mT * 0.25 + view * 0.1
    length.add_(q.shape[-2])
    return s.softmax(-1) @ values, view + 0


def read_by_the_scores(length, q, keys, values):
    s = q @ keys.mT * 0.25 * length
    length.add_(q.shape[-2])
    return s.softmax(-1) @ values, s.amax()


def changed_after_the_product(length, q, keys, values):
    mask = torch.arange(keys.shape[-2]) <= length
    out = (q @ keys.mT * 0.25).masked_fill(~mask, -math.inf).softmax(-1) @ values
    length.add_(q.shape[-2])
    return out * length, mask


@pytest.mark.parametrize(
    ("function", "fused"),
    [
        (of_its_own_length, 1),
        (read_before_and_after, 1),
        (seen_through_a_view, 1),
        (read_by_the_scores, 0),
        (changed_after_the_product, 1),
    ],
)
def test_a_length_that_is_added_to(function, fused):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager"})
    lengths = [torch.tensor(3) for _ in range(3)]
    with fusion.collect_reports() as reports:
        for n in (4, 1, 1, 2):
            given = [torch.randn(1, 2, m, 16) for m in (n, 12, 12)]
            runs = zip(
                (compiled, function, function), lengths, (given, given, [x.double() for x in given]), strict=True
            )
            results = [run(length, *tensors) for run, length, tensors in runs]
            assert len({int(length) for length in lengths}) == 1
            assert_as_exact_as_eager(*results)
    assert {report.fused for report in reports} == {fused}
