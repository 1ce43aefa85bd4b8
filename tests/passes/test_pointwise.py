"""Pointwise operations of the score language, each through the whole backend: one line per operation."""

import math

import pytest
import torch
import torch.nn.functional as F

import fusion
from tests.numerics import assert_as_exact_as_eager

OPERATIONS = {
    "mish": F.mish,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "celu and selu": lambda s: F.celu(s) + F.selu(s),
    "threshold and shrinks": lambda s: F.threshold(s, 0.1, -2.0) + F.hardshrink(s) * F.softshrink(s),
    "hyperbolic": lambda s: torch.asinh(s) + torch.sinh(s * 0.1) + torch.cosh(s * 0.1) + torch.atanh(s * 0.02),
    "angles": lambda s: torch.acos(s.clamp(-9, 9) * 0.1) * torch.arcsin(s.clamp(-9, 9) * 0.1),
    "logarithms": lambda s: torch.logaddexp(s, torch.multiply(s, -0.5)) + torch.frac(s) + torch.erfc(s),
    "finite": lambda s: torch.where(torch.isfinite(s.masked_fill(s > 2, math.inf)), s, 1.0),
}


@torch.no_grad()
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_pointwise_operation_of_the_score(name):
    operation = OPERATIONS[name]

    def attend(q, k, v):
        return torch.softmax(operation(q @ k.mT), -1) @ v

    given = [torch.randn(1, 2, 19, 8) for _ in range(3)]  # scores of -8 .. 8
    with fusion.collect_reports() as reports:
        actual = torch.compile(attend, backend="fusion", options={"inner": "eager"})(*given)
    assert [report.fused for report in reports] == [1]
    assert_as_exact_as_eager(actual, attend(*given), attend(*(x.double() for x in given)), torch.float32)
