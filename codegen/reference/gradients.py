"""Gradients of the parts of a spec whose cost is linear in the length: the rest of a backward around its kernels.

A kernel returns the gradient of each element that it read, at the coordinates at which it read it; these functions turn
it into the gradient of the tensor. Indices are evaluated and pulled back by torch itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fusion.ir.expr import ROW_MAX, ROW_SUM, Expr, I, J
from fusion.ir.spec import AttentionSpec
from fusion.lowering.rows import LOG_SUM, row_scale, slope

from .backward import recording
from .forward import Execution


def of_access(
    spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], number: int, upstream: Tensor
) -> Tensor:
    """Gradient of Q (number 0), K (1) or V (2) from that of its elements, [b.., row, column]."""
    with torch.enable_grad(), recording():
        given = [o.detach().requires_grad_(n == number) for n, o in enumerate(operands)]
        gathered = Execution(spec, given, sizes).gather(number)
        return torch.autograd.grad(gathered, given[number], upstream.to(gathered.dtype))[0]


def of_expression(
    spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], expr: Expr, upstream: Tensor, number: int
) -> Tensor:
    """Gradient of operand `number` through an expression free of scores; upstream: [b.., i or 1, j or 1]."""
    with torch.enable_grad(), recording():
        given = [o.detach().requires_grad_(n == number) for n, o in enumerate(operands)]
        found = value(spec, given, sizes, expr)
        shape = torch.broadcast_shapes(found.shape, upstream.shape)
        total = upstream.expand(shape).to(found.dtype)
        return torch.autograd.grad(found.expand(shape), given[number], total)[0]


def of_rows(
    spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], row_max: Tensor, row_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale of rows with these maxima and sums, its slope (see `fusion.lowering.rows`), and the part of the
    mean of dP over their weights that delta lacks. Float32 [b.., i]; computed in float64, since intermediate values may
    be beyond float32, except for the log-sum-exp, whose logarithm eager mode loses beside a huge fill."""
    known = {ROW_MAX: row_max, ROW_SUM: row_sum, LOG_SUM: row_max + row_sum.log()}
    rows = {leaf: of_row.unsqueeze(-1).double() for leaf, of_row in known.items()}
    scale, steep = (
        value(spec, operands, sizes, expr, torch.float64, rows).expand(rows[ROW_SUM].shape).squeeze(-1)
        for expr in (row_scale(spec), slope(spec))
    )
    # Where that is not a number no gradient depends on it: weights are all 0, or NaN.
    lost = (1 - steep * scale * row_sum).float().nan_to_num(1.0, 1.0, 1.0)
    return scale.float(), steep.float().nan_to_num(0.0, 0.0, 0.0), lost


def value(
    spec: AttentionSpec,
    operands: Sequence[Tensor],
    sizes: Sequence[int],
    expr: Expr,
    dtype: torch.dtype | None = None,
    rows: Mapping[Expr, Tensor] | None = None,
) -> Tensor:
    """An expression free of scores and keys, over [b.., i, 1]. rows: its leaves that depend on rows."""
    run = Execution(spec, operands, sizes, dtype)
    axis = len(run.batch)
    positions = {I: run.arange(0, run.n_q, axis), J: run.arange(0, run.n_k, axis + 1)}
    found = run.value(expr, {**positions, **(rows or {})})
    return found if found.dim() else found.view([1] * (axis + 2))
