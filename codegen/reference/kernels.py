"""The reference interpreter as an emitter: it serves every device, and plans nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.ir.results import no_statistics
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine

from ..emitter import Backward
from .backward import backward
from .forward import run, run_all


class ReferenceKernel:
    """A spec, executed in plain torch."""

    def __init__(self, spec: AttentionSpec):
        self.spec = spec

    def source(self, sizes: Sequence[int]) -> str:
        """Empty: no code is generated."""
        return ""

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        return run(self.spec, operands, sizes)

    def choice(self, sizes: Sequence[int]) -> None:
        """None: nothing is chosen."""

    def prepare(self, sizes: Sequence[int]) -> None:
        """Nothing is compiled."""


class ReferenceGradient(ReferenceKernel):
    """A forward kernel, and the gradient of the reference interpreter, which needs no statistics (they are zeros)."""

    def __init__(self, spec: AttentionSpec, kernel: Callable[[Sequence[Tensor], Sequence[int]], Tensor]):
        super().__init__(spec)
        self.kernel = kernel

    def without_kernels(self, needs: Sequence[bool]) -> str:
        """Reason why gradients are left to the reference interpreter."""
        return "there is no kernel for them"

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """[output, zeros, *auxiliary outputs]."""
        out, *aux_outputs = (
            run_all(self.spec, operands, sizes) if self.spec.aux_outputs else [self.kernel(operands, sizes)]
        )
        return [out, no_statistics(self.spec, operands, sizes), *aux_outputs]

    def backward(self, *given: Any) -> list[Tensor]:
        """Gradients of the operands that are wanted. given: the fields of `Backward`."""
        call = Backward(*given)
        return backward(self.spec, call.grad, call.operands, call.sizes, call.needs, aux_outputs=call.aux_outputs)


def supports(spec: AttentionSpec, machine: Machine) -> str | None:
    """Every spec is supported."""
    return None


def reads(dtype: torch.dtype, machine: Machine) -> bool:
    """Every dtype is read."""
    return True


def compile(spec: AttentionSpec, machine: Machine, plan: Any = None, measure: bool = False) -> ReferenceKernel:
    """Interpreter of a spec."""
    return ReferenceKernel(spec)


def compile_training(spec: AttentionSpec, machine: Machine, plan: Any = None, measure: bool = False) -> None:
    """None: every emitter falls back to this gradient anyway."""
