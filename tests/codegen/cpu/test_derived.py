"""What is derived once for calls of the same sizes: where gradients of Q, K and V are written, and how those of heads
that read the same keys are added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu import backward
from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir import Expr, integers
from fusion.ir.expr import C, E, I, J
from fusion.ir.spec import Operand
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import BATCH, HEAD, NK, NQ, TARGETS, assert_gradients_as_exact_as_eager, case, draw

D, D_V = 16, 24
MORE = 3  # elements that nothing reads, on either side


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of [B, H, N, d], as an index and as a function, and back."""

    index: Callable[[Expr, Expr, Expr, int, Expr], tuple[Expr, ...]]  # of head, row, column, d and N
    make: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, torch.Size], Tensor]


def _heads_beside(x: Tensor) -> Tensor:
    """[B, N, H d]"""
    return x.transpose(1, 2).flatten(2)


def _heads_apart(x: Tensor, shape: torch.Size) -> Tensor:
    return x.unflatten(2, (shape[1], shape[3])).transpose(1, 2)


def _between(x: Tensor) -> Tensor:
    """[B, N, H d] as a part of something larger."""
    return torch.nn.functional.pad(_heads_beside(x), (MORE, MORE))


LAYOUTS = {
    "columns of a linear layer": Layout(
        index=lambda h, row, c, d, n: (BATCH, row, integers.add(integers.mul(h, d), c)),
        make=_heads_beside, back=_heads_apart,
    ),
    "rows of all batches": Layout(
        index=lambda h, row, c, d, n: (integers.add(integers.mul(BATCH, n), row), integers.add(integers.mul(h, d), c)),
        make=lambda x: _heads_beside(x).flatten(0, 1),
        back=lambda x, shape: _heads_apart(x.unflatten(0, (shape[0], shape[2])), shape),
    ),
    "heads innermost": Layout(
        index=lambda h, row, c, d, n: (BATCH, row, c, h),
        make=lambda x: x.permute(0, 2, 3, 1).contiguous(), back=lambda x, shape: x.permute(0, 3, 1, 2),
    ),
    "part of a packed tensor": Layout(
        index=lambda h, row, c, d, n: (BATCH, row, integers.add(integers.mul(h, d), c, MORE)),
        make=_between, back=lambda x, shape: _heads_apart(x[..., MORE:-MORE], shape),
    ),
    "rows backwards": Layout(
        index=lambda h, row, c, d, n: (BATCH, h, integers.sub(integers.sub(n, 1), row), c),
        make=lambda x: x.flip(2), back=lambda x, shape: x.flip(2),
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_written_where_their_elements_lie(
    name: str, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, layout = case("plain", dtype, D, D_V, group=group), LAYOUTS[name]
    operands, sizes = draw(c, {"B": 2, "H": 2, "Nq": 21, "Nk": 37})
    kv = HEAD if group == 1 else integers.floordiv(HEAD, group)
    index = layout.index(HEAD, I, C, D, NQ), layout.index(kv, J, C, D, NK), layout.index(kv, J, E, D_V, NK)
    described = tuple(Operand(dtype=dtype, rank=len(each), name=n) for n, each in zip("qkv", index, strict=True))
    q, k, v = index
    laid_out = replace(c.spec, operands=described, q=q, k=k, v=v)
    given = [layout.make(x) for x in operands]
    if "backwards" not in name or group == 1:
        monkeypatch.setattr(backward.pulled, "of_access", None)  # nothing is gathered
    found = _gradients(laid_out, given, sizes)
    grad = torch.randn(2, 2 * group, 21, D_V, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    back = [layout.back(g, x.shape) for g, x in zip(found, operands, strict=True)]
    assert_gradients_as_exact_as_eager(back, c, operands, grad, (True,) * 3)
    for ours, g in zip(back, found, strict=True):
        assert ours.ne(0).sum() == g.ne(0).sum(), "something was written where nothing is read"


def _gradients(spec, operands: list[Tensor], sizes: list[int]) -> list[Tensor]:
    run = TrainingKernel(spec, tilings_for(spec, TARGETS["best"]), TARGETS["best"])
    out, statistics = run.outputs(operands, sizes)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    return run.backward(grad, out, statistics, operands, sizes, (True,) * 3)


def test_a_tensor_that_is_larger_than_what_is_read_has_zeros_in_its_gradient() -> None:
    c = case("plain", group=2)
    (q, k, v), sizes = draw(c, {"B": 2, "H": 1, "Nq": 9, "Nk": 7})
    _, dk, dv = _gradients(c.spec, [q, *(torch.cat([x, x[:, :, :2]], 2) for x in (k, v))], sizes)
    assert all(not g[:, :, 7:].any() and g[:, :, :7].any() for g in (dk, dv))


def test_statistics_need_not_be_packed() -> None:
    c = case("plain", "float32", 16)
    run = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS["best"]), TARGETS["best"])
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 21, "Nk": 21})
    out, statistics = run.outputs(operands, sizes)
    grad, needs = torch.randn_like(out), (True,) * 3
    apart = statistics.repeat_interleave(2, -1)[..., ::2]
    found = run.backward(grad, out, apart, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(found, c, operands, grad, needs)
