"""From a request to an executor: whether a spec admits an approximation (plain scaled scores under a softmax, unmasked or
causal), and the code that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fusion.approximate.certificates import note_exact
from fusion.errors import UnknownMachineError
from fusion.ir.expr import I, J, Kind, const, node
from fusion.ir.mask_facts import is_dead
from fusion.ir.request import Approximation, Request
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import plain_scale
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning.problem import Problem

Executor = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
TRAINING = "gradients are asked for, and are those of exact attention"
WEIGHTS = "its weights are used elsewhere, and must be those of exact attention"


def refusal(spec: AttentionSpec, device: str, request: Request) -> str | None:
    """Reason why this spec always runs exact, or None."""
    result = plain(spec)
    if isinstance(result, str):
        return result
    if device not in ("cpu", "cuda"):
        return f"there are no approximate kernels for device {device!r}"
    assert request.approximation is not None
    if request.approximation.method == "polynomial":
        return None if device == "cpu" else _unsupported(spec)
    from fusion.approximate import two_planes

    return two_planes.refusal(spec, device, request.emitter)


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
    if (reason := refusal(spec, device, request)) is not None:
        return Exact(allowed, exact, reason)
    admitted = plain(spec)
    assert isinstance(admitted, Plain)
    try:
        here = machine if device == "cpu" else find_machine(device)
    except UnknownMachineError as problem:
        return Exact(allowed, exact, f"times cannot be predicted ({problem})")
    if allowed.method == "polynomial":
        from fusion.approximate.polynomial import PolynomialAttention

        kernels = _kernels(here) if request.emitter != "reference" else None
        return PolynomialAttention(spec, admitted, exact, build_exact, here, allowed.epsilon, kernels=kernels)
    from fusion.approximate.two_planes import TwoPlaneAttention

    return TwoPlaneAttention(spec, admitted, exact, build_exact, here, allowed.epsilon)


def _kernels(machine: Machine) -> str | None:
    """The feature kernels that a machine has."""
    if machine.kind == "gpu":
        return "triton"
    from fusion.codegen.mlir.approximate import polynomial

    return "amx" if polynomial.supports(machine) is None else None


def describe(allowed: Approximation, problem: Problem, machine: Machine) -> str:
    """Text for an admitted site with these sizes: the length at the crossing, for a few bounds."""
    head = f"{allowed.method}: epsilon {allowed.epsilon:g}, decided per call and head from the data (last_certificates)"
    if allowed.method != "polynomial":
        return head
    from fusion.approximate import cost

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


DEAD = -1e30
"""A fill below this has no weight beside any score that float32 can hold the exponential of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Scores scale * q.k under a softmax; causal: key j is live for query i where j <= i."""

    scale: float
    causal: bool


def plain(spec: AttentionSpec) -> Plain | str:
    """Plain form of a spec, or the reason why it has none."""
    if spec.mixing is not None:
        return "heads are mixed"
    if spec.aux_outputs:
        return "its weights are used elsewhere, and must be those of exact attention"
    if spec.normalizer is Normalizer.NONE:
        return "the weights have no softmax"
    if spec.weight is not const(1.0) or spec.sinks:
        return "the weights are changed after the softmax, or it has sinks"
    if spec.scales_rows:
        return "rows are scaled by something else than their sum"
    if any(o.dtype not in ("float32", "bfloat16", "float16") for o in spec.operands[:3]):
        return "Q, K and V must be float32, bfloat16 or float16"
    if spec.tables or any(value is not None for value in spec.values):
        return "K and V are read through a table, or converted from a stored form"
    score, causal = spec.score, False
    if spec.mask is not None:
        if spec.mask.live is not node("ile", (J, I), Kind.BOOL):
            return "it has a mask that is not causal from the first key on"
        if spec.mask.fill > DEAD:
            return "masked scores are not far enough below the others"
        if score.op == "where":  # of which one branch holds the score
            score = score.args[1] if is_dead(score.args[2]) else score.args[2]
        causal = True
    scale = plain_scale(score)
    if scale is None:
        return "the score program is not a constant times the score"
    return Plain(scale=scale, causal=causal)
