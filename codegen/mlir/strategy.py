"""Which products and tiles a spec gets on a target, and what is not supported."""

from __future__ import annotations

from fusion.codegen.mlir.compile import unavailable
from fusion.codegen.mlir.float8 import FORMATS
from fusion.codegen.mlir.scope import MEMORY_TYPE
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.work_items import Tiling
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.machine import Machine
from fusion.refusals import Ground, Refusal

#: bfloat16 planes that hold an element exactly
PLANES = {"bfloat16": 1, "float16": 2, "float32": 3, **dict.fromkeys(FORMATS, 1)}


def supports(spec: AttentionSpec, machine: Machine) -> Refusal | None:
    """Why this spec has no CPU kernel, or None."""
    if (reason := unavailable()) is not None:
        return Refusal(Ground.NOT_INSTALLED, reason)
    if machine.kind != "cpu":
        return Refusal(Ground.OTHER_MACHINE, f"{machine.name} is not a CPU")
    for operand in spec.operands:
        if operand.dtype not in MEMORY_TYPE:
            return Refusal(
                Ground.DTYPE, f"operand {operand.name} has dtype {operand.dtype}; kernels read {', '.join(MEMORY_TYPE)}"
            )
    for number in (0, 1, 2):
        operand = spec.operands[number]
        if operand.dtype not in PLANES:
            return Refusal(
                Ground.DTYPE, f"operand {operand.name} has dtype {operand.dtype}; products take {', '.join(PLANES)}"
            )
    written = [dtype for dtype in PLANES if dtype not in FORMATS]
    if spec.out_dtype not in written:
        return Refusal(Ground.DTYPE, f"the output has dtype {spec.out_dtype}; kernels write {', '.join(written)}")
    return None


def tilings_for(spec: AttentionSpec, target: Target, most_planes: int = 3) -> tuple[Tiling, ...]:
    """How products are formed, with a tile for any lengths; and where that is by split planes, multiply-adds for inputs
    that cannot be split.

    most_planes: fewer than 3 round (see `fusion.approximate.rounding`).
    """
    together = target.tile_groups
    keys = _keys(target, together, score_bytes=4, step=12 * target.tile_rows)
    multiply_add = Tiling(groups=2 * together, together=together, keys=keys, planes=0)
    if not target.amx:
        return (multiply_add,)
    planes = max(PLANES[dtype] for dtype in (spec.dtype, *(operand.dtype for operand in spec.operands[:3])))
    planes = min(planes, most_planes)
    if planes > 1 and spec.normalizer is Normalizer.NONE:
        return (multiply_add,)  # weights may be infinite, which has no planes
    keys = _keys(target, 2, score_bytes=4 + 2 * planes, step=64)
    return (Tiling(groups=4, together=2, keys=keys, planes=planes), multiply_add)


def register_tile(tiling: Tiling, target: Target) -> tuple[int, int]:
    """(rows, keys) that B_r and B_c of a tiling are multiples of."""
    if tiling.planes:
        return 2 * target.lanes, 32
    return (tiling.together or target.tile_groups) * target.lanes, target.tile_rows


def _keys(target: Target, together: int, score_bytes: int, step: int) -> int:
    """B_c in closed form, with M the first-level cache: the scores and weights of the rows that are worked on together
    fill half of it, and leave the other half to the rows of K and V and the output that stream past.

    The traffic to the next level does not depend on B_c, only the number of times that the output is loaded and stored
    again does (n_k / B_c), so B_c is as large as that allows, a multiple of `step`.
    """
    rows = together * target.lanes
    return max(step, target.near_bytes // 2 // (rows * score_bytes) // step * step)
