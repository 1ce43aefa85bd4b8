"""Gradients that the backward kernels of a spec compute, and the specs that have such kernels.

With P the weights before the weight program, y = P's softmax, dW = dO V^T and delta = the row sum of dO * O:

    dx = y * (weight * dW - delta)        dweight = y * dW        dsink = -(sink's share of the row sum) * delta

Where rows have another scale than one over their sum, y is the scaled weight, and delta has a factor
(`fusion.lowering.rows`). Gradients of auxiliary outputs add to weight * dW and to delta
(`fusion.lowering.aux_gradients`); `with_arriving` makes them operands of the spec. The score program's derivative
takes dx to dS and to the tensors that the program reads; dQ = dS K, dK = dS^T Q, dV = W^T dO.

dK and dV are computed by programs that each own some keys. Where query heads share a key head, the program visits all
of them, so that every element of dQ, dK, dV is written once, by one program: deterministic, without atomic additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.ir.derivative import SINK_UPSTREAM, adjoints
from fusion.ir.expr import SCORE, WEIGHT, ZERO, Expr, Kind, loads
from fusion.ir.ops import apply
from fusion.ir.reads import elements
from fusion.ir.spec import AttentionSpec, AuxOutput, Operand, Reduction
from fusion.lowering import aux_gradients, rows
from fusion.lowering.aux_gradients import AuxGradients
from fusion.lowering.gradients import (
    Axes,
    hides_nan,
    left_to_reference,
    magnifies_rounding,
    of_score,
    of_weight,
    rounds,
    summed_over,
    wanted_loads,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The gradient of one load of a captured tensor."""

    load: Expr  # what is read
    gradient: Expr  # its gradient for every score
    full: Expr  # the same where no mask is evaluated
    sink: int | None = None  # the number of the sink that it belongs to, or None

    @property
    def axes(self) -> Axes:
        return summed_over(self.load)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Gradients to be computed. program, full: the score program where no mask is evaluated, and dS there; None where
    it is the same, or would leave out a load that needs a gradient."""

    score: Expr  # dS as an expression in UPSTREAM
    program: Expr | None
    full: Expr | None
    captured: tuple[Captured, ...]  # of the loads that need a gradient
    groups: tuple[Expr, ...]  # how many values of each batch coordinate share an element of K and V (1: none)
    aux_outputs: AuxGradients  # what arrives at auxiliary outputs


def gradients_of(spec: AttentionSpec, needs: tuple[bool, ...]) -> Gradients:
    """Gradients of the operands that `needs` marks; `unsupported_gradient` must have no reason."""
    keys = elements(spec, 1)
    assert keys is not None
    targets = wanted_loads(needs, spec.score)
    found = of_score(spec.score, targets)
    program = None if spec.mask is None else spec.mask.full
    if program is not None and not {*targets} <= {*loads(program)}:
        program = None
    simpler = found if program is None else of_score(program, targets)
    captured = [Captured(load=load, gradient=found[load], full=simpler[load]) for load in targets]
    at_weight = of_weight(spec.weight, wanted_loads(needs, spec.weight))
    captured += [Captured(load=load, gradient=gradient, full=gradient) for load, gradient in at_weight.items()]
    for number, sink in enumerate(spec.sinks):
        for load in wanted_loads(needs, sink):
            gradient = adjoints(sink, SINK_UPSTREAM, [load])[load]
            captured.append(Captured(load=load, gradient=gradient, full=gradient, sink=number))
    kept = tuple(item for item in captured if item.gradient is not ZERO)
    full = None if program is None else simpler[SCORE]
    return Gradients(
        score=found[SCORE], program=program, full=full, captured=kept, groups=keys.groups, aux_outputs=arriving(spec)
    )


def with_arriving(spec: AttentionSpec, places: Sequence[int]) -> AttentionSpec:
    """Spec with only these of its auxiliary outputs, whose gradients are its last operands. It skips no tile where
    scores without a weight have a gradient."""
    aux = tuple(spec.aux_outputs[place] for place in places)
    added = (Operand(dtype=f.dtype, rank=len(f.dims), name=f"arriving{n}") for n, f in zip(places, aux, strict=True))
    made = replace(spec, operands=(*spec.operands, *added), aux_outputs=aux)
    return replace(made, mask=None) if arriving(made).everywhere else made


def arriving(spec: AttentionSpec) -> AuxGradients:
    """Gradients that arrive at the auxiliary outputs of such a spec."""
    return aux_gradients.aux_gradients(spec, len(spec.operands) - len(spec.aux_outputs))


def delta_of_aux(spec: AttentionSpec) -> AttentionSpec:
    """Such a spec, with one auxiliary output that delta lacks: the sum over the keys of the weight times the gradient
    that arrives at it."""
    dims = (*(axis.name for axis in spec.axes), "i")
    value = apply("fmul", WEIGHT, arriving(spec).weight)
    lacked = AuxOutput(value=value, dims=dims, dtype="float32", reduction=Reduction.SUM, over="j")
    return replace(spec, aux_outputs=(lacked,))


def unsupported_gradient(spec: AttentionSpec, needs: tuple[bool, ...]) -> str | None:
    """Reason why the gradients are not computed by kernels, or None."""
    reason = left_to_reference(spec) or rows.unsupported(spec, needs)
    if (reason := reason or aux_gradients.unsupported(spec, needs)) is not None:
        return reason
    if rounds(spec):
        return "a gradient is rounded to a coarser dtype on its way through a cast"
    if hides_nan(spec, needs):
        return "a gradient is NaN at keys that the mask hides"
    if magnifies_rounding(spec, needs):
        return "a gradient is multiplied by a fill, and with it the rounding of the outputs"
    if any(load.kind is Kind.FLOAT and needs[load.operand] for f in spec.aux_outputs for load in loads(f.value)):
        return "a tensor beside the weights needs a gradient"
    read = [load for e in (spec.score, spec.weight, *spec.sinks) for load in loads(e)]
    if any(load.operand < 3 and needs[load.operand] for load in read):
        return "the score program reads elements of q, k or v"
    found = [elements(spec, number) for number in (0, 1, 2)]
    for number, (what, read) in enumerate(zip("qkv", found, strict=True)):
        if read is None or number == 0 and not read.apart:
            return f"elements of {what} are read more than once: {', '.join(map(str, spec.access(number)[0]))}"
    if found[1].groups != found[2].groups:  # type: ignore[union-attr]
        return "several queries share elements of K and V in a way that is not heads in equal groups"
    return None
