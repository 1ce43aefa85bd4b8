"""Correctness on a GPU: outputs and gradients against float64, the same twice, under CUDA graphs, with dropout.

Run by itself it calls one variant twice, for compute-sanitizer and ncu to look at:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m benchmarks.gpu.check causal
    ncu --kernel-name regex:attention_ --set full python -m benchmarks.gpu.check causal --N 4096 --heads 16
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import results
from benchmarks.common.rows import GPU_ROWS, Problem
from benchmarks.gpu.cells import Operands
from benchmarks.gpu.device import Device, Gpu, Rehearsal, running
from fusion.exactness import errors

DROPPED = 0.2
REPEATS = 4  # of a training step that must give the same bits


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
        comparison = errors(ours, theirs, true)
        if comparison.share > 1:
            faults.append(f"{what}: {comparison}")
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


def checks(names: Sequence[str], dtype: str, device: Device) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """All checks, the most telling first: a name, and a function that returns what is wrong. N = 389 has tails in every
    tile; 2048 fills the device."""
    low = getattr(torch, dtype)
    short, long, heads = (13, 12, 2) if device.rehearsal else (389, 2048, 8)

    def width(name: str, d: int) -> int:
        return (80 if device.rehearsal else 576) if GPU_ROWS[name].latent else 16 if device.rehearsal else d

    def exact(name: str, d: int, kind: torch.dtype) -> tuple[str, Callable[[], list[str]]]:
        given = Problem(B=2, H=2 if device.rehearsal else 4, N=short, d=width(name, d), dtype=kind)
        return f"{name} d={given.d} {str(kind)[6:]}", lambda: as_exact_as_eager(name, given, device)

    for name in names:
        yield exact(name, 128, low)
    for title, look, some in (
        ("same bits", same_bits, ("full", "causal", "packed", "grouped")),
        ("CUDA graphs", same_in_graphs, ("causal", "packed", "decode")),
    ):
        for name in (name for name in names if name in some):
            given = Problem(B=2, H=heads, N=long, d=width(name, 128), dtype=low)
            yield f"{title}: {name} N={long}", functools.partial(look, name, given, device)
    square = Problem(B=2, H=2, N=16 if device.rehearsal else 256, d=16 if device.rehearsal else 256, dtype=low)
    yield "dropout", lambda: dropout(square, device)
    if device.rehearsal:
        return
    wider = [n for n in names if n in ("full", "causal", "bias")]
    yield from (exact(name, d, low) for d in (64, 256, 512) for name in wider)
    yield from (exact(name, 128, kind) for kind in (torch.float32, torch.float16) for name in wider)
    yield from (exact(name, 80, low) for name in names if not GPU_ROWS[name].latent)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("row", choices=[*GPU_ROWS])
    parser.add_argument("--N", type=int, default=389)
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--forward", action="store_true", help="without the gradient")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    device = Rehearsal() if options.rehearse else Gpu()
    with running(device):
        problem = Problem(B=1, H=options.heads, N=options.N, d=options.d, dtype=torch.bfloat16)
        operands, grad = draw(options.row, problem, device)
        call = device.compiled(GPU_ROWS[options.row].plain, "fusion", options={"inner": "eager"})
        for _ in range(2):
            if options.forward:
                with torch.no_grad():
                    call(*operands)
            else:
                gradients(call, operands, grad)
        device.synchronize()


if __name__ == "__main__":
    main()
