"""What runs behind the op: the kernel of a spec, built once per process, or the reference interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusion.codegen import mlir, reference, triton
from fusion.ir import AttentionSpec
from fusion.machine import machine

log = logging.getLogger(__name__)
Executor = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
_executors: dict[tuple[str, str, str], Executor] = {}


def attention(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> Tensor:
    """`fusion::attention`: see `fusion.op`."""
    return executor(spec, operands[0].device.type, emitter)(operands, sizes)


def executor(spec: str, device: str, emitter: str = "auto") -> Executor:
    """The function that computes a spec on a kind of device; compiled at first use."""
    key = (spec, device, emitter)
    found = _executors.get(key)
    if found is None:
        found = _executors[key] = _build(AttentionSpec.from_json(spec), device, emitter)
    return found


class Guarded:
    """A kernel that is left for the reference interpreter at its first failure: users see numbers, and a warning."""

    def __init__(self, spec: AttentionSpec, kernel: Executor):
        self.spec, self.kernel = spec, kernel
        self.broken = False

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if not self.broken:
            try:
                return self.kernel(operands, sizes)
            except Exception:
                self.broken = True
                log.exception("a kernel failed; running %s in the reference interpreter from now on", self.spec)
        return reference.run(self.spec, operands, sizes)


def kernel_source(spec: AttentionSpec, device: str, emitter: str) -> str | None:
    """The source of the kernel that runs a spec, or None where the reference interpreter does."""
    found = executor(spec.to_json(), device, emitter)
    return getattr(found.kernel, "source", None) if isinstance(found, Guarded) else None


def prepare(spec: AttentionSpec, device: torch.device) -> str | None:
    """Build the kernel of a spec now; why there is none, or None."""
    reason = unsupported(spec, device)
    if reason is not None:
        return reason
    try:
        found = executor(spec.to_json(), device.type)
    except Exception as problem:
        log.warning("no kernel for %s", spec, exc_info=True)
        return f"its kernel could not be built ({type(problem).__name__}: {problem})"
    return None if isinstance(found, Guarded) else "its kernel could not be built"


def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
    """Why there is no kernel for this spec on this device, or None if there is one."""
    if device.type == "cpu":
        return mlir.supports(spec, machine())
    if device.type == "cuda":
        return triton.supports(spec)
    return f"there is no emitter for device {device.type!r}"


def _build(spec: AttentionSpec, device: str, emitter: str) -> Executor:
    if emitter != "reference":
        reason = unsupported(spec, torch.device(device))
        if reason is None:
            return Guarded(spec, triton.compile(spec) if device == "cuda" else mlir.compile(spec, machine=machine()))
        log.warning("running %s in the reference interpreter: %s", spec, reason)
    return lambda operands, sizes: reference.run(spec, operands, sizes)
