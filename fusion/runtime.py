"""What runs behind the op: the kernel of a spec, built once per process, or the reference interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusion.codegen import reference
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


def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
    """Why there is no kernel for this spec on this device, or None if there is one."""
    if device.type == "cpu":
        from fusion.codegen import mlir

        return mlir.supports(spec, machine())
    return f"there is no emitter for device {device.type!r} yet"


def _build(spec: AttentionSpec, device: str, emitter: str) -> Executor:
    reason = None
    if emitter != "reference":
        reason = unsupported(spec, torch.device(device))
        if reason is None:
            from fusion.codegen import mlir

            return mlir.compile(spec, machine=machine())
        log.warning("running %s in the reference interpreter: %s", spec, reason)
    return lambda operands, sizes: reference.run(spec, operands, sizes)
