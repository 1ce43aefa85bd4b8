"""The backward kernels: delta and dead rows first, then dQ by blocks of queries, dK and dV by blocks of keys.

Scores are computed again from the operands and the forward's statistics of each row. `fusion.codegen.triton.gradients`
has the formulas.
"""

from __future__ import annotations

from fusion.codegen.triton.backward.keys import Keys, KeysAlone, ValuesAlone
from fusion.codegen.triton.backward.prepare import Prepare
from fusion.codegen.triton.backward.queries import Queries
from fusion.codegen.triton.backward.role import Role
from fusion.codegen.triton.forward import KernelText
from fusion.codegen.triton.tile_lists import KeyLists, RowLists
from fusion.ir.spec import AttentionSpec
from fusion.lowering.gradients import Axes

__all__ = ["Keys", "KeysAlone", "Prepare", "Queries", "ValuesAlone", "backward_kernels"]


def backward_kernels(
    spec: AttentionSpec, d: int, d_v: int, needs: tuple[bool, ...], described: bool = False, apart: bool = False
) -> list[KernelText]:
    """The kernels that are needed for the gradients of the operands that `needs` marks, in the order of their
    launch. described: their loops read tiles by tensor descriptors. apart: dK and dV have a kernel each."""
    role = Role(spec, d, d_v, needs)
    by_key = {item.axes is Axes.QUERIES for item in role.gradients.captured}
    kernels = []
    if role.softmax:
        kernels.append(Prepare(spec, d, d_v, needs).text())
    if needs[0] or False in by_key:
        kernels += [KeyLists(spec).text()] if role.listed else []
        kernels.append(Queries(spec, d, d_v, needs, described).text())
    with_keys = needs[1] or True in by_key
    if with_keys or needs[2]:
        kernels += [RowLists(spec, dead=role.softmax).text()] if role.listed else []
        found = [KeysAlone] * with_keys + [ValuesAlone] * needs[2] if apart else [Keys]
        kernels += [kind(spec, d, d_v, needs, described).text() for kind in found]
    return kernels
