"""GPU kernels: an `AttentionSpec` becomes one Python module with Triton kernels, written to torch's cache directory.

It is an emitter (`fusion.codegen.emitter`). `forward` writes the kernel around the loop of `key_loop`, `expressions`
and `matrices` the values and addresses in it, `kernel` and `tiles` the parts that it shares with others, `panels`
divides head dimensions, `mathematics` has functions that Triton lacks, `module` writes and loads files, `autotune`
measures other tiles than the planned (`candidates`) and takes smaller ones where they do not fit, `launch` makes the
call, `split` is for few queries, `features` and `polynomial` are for approximate attention, `interpret` runs it on CPU
tensors in Triton's interpreter. Triton is not imported before a kernel is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fusion.ir.expr import C, E, contains, loads
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_model import tile_clocks
from fusion.refusals import Reason, Refusal

from .. import emitter
from .autotune import Tuner
from .differentiable import Differentiable
from .dtypes import DTYPES, FLOAT8, PRODUCTS
from .launch import Kernel

_LOADED = {*DTYPES, *FLOAT8, "bool", "uint8", "int8", "int16", "int32", "int64"}


@functools.cache
def unavailable() -> str | None:
    """Reason why nothing can be compiled on this machine, or None."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error}); install triton to have GPU kernels"
    return None


def supports(spec: AttentionSpec, machine: Machine | None = None) -> Refusal | None:
    """Reason why this spec has no GPU kernel, or None; the same on every machine."""
    if (reason := unavailable()) is not None:
        return Refusal(Reason.NOT_INSTALLED, reason)
    if (refusal := emitter.unread(spec, sorted(_LOADED), PRODUCTS)) is not None:
        return refusal
    if spec.mixing is not None:
        return Refusal(Reason.HEADS_MIXED, "heads are mixed, and kernels for GPUs compute them one by one")
    if spec.reproducible and spec.aux_outputs:
        return Refusal(
            Reason.NOT_REPRODUCIBLE,
            "reproducible results are asked for, and kernels for GPUs sum up weights that are results in tiles of the "
            "backward",
        )
    written = (("an auxiliary output has", aux.dtype) for aux in spec.aux_outputs)
    for what, dtype in (("the products have", spec.dtype), ("the output has", spec.out_dtype), *written):
        if dtype not in DTYPES:
            return Refusal(Reason.DTYPE, f"{what} dtype {dtype}; kernels take {', '.join(DTYPES)}")
    for index in (index for number in (0, 1, 2) for part in loads(spec.element(number)) for index in part.args):
        if any(contains(part, C) or contains(part, E) for part in loads(index)):
            return Refusal(Reason.INDIRECT_COLUMN, f"a column of Q, K or V is itself read from a tensor: {index}")
    return None


def reads(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether Triton has conversions from a float8 dtype for a machine."""
    if str(dtype).removeprefix("torch.") not in FLOAT8 or unavailable() is not None:
        return False
    # Of NVIDIA's processors, those from 8.9 on have instructions for e4m3fn; e5m2 is a float16's upper half.
    return dtype is torch.float8_e5m2 or "fp8" in machine.isa


def compile(
    spec: AttentionSpec,
    machine: Machine | None = None,
    plan: Callable[[Machine], GpuPlanner] | None = None,
    measure: bool = False,
) -> Kernel:
    """Kernel of a spec, which plans for the machine of each call's device. plan: machine -> the planner that makes the
    choices. measure: tiles are timed at the first call, those first that are predicted to be the fastest on `machine`.
    Raises ValueError where `supports` has a reason."""
    if (reason := supports(spec)) is not None:
        raise ValueError(f"no GPU kernel for {spec}: {reason}")
    return Kernel(spec, tuner=_tuner(spec, machine) if measure else None, plan=plan)


def compile_training(
    spec: AttentionSpec,
    machine: Machine | None = None,
    plan: Callable[[Machine], GpuPlanner] | None = None,
    measure: bool = False,
) -> Differentiable | None:
    """Kernels that train with a spec, or None where `supports` has a reason."""
    if supports(spec) is not None:
        return None
    return Differentiable(spec, tuner=_tuner(spec, machine) if measure else None, plan=plan)


def _tuner(spec: AttentionSpec, machine: Machine | None) -> Tuner:
    return Tuner(None if machine is None else tile_clocks(spec, machine))
