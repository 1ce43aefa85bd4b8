"""`fusion::attention_derivative`: tangents, and derivatives of gradients, none of which have an operator of their own.

    attention_derivative(Tensor[] inputs, SymInt[] sizes, str spec, str emitter, str steps) -> Tensor[]

`steps` names the derivative of the attention (`fusion.ir.derivative`). Kernels compute the tangents of most attentions
(`fusion.runtime.tangents`), the reference interpreter the rest, a block of rows at a time. Every differentiable
operator of fusion is itself such a derivative (the attention that of no steps, its backward that of one), so each
derivative that autograd asks for adds one step, to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.codegen.reference.derivatives import derivative
from fusion.ir import AttentionSpec, results
from fusion.ir.derivative import Gradients, Place, Step, Tangents, from_text, signature, to_text
from fusion.runtime.tangents import have_kernels, tangent


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Function that a call of an operator computes, as a derivative. inputs: the positions of the derivative's inputs
    among the tensors of the call. results: likewise."""

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    sizes: Sequence[int]
    spec: str
    emitter: str
    steps: tuple[Step, ...]


def of_attention(arguments: Sequence[Any]) -> Function:
    """`fusion::attention`, `attention_forward` and `attention_outputs`, whose second result has no derivative."""
    operands, sizes, spec, emitter = arguments
    aux_outputs = range(2, 2 + len(AttentionSpec.from_json(spec).aux_outputs))
    inputs = tuple(range(len(operands)))
    return Function(inputs=inputs, results=(0, *aux_outputs), sizes=sizes, spec=spec, emitter=emitter, steps=())


def of_backward(arguments: Sequence[Any]) -> Function:
    """`fusion::attention_backward`. Its output and statistics follow from the operands, and are no inputs of the
    derivative."""
    grad, *rest = arguments
    return of_outputs_backward((grad, [], *rest))


def of_outputs_backward(arguments: Sequence[Any]) -> Function:
    """`fusion::attention_outputs_backward`."""
    _, aux_outputs, _, _, operands, sizes, spec, emitter, needs = arguments
    first, count = 1 + len(aux_outputs) + 2, len(operands)
    given = [k <= len(aux_outputs) for k in range(1 + len(AttentionSpec.from_json(spec).aux_outputs))]
    return Function(
        inputs=(*range(first, first + count), *range(1 + len(aux_outputs))),
        results=tuple(range(sum(needs))),
        sizes=sizes,
        spec=spec,
        emitter=emitter,
        steps=(Gradients(tuple(map(bool, needs)), tuple(given)),),
    )


def of_derivative(arguments: Sequence[Any]) -> Function:
    """`fusion::attention_derivative`."""
    inputs, sizes, spec, emitter, text = arguments
    steps = from_text(text)
    count = len(signature(AttentionSpec.from_json(spec), steps)[1])
    places = tuple(range(len(inputs))), tuple(range(count))
    return Function(inputs=places[0], results=places[1], sizes=sizes, spec=spec, emitter=emitter, steps=steps)


def tangents(function: Function, tensors: Sequence[Tensor], moving: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Tangent of each result of a call. tensors, moving: the tensors of the call, and their tangents."""
    inputs, given = [tensors[k] for k in function.inputs], [moving[k] for k in function.inputs]
    step = Tangents(tuple(t is not None for t in given))
    return dict(zip(function.results, _call(function, step, inputs, given), strict=True))


def gradients(
    function: Function, tensors: Sequence[Tensor], arriving: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradient of each tensor of a call that needs one. arriving: the gradients of its results."""
    inputs, given = [tensors[k] for k in function.inputs], [arriving[k] for k in function.results]
    marks = tuple(needs[k] and tensors[k].is_floating_point() for k in function.inputs)
    result: list[Tensor | None] = [None] * len(tensors)
    if any(marks) and any(g is not None for g in given):
        step = Gradients(marks, tuple(g is not None for g in given))
        places = [k for k, mark in zip(function.inputs, marks, strict=True) if mark]
        for place, gradient in zip(places, _call(function, step, inputs, given), strict=True):
            result[place] = gradient
    return result


def _call(function: Function, step: Step, inputs: list[Tensor], given: Sequence[Tensor | None]) -> list[Tensor]:
    every = [*inputs, *(t for t in given if t is not None)]
    steps = to_text((*function.steps, step))
    return torch.ops.fusion.attention_derivative(every, function.sizes, function.spec, function.emitter, steps)


def execute(inputs: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str, steps: str) -> list[Tensor]:
    """`fusion::attention_derivative`."""
    parsed, promised = AttentionSpec.from_json(spec), fake(inputs, sizes, spec, emitter, steps)
    (first, *aux_outputs), device, fast = from_text(steps), inputs[0].device.type, None
    if isinstance(first, Tangents) and not aux_outputs and have_kernels(parsed, first.inputs, emitter, device):
        fast = tangent(parsed, first, inputs, sizes, emitter)
    every = derivative(parsed, (first, *aux_outputs), inputs, sizes) if fast is None else [fast]
    return [memory.copy_(value) for memory, value in zip(promised, every, strict=True)]


def fake(inputs: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str, steps: str) -> list[Tensor]:
    """Empty results, each with the layout of the operand's gradient or of the result that it belongs to."""
    parsed = AttentionSpec.from_json(spec)

    def empty(place: Place) -> Tensor:
        if place.is_operand:
            return results.empty_gradient(inputs[place.number], parsed.operands[place.number])
        return results.empty_result(parsed, place.number, inputs[0], sizes)

    return [empty(place) for place in signature(parsed, from_text(steps))[1]]
