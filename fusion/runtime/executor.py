"""Implementations of the attention ops: from their arguments to a kernel's call.

`OF_OPERATORS` maps each operator to a function of (spec, type of device, request), the first and the last as text. It
returns the function of the other arguments, in the order of the operator's schema (`fusion.runtime.op`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.approximate import dispatch
from fusion.ir import AttentionSpec
from fusion.ir.request import Request
from fusion.ir.results import is_zero, laid_out
from fusion.runtime.kernels import differentiable, executor

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
        arriving = [g if _captured(g) or not is_zero(g) else None for g in aux_outputs]
        return run(grad, *rest, arriving) if any(g is not None for g in arriving) else run(grad, *rest)

    return backward


def _captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


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
