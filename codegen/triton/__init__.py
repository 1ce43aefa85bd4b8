"""GPU kernels: an `AttentionSpec` becomes one Python module with Triton kernels, written to torch's cache directory.

    supports(spec)   why there is no kernel for it, or None
    reads(dtype, machine)   whether kernels on a machine read tensors of a float8 dtype
    Differentiable(spec)    forward with statistics, and the gradients
    compile(spec)    the kernel: call it with operand tensors and sizes; `kernel.source` is the module's text

`forward` writes the kernel around the loop of `key_loop`, `expressions` and `matrices` the values and addresses in it,
`panels` divides head dimensions, `mathematics` has functions that Triton lacks, `module` writes and loads files,
`autotune` measures other tiles than the planned (`candidates`, `forms`) and takes smaller ones where they do not fit,
`launch` makes the call, `split` is for few queries, `features` and `polynomial` are the kernels of approximate
attention, `interpret` runs it on CPU tensors in Triton's interpreter. Nothing of Triton is imported before a kernel is
made.
"""

from __future__ import annotations

import functools

import torch

from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.dtypes import DTYPES, FLOAT8
from fusion.codegen.triton.launch import Kernel
from fusion.ir.expr import C, E, contains, loads
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.refusals import Ground, Refusal

__all__ = ["Differentiable", "Kernel", "compile", "reads", "supports", "unavailable"]

_LOADED = {*DTYPES, *FLOAT8, "bool", "uint8", "int8", "int16", "int32", "int64"}


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error}); install triton to have GPU kernels"
    return None


def supports(spec: AttentionSpec) -> Refusal | None:
    """Why this spec has no GPU kernel, or None."""
    if (reason := unavailable()) is not None:
        return Refusal(Ground.NOT_INSTALLED, reason)
    for operand in spec.operands:
        if operand.dtype not in _LOADED:
            return Refusal(
                Ground.DTYPE,
                f"operand {operand.name} has dtype {operand.dtype}; kernels read {', '.join(sorted(_LOADED))}",
            )
    for operand in spec.operands[:3]:
        if operand.dtype not in DTYPES | FLOAT8:
            return Refusal(
                Ground.DTYPE,
                f"operand {operand.name} has dtype {operand.dtype}; products take {', '.join(DTYPES | FLOAT8)}",
            )
    for what, dtype in (("the products have", spec.dtype), ("the output has", spec.out_dtype)):
        if dtype not in DTYPES:
            return Refusal(Ground.DTYPE, f"{what} dtype {dtype}; kernels take {', '.join(DTYPES)}")
    for index in (*spec.q, *spec.k, *spec.v):
        if any(contains(part, C) or contains(part, E) for part in loads(index)):
            return Refusal(Ground.INDIRECT_COLUMN, f"a column of Q, K or V is itself read from a tensor: {index}")
    return None


def reads(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether Triton has conversions from a float8 dtype for a machine."""
    if str(dtype).removeprefix("torch.") not in FLOAT8 or unavailable() is not None:
        return False
    # Of NVIDIA's processors, those from 8.9 on have instructions for e4m3fn; e5m2 is a float16's upper half.
    return dtype is torch.float8_e5m2 or "fp8" in machine.isa


def compile(spec: AttentionSpec) -> Kernel:
    """The kernel of a spec; one is made per spec in a process. Raises ValueError where `supports` has a reason."""
    if (reason := supports(spec)) is not None:
        raise ValueError(f"no GPU kernel for {spec}: {reason}")
    if spec not in _kernels:
        _kernels[spec] = Kernel(spec)
    return _kernels[spec]


_kernels: dict[AttentionSpec, Kernel] = {}
