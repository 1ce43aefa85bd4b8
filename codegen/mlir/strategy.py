"""Which products and tiles a spec gets on a target, and what is not supported."""

from __future__ import annotations

from dataclasses import replace

from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning.register_tiles import PLANES, Target, planes_of
from fusion.refusals import Ground, Refusal

from .. import emitter
from .compile import unavailable
from .scope import MEMORY_TYPE
from .work_items import Tiling


def supports(spec: AttentionSpec, machine: Machine) -> Refusal | None:
    """Why this spec has no CPU kernel, or None."""
    if (reason := unavailable()) is not None:
        return Refusal(Ground.NOT_INSTALLED, reason)
    if machine.kind != "cpu":
        return Refusal(Ground.OTHER_MACHINE, f"{machine.name} is not a CPU")
    if (refusal := emitter.unread(spec, MEMORY_TYPE, PLANES)) is not None:
        return refusal
    written = ("float32", "bfloat16", "float16")
    if spec.out_dtype not in written:
        return Refusal(Ground.DTYPE, f"the output has dtype {spec.out_dtype}; kernels write {', '.join(written)}")
    return None


def tilings_for(spec: AttentionSpec, target: Target, most_planes: int = 3) -> tuple[Tiling, ...]:
    """How products are formed, with a tile for any lengths; and where that is by split planes, multiply-adds for inputs
    that cannot be split. most_planes: fewer than 3 round (see `fusion.approximate.rounding`)."""
    together = target.tile_groups
    multiply_add = Tiling(groups=2 * together, together=together, keys=target.keys(0), planes=0)
    planes = min(planes_of(spec, target), most_planes)
    if not planes:
        return (multiply_add,)
    if not target.amx:
        return (replace(multiply_add, keys=target.keys(planes), planes=planes),)
    return (Tiling(groups=4, together=2, keys=target.keys(planes), planes=planes), multiply_add)
