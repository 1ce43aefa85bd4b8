"""Gradients of any `AttentionSpec` in plain torch: autograd through the reference forward, a block of query rows at a
time.

No formula of a derivative is used: those of `fusion.ir.derivative`, and the kernels built from them, are tested against
these gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fusion.ir.spec import AttentionSpec
from fusion.torch_private.autograd import recording

from .forward import Execution

BLOCK_ELEMENTS = 1 << 22  # score elements of a block of rows that are alive at once


def backward(
    spec: AttentionSpec,
    grad: torch.Tensor,
    operands: Sequence[torch.Tensor],
    sizes: Sequence[int],
    needs: Sequence[bool],
    dtype: torch.dtype | None = None,
    aux_outputs: Sequence[torch.Tensor | None] = (),
) -> list[torch.Tensor]:
    """Gradients of the operands that `needs` marks, in order, each of its operand's shape and in the computation's
    dtype.

    grad: of the output, with dimensions `spec.output.dims`. aux_outputs: of each auxiliary output, None where none
    arrives; () where none arrives at any.
    """
    arriving = [g for g in aux_outputs if g is not None]
    spec = replace(
        spec, aux_outputs=tuple(f for f, g in zip(spec.aux_outputs, aux_outputs, strict=False) if g is not None)
    )
    with torch.enable_grad(), recording():
        given = [o.detach().requires_grad_(needed) for o, needed in zip(operands, needs, strict=True)]
        wanted = [t for t, n in zip(given, needs, strict=True) if n]
        return _gradients(Execution(spec, given, sizes, dtype), [grad, *arriving], wanted)


def _gradients(run: Execution, grads: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the operands that are wanted, from those of the output and the auxiliary outputs."""
    upstream = [run.as_computed(number, grad) for number, grad in enumerate(grads)]
    total = [torch.zeros(t.shape, dtype=run.dtype, device=t.device) for t in wanted]
    if run.n_q and any(gradient.numel() for gradient in upstream):
        gathered = run.gathered()
        # Q, K and V are cut off from their operands, so that each block's gradient is a plain sum into three tensors.
        cut = [t.detach().requires_grad_(t.requires_grad) for t in gathered]
        with_gradient = [t for t in gathered if t.requires_grad]
        sums = [torch.zeros(t.shape, dtype=run.dtype, device=t.device) for t in with_gradient]
        into = dict(zip([*(t for t in cut if t.requires_grad), *wanted], [*sums, *total], strict=True))
        for block in run.blocks(BLOCK_ELEMENTS):
            parts = [run.cut(number, gradient, *block) for number, gradient in enumerate(upstream)]
            _add(run.results(*block, *cut), parts, into)
        _add(with_gradient, sums, dict(zip(wanted, total, strict=True)))
    return total


def _add(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], into: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    """Add to each tensor's sum its gradient through these outputs."""
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    if not pairs or not into:
        return
    reached, arriving = zip(*pairs, strict=True)
    found = torch.autograd.grad(reached, [*into], arriving, allow_unused=True)
    for total, part in zip(into.values(), found, strict=True):
        if part is not None:
            total += part
