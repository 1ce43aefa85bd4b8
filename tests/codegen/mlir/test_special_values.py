"""Infinities, NaN and very large values: as eager has them, whatever the kernel splits, skips or speculates on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir import Normalizer
from fusion.planning.register_tiles import tilings_for
from tests import emulation
from tests.codegen.mlir.cases import (
    TARGETS,
    assert_as_exact_as_eager,
    assert_gradients_as_exact_as_eager,
    case,
    draw,
    eager,
)
from tests.fuzz import quick
from tests.numerics import assert_within

INF, NAN = float("inf"), float("nan")
SHAPE = {"B": 1, "H": 2, "Nq": 40, "Nk": 70}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["best", "avx2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [INF, -INF, NAN, 3e38])
def test_in_the_operands(value: float, dtype: str, target: str) -> None:
    c = case("plain", dtype)
    run = Kernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])
    for number, place in ((0, (0, 0, 3, 5)), (1, (0, 1, 66, 0)), (2, (0, 0, 69, 63))):
        operands, sizes = draw(c, SHAPE)
        operands[number][place] = value
        assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("normalizer", [Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX, Normalizer.ZERO_SOFTMAX])
def test_in_a_bias(value: float, normalizer: Normalizer) -> None:
    c = case("bias", normalizer=normalizer)
    run = Kernel(c.spec, tilings_for(c.spec, TARGETS["best"]), TARGETS["best"])
    operands, sizes = draw(c, SHAPE)
    operands[3][0, 1, 2] = value
    operands[3][1, 20] = value
    assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.parametrize("scale", [1e-30, 1e15])
def test_range(scale: float) -> None:
    c = case("plain")
    run = Kernel(c.spec, tilings_for(c.spec, TARGETS["best"]), TARGETS["best"])
    operands, sizes = draw(c, SHAPE)
    operands[0], operands[1] = operands[0] * scale, operands[1] / scale
    assert_as_exact_as_eager(run(operands, sizes), c, operands)
    operands[2] = operands[2] * scale
    assert_as_exact_as_eager(run(operands, sizes), c, operands)


def test_the_maximum_moves_up_late() -> None:
    """Rows whose large scores come last rescale what was summed before; those whose come first do not."""
    c = case("bias")
    run = Kernel(c.spec, tilings_for(c.spec, TARGETS["best"]), TARGETS["best"])
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 40, "Nk": 1000})
    operands[3] = operands[3] + torch.linspace(-200, 200, 1000) * torch.tensor([1.0, -1.0])[:, None, None]
    assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.parametrize("target", ["best", "avx2"])
@pytest.mark.parametrize("queries", [4, 40])
def test_a_maximum_far_from_zero_moves_up_by_little(queries: int, target: str) -> None:
    """m * log2(e) is rounded for each maximum otherwise, by 2**-11 at 10000; every second row has another's jump beside
    it. Fewer than eight queries go row by row.

    The values tell what weight the first half has. The bound is that of sums in any order: a rule for random weights
    allows less for equal ones."""
    c = case("bias")
    run = Kernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])
    operands, sizes = draw(c, {"B": 1, "H": 6, "Nq": queries, "Nk": 300})
    operands[0].zero_()
    first = torch.arange(300) < 150
    operands[2] = torch.ones_like(operands[2]) * first[:, None]
    operands[3][:, ::2] = torch.where(first, -10001.0, -10000.0) + torch.arange(0, queries, 2)[:, None] / 7
    operands[3][:, 1::2] = torch.where(first, 0.0, 100.0)
    error = run(operands, sizes) - eager(c, operands, torch.float64)
    assert_within(error.abs(), 300 * 2**-24 * operands[2].abs().mean(-2, keepdim=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["best", "avx2"])
@pytest.mark.parametrize("queries", [4, 40])
@pytest.mark.parametrize("steps", [(0.6e9, 0.8e9), (-0.8e9, -0.6e9, 0.0), (-2e9, -1e9, 1e9, 2e9)])
def test_a_maximum_that_becomes_or_stops_being_huge(steps: tuple[float, ...], queries: int, target: str) -> None:
    """Beyond `numbers.HUGE` exponentials have another unit, and weights of one are rescaled to the other."""
    c = case("bias")
    run = Kernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": queries, "Nk": 1000})
    operands[3][:] = torch.tensor(steps).repeat_interleave(1000)[:: len(steps)]
    assert_as_exact_as_eager(run(operands, sizes), c, operands)


def test_the_floating_point_mode_is_the_callers_again() -> None:
    """Kernels may flush denormal results while they run; torch must not notice."""
    c = case("plain", "bfloat16", 64)
    operands, sizes = draw(c, {"B": 1, "H": 4, "Nq": 300, "Nk": 300})
    Kernel(c.spec, tilings_for(c.spec, TARGETS["best"]), TARGETS["best"])(operands, sizes)
    smallest = torch.full((4096,), 2.0**-126)
    assert (smallest * 0.5 != 0).all()


FACTORS = [(1, 1, 2.0**-60), (1, 1, 2.0**-114), (1, 1, 2.0**-122), (2.0**-115, 2.0**112, 1), (2.0**-60, 2.0**60, 1)]
"""Factors of Q, K and V."""


@pytest.mark.parametrize("factors", FACTORS)
def test_tiny_values_in_planes_of_bfloat16(factors: tuple[float, float, float]) -> None:
    """Products of planes take denormal numbers for 0: the last planes of a float32 below 2**-102."""
    c = case("plain", d=40, d_v=24)
    chosen = quick.Plan(
        target=emulation.AMX, tiling=tilings_for(c.spec, emulation.AMX)[0], schedule="flash", span=512, optimised=False
    )
    with quick.compiling_for(chosen):
        run = quick.kernel(c.spec, chosen, trained=False)
        assert isinstance(run, Kernel)
        operands, sizes = draw(c, SHAPE)
        operands = [x * factor for x, factor in zip(operands, factors, strict=True)]
        assert_as_exact_as_eager(run(operands, sizes), c, operands)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fused", [True, False], ids=["one kernel", "two kernels"])
@pytest.mark.parametrize(
    ("factors", "arriving"),
    [((1, 1, 1), 2.0**-20), ((1, 1, 1), 2.0**-100), ((1, 1, 1), 2.0**-112), ((1, 1, 2.0**-60), 2.0**-50),
     ((2.0**-50, 2.0**50, 1), 2.0**-10)],
)  # fmt: skip
def test_tiny_gradients_in_planes_of_bfloat16(
    factors: tuple[float, float, float], arriving: float, fused: bool
) -> None:
    c = case("causal", d=40, d_v=24)
    with emulation.compiling(emulation.AMX):
        run = TrainingKernel(c.spec, tilings_for(c.spec, emulation.AMX), emulation.AMX)
        run.fused = fused
        operands, sizes = draw(c, SHAPE)
        operands = [x * factor for x, factor in zip(operands, factors, strict=True)]
        out, statistics = run.outputs(operands, sizes)
        grad, needs = arriving * torch.randn_like(out), (True,) * 3
        given = run.backward(grad, out, statistics, operands, sizes, needs)
        assert_gradients_as_exact_as_eager(given, c, operands, grad, needs)
