"""What the ops run: from their arguments to a kernel's call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusion.approximate import dispatch
from fusion.codegen.emitter import Backward
from fusion.ir import AttentionSpec
from fusion.ir.request import Request
from fusion.ir.results import is_zero, laid_out
from fusion.runtime.kernels import differentiable, executor


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


def attention(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> Tensor:
    """`fusion::attention`: see `fusion.runtime.op`."""
    return executor(spec, operands[0].device.type, emitter)(operands, sizes)


def attention_forward(
    operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str
) -> tuple[Tensor, Tensor]:
    """`fusion::attention_forward`: see `fusion.runtime.op`."""
    return forward_of(spec, operands[0].device.type, emitter)(operands, sizes)


def forward_of(spec: str, device: str, request: str) -> Callable[[Sequence[Tensor], Sequence[int]], tuple]:
    """(operands, sizes) -> (output, statistics)."""
    outputs, allowed = differentiable(spec, device, request).outputs, Request.parse(request).approximation

    def run(operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        if allowed is not None:
            dispatch.note_exact(allowed, operands, dispatch.TRAINING)
        out, statistics = outputs(operands, sizes)
        return out, statistics

    return run


def attention_outputs(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> list[Tensor]:
    """`fusion::attention_outputs`: see `fusion.runtime.op`."""
    if (allowed := Request.parse(emitter).approximation) is not None:
        dispatch.note_exact(allowed, operands, dispatch.WEIGHTS)
    return differentiable(spec, operands[0].device.type, emitter).outputs(operands, sizes)


def attention_outputs_backward(grad: Tensor, further: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    """`fusion::attention_outputs_backward`: see `fusion.runtime.op`. Gradients that are all zero cost one look."""
    arriving = [None if is_zero(g) else g for g in further]
    return _backward(BackwardArguments(grad, *arguments), arriving if any(g is not None for g in arriving) else ())


def attention_backward(*arguments: Any) -> list[Tensor]:
    """`fusion::attention_backward`: see `fusion.runtime.op`."""
    return _backward(BackwardArguments(*arguments), ())


def _backward(given: BackwardArguments, further: Sequence[Tensor | None]) -> list[Tensor]:
    *arguments, spec, emitter, needs = given
    return backward_of(spec, given.operands[0].device.type, emitter)(*arguments, needs, further)


def backward_of(spec: str, device: str, request: str) -> Callable[..., list[Tensor]]:
    """A function of the fields of `Backward` -> the gradients of the operands that are needed, in order in memory."""
    kernels, described = differentiable(spec, device, request), AttentionSpec.from_json(spec).operands

    def run(*given: Any) -> list[Tensor]:
        *before, operands, sizes, needs, further = Backward(*given)
        found = kernels.backward(*before, operands, sizes, tuple(needs), *((further,) if further else ()))
        wanted = [(t, o) for t, o, needed in zip(operands, described, needs, strict=True) if needed]
        return [laid_out(gradient, *place) for gradient, place in zip(found, wanted, strict=True)]

    return run
