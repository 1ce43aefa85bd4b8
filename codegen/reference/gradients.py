"""Gradients of the parts of a spec whose cost is linear in the length: what is left to do around backward kernels.

A kernel hands over the gradient of each element that it read, at the coordinates at which it read it; here that becomes
the gradient of the tensor. Indices are evaluated and pulled back by torch itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion.codegen.reference.backward import backward, recording
from fusion.codegen.reference.forward import Execution
from fusion.ir.expr import Expr, I, J
from fusion.ir.spec import AttentionSpec

__all__ = ["backward", "of_access", "of_expression", "value"]


def of_access(
    spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], number: int, upstream: Tensor
) -> Tensor:
    """The gradient of Q (number 0), K (1) or V (2) from that of its elements, [b.., row, column]."""
    with torch.enable_grad(), recording():
        given = [o.detach().requires_grad_(n == number) for n, o in enumerate(operands)]
        gathered = Execution(spec, given, sizes).gathered()[number]
        return torch.autograd.grad(gathered, given[number], upstream.to(gathered.dtype))[0]


def of_expression(
    spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], expr: Expr, upstream: Tensor, number: int
) -> Tensor:
    """The gradient of operand `number` through an expression free of scores; upstream: [b.., i or 1, j or 1]."""
    with torch.enable_grad(), recording():
        given = [o.detach().requires_grad_(n == number) for n, o in enumerate(operands)]
        found = _value(spec, given, sizes, expr)
        shape = torch.broadcast_shapes(found.shape, upstream.shape)
        total = upstream.expand(shape).to(found.dtype)
        return torch.autograd.grad(found.expand(shape), given[number], total)[0]


def value(spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], expr: Expr) -> Tensor:
    """An expression free of scores and keys, over [b.., i, 1]."""
    return _value(spec, operands, sizes, expr)


def _value(spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], expr: Expr) -> Tensor:
    run = Execution(spec, operands, sizes)
    axis = len(run.batch)
    positions = {I: run.arange(0, run.n_q, axis), J: run.arange(0, run.n_k, axis + 1)}
    found = run.value(expr, positions)
    return found if found.dim() else found.view([1] * (axis + 2))
