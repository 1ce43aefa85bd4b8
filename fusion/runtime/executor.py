"""What runs behind the op: the kernel of a spec, built once per process, or the reference interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusion.approximate import dispatch
from fusion.approximate.dispatch import Request
from fusion.codegen import reference
from fusion.errors import LargeTableError, UnknownMachineError
from fusion.ir import AttentionSpec, Normalizer, Operand
from fusion.ir.sizes import size_value
from fusion.machine import machine
from fusion.refusals import Ground, Refusal

if TYPE_CHECKING:
    from fusion.codegen.triton.autotune import Tuner
    from fusion.planning.choice import Choice

log = logging.getLogger(__name__)
TUNED = "/tuned"
"""Ends the text of an emitter whose kernels measure tiles at their first call: `options={"autotune": True}`."""

Executor = Callable[[Sequence[Tensor], Sequence[int]], Tensor]


class BackwardArguments(NamedTuple):
    """Arguments of `fusion::attention_backward`, in the order of its schema: see `fusion.runtime.op`."""

    grad: Tensor
    out: Tensor
    statistics: Tensor
    operands: Sequence[Tensor]
    sizes: Sequence[int]
    spec: str
    emitter: str
    needs: Sequence[bool]


class Differentiable(Protocol):
    """What trains with one spec.

    forward(operands, sizes) -> (output, statistics); backward(grad, out, statistics, operands, sizes, needs) -> the
    gradients of the operands that `needs` marks, of any dtype and strides.
    """

    def forward(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad: Tensor,
        out: Tensor,
        statistics: Tensor,
        operands: Sequence[Tensor],
        sizes: Sequence[int],
        needs: tuple[bool, ...],
    ) -> list[Tensor]: ...


_executors: dict[tuple[str, str, str], Executor] = {}
_differentiables: dict[tuple[str, str, str], Differentiable] = {}


def attention(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> Tensor:
    """`fusion::attention`: see `fusion.runtime.op`."""
    return executor(spec, operands[0].device.type, emitter)(operands, sizes)


def attention_forward(
    operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str
) -> tuple[Tensor, Tensor]:
    """`fusion::attention_forward`: see `fusion.runtime.op`."""
    emitter, request = Request.parse(emitter)
    if request is not None:
        dispatch.note_exact(request, operands, dispatch.TRAINING)
    return differentiable(spec, operands[0].device.type, emitter).forward(operands, sizes)


def attention_backward(*arguments: Any) -> list[Tensor]:
    """`fusion::attention_backward`: see `fusion.runtime.op`."""
    grad, out, statistics, operands, sizes, spec, emitter, needs = BackwardArguments(*arguments)
    emitter, _ = Request.parse(emitter)
    kernels = differentiable(spec, operands[0].device.type, emitter)
    found = kernels.backward(grad, out, statistics, operands, sizes, tuple(needs))
    described = AttentionSpec.from_json(spec).operands
    wanted = [(t, o) for t, o, needed in zip(operands, described, needs, strict=True) if needed]
    return [_laid_out(gradient, *place) for gradient, place in zip(found, wanted, strict=True)]


def output_extents(spec: AttentionSpec, sizes: Sequence[int]) -> dict[str, int | torch.SymInt]:
    """The extent of each coordinate of the output."""
    known = dict(zip(spec.sizes, sizes, strict=True))
    batch = {f"b{axis}": size_value(extent, known) for axis, extent in enumerate(spec.batch)}
    return batch | {"i": size_value(spec.n_q, known), "e": size_value(spec.d_v, known)}


def statistics_shape(spec: AttentionSpec, extents: dict[str, int | torch.SymInt]) -> list[int | torch.SymInt]:
    """[3, b.., i]: what the emitter's backward needs to know of each row. [0] without a normaliser."""
    if spec.normalizer is Normalizer.NONE:
        return [0]
    return [3, *(extents[f"b{axis}"] for axis in range(len(spec.batch))), extents["i"]]


def statistics_dtype(operands: Sequence[Tensor]) -> torch.dtype:
    """float64 where anything is computed in it, else float32."""
    return torch.float64 if any(o.dtype is torch.float64 for o in operands) else torch.float32


def empty_gradient(tensor: Tensor, operand: Operand) -> Tensor:
    """Memory for an operand's gradient: its shape and dtype, packed in the order that the spec states."""
    order = operand.order or tuple(range(operand.rank))
    packed = tensor.new_empty([tensor.shape[dim] for dim in order])
    return packed.permute([order.index(dim) for dim in range(operand.rank)])


def _laid_out(gradient: Tensor, tensor: Tensor, operand: Operand) -> Tensor:
    """The gradient as `empty_gradient` would hold it; a dense bias has a large one, which is not copied for nothing."""
    strides, step = [0] * operand.rank, 1
    for dim in reversed(operand.order or range(operand.rank)):
        strides[dim], step = step, step * max(tensor.shape[dim], 1)
    if gradient.dtype is tensor.dtype and list(gradient.stride()) == strides:
        return gradient
    return empty_gradient(tensor, operand).copy_(gradient)


def executor(spec: str, device: str, emitter: str = "auto") -> Executor:
    """The function that computes a spec on a kind of device; compiled at first use."""
    key = (spec, device, emitter)
    found = _executors.get(key)
    if found is None:
        found = _executors[key] = _build(AttentionSpec.from_json(spec), device, emitter)
    return found


class Guarded:
    """A kernel that is left for the reference interpreter at its first failure: users see numbers, and a warning."""

    def __init__(self, spec: AttentionSpec, kernel: Executor):
        self.spec, self.kernel = spec, kernel
        self.broken = False

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if not self.broken:
            try:
                return self.kernel(operands, sizes)
            except Exception:
                self.broken = True
                log.exception("a kernel failed; running %s in the reference interpreter from now on", self.spec)
        return reference.run(self.spec, operands, sizes)


class _GuardedApproximation:
    """An approximation that is left for the exact kernel at its first failure."""

    def __init__(self, spec: AttentionSpec, request: Request, kernel: Executor, exact: Executor):
        self.spec, self.request, self.kernel, self.exact = spec, request, kernel, exact
        self.broken: str | None = None

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if self.broken is None:
            try:
                return self.kernel(operands, sizes)
            except Exception as problem:
                self.broken = f"the approximation failed before ({type(problem).__name__}: {problem})"
                log.exception("an approximation failed; %s runs exact from now on", self.spec)
        dispatch.note_exact(self.request, operands, self.broken)
        return self.exact(operands, sizes)


def _forward_kernel(spec: AttentionSpec, device: str, emitter: str = "auto", trained: bool = False) -> Any:
    """What an emitter runs for a spec, forward; None where the reference interpreter does. trained: gradients are
    needed, for which the kernel writes statistics of its rows."""
    emitter = Request.parse(emitter)[0]
    if trained and isinstance(found := differentiable(spec.to_json(), device, emitter), _GuardedTraining):
        return found.kernel
    found = executor(spec.to_json(), device, emitter)
    return found.kernel if isinstance(found, Guarded) else None


def kernel_source(spec: AttentionSpec, device: str, emitter: str, trained: bool = False) -> str | None:
    """The source of the kernel that runs a spec, or None where the reference interpreter does."""
    return getattr(_forward_kernel(spec, device, emitter, trained), "source", None)


def kernel_tile(spec: AttentionSpec, device: str, emitter: str, sizes: Sequence[int]) -> tuple[int, int] | None:
    """(B_r, B_c) that a call of a spec with these sizes gets, where its emitter says so."""
    tile_of = getattr(_forward_kernel(spec, device, emitter), "tile_of", None)
    return None if tile_of is None else tile_of(sizes)


def kernel_choice(spec: AttentionSpec, device: str, emitter: str, trained: bool, sizes: Sequence[int]) -> Choice | None:
    """What a call of a spec with these sizes runs on a GPU, as far as is known by now; None for other emitters."""
    choice_of = getattr(_forward_kernel(spec, device, emitter, trained), "choice", None)
    return None if choice_of is None else choice_of(sizes)


def prepare(spec: AttentionSpec, device: torch.device, sizes: Sequence[int], trained: bool = False) -> Refusal | None:
    """Build the kernel for a call of a spec with these sizes now; why there is none, or None."""
    reason = unsupported(spec, device)
    if reason is not None:
        return reason
    try:
        kernel = _forward_kernel(spec, device.type, trained=trained)
        if hasattr(kernel, "prepare"):
            kernel.prepare(sizes)
    except Exception as problem:
        log.warning("no kernel for %s", spec, exc_info=True)
        return Refusal(Ground.DEFECT, f"its kernel could not be built ({type(problem).__name__}: {problem})")
    return None if kernel is not None else Refusal(Ground.DEFECT, "its kernel could not be built")


def differentiable(spec: str, device: str, emitter: str = "auto") -> Differentiable:
    """The two functions that train with a spec on a kind of device."""
    key = (spec, device, emitter)
    found = _differentiables.get(key)
    if found is None:
        found = _differentiables[key] = _build_differentiable(spec, device, emitter)
    return found


def unsupported(spec: AttentionSpec, device: torch.device) -> Refusal | None:
    """Why there is no kernel for this spec on this device, or None if there is one."""
    if device.type == "cpu":
        from fusion.codegen import mlir

        return mlir.supports(spec, machine())
    if device.type == "cuda":
        from fusion.codegen import triton

        return triton.supports(spec)
    return Refusal(Ground.NO_EMITTER, f"there is no emitter for device {device.type!r}")


def reads(dtype: torch.dtype, device: torch.device, emitter: str = "auto") -> bool:
    """Whether kernels on a device read tensors of a float8 dtype as they are; otherwise these are widened before."""
    if emitter == "reference":
        return True
    if device.type == "cpu":
        from fusion.codegen.mlir import float8

        return str(dtype).removeprefix("torch.") in float8.FORMATS
    if device.type == "cuda":
        from fusion.codegen import triton

        return triton.reads(dtype, machine(str(device)))
    return False


def _compile(spec: AttentionSpec, device: str) -> Executor:
    """The kernel of a device's emitter. Emitters are imported where they are used: each brings a compiler along."""
    if device == "cuda":
        from fusion.codegen import triton

        return triton.compile(spec)
    from fusion.codegen import mlir
    from fusion.planning.from_spec import tile_times

    return mlir.compile(spec, machine(), tile_times(spec, machine()))


def _compile_tuned(spec: AttentionSpec) -> Executor:
    """A GPU kernel that measures tiles."""
    from fusion.codegen import triton

    return triton.Kernel(spec, tuner=_tuner(spec))


def _tuner(spec: AttentionSpec) -> Tuner:
    """What measures tiles of a spec's kernels: those first that the cost model expects to be the fastest."""
    from fusion.codegen.triton.autotune import Tuner
    from fusion.planning.from_spec import gpu_tile_times

    try:
        return Tuner(gpu_tile_times(spec, machine("cuda")))
    except UnknownMachineError:
        return Tuner()


def _build(spec: AttentionSpec, device: str, emitter: str) -> Executor:
    emitter, request = Request.parse(emitter)
    if device != "cuda" and request is None and emitter.endswith(TUNED):  # only GPU kernels measure
        return executor(spec.to_json(), device, emitter.removesuffix(TUNED))
    if request is not None:
        exact = executor(spec.to_json(), device, emitter)
        kernel = dispatch.build(
            spec, device, emitter, request, exact, lambda other: executor(other.to_json(), device, emitter), machine()
        )
        return _GuardedApproximation(spec, request, kernel, exact)
    if emitter != "reference":
        reason = unsupported(spec, torch.device(device))
        if reason is None:
            return Guarded(spec, _compile_tuned(spec) if emitter.endswith(TUNED) else _compile(spec, device))
        log.warning("running %s in the reference interpreter: %s", spec, reason)
    return lambda operands, sizes: reference.run(spec, operands, sizes)


def _build_differentiable(spec: str, device: str, emitter: str) -> Differentiable:
    if emitter.endswith(TUNED):
        return _build_tuned_differentiable(spec, device, emitter)
    kernel = None if emitter == "reference" else _compile_training(AttentionSpec.from_json(spec), device)
    return _WithReferenceGradient(spec, device, emitter) if kernel is None else _GuardedTraining(spec, kernel)


def _build_tuned_differentiable(spec: str, device: str, emitter: str) -> Differentiable:
    if device != "cuda":
        return differentiable(spec, device, emitter.removesuffix(TUNED))
    from fusion.codegen import triton

    parsed = AttentionSpec.from_json(spec)
    if triton.supports(parsed) is not None:
        return _WithReferenceGradient(spec, device, emitter)
    return _GuardedTraining(spec, triton.Differentiable(parsed, tuner=_tuner(parsed)))


def _compile_training(spec: AttentionSpec, device: str) -> Differentiable | None:
    """Forward and backward kernels of a device's emitter, or None where it has none for this spec."""
    if device == "cuda":
        from fusion.codegen import triton

        return triton.Differentiable(spec) if triton.supports(spec) is None else None
    from fusion.codegen import mlir

    return mlir.compile_training(spec, machine()) if device == "cpu" else None


class _GuardedTraining:
    """Kernels for training that are left for the reference interpreter at their first failure.

    Its gradient needs no statistics, so that it can follow any forward.
    """

    def __init__(self, spec: str, kernel: Differentiable):
        self.spec, self.kernel, self.broken = AttentionSpec.from_json(spec), kernel, False

    def _give_up(self) -> None:
        self.broken = True
        log.exception("a kernel failed; training with %s in the reference interpreter from now on", self.spec)

    def forward(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        if not self.broken:
            try:
                return self.kernel.forward(operands, sizes)
            except Exception:
                self._give_up()
        return reference.run(self.spec, operands, sizes), _no_statistics(self.spec, operands, sizes)

    def backward(
        self,
        grad: Tensor,
        out: Tensor,
        statistics: Tensor,
        operands: Sequence[Tensor],
        sizes: Sequence[int],
        needs: tuple[bool, ...],
    ) -> list[Tensor]:
        if not self.broken:
            try:
                return self.kernel.backward(grad, out, statistics, operands, sizes, needs)
            except LargeTableError:
                log.info("the gradient of %s is left to the reference interpreter", self.spec, exc_info=True)
            except Exception:
                self._give_up()
        return reference.backward(self.spec, grad, operands, sizes, needs)


def _no_statistics(spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """What a forward returns whose gradient needs no statistics: zeros, as the op has promised their shape."""
    shape = statistics_shape(spec, output_extents(spec, sizes))
    return operands[0].new_zeros(shape, dtype=statistics_dtype(operands))


class _WithReferenceGradient:
    """The forward of the emitter, and the gradient of the reference interpreter, which needs no statistics (they are
    zeros)."""

    def __init__(self, spec: str, device: str, emitter: str):
        self.spec = AttentionSpec.from_json(spec)
        self.run = executor(spec, device, emitter)

    def forward(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.run(operands, sizes), _no_statistics(self.spec, operands, sizes)

    def backward(
        self,
        grad: Tensor,
        out: Tensor,
        statistics: Tensor,
        operands: Sequence[Tensor],
        sizes: Sequence[int],
        needs: tuple[bool, ...],
    ) -> list[Tensor]:
        return reference.backward(self.spec, grad, operands, sizes, needs)
