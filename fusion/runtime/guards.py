"""Fall-back to the reference interpreter at a kernel's first failure: users get their results, and a warning.

Memory that runs out is no failure of a kernel: the error is the user's, and the reference interpreter, which stores
whole score matrices, would need more of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor

from fusion.approximate import dispatch
from fusion.codegen import reference
from fusion.codegen.emitter import Kernel, TrainingKernel
from fusion.errors import LargeTableError
from fusion.ir import AttentionSpec
from fusion.ir.request import Approximation
from fusion.torch_private.tensors import is_out_of_memory

log = logging.getLogger(__name__)
Executor = Callable[[Sequence[Tensor], Sequence[int]], Tensor]

_raising: list[object] = []
"""One entry for each `failures_raised` of any thread: a gradient runs on threads of autograd's own."""


@contextlib.contextmanager
def failures_raised() -> Iterator[None]:
    """Context in which a kernel that fails raises, on every thread: for tests and benchmarks, which would otherwise
    measure the fall-back."""
    _raising.append(entry := object())
    try:
        yield
    finally:
        _raising.remove(entry)


def _must_raise(error: Exception, spec: AttentionSpec) -> bool:
    """Whether an error is the caller's: also where results are to be reproducible, which the interpreter's are not."""
    return bool(_raising) or spec.reproducible or is_out_of_memory(error)


class GuardedKernel:
    """A kernel that falls back to the reference interpreter at its first failure; an approximation to the exact one."""

    FAILED = "a kernel failed; running %s in the reference interpreter from now on"

    def __init__(self, spec: AttentionSpec, kernel: Kernel | Executor):
        self.spec, self.kernel, self.broken = spec, cast("Kernel", kernel), ""
        self._run = kernel.__call__  # methods are called faster than objects

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if not self.broken:
            try:
                return self._run(operands, sizes)
            except Exception as error:
                if _must_raise(error, self.spec):
                    raise
                self.broken = f"{type(error).__name__}: {error}"
                log.exception(self.FAILED, self.spec)
        return self._instead(operands, sizes)

    def _instead(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        return reference.run(self.spec, operands, sizes)


class GuardedApproximation(GuardedKernel):
    FAILED = "an approximation failed; %s runs exact from now on"

    def __init__(self, spec: AttentionSpec, allowed: Approximation, run: Executor, exact: Executor):
        super().__init__(spec, run)
        self.allowed, self.exact = allowed, exact

    def _instead(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        dispatch.note_exact(self.allowed, operands, f"the approximation failed before ({self.broken})")
        return self.exact(operands, sizes)


class GuardedTraining:
    """Kernels for training that fall back to the reference interpreter at their first failure. Its gradient needs no
    statistics, so that it can follow any forward."""

    def __init__(self, spec: AttentionSpec, kernel: TrainingKernel):
        self.spec, self.kernel, self.broken = spec, kernel, False
        self._reference = reference.ReferenceGradient(spec, lambda *given: reference.run(spec, *given))

    def _attempt(self, method: str, *given: Any) -> list[Tensor]:
        """Result of the kernel, or of the reference interpreter where the kernel fails or has failed before."""
        if not self.broken:
            try:
                return getattr(self.kernel, method)(*given)
            except LargeTableError:
                log.info("the gradient of %s is left to the reference interpreter", self.spec, exc_info=True)
            except Exception as error:
                if _must_raise(error, self.spec):
                    raise
                result = getattr(self._reference, method)(*given)  # which raises, too, where the call is at fault
                self.broken = True
                log.exception("a kernel failed; training with %s in the reference interpreter from now on", self.spec)
                return result
        return getattr(self._reference, method)(*given)

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """[output, statistics, *auxiliary outputs]."""
        return self._attempt("outputs", operands, sizes)

    def backward(self, *given: Any) -> list[Tensor]:
        """Gradients of the operands that are wanted. given: the fields of `Backward`."""
        return self._attempt("backward", *given)
