"""Memory of results: what kernels write is not filled before; what they add to, or write in part, is zero."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton import differentiable
from fusion.codegen.triton.differentiable import Differentiable
from fusion.planning.gpu import GpuPlanner
from tests.codegen.mlir.cases import Case, case, draw
from tests.codegen.triton.test_backward import SHAPES, Apart, Joined
from tests.numerics import assert_as_exact_as_eager


def differentiable_by(c: Case, policy: Apart) -> Differentiable:
    """Kernels of a case by a policy of the test's."""
    return Differentiable(c.spec, plan=lambda machine: GpuPlanner(c.spec, machine, policy))


def filled(monkeypatch, run: Differentiable, operands: list[torch.Tensor], sizes: list[int]) -> list[tuple[int, ...]]:
    """Shapes of the tensors of floats that are filled with zeros in a forward and a backward."""
    shapes, zeros = [], torch.zeros

    def noted(shape, **named):
        shapes.extend([tuple(shape)] if named["dtype"].is_floating_point else [])
        return zeros(shape, **named)

    with monkeypatch.context() as patch:
        patch.setattr(differentiable.torch, "zeros", noted)
        out, statistics = run.outputs(operands, sizes)
        assert statistics[:2].isfinite().all()
        gradients = run.backward(torch.ones_like(out), out, statistics, operands, sizes, (True,) * len(operands))
    assert all(gradient.isfinite().all() for gradient in gradients)
    return shapes


@pytest.mark.parametrize("group", [1, 2])
def test_gradients_of_q_k_and_v_are_written(monkeypatch, group: int) -> None:
    c = case("causal", group=group)
    operands, sizes = draw(c, SHAPES[0] | {"H": group})
    assert not filled(monkeypatch, differentiable_by(c, Apart()), operands, sizes)


def test_gradients_of_captured_tensors_are_added_to(monkeypatch) -> None:
    c = case("alibi")
    operands, sizes = draw(c, SHAPES[0])
    assert filled(monkeypatch, differentiable_by(c, Apart()), operands, sizes) == [tuple(operands[3].shape)]


def test_one_kernel_adds_to_the_gradient_of_q_alone(monkeypatch) -> None:
    c = case("plain")
    operands, sizes = draw(c, SHAPES[0])
    assert filled(monkeypatch, differentiable_by(c, Joined()), operands, sizes) == [tuple(operands[0].shape)]


def test_elements_that_the_attention_does_not_read_have_a_gradient_of_zero() -> None:
    """Heads of Q, K and V in one tensor, of which the attention reads part of the columns."""

    def attention(x):
        q, k, v = x.unflatten(-1, (3, 1, 24))[..., :16].permute(2, 0, 3, 1, 4)
        return (q @ k.mT).softmax(-1) @ v

    def gradient(function, dtype=torch.float32):
        x = torch.randn(1, 40, 72, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        function(x).square().sum().backward()
        return x.grad

    compiled = torch.compile(attention, backend="fusion", options={"inner": "eager", "strict": True})
    assert_as_exact_as_eager(gradient(compiled), gradient(attention), gradient(attention, torch.float64))
