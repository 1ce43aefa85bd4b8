"""Gradients of K and V of few queries: nothing averages out the errors of their scores."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.training import TrainingKernel
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import HERE, assert_trains_as_exact_as_eager, case


@pytest.mark.parametrize("queries", [1, pytest.param(3, marks=pytest.mark.long)])
def test_gradients_are_as_exact_as_eager(queries: int) -> None:
    """In each of some draws; with scores that are one sum per element a fifth of them was not."""
    c = case("plain", d=64)
    kernel = TrainingKernel(c.spec, tilings_for(c.spec, HERE), HERE)
    for seed in range(12):
        torch.manual_seed(seed)
        assert_trains_as_exact_as_eager(kernel, c, {"B": 1, "H": 4, "Nq": queries, "Nk": 512})
