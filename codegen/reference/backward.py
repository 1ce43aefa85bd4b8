"""Gradients of any `AttentionSpec` in plain torch: autograd through the reference forward, a block of query rows at
a time.

Nothing here knows a derivative: the formulas of `fusion.ir.derivative`, and the kernels made of them, are tested
against it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.autograd import forward_ad

from fusion.codegen.reference.forward import Execution
from fusion.ir.results import result_names
from fusion.ir.spec import AttentionSpec, FurtherOutput, Reduction

#: score elements of a block of rows that are alive at once
BLOCK_ELEMENTS = 1 << 22

_KEYS = torch._C.DispatchKey
_OF_RECORDING = (
    _KEYS.AutogradCPU, _KEYS.AutogradCUDA, _KEYS.AutogradOther, _KEYS.AutogradFunctionality, _KEYS.ADInplaceOrView,
    _KEYS.ZeroTensor, _KEYS.FuncTorchDynamicLayerFrontMode, _KEYS.FuncTorchDynamicLayerBackMode,
    _KEYS.FuncTorchGradWrapper,
)  # fmt: skip
"""What autograd and the levels of torch.func need; an operator is called below them, or below a dispatch mode."""


def backward(
    spec: AttentionSpec,
    grad: torch.Tensor,
    operands: Sequence[torch.Tensor],
    sizes: Sequence[int],
    needs: Sequence[bool],
    dtype: torch.dtype | None = None,
    further: Sequence[torch.Tensor | None] = (),
) -> list[torch.Tensor]:
    """The gradients of the operands that `needs` marks, in order, each of its operand's shape and in the
    computation's dtype.

    grad: of the output, with dimensions `spec.output.dims`. further: of each of the further outputs, None where nothing
    arrives; () where nothing does at any.
    """
    arriving = [g for g in further if g is not None]
    spec = replace(spec, further=tuple(f for f, g in zip(spec.further, further, strict=False) if g is not None))
    with torch.enable_grad(), recording():
        given = [o.detach().requires_grad_(needed) for o, needed in zip(operands, needs, strict=True)]
        wanted = [t for t, n in zip(given, needs, strict=True) if n]
        return _Backward(spec, given, sizes, dtype).gradients([grad, *arriving], wanted)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd record although this runs inside an operator, below the dispatcher's autograd keys. Tangents that
    tensors have outside are the operator's business."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in _OF_RECORDING:
        hidden = hidden.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, hidden), forward_ad._set_fwd_grad_enabled(False):
        yield


class _Backward:
    def __init__(
        self, spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype | None
    ):
        self.execution = Execution(spec, operands, sizes, dtype)

    def gradients(self, grads: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        run = self.execution
        upstream = [self._as_rows(grads[0]), *map(self._further, run.spec.further, grads[1:])]
        total = [torch.zeros(t.shape, dtype=run.dtype, device=t.device) for t in wanted]
        if run.n_q and any(gradient.numel() for gradient in upstream):
            gathered = run.gathered()
            # Q, K and V are cut off from their operands, so that each block's gradient is a plain sum into three
            # tensors.
            cut = [t.detach().requires_grad_(t.requires_grad) for t in gathered]
            sums = [torch.zeros(t.shape, dtype=run.dtype, device=t.device) if t.requires_grad else None for t in cut]
            for first, count in self._blocks():
                self._block(first, count, cut, upstream, wanted, sums, total)
            kept = [(t, s) for t, s in zip(gathered, sums, strict=True) if s is not None]
            if kept:
                self._accumulate(*zip(*kept, strict=True), wanted, total)
        return total

    def _as_rows(self, grad: torch.Tensor) -> torch.Tensor:
        """The output's gradient as [b.., i, e]."""
        run, dims = self.execution, self.execution.spec.output.dims
        return grad.to(run.dtype).permute([dims.index(name) for name in result_names(run.spec)])

    def _further(self, further: FurtherOutput, grad: torch.Tensor) -> torch.Tensor:
        """A further output's gradient with its coordinates in the order b.., i, j."""
        names = result_names(self.execution.spec, further)
        return grad.to(self.execution.dtype).permute([further.dims.index(name) for name in names])

    def _part(self, number: int, upstream: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The gradient of what some rows contribute to a result (number 0: the output)."""
        if number and "i" not in self.execution.spec.further[number - 1].dims:
            return upstream  # a sum over the rows
        return upstream.narrow(len(self.execution.batch), first, count)

    def _blocks(self) -> list[tuple[int, int]]:
        run = self.execution
        if any(f.over == "i" and f.reduction is not Reduction.SUM for f in run.spec.further):
            return [(0, run.n_q)]
        count = max(1, BLOCK_ELEMENTS // max(1, math.prod(run.batch) * run.n_k))
        return [(first, min(count, run.n_q - first)) for first in range(0, run.n_q, count)]

    def _block(self, first, count, cut, upstream, wanted, sums, total) -> None:
        results = [
            (out, self._part(number, upstream[number], first, count))
            for number, out in enumerate(self.execution.results(first, count, *cut))
            if out.requires_grad
        ]
        if not results:
            return
        places = [(t, s) for t, s in zip(cut, sums, strict=True) if s is not None]
        targets = [*(t for t, _ in places), *wanted]
        outputs, gradients = (list(part) for part in zip(*results, strict=True))
        found = torch.autograd.grad(outputs, targets, gradients, allow_unused=True)
        for into, part in zip([*(s for _, s in places), *total], found, strict=True):
            if part is not None:
                into += part

    def _accumulate(self, outputs, gradients, wanted, total) -> None:
        found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        for into, part in zip(total, found, strict=True):
            if part is not None:
                into += part
