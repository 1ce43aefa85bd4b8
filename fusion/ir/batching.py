"""Batches of attentions as one attention, for `torch.vmap`.

Every operand, and every result, gets one more dimension, its first, and the spec one more batch coordinate, also the
first. So an operand that is shared by the batch has to be expanded.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.ir.expr import Expr, coord, load, rebuild, size
from fusion.ir.spec import AttentionSpec, Operand, Output
from fusion.ir.tile_map import MapSpec

Index = tuple[Expr, ...]
Names = tuple[str, ...]


def batched(spec: AttentionSpec) -> AttentionSpec:
    """Spec of a batch of attentions; its last size is the number of them."""
    name = _new_size(spec.sizes)
    return spec.mapped(
        _moved,
        sizes=(*spec.sizes, name),
        batch=(size(name), *spec.batch),
        operands=tuple(map(_operand, spec.operands)),
        q=_index(spec.q),
        k=_index(spec.k),
        v=_index(spec.v),
        output=Output(dims=_names(spec.output.dims), order=_names(spec.output.order)),
        aux_outputs=tuple(replace(f, value=_moved(f.value), dims=_names(f.dims)) for f in spec.aux_outputs),
    )


def batched_map(spec: MapSpec) -> MapSpec:
    """Spec of a batch of tile maps; its last size is the number of them."""
    name = _new_size(spec.sizes)
    batch, sizes = (size(name), *spec.batch), (*spec.sizes, name)
    return replace(spec, sizes=sizes, batch=batch, live=_moved(spec.live), full=_moved(spec.full))


def _new_size(sizes: Names) -> str:
    return next(name for k in range(len(sizes) + 1) if (name := f"mapped{k}") not in sizes)


def _operand(operand: Operand) -> Operand:
    order = tuple(dim + 1 for dim in operand.order)
    return replace(operand, rank=operand.rank + 1, order=(0, *order) if order else ())


def _names(names: Names) -> Names:
    return "b0", *(f"b{int(name[1:]) + 1}" if name.startswith("b") else name for name in names)


def _index(index: Index) -> Index:
    return coord("b0"), *map(_moved, index)


def _moved(expr: Expr) -> Expr:
    """Expression over the moved coordinates, whose loads have one more dimension."""

    def leaf(part: Expr) -> Expr | None:
        if part.op == "coord" and part.name.startswith("b"):
            return coord(f"b{int(part.name[1:]) + 1}")
        return load(part.operand, _index(part.args), part.kind) if part.op == "load" else None

    return rebuild(expr, leaf)
