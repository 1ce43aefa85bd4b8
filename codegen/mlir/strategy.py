"""Which products and tiles a spec gets on a target, and what is not supported."""

from __future__ import annotations

from fusion.codegen.mlir.compile import unavailable
from fusion.codegen.mlir.kernel import Tiling
from fusion.codegen.mlir.scope import MEMORY_TYPE
from fusion.codegen.mlir.target import Target
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.machine import Machine

#: bfloat16 planes that hold an element exactly
PLANES = {"bfloat16": 1, "float16": 2, "float32": 3}


def supports(spec: AttentionSpec, machine: Machine) -> str | None:
    """Why this spec has no CPU kernel, or None."""
    if (reason := unavailable()) is not None:
        return reason
    if machine.kind != "cpu":
        return f"{machine.name} is not a CPU"
    for operand in spec.operands:
        if operand.dtype not in MEMORY_TYPE:
            return f"operand {operand.name} has dtype {operand.dtype}; kernels read {', '.join(MEMORY_TYPE)}"
    for number in (0, 1, 2):
        operand = spec.operands[number]
        if operand.dtype not in PLANES:
            return f"operand {operand.name} has dtype {operand.dtype}; products take {', '.join(PLANES)}"
    if spec.out_dtype not in PLANES:
        return f"the output has dtype {spec.out_dtype}; kernels write {', '.join(PLANES)}"
    return None


def tilings_for(spec: AttentionSpec, target: Target) -> tuple[Tiling, ...]:
    """The first choice, and where that is products of split planes, multiply-adds for inputs that cannot be split."""
    multiply_add = Tiling(
        groups=2 * target.tile_groups, together=target.tile_groups, keys=24 * target.tile_rows // 2, planes=0
    )
    if not target.amx:
        return (multiply_add,)
    planes = max(PLANES[dtype] for dtype in (spec.dtype, *(operand.dtype for operand in spec.operands[:3])))
    if planes > 1 and spec.normalizer is Normalizer.NONE:
        return (multiply_add,)  # weights may be infinite, which has no planes
    return (Tiling(groups=4, together=2, keys=64 if planes > 1 else 128, planes=planes), multiply_add)
