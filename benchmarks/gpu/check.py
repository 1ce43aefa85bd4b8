"""Whether results on a GPU are right: outputs and gradients against float64, the same twice, under CUDA graphs, with
dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.rows import GPU_ROWS, Problem
from benchmarks.gpu.cells import Operands, brief
from benchmarks.gpu.device import Device
from fusion.exactness import errors

DROPPED = 0.2
REPEATS = 4  # of a training step that must give the same bits


@dataclass(slots=True, kw_only=True)
class Check:
    """What was looked at, and what is wrong with it; faults is empty where nothing is."""

    name: str
    run: Callable[[], list[str]]
    faults: list[str] | None = None

    def look(self) -> None:
        try:
            self.faults = self.run()
        except Exception as failure:  # the rest is still worth knowing
            self.faults = [brief(failure)]


def gradients(call: Callable[..., Tensor], operands: Operands, grad: Tensor) -> list[Tensor]:
    """The output and the gradients of all floating-point operands."""
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in operands]
    out = call(*given)
    wanted = [x for x in given if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))]


def draw(name: str, problem: Problem, device: Device) -> tuple[Operands, Tensor]:
    """A row's operands and a gradient of its output."""
    row = GPU_ROWS[name]
    operands = problem.tensors(row, device=device.kind)
    shape = (*operands[0].shape[:-1], row.width(problem.d))
    generator = torch.Generator(device.kind).manual_seed(1)
    return operands, torch.randn(shape, generator=generator, device=device.kind).to(problem.dtype)


def as_exact_as_eager(name: str, problem: Problem, device: Device) -> list[str]:
    """The rule of `fusion.exactness`, for the output without and with gradients, and for every gradient."""
    torch._dynamo.reset()
    operands, grad = draw(name, problem, device)
    plain = GPU_ROWS[name].plain
    call = device.compiled(plain, "fusion")
    wide = tuple(x.double() if x.is_floating_point() else x for x in operands)
    want, eager = gradients(plain, wide, grad), gradients(plain, operands, grad)
    got = gradients(call, operands, grad)
    with torch.no_grad():
        compared = [("inference", call(*operands), eager[0], want[0])]
    names = ["output", "dq", "dk", *([] if GPU_ROWS[name].latent else ["dv"]), "dextra"]
    compared += zip(names, got, eager, want, strict=False)
    faults = []
    for what, ours, theirs, true in compared:
        found = errors(ours, theirs, true)
        if found.share > 1:
            faults.append(f"{what}: {found}")
    return faults


def same_bits(name: str, problem: Problem, device: Device) -> list[str]:
    """Repeated training steps where torch is told to be deterministic: the output and the gradients of q, k and v."""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    try:
        return _differences(name, problem, device)
    finally:
        torch.use_deterministic_algorithms(False)


def _differences(name: str, problem: Problem, device: Device) -> list[str]:
    operands, grad = draw(name, problem, device)
    call = device.compiled(GPU_ROWS[name].plain, "fusion")
    first = gradients(call, operands, grad)[: 3 if GPU_ROWS[name].latent else 4]
    for _ in range(1 if device.rehearsal else REPEATS):
        again = gradients(call, operands, grad)
        for what, x, y in zip(("output", "dq", "dk", "dv"), first, again, strict=False):
            if not torch.equal(x, y):
                return [f"{what} differs by up to {(x - y).abs().max().item():.1e} between two runs"]
    return []


def same_in_graphs(name: str, problem: Problem, device: Device) -> list[str]:
    """`mode="reduce-overhead"`, which records CUDA graphs: new values in, the values of the ordinary call out."""
    torch._dynamo.reset()
    operands, _ = draw(name, problem, device)
    ordinary = device.compiled(GPU_ROWS[name].plain, "fusion")
    with torch.no_grad():
        others = tuple(x.flip(-1) if x.is_floating_point() else x for x in operands)
        want = [ordinary(*given).clone() for given in (operands, others)]
        torch._dynamo.reset()
        recorded = device.compiled(GPU_ROWS[name].plain, "fusion", mode="reduce-overhead")
        for _ in range(1 if device.rehearsal else 3):  # warm-up, recording, replay
            got = [recorded(*given).clone() for given in (operands, others)]
    return [f"call {at} differs" for at, (x, y) in enumerate(zip(want, got, strict=True)) if not torch.equal(x, y)]


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1)
    return F.dropout(weights, DROPPED) @ v


def dropout(problem: Problem, device: Device) -> list[str]:
    """With V the unit vectors the output is the weights: a share of them is gone, and the gradient of V says the same.

    N must be d. dV[j] = sum_i w[i, j] g[i], with g the unit vectors: dV is the transposed weights.
    """
    torch._dynamo.reset()
    q, k, _ = draw("full", problem, device)[0]
    one = torch.eye(problem.N, device=device.kind, dtype=problem.dtype).expand(problem.B, problem.H, -1, -1)
    v = one.clone().requires_grad_()
    out = device.compiled(dropped, "fusion")(q, k, v)
    (dv,) = torch.autograd.grad(out, v, one)
    gone, faults = (out == 0).float().mean().item(), []
    spread = 5 * (DROPPED * (1 - DROPPED) / out.numel()) ** 0.5
    if not abs(gone - DROPPED) <= spread:
        faults.append(f"{gone:.4f} of the weights are gone, {DROPPED} +- {spread:.4f} should be")
    if not torch.equal(dv.transpose(-2, -1) == 0, out == 0):
        faults.append("the backward drops other weights than the forward")
    return faults


def checks(names: list[str], dtype: str, device: Device) -> Iterator[Check]:
    """All checks, the most telling first. N = 389 has tails in every tile; 2048 fills the device."""
    low = getattr(torch, dtype)
    short, long, heads = (13, 12, 2) if device.rehearsal else (389, 2048, 8)

    def width(name: str, d: int) -> int:
        return (80 if device.rehearsal else 576) if GPU_ROWS[name].latent else 16 if device.rehearsal else d

    def exact(name: str, d: int, kind: torch.dtype) -> Check:
        given = Problem(B=2, H=2 if device.rehearsal else 4, N=short, d=width(name, d), dtype=kind)
        title = f"{name} d={given.d} {str(kind).removeprefix('torch.')}"
        return Check(name=title, run=lambda: as_exact_as_eager(name, given, device))

    def other(title: str, look: Callable[..., list[str]], name: str) -> Check:
        given = Problem(B=2, H=heads, N=long, d=width(name, 128), dtype=low)
        return Check(name=f"{title}: {name} N={long}", run=lambda: look(name, given, device))

    yield from (exact(name, 128, low) for name in names)
    yield from (other("same bits", same_bits, n) for n in names if n in ("full", "causal", "packed", "grouped"))
    yield from (other("CUDA graphs", same_in_graphs, n) for n in names if n in ("causal", "packed", "decode"))
    square = Problem(B=2, H=2, N=16 if device.rehearsal else 256, d=16 if device.rehearsal else 256, dtype=low)
    yield Check(name="dropout", run=lambda: dropout(square, device))
    if device.rehearsal:
        return
    wider = [n for n in names if n in ("full", "causal", "bias")]
    yield from (exact(name, d, low) for d in (64, 256, 512) for name in wider)
    yield from (exact(name, 128, kind) for kind in (torch.float32, torch.float16) for name in wider)
    yield from (exact(name, 80, low) for name in names if not GPU_ROWS[name].latent)
