"""Gradients on more threads than there are cores: the same in every run, and those of one thread but for the order of
sums."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.training import TrainingKernel
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import TARGETS, assert_gradients_as_exact_as_eager, case, draw, on_threads


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "group"), [("causal", 1), ("causal", 3), ("bias", 1), ("bucket_table", 1), ("alibi", 3)]
)
def test_gradients_are_the_same_in_every_run(name: str, group: int, dtype: str) -> None:
    """Three query heads to a key head: a sum of two terms is the same in any order."""
    c = case(name, dtype, group=group)
    target = TARGETS["best"]
    run = TrainingKernel(c.spec, tilings_for(c.spec, target), target)
    operands, sizes = draw(c, {"B": 1, "H": 2 if group > 1 else 5, "Nq": 333, "Nk": 333})
    out, statistics = run.outputs(operands, sizes)
    grad, needs = torch.randn_like(out), (True,) * len(operands)

    def gradients() -> list[torch.Tensor]:
        return run.backward(grad, out, statistics, operands, sizes, needs)

    first, *others = (on_threads(gradients) for _ in range(6))
    for found in first:
        assert_gradients_as_exact_as_eager(found, c, operands, grad, needs)
    for again in others:
        assert all(
            torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True)
        )
