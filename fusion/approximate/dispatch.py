"""From the options to an executor: what is asked for, whether a spec admits it, and who runs it.

The op carries its emitter as text. With approximation that text is `emitter+method:epsilon`, so that graphs and caches
that hold the op tell approximate calls from exact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fusion.approximate import certificates
from fusion.approximate.eligible import Plain, plain
from fusion.errors import UnknownMachineError
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning.problem import Problem

Executor = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
TRAINING = "gradients are asked for, and are those of exact attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """method: "polynomial" or "certified_sparse"; epsilon: the error of the weights that is allowed."""

    method: str
    epsilon: float

    @staticmethod
    def parse(emitter: str) -> tuple[str, Request | None]:
        """The emitter proper, and what is asked for beyond it."""
        base, found, text = emitter.partition("+")
        if not found:
            return base, None
        method, _, epsilon = text.partition(":")
        return base, Request(method=method, epsilon=float(epsilon))

    def attach(self, emitter: str) -> str:
        """The text that `parse` reads."""
        return f"{emitter}+{self.method}:{self.epsilon!r}"


def refusal(spec: AttentionSpec, device: str, emitter: str, request: Request) -> str | None:
    """Why this spec always runs exact, or None."""
    found = plain(spec)
    if isinstance(found, str):
        return found
    if device not in ("cpu", "cuda"):
        return f"there are no approximate kernels for device {device!r}"
    if request.method == "polynomial":
        return None if device == "cpu" else _unsupported(spec)
    if device == "cuda":
        return "there are no selective kernels for GPUs"
    from fusion.approximate import sparse

    return sparse.refusal(spec, found, emitter)


def _unsupported(spec: AttentionSpec) -> str | None:
    """Why there are no feature kernels for a GPU, or None."""
    from fusion.codegen import triton
    from fusion.codegen.triton import polynomial

    if not (spec.d.is_const and spec.d_v.is_const):
        return "GPU kernels of polynomial features are made for one head dimension, and this one varies"
    return triton.unavailable() or polynomial.supports(spec.d.integer, spec.d_v.integer)


def build(
    spec: AttentionSpec,
    device: str,
    emitter: str,
    request: Request,
    exact: Executor,
    build_exact: Callable[[AttentionSpec], Executor],
    machine: Machine,
) -> Executor:
    """The executor of one spec: approximate where certified, and exact with a record of why not where not."""
    if (reason := refusal(spec, device, emitter, request)) is not None:
        return Exact(request, exact, reason)
    admitted = plain(spec)
    assert isinstance(admitted, Plain)
    if request.method == "polynomial":
        from fusion.approximate.polynomial import PolynomialAttention

        try:
            here = machine if device == "cpu" else find_machine(device)
        except UnknownMachineError as problem:
            return Exact(request, exact, f"times cannot be predicted ({problem})")
        kernels = _kernels(here) if emitter != "reference" else None
        return PolynomialAttention(spec, admitted, exact, build_exact, here, request.epsilon, kernels=kernels)
    from fusion.approximate.sparse import SparseAttention

    return SparseAttention(spec, admitted, exact, build_exact, machine, request.epsilon)


def _kernels(machine: Machine) -> str | None:
    """The feature kernels that a machine has."""
    if machine.kind == "gpu":
        return "triton"
    from fusion.codegen.mlir import polynomial

    return "amx" if polynomial.supports(machine) is None else None


def describe(request: Request, problem: Problem, machine: Machine) -> str:
    """What to expect of an admitted site with these sizes, in words: where the crossing lies, for a few bounds."""
    head = f"{request.method}: epsilon {request.epsilon:g}, decided per call and head from the data (last_certificates)"
    if request.method != "polynomial":
        return head
    from fusion.approximate import cost

    lines, split = [head], _kernels(machine) is not None
    for bound in (0.5, 1.0, 2.0):
        lines.append(cost.crossing_text(machine, problem, bound, request.epsilon, split))
    return "\n".join(lines)


class Exact:
    """The exact kernel, with a certificate that says why."""

    def __init__(self, request: Request, exact: Executor, reason: str):
        self.request, self.exact, self.reason = request, exact, reason

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        out = self.exact(operands, sizes)
        note_exact(self.request, operands, self.reason)
        return out


def note_exact(request: Request, operands: Sequence[Tensor], reason: str) -> None:
    """Record that a call ran exact."""
    certificates.note_exact(request.method, request.epsilon, operands, reason)
