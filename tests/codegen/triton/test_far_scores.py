"""Scores far from zero: their maximum times log2(e) is rounded, and nothing may depend on how."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.planning.choice import Tile
from tests.codegen.mlir.cases import assert_as_exact_as_eager, assert_gradients_as_exact_as_eager, case, draw
from tests.passes.exactness import as_exact_as_eager, padded

TILE = Tile(rows=16, keys=16, warps=4, stages=1)


def steps(sinks: bool = False):
    """A bias alone: of the first half of the keys -10001, of the others -9999; eager's exponentials are exact."""
    c = case("bias", d=16, sinks=sinks)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 18, "Nk": 96})
    operands[0].zero_()
    operands[3][:] = torch.where(torch.arange(96) < 48, -10001.0, -9999.0)
    if sinks:
        operands[-1][:] = -10000.0
    return c, operands, sizes


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_maxima_of_parts(splits: int) -> None:
    c, operands, sizes = steps()
    assert_as_exact_as_eager(Kernel(c.spec, TILE, splits=splits)(operands, sizes), c, operands)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("bias", [(0.6e9, 0.8e9), (-0.8e9, -0.6e9, 0.0), (-2e9, -1e9, 1e9, 2e9)])
def test_a_maximum_that_becomes_or_stops_being_huge(bias: tuple[float, ...], splits: int) -> None:
    """Beyond `numbers.HUGE` exponentials have another unit."""
    c, operands, sizes = steps()
    operands[3][:] = torch.tensor(bias).repeat_interleave(96 // len(bias))
    assert_as_exact_as_eager(Kernel(c.spec, TILE, splits=splits)(operands, sizes), c, operands)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_sink_beside_them(splits: int) -> None:
    c, operands, sizes = steps(sinks=True)
    assert_as_exact_as_eager(Kernel(c.spec, TILE, splits=splits)(operands, sizes), c, operands)


def test_weights_of_the_backward_are_those_of_the_forward() -> None:
    c, operands, sizes = steps()
    run, needs = Differentiable(c.spec, TILE), (True, True, True, True)
    out, statistics = run.outputs(operands, sizes)
    grad = torch.randn(out.shape)
    got = run.backward(grad, out, statistics, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(got, c, operands, grad, needs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fill", [-1e6, -1e9, -1e10, -1e20, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("scale", [0.3, 0.7, 1.0])
def test_rows_of_nothing_but_a_fill_are_means(fill: float, scale: float) -> None:
    """There a product that is rounded once, before a difference that is not, would be off by any exponent."""

    def attention(q, k, v, pad):
        return (q @ k.mT * scale).masked_fill(~pad[:, None, None], fill).softmax(-1) @ v

    (site,) = as_exact_as_eager(attention, padded(torch.float32, 37), gradients=True)
    assert site.fused


@pytest.mark.parametrize("size", [1e3, 1e5, 1e9])
def test_scores_that_are_huge_without_a_mask(size: float) -> None:
    def attention(q, k, v, pad):
        return (q @ k.mT * 0.3).softmax(-1) @ v

    q, *rest = padded(torch.float32, 37)
    (site,) = as_exact_as_eager(attention, [q.sign() * size, *(x.sign() for x in rest[:2]), rest[2]])
    assert site.fused
