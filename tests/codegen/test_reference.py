"""The reference interpreter against plain torch: what every spec of the kernels' tests means, forward and gradient."""

from __future__ import annotations

import pytest
import torch

from fusion.codegen import reference
from fusion.ir import Normalizer
from tests.codegen.mlir.cases import (
    PROGRAMS,
    Case,
    assert_as_exact_as_eager,
    assert_gradients_as_exact_as_eager,
    case,
    draw,
)

SHAPES = (
    {"B": 2, "H": 2, "Nq": 40, "Nk": 40},
    {"B": 1, "H": 3, "Nq": 33, "Nk": 75},
    {"B": 1, "H": 1, "Nq": 1, "Nk": 1},
)


def check(c: Case) -> None:
    for shape in SHAPES:
        operands, sizes = draw(c, shape)
        needs = [o.is_floating_point() for o in operands]
        out = reference.run(c.spec, operands, sizes)
        assert_as_exact_as_eager(out, c, operands)
        grad = torch.randn(out.shape)
        got = reference.backward(c.spec, grad, operands, sizes, needs)
        assert_gradients_as_exact_as_eager(got, c, operands, grad, needs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program(name: str) -> None:
    check(case(name, d=16))


OPTIONS = [
    {"group": 3},
    {"weight": True},
    {"sinks": True},
    {"off_by_one": True},
    {"weight": True, "sinks": True, "off_by_one": True},
    {"normalizer": Normalizer.SAFE_SOFTMAX},
    {"normalizer": Normalizer.ZERO_SOFTMAX},
    {"normalizer": Normalizer.NONE},
    {"d_v": 5, "order": ("b0", "i", "b1", "e")},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["causal", "left_padded", "bias"])
def test_around_the_scores(name: str, options: dict) -> None:
    if options.get("normalizer") is Normalizer.NONE:
        name = "sigmoid"
    check(case(name, d=16, **options))
