"""The backward kernels: delta and dead rows first, then dQ by blocks of queries, dK and dV by blocks of keys; or all
three by blocks of keys.

Scores are computed again from the operands and the forward's statistics of each row. `fusion.codegen.triton.gradients`
has the formulas.
"""

from __future__ import annotations

from collections.abc import Collection

from fusion.ir.expr import C, I
from fusion.ir.reads import is_strided
from fusion.ir.spec import AttentionSpec
from fusion.lowering.gradients import Axes

from ..gradients import gradients_of
from ..kernel import KernelText
from ..tile_lists import KeyLists, RowLists
from .keys import Joint, Keys, KeysAlone, ValuesAlone
from .queries import Delta, Prepare, Queries
from .role import Role

BY_KEYS = (Keys, KeysAlone, ValuesAlone, Joint)
WRITTEN = {kind.name: kind.written for kind in (Prepare, Delta, Queries, *BY_KEYS)}
"""The operands whose gradients each kernel writes (`Joint` adds to dQ)."""


def may_join(spec: AttentionSpec, needs: tuple[bool, ...]) -> bool:
    """Whether one kernel can compute all gradients: those of Q, K and V are wanted, and of captured tensors at most
    those that are summed over queries; and Q is a strided view."""
    captured = gradients_of(spec, needs).captured
    own = all(item.axes is Axes.QUERIES and item.sink is None for item in captured)
    return own and all(needs[:3]) and is_strided(spec.q, (*spec.axes, I, C))


def backward_kernels(
    spec: AttentionSpec,
    d: int,
    d_v: int,
    needs: tuple[bool, ...],
    described: bool = False,
    by_keys: Collection[str] = (Keys.name,),
) -> list[KernelText]:
    """Kernels for the gradients of the operands that `needs` marks, in the order of their launch.
    described: their loops read tiles by tensor descriptors. by_keys: names of the kernels by keys that there may be."""
    role = Role(spec, d, d_v, needs)
    by_key = {item.axes is Axes.QUERIES for item in role.gradients.captured}
    kernels = []
    if role.softmax:
        kernels.append(Prepare(spec, d, d_v, needs).text())
        if Delta.needed(spec, needs):
            kernels.append(Delta(spec, d, d_v, needs).text())
    if (needs[0] or False in by_key) and Joint.name not in by_keys:
        kernels += [KeyLists(spec).text()] if role.listed else []
        kernels.append(Queries(spec, d, d_v, needs, described).text())
    wanted = {number for number, needed in ((1, needs[1] or True in by_key), (2, needs[2])) if needed}
    found = [kind for kind in BY_KEYS if kind.name in by_keys and kind.written & wanted]
    kernels += [RowLists(spec, dead=role.softmax).text()] if role.listed and found else []
    return [*kernels, *(kind(spec, d, d_v, needs, described).text() for kind in found)]
