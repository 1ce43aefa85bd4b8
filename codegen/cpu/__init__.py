"""CPU kernels: an `AttentionSpec` becomes one function in MLIR, which `codegen.mlir` writes. Here it is compiled in
process by torch-mlir and run on torch's OpenMP threads.

It is the emitter "mlir" (`fusion.codegen.emitter`). Nothing of torch-mlir is imported before a kernel is compiled.

    machine_code          from MLIR text to an address, and objects that are kept on disk
    calling               workspace and parameters of a call, on threads
    launch                forward kernels: the tile of a call, its division among threads, its output
    training, backward    forward with statistics of rows; gradients of a call, by the kernels of its plan
    derived               what backward calls with the same sizes share
    export                a call in MLIR, for modules that others compile
    polynomial, moments   calls of the kernels of approximate attention
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusion.caching import OncePerKey
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning.choice import Planner
from fusion.planning.cpu_measured import Tuner
from fusion.planning.register_tiles import PLANES, target_for, tilings_for
from fusion.refusals import Reason, Refusal

from .. import emitter
from ..mlir.scope import MEMORY_TYPE
from ..mlir.vectormath import FORMATS
from .launch import Kernel
from .machine_code import unavailable

if TYPE_CHECKING:
    from .training import TrainingKernel

__all__ = ["Kernel", "compile", "compile_training", "supports", "unavailable"]


def supports(spec: AttentionSpec, machine: Machine) -> Refusal | None:
    """Why this spec has no CPU kernel, or None."""
    if (reason := unavailable()) is not None:
        return Refusal(Reason.NOT_INSTALLED, reason)
    if machine.kind != "cpu":
        return Refusal(Reason.OTHER_MACHINE, f"{machine.name} is not a CPU")
    if (refusal := emitter.unread(spec, MEMORY_TYPE, PLANES)) is not None:
        return refusal
    if spec.reproducible and (obstacle := _not_reproducible(spec)) is not None:
        return Refusal(Reason.NOT_REPRODUCIBLE, f"reproducible results are asked for, and {obstacle}")
    written = ("float32", "bfloat16", "float16")
    if spec.out_dtype not in written:
        return Refusal(Reason.DTYPE, f"the output has dtype {spec.out_dtype}; kernels write {', '.join(written)}")
    return None


def _not_reproducible(spec: AttentionSpec) -> str | None:
    """Obstacle to results of a row that follow from that row alone; None where there is none."""
    from fusion.lowering.backward_plan import unsupported

    if spec.aux_outputs and (reason := unsupported(spec)) is not None:
        return f"its weights are computed by the reference interpreter: {reason}"
    if spec.mixing is not None:
        return "heads are mixed, in tiles that follow from the number of heads"
    if any(aux.over == "i" for aux in spec.aux_outputs):
        return "statistics of keys are sums over rows, which threads add up in an order of their own"
    return None


def reads(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether kernels read tensors of a float8 dtype."""
    return str(dtype).removeprefix("torch.") in FORMATS


def compile(
    spec: AttentionSpec,
    machine: Machine | None = None,
    plan: Callable[[Machine], Planner] | None = None,
    measure: bool = False,
) -> Kernel:
    """The kernel of a spec, one per spec and machine in a process. plan: machine -> the planner that makes the choices;
    without it there is one tile for all lengths. measure: its best few are timed at the first call
    (`fusion.planning.cpu_measured`). Raises KernelCompilationError (a defect here), or ValueError where `supports` has
    a reason."""
    machine = machine or Machine.detect()
    if (reason := supports(spec, machine)) is not None:
        raise ValueError(f"no CPU kernel for {spec}: {reason}")
    target = target_for(spec, machine)
    tuner = Tuner(spec, machine) if measure and not spec.reproducible else None
    make = lambda: Kernel(spec, tilings_for(spec, target), target, plan and plan(machine), tuner)
    return _kernels.get_or_make((spec, target, plan is None, measure), make)


def compile_training(
    spec: AttentionSpec, machine: Machine | None = None, plan: Any = None, measure: bool = False
) -> TrainingKernel | None:
    """The kernels that train with a spec, or None where it has no backward kernel. They have one tile for all lengths:
    nothing is planned or measured."""
    from fusion.lowering.backward_plan import unsupported

    from .training import TrainingKernel

    machine = machine or Machine.detect()
    if supports(spec, machine) is not None or unsupported(spec) is not None:
        return None
    target = target_for(spec, machine)
    make = lambda: TrainingKernel(spec, tilings_for(spec, target), target, machine)
    return _training.get_or_make((spec, target, machine.cores), make)


_kernels, _training = OncePerKey(1024), OncePerKey(1024)
