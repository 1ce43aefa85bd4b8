"""Smallest shapes of a spec's operands: for tensors that are made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fusion.ir import AttentionSpec
from fusion.ir.expr import C, E, Expr, I, J, Kind, coord, load, loads
from fusion.ir.ops import evaluate
from fusion.ir.results import leaves, size_value


def shapes_read(
    spec: AttentionSpec, sizes: Mapping[str, int], largest: Callable[[int], int] = lambda operand: 0
) -> list[list[int]]:
    """Shapes of the operands, just large enough for the indices that a spec uses. largest: the largest integers of the
    operands that hold positions, by number: the elements at these positions have to exist."""
    extents = {coord(f"b{axis}"): size_value(extent, sizes) for axis, extent in enumerate(spec.batch)}
    for coordinate, extent in ((I, spec.n_q), (J, spec.n_k), (C, spec.d), (E, spec.d_v)):
        extents[coordinate] = size_value(extent, sizes)
    extents |= {coord(name): extents[I if name[0] == "i" else J] for name in ("i0", "i1", "j0", "j1")}
    axes = {c: torch.arange(n).view([-1 if c is d else 1 for d in extents]) for c, n in extents.items()}

    def element(part: Expr):
        value = torch.tensor(largest(part.operand))
        return (lambda *_: value) if part.args else value

    leaf = leaves(sizes, axes, element)
    found = [[1] * operand.rank for operand in spec.operands]
    whole = [load(number, index, Kind.FLOAT) for number, index in enumerate((spec.q, spec.k, spec.v))]
    for read in loads(*whole, *spec.expressions()):
        shape = found[read.operand]
        for dim, index in enumerate(read.args):
            shape[dim] = max(shape[dim], 1 + int(torch.as_tensor(evaluate(index, leaf)).max()))
    return found
