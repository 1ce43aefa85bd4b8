"""What is derived once for calls of the same sizes: how gradients of heads that read the same keys are added up."""

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.mlir.backward.derived import summing
from fusion.codegen.mlir.strategy import tilings_for
from fusion.codegen.mlir.training import TrainingKernel
from fusion.codegen.reference import gradients
from tests.codegen.mlir.cases import TARGETS, assert_gradients_as_exact_as_eager, case, draw
from tests.numerics import assert_same_in_float64


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_sum_is_the_gradient_of_the_reads(number: int, heads: int) -> None:
    c = case("plain", group=3)
    operands, sizes = draw(c, {"B": 2, "H": heads, "Nq": 5, "Nk": 7})
    shape, extents = operands[number].shape, (2, 3 * heads, 7 if number else 5, operands[number].shape[-1])
    upstream = torch.randn(extents, dtype=torch.float64)
    found = summing(c.spec, number, shape, extents)
    assert found is not None
    wide = [x.double() for x in operands]
    expected = gradients.of_access(c.spec, wide, sizes, number, upstream)
    assert_same_in_float64(found.of(upstream, wide[number]), expected)


def test_a_tensor_that_is_larger_than_what_is_read_has_no_such_sum() -> None:
    c = case("plain")
    assert summing(c.spec, 1, (2, 2, 9, 8), (2, 2, 7, 8)) is None


def test_statistics_need_not_be_packed() -> None:
    c = case("plain", "float32", 16)
    run = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS["best"]), TARGETS["best"])
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 21, "Nk": 21})
    out, statistics = run.outputs(operands, sizes)
    grad, needs = torch.randn_like(out), (True,) * 3
    apart = statistics.repeat_interleave(2, -1)[..., ::2]
    found = run.backward(grad, out, apart, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(found, c, operands, grad, needs)
