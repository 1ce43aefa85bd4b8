"""Rows with a large weight, and rows of V with much in common: their deltas are summed over the keys."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton.differentiable import Differentiable, _BackwardLaunches
from fusion.planning.choice import Tile
from tests.codegen.mlir.cases import Case, assert_gradients_as_exact_as_eager, case, draw

TILE = Tile(rows=16, keys=32, warps=4, stages=1)


def check(c: Case, operands: list[torch.Tensor], sizes: list[int]) -> None:
    run, needs = Differentiable(c.spec, TILE), tuple(x.is_floating_point() for x in operands)
    out, statistics = run.outputs(operands, sizes)
    grad = (torch.randn(out.shape) + 1).to(out.dtype)
    gradients = run.backward(grad, out, statistics, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(gradients, c, operands, grad, needs)


def sink(c: Case) -> tuple[list[torch.Tensor], list[int]]:
    """Nearly all of each row's weight is at the first key."""
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 20, "Nk": 600})
    q, k = operands[:2]
    direction = torch.nn.functional.normalize(torch.randn(q.shape[-1]), dim=0)
    q += (22 - q @ direction)[..., None] * direction
    k[..., 0, :] = 5.5 * direction
    operands[2] += 1
    return operands, sizes


def common(c: Case) -> tuple[list[torch.Tensor], list[int]]:
    """Some rows have a large weight; rows of V have much in common."""
    operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": 75, "Nk": 60})
    operands[0] *= torch.where(torch.rand(operands[0].shape[:-1]) < 0.5, 9, 1)[..., None]
    operands[2] += 8
    return operands, sizes


DRAWS = {
    "plain": (sink, {}),
    "causal_last_key": (sink, {}),
    "alibi": (sink, {"weight": True}),
    "plain with sinks": (common, {"sinks": True}),
    "plain by one more": (common, {"off_by_one": True}),
    "plain of groups": (common, {"group": 2}),
    "bias": (common, {}),
    "documents": (common, {}),
    "bucket_table": (common, {}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_gradients_in_float32(name: str) -> None:
    drawn, options = DRAWS[name]
    c = case(name.split()[0], "float32", 24, 16, **options)
    check(c, *drawn(c))


@pytest.mark.parametrize(("name", "dtype"), [("causal_last_key", "float32"), ("bucket_table", "bfloat16")])
def test_without_the_correction_they_are_off(name: str, dtype: str) -> None:
    c = case(name, dtype, 24, 16)
    drawn = [DRAWS[name][0](c) for _ in range(4)]
    for operands in drawn:
        check(c, *operands)
    with mock.patch.object(_BackwardLaunches, "_delta"), pytest.raises(AssertionError, match="exceeds"):
        for operands in drawn:
            check(c, *operands)


def test_half_precision_without_tables_needs_none() -> None:
    """Nor has it the kernel."""
    c = case("plain", "bfloat16", 24, 16)
    with mock.patch.object(_BackwardLaunches, "_delta", side_effect=AssertionError("a correction ran")):
        check(c, *common(c))
