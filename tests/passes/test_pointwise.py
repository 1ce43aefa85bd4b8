"""Pointwise operations of the score language, each through the whole backend: one line per operation."""

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
