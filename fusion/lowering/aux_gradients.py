"""Gradients that arrive at auxiliary outputs.

With f the value of an auxiliary output and g its gradient, for a row, for a key or for each weight,

    F_j = sum over auxiliary outputs of g df/dw        at the weight w_j, beside that of the product with V
    G   = sum over auxiliary outputs of g df/dL        at the log-sum-exp L of a row
    dx_j = w_j (dP_j + F_j - delta + G)                delta = sum over j of w_j (dP_j + F_j)

which is a softmax's gradient: F is one more expression per score, and G is subtracted from delta, once per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.ir.derivative import AUX_UPSTREAM, adjoints
from fusion.ir.expr import (
    FALSE,
    LOG_WEIGHT,
    ROW_MAX,
    ROW_SUM,
    WEIGHT,
    ZERO,
    Expr,
    Kind,
    coord,
    coordinates,
    load,
    loads,
    substitute,
    walk,
)
from fusion.ir.primitives import is_tame
from fusion.ir.spec import AttentionSpec, AuxOutput, Normalizer, Reduction
from fusion.lowering.rows import INFINITE, LIVE_LOG_SUM, LOG_SUM, in_log_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxGradients:
    """Expressions in WEIGHT, positions, loads of tensors, and the gradients that arrive.

    weight: F.
    log_sum: G, which is free of the key.
    loads: the gradient of each load, times AUX_UPSTREAM.
    everywhere: whether keys without a weight may count, too, so that none can be skipped.
    """

    weight: Expr
    log_sum: Expr
    loads: dict[Expr, Expr]
    everywhere: bool


def aux_gradients(spec: AttentionSpec, first: int) -> AuxGradients:
    """Gradients of all auxiliary outputs, none of which is `unsupported`. Operands `first`, `first` + 1, ... are the
    gradients that arrive at them."""
    totals: dict[Expr, Expr] = {}
    for number, aux in enumerate(spec.aux_outputs, first):
        arriving = load(number, tuple(map(coord, aux.dims)), Kind.FLOAT)
        reads = [part for part in loads(aux.value) if part.kind is Kind.FLOAT]
        for target, term in adjoints(_value(aux), arriving, [WEIGHT, LOG_SUM, *reads]).items():
            totals[target] = totals[target] + term if target in totals else term
    weight, log_sum = (totals.pop(target, ZERO) for target in (WEIGHT, LOG_SUM))
    nonzero = {target: term for target, term in totals.items() if term is not ZERO}
    unseen = [substitute(term, {WEIGHT: ZERO}) for term in (weight, *nonzero.values())]
    return AuxGradients(
        weight=weight,
        log_sum=log_sum,
        loads={target: AUX_UPSTREAM * term for target, term in nonzero.items()},
        everywhere=not _is_finite(unseen[0], first) or any(term is not ZERO for term in unseen[1:]),
    )


def unsupported(spec: AttentionSpec, needs: Sequence[bool] | None = None) -> str | None:
    """Reason why kernels have no gradient of auxiliary outputs for operands that `needs` marks (None: any), or None."""
    for aux in spec.aux_outputs:
        value = _value(aux)
        if aux.reduction not in (Reduction.NONE, Reduction.SUM):
            return f"the position of the {aux.reduction.value} is not recorded"
        if LOG_WEIGHT in walk(value):
            return "the gradient of a weight's logarithm is no multiple of the weight"
        if {ROW_MAX, ROW_SUM} & {*walk(value)}:
            return "the key with the largest logit is not recorded"
        if LOG_SUM not in walk(value):
            continue
        if spec.normalizer is Normalizer.SAFE_SOFTMAX and LIVE_LOG_SUM not in walk(aux.value):
            return "the gradient of the log-sum-exp of a row without a live key is NaN, which weights of 0 would hide"
        if spec.row_scale is not None:
            return "rows are scaled by something else than the sum of that log-sum-exp"
        if any(part.kind is Kind.FLOAT and (needs is None or needs[part.operand]) for part in loads(value)):
            return "a tensor beside the log-sum-exp needs a gradient"
    return None


def left_out(spec: AttentionSpec) -> list[tuple[AuxOutput, str]]:
    """Auxiliary outputs whose gradients are left to the reference interpreter, with the reason."""
    reasons = (
        (f, unsupported(replace(spec, aux_outputs=(f,)), (False,) * len(spec.operands))) for f in spec.aux_outputs
    )
    return [(aux, reason) for aux, reason in reasons if reason is not None]


def _value(aux: AuxOutput) -> Expr:
    """Value in log-sum-exps. Where these are infinite weights are NaN or zero, whatever is subtracted from delta."""
    return substitute(in_log_sums(aux.value), {INFINITE: FALSE})


def _is_finite(expr: Expr, first: int) -> bool:
    """Whether a value without WEIGHT is finite where arriving gradients are; loads that vary by key may not be."""
    for part in walk(expr):
        if part.kind is not Kind.FLOAT:
            continue
        if part.op == "load":
            fine = part.operand >= first or "j" not in coordinates(part)
        elif part.op == "div":
            fine = part.args[1].is_const and part.args[1].value != 0
        else:
            fine = math.isfinite(part.value) if part.is_const else is_tame(part.op)
        if not fine:
            return False
    return True
