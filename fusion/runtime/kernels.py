"""Registry of this process's kernels: built once for each spec, type of device and request.

`OF_OPERATORS` maps each attention op to a function of (spec, type of device, request), the first and the last as text.
It returns the function of the other arguments, in the order of the operator's schema (`fusion.runtime.op`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion.approximate import dispatch
from fusion.caching import OncePerKey
from fusion.codegen import emitter, reference
from fusion.codegen.emitter import Kernel, Registration, TrainingKernel
from fusion.errors import KernelProofError, UnknownMachineError
from fusion.ir import AttentionSpec
from fusion.ir.request import PLAIN, Request
from fusion.ir.results import is_zero, laid_out
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning import planner_for
from fusion.proof import Proof
from fusion.refusals import Reason, Refusal
from fusion.runtime.guards import Executor, GuardedApproximation, GuardedKernel, GuardedTraining

log = logging.getLogger(__name__)

_forward, _training = OncePerKey(1024), OncePerKey(1024)
"""By (spec as text, device, request). One that is gone is built again at its next use."""

holders: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects that keep an executor of their own; their method `forget` drops it, so that the next use asks here again."""


def executor(spec: str, device: str, request: str = "auto") -> Executor:
    """Function that computes a spec on a type of device; built at first use. spec, request: as text."""
    make = lambda: _build(AttentionSpec.from_json(spec), device, Request.parse(request))
    return _forward.get_or_make((spec, device, request), make)


def differentiable(spec: str, device: str, request: str = "auto") -> GuardedTraining:
    """The two functions that train with a spec on a type of device; built at first use. Gradients are exact."""

    def make() -> GuardedTraining:
        exact = replace(Request.parse(request), approximation=None)
        return _build_training(AttentionSpec.from_json(spec), device, exact)

    return _training.get_or_make((spec, device, request), make)


def forget() -> None:
    """Build every kernel anew at its next use."""
    _forward.clear()
    _training.clear()
    for holder in list(holders):
        holder.forget()


@contextlib.contextmanager
def emitting(*given: Any, **named: Any) -> Iterator[None]:
    """Context with another emitter, of these arguments of `fusion.codegen.emitter.register`, and its own kernels."""
    before = dict(_forward), dict(_training)
    forget()
    try:
        with emitter.registered(*given, **named):
            yield
    finally:
        forget()
        for kept, kernels in zip((_forward, _training), before, strict=True):
            kept.update(kernels)  # type: ignore[arg-type]


def unsupported(spec: AttentionSpec, device: str, request: Request = PLAIN) -> Refusal | None:
    """Reason for no kernel for this spec on a type of device, or None. Raises EmitterError for an unfit emitter."""
    if (result := emitter.find(request.emitter, device)) is None:
        return Refusal(Reason.NO_EMITTER, f"there is no emitter for device {device!r}")
    if spec.aux_outputs and not result.aux_outputs:
        return Refusal(
            Reason.WEIGHTS_NEEDED, f"the attention weights are needed elsewhere, and {result.name} writes none"
        )
    if spec.reproducible and not result.reproducible:
        return Refusal(
            Reason.NOT_REPRODUCIBLE,
            f"reproducible results are asked for, and those of emitter {result.name!r} on device {device!r} follow "
            "from the lengths and the batch of a call",
        )
    try:
        return result.load().supports(spec, result.machine(device))
    except UnknownMachineError as problem:
        return Refusal(Reason.OTHER_MACHINE, str(problem))


def reads(dtype: torch.dtype, device: torch.device, request: Request = PLAIN) -> bool:
    """Whether kernels on a device read tensors of a float8 dtype unchanged; otherwise these are widened before."""
    result = emitter.find(request.emitter, device.type)
    return result is not None and result.load().reads(dtype, result.machine(str(device)))


def machine_of(device: str, request: Request = PLAIN) -> Machine:
    """Machine that kernels on a type of device are generated for."""
    result = emitter.find(request.emitter, device)
    return find_machine(device) if result is None else result.machine(device)


def kernel_of(spec: AttentionSpec, device: str, request: Request, trained: bool = False) -> Kernel | TrainingKernel:
    """Kernel of a spec's forward. trained: gradients are needed, for which it writes statistics of its rows."""
    exact = str(replace(request, approximation=None))
    if trained or spec.aux_outputs:
        kernel = differentiable(spec.to_json(), device, exact).kernel
        if spec.aux_outputs or not isinstance(kernel, reference.ReferenceGradient):
            return kernel
    result = executor(spec.to_json(), device, exact)
    assert isinstance(result, GuardedKernel)
    return result.kernel


def prepare(
    spec: AttentionSpec, device: torch.device, sizes: Sequence[int], trained: bool = False, request: Request = PLAIN
) -> Refusal | None:
    """Build the kernel for a call of a spec with these sizes now; returns the reason why there is none, or None."""
    if (reason := unsupported(spec, device.type, request)) is not None:
        return reason
    try:
        kernel_of(spec, device.type, request, trained).prepare(sizes)
    except KernelProofError as problem:
        return Refusal(Reason.DEFECT, f"{problem} (a defect of fusion)")
    except Exception as problem:
        log.warning("no kernel for %s", spec, exc_info=True)
        return Refusal(Reason.DEFECT, f"its kernel could not be built ({type(problem).__name__}: {problem})")
    return None


def _build(spec: AttentionSpec, device: str, request: Request) -> Executor:
    if request.approximation is not None:
        return _build_approximation(spec, device, request)
    if (registered := _emitter_for(spec, device, request)) is None:
        return GuardedKernel(spec, reference.ReferenceKernel(spec))
    plan = functools.partial(planner_for, spec)
    kernel = registered.load().compile(spec, registered.machine(device), plan, request.tuned)
    return GuardedKernel(spec, _proved(kernel, spec, device, request))


def _proved(kernel: Any, spec: AttentionSpec, device: str, request: Request) -> Any:
    """The kernel, with a proof before its first use if that is requested and the kernel has one."""
    if not request.proved or not hasattr(kernel, "proved"):
        return kernel
    return kernel.proved(Proof(spec=spec, device=device))


def _build_approximation(spec: AttentionSpec, device: str, request: Request) -> Executor:
    allowed, exactly = request.approximation, str(replace(request, approximation=None))
    assert allowed is not None
    build_exact = lambda other: executor(other.to_json(), device, exactly)
    exact = build_exact(spec)
    run = dispatch.build(spec, device, request, exact, build_exact, find_machine())
    return GuardedApproximation(spec, allowed, run, exact)


def _build_training(spec: AttentionSpec, device: str, request: Request) -> GuardedTraining:
    registered, kernel = _emitter_for(spec, device, request), None
    if registered is not None:
        plan = functools.partial(planner_for, spec)
        kernel = registered.load().compile_training(spec, registered.machine(device), plan, request.tuned)
        kernel = kernel and _proved(kernel, spec, device, request)
    if kernel is None:
        kernel = reference.ReferenceGradient(spec, executor(spec.to_json(), device, str(request)))
    return GuardedTraining(spec, kernel)


def _emitter_for(spec: AttentionSpec, device: str, request: Request) -> Registration | None:
    """Emitter of the kernel of a spec; None, with a warning, where the reference interpreter runs it."""
    if (reason := unsupported(spec, device, request)) is None:
        return emitter.find(request.emitter, device)
    log.warning("running %s in the reference interpreter: %s", spec, reason)
    return None


Run = Callable[..., Any]


def attention_of(spec: str, device: str, request: str) -> Run:
    """(operands, sizes) -> output."""
    return executor(spec, device, request).__call__  # methods are called faster than objects


def outputs_of(reason: str, spec: str, device: str, request: str) -> Run:
    """(operands, sizes) -> [output, statistics, *auxiliary outputs]. reason: why these are exact."""
    outputs, allowed = differentiable(spec, device, request).outputs, Request.parse(request).approximation
    if allowed is None:
        return outputs

    def exact(operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        dispatch.note_exact(allowed, operands, reason)
        return outputs(operands, sizes)

    return exact


def backward_of(spec: str, device: str, request: str) -> Run:
    """(grad, out, statistics, operands, sizes, needs, aux_outputs) -> the gradients of the operands that are needed, in
    order in memory. aux_outputs: see `fusion.codegen.emitter.Backward`."""
    kernels, described = differentiable(spec, device, request), AttentionSpec.from_json(spec).operands

    def backward(*given: Any) -> list[Tensor]:
        grad, out, statistics, operands, sizes, needs, *aux_outputs = given
        gradients = kernels.backward(grad, out, statistics, operands, sizes, tuple(needs), *aux_outputs)
        wanted = [(t, o) for t, o, needed in zip(operands, described, needs, strict=True) if needed]
        return [laid_out(gradient, *place) for gradient, place in zip(gradients, wanted, strict=True)]

    return backward


def outputs_backward_of(spec: str, device: str, request: str) -> Run:
    """(grad, aux_outputs, out, statistics, operands, sizes, needs) -> as `backward_of`. Gradients that are all zero
    cost one check, but while a CUDA graph is captured, when the host may not wait for the device."""
    run = backward_of(spec, device, request)

    def backward(grad: Tensor, aux_outputs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        captured = grad.is_cuda and torch.cuda.is_current_stream_capturing()
        arriving = [g if captured or not is_zero(g) else None for g in aux_outputs]
        return run(grad, *rest, arriving) if any(g is not None for g in arriving) else run(grad, *rest)

    return backward


OF_OPERATORS: dict[str, tuple[Callable[[str, str, str], Run], int]] = {
    "attention": (attention_of, 2),
    "attention_below_autograd": (attention_of, 2),
    "attention_forward": (functools.partial(outputs_of, dispatch.TRAINING), 2),
    "attention_outputs": (functools.partial(outputs_of, dispatch.WEIGHTS), 2),
    "attention_backward": (backward_of, 5),
    "attention_outputs_backward": (outputs_backward_of, 6),
}
"""By name: what finds what runs, and how many arguments come before the spec; the last of them are operands, sizes."""


def implementation(operator: str) -> Run:
    """Implementation of an operator, a function of the arguments of its schema."""
    find, n = OF_OPERATORS[operator]

    def forward(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str) -> Any:
        return find(spec, operands[0].device.type, request)(operands, sizes)

    def run(*given: Any) -> Any:
        return find(given[n], given[n - 2][0].device.type, given[n + 1])(*given[:n], *given[n + 2 :])

    return forward if n == 2 else run  # the former is the same, and faster
