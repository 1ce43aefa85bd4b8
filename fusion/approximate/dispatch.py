"""From a request to an executor: whether a spec admits an approximation, and the code that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fusion.approximate.certificates import Plain, note_exact, plain_form
from fusion.errors import UnknownMachineError
from fusion.ir.request import Approximation, Request
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning.problem import Problem

Executor = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
TRAINING = "gradients are asked for, and are those of exact attention"
WEIGHTS = "its weights are used elsewhere, and must be those of exact attention"


def refusal(spec: AttentionSpec, device: str) -> str | None:
    """Reason why this spec always runs exact, or None."""
    result = plain_form(spec)
    if isinstance(result, str):
        return result
    if device not in ("cpu", "cuda"):
        return f"there are no approximate kernels for device {device!r}"
    return None if device == "cpu" else _unsupported(spec)


def _unsupported(spec: AttentionSpec) -> str | None:
    """Reason why there are no feature kernels for a GPU, or None."""
    from fusion.codegen import triton
    from fusion.codegen.triton import polynomial

    if not (spec.d.is_const and spec.d_v.is_const):
        return "GPU kernels of polynomial features are made for one head dimension, and this one varies"
    return triton.unavailable() or polynomial.supports(spec.d.integer, spec.d_v.integer)


def build(
    spec: AttentionSpec,
    device: str,
    request: Request,
    exact: Executor,
    build_exact: Callable[[AttentionSpec], Executor],
    machine: Machine,
) -> Executor:
    """Executor of one spec: approximate where certified; else exact, with a record of the reason."""
    allowed = request.approximation
    assert allowed is not None
    if (reason := refusal(spec, device)) is not None:
        return Exact(allowed, exact, reason)
    admitted = plain_form(spec)
    assert isinstance(admitted, Plain)
    try:
        here = machine if device == "cpu" else find_machine(device)
    except UnknownMachineError as problem:
        return Exact(allowed, exact, f"times cannot be predicted ({problem})")
    from fusion.approximate.polynomial import PolynomialAttention

    kernels = _kernels(here) if request.emitter != "reference" else None
    return PolynomialAttention(spec, admitted, exact, build_exact, here, allowed.epsilon, kernels=kernels)


def _kernels(machine: Machine) -> str | None:
    """The feature kernels that a machine has."""
    if machine.kind == "gpu":
        return "triton"
    from fusion.codegen.cpu import polynomial

    return "amx" if polynomial.supports(machine) is None else None


def describe(allowed: Approximation, problem: Problem, machine: Machine) -> str:
    """Text for an admitted site with these sizes: the length at the crossing, for a few bounds."""
    from fusion.approximate import cost

    head = f"{allowed.method}: epsilon {allowed.epsilon:g}, decided per call and head from the data (last_certificates)"
    lines, split = [head], _kernels(machine) is not None
    for bound in (0.5, 1.0, 2.0):
        lines.append(cost.crossing_text(machine, problem, bound, allowed.epsilon, split))
    return "\n".join(lines)


class Exact:
    """The exact kernel, with a certificate that gives the reason."""

    def __init__(self, allowed: Approximation, exact: Executor, reason: str):
        self.allowed, self.exact, self.reason = allowed, exact, reason

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        out = self.exact(operands, sizes)
        note_exact(self.allowed, operands, self.reason)
        return out
