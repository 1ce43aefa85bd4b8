"""Calls on 1 to 64 threads, whatever the cores: bits that do not depend on their number, and those that may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen import cpu
from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import TARGETS, assert_as_exact_as_eager, case, draw
from tests.reproducible import threads

THREADS = (1, 2, 3, 7, 16, 33, 64)
SHAPES = {"prefill": (3, 300, 333), "few items": (1, 70, 1500), "decoding": (2, 1, 2100)}
"""Heads, queries and keys."""


def on_all(run: Callable[[], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Results on each of these numbers of threads."""
    results = []
    for count in THREADS:
        with threads(count):
            results.append(run())
    return results


def assert_same_bits(results: list[list[torch.Tensor]]) -> None:
    first, *others = results
    for count, other in zip(THREADS[1:], others, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True)), f"{count} threads"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "causal", "left_padded"])
def test_a_kernel_has_the_same_bits_on_any_number_of_threads(name: str, dtype: str, shape: str) -> None:
    """In one tile, or row by row with the keys in parts."""
    heads, n_q, n_k = SHAPES[shape]
    c, target = case(name, dtype), TARGETS["best"]
    operands, sizes = draw(c, {"B": 1, "H": heads, "Nq": n_q, "Nk": n_k})
    run = Kernel(c.spec, tilings_for(c.spec, target), target)
    results = on_all(lambda: [run(operands, sizes)])
    assert_same_bits(results)
    assert_as_exact_as_eager(results[0][0], c, operands)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_a_step_has_the_same_bits_on_any_number_of_threads(name: str, dtype: str) -> None:
    c, target = case(name, dtype), TARGETS["best"]
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 130, "Nk": 200})
    run = TrainingKernel(c.spec, tilings_for(c.spec, target), target)
    grad = torch.randn(1, 2, 130, 64).to(operands[0].dtype)

    def step() -> list[torch.Tensor]:
        out, statistics = run.outputs(operands, sizes)
        return [out, *run.backward(grad, out, statistics, operands, sizes, (True,) * len(operands))]

    assert_same_bits(on_all(step))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["causal", "left_padded"])
def test_planned_kernels_are_as_exact_on_any_number_of_threads(name: str, shape: str) -> None:
    """Their tile is chosen for as many threads as there are: bits may differ."""
    from fusion.machine import Machine
    from fusion.planning.cpu_planner import CpuPlanner

    heads, n_q, n_k = SHAPES[shape]
    c = case(name)
    operands, sizes = draw(c, {"B": 1, "H": heads, "Nq": n_q, "Nk": n_k})
    machine = Machine.detect()

    def run() -> list[torch.Tensor]:
        return [cpu.compile(c.spec, machine, plan=lambda machine: CpuPlanner(c.spec, machine))(operands, sizes)]

    for (out,) in on_all(run):
        assert_as_exact_as_eager(out, c, operands)
