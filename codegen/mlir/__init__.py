"""CPU kernels: an `AttentionSpec` becomes one function in MLIR, compiled in process by torch-mlir, run on torch's
OpenMP threads.

    supports(spec, machine)        why there is no kernel for it, or None
    compile(spec, machine, times)  the kernel: call it with operand tensors and sizes; `kernel.source` is its MLIR text
    compile_training(spec, machine)
                                   the pair of `forward` (with row statistics) and `backward`; None where there is none

How the kernel works is told in `kernel` (loops), `products` and `amx` (matrix products), `softmax` (score program and
statistics), `scope` (expressions), `dense` and `rows` (reading tensors of any strides), `launch` and `calling` (the
call); of training in `training` and `backward`. Nothing of torch-mlir is imported before a kernel is compiled.
"""

from __future__ import annotations

from fusion.codegen.mlir.backward.plan import unsupported
from fusion.codegen.mlir.compile import unavailable
from fusion.codegen.mlir.launch import Kernel, TileTimes
from fusion.codegen.mlir.strategy import supports, tilings_for
from fusion.codegen.mlir.target import target_of
from fusion.codegen.mlir.training import TrainingKernel
from fusion.errors import KernelCompilationError
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine

__all__ = [
    "Kernel",
    "KernelCompilationError",
    "TrainingKernel",
    "compile",
    "compile_training",
    "supports",
    "unavailable",
]


def compile(spec: AttentionSpec, machine: Machine | None = None, times: TileTimes | None = None) -> Kernel:
    """The kernel of a spec. One kernel per spec and machine is made in a process. times: the cost model that chooses
    tiles (`fusion.planning.from_spec.tile_times`); without it there is one tile for all lengths.

    Raises KernelCompilationError (a defect here), or ValueError where `supports` has a reason.
    """
    machine = machine or Machine.detect()
    if (reason := supports(spec, machine)) is not None:
        raise ValueError(f"no CPU kernel for {spec}: {reason}")
    target = target_of(machine)
    key = (spec, target, times is None)
    if key not in _kernels:
        _kernels[key] = Kernel(spec, tilings_for(spec, target), target, times)
    return _kernels[key]


def compile_training(spec: AttentionSpec, machine: Machine | None = None) -> TrainingKernel | None:
    """The kernels that train with a spec, or None where it has no backward kernel. Backward kernels are compiled at
    their first call."""
    machine = machine or Machine.detect()
    if supports(spec, machine) is not None or unsupported(spec) is not None:
        return None
    target = target_of(machine)
    if (spec, target) not in _training:
        _training[spec, target] = TrainingKernel(spec, tilings_for(spec, target), target)
    return _training[spec, target]


_kernels: dict[tuple, Kernel] = {}
_training: dict[tuple, TrainingKernel] = {}
