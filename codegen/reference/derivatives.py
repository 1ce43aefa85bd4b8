"""Derivatives of any `AttentionSpec`, of any order, in plain torch: a block of query rows at a time, so that no tensor
of size N_q x N_k is stored.

For a block of rows, an attention is a function of its operands and results; `torch.func` computes its derivatives.
Tensors that belong to results are cut into the same rows, tensors that belong to operands are not cut. So a derivative
of the attention follows from those of its blocks: results per row are concatenated, and results per operand are summed.
That holds for tangents, gradients and all their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusion.ir.derivative import Gradients, Place, Step, Tangents, marked, signature
from fusion.ir.spec import AttentionSpec
from fusion.torch_private import autograd, functorch

from .forward import Execution

Block = tuple[int, int]  # (first row, how many)
Function = Callable[[Block, list[Tensor]], list[Tensor]]
"""(a block of rows, inputs) -> results, those that belong to rows cut into this block."""

BLOCK_ELEMENTS = 1 << 20  # score elements of a block of rows, of which a derivative holds a few tables at once


def derivative(
    spec: AttentionSpec,
    steps: Sequence[Step],
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Derivative of an attention by `steps`, at `inputs` (see `fusion.ir.derivative`). Results are of the shape of the
    operand or result that they belong to, in the computation's dtype: by default float32, or float64 where an operand
    is."""
    run = Execution(spec, inputs[: len(spec.operands)], sizes, dtype)
    takes, gives = signature(spec, steps)
    function = _attention(spec, sizes, run.dtype)
    for step in steps:
        function = _tangents(function, step) if isinstance(step, Tangents) else _gradients(function, step)
    given = [_as_computed(run, place, tensor) for place, tensor in zip(takes, inputs, strict=True)]
    found: list[list[Tensor]] = [[] for _ in gives]
    with autograd.recording():
        for block in run.blocks(BLOCK_ELEMENTS >> len(steps)):  # a higher order holds more tables of scores
            parts = function(block, [_cut(run, place, x, block) for place, x in zip(takes, given, strict=True)])
            for place, into, part in zip(gives, found, parts, strict=True):
                into[:] = [*into, part] if _has_rows(run, place) or not into else [into[0] + part]
    return [_as_given(run, place, parts) for place, parts in zip(gives, found, strict=True)]


def _attention(spec: AttentionSpec, sizes: Sequence[int], dtype: torch.dtype) -> Function:
    def rows(block: Block, inputs: list[Tensor]) -> list[Tensor]:
        run = Execution(spec, inputs, sizes, dtype)
        return run.results(*block, *run.gathered())

    return rows


def _tangents(function: Function, step: Tangents) -> Function:
    def tangents(block: Block, inputs: list[Tensor]) -> list[Tensor]:
        count = len(step.inputs)
        moving = marked(inputs[:count], step.inputs)
        partial = _of_marked(function, block, inputs[:count], step.inputs)
        return _moved(partial, moving, inputs[count:])

    return tangents


def _moved(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    """`torch.func.jvp`, also where a level of forward mode is open that `torch.func` did not open."""
    with functorch.tangent_level() as level:
        pairs = zip(inputs, tangents, strict=True)  # a tangent is kept in its tensor's strides: not in those of 0
        duals = [autograd.make_dual(x.contiguous(), t.contiguous()) for x, t in pairs]
        pairs = [autograd.unpack_dual(result) for result in function(*duals)]
        return [functorch.taken_off(torch.zeros_like(x) if t is None else t, level) for x, t in pairs]


def _gradients(function: Function, step: Gradients) -> Function:
    def gradients(block: Block, inputs: list[Tensor]) -> list[Tensor]:
        count = len(step.inputs)
        partial = _of_marked(function, block, inputs[:count], step.inputs)

        def reached(*moving: Tensor) -> tuple[Tensor, ...]:
            return tuple(marked(partial(*moving), step.results))

        pull_back = torch.func.vjp(reached, *marked(inputs[:count], step.inputs))[1]
        return list(pull_back(tuple(inputs[count:])))

    return gradients


def _of_marked(
    function: Function, block: Block, inputs: list[Tensor], marks: Sequence[bool]
) -> Callable[..., tuple[Tensor, ...]]:

    def partial(*moving: Tensor) -> tuple[Tensor, ...]:
        left = iter(moving)
        return tuple(function(block, [next(left) if m else x for x, m in zip(inputs, marks, strict=True)]))

    return partial


def _has_rows(run: Execution, place: Place) -> bool:
    return not place.is_operand and run.has_rows(place.number)


def _as_computed(run: Execution, place: Place, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return (tensor.to(run.dtype) if place.is_operand else run.as_computed(place.number, tensor)).detach()


def _cut(run: Execution, place: Place, tensor: Tensor, block: Block) -> Tensor:
    return tensor if place.is_operand else run.cut(place.number, tensor, *block)


def _as_given(run: Execution, place: Place, parts: list[Tensor]) -> Tensor:
    if place.is_operand:
        return parts[0]
    return run.as_given(place.number, torch.cat(parts, len(run.batch)) if _has_rows(run, place) else parts[0])
