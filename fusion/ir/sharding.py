"""One part of an attention whose batch coordinate is split between processes.

Coordinate b of extent B is cut into `parts` runs of L = B / parts; part r has b = r * L + b', 0 <= b' < L. An operand
can be cut along with it where its index in one dimension of extent D moves by D / parts from part to part,

    index(b + L) = index(b) + D / parts        as b itself does, or b // group of grouped heads

for then part r reads nothing but its own run of that dimension, at `index(b')`. Every other operand is needed whole and
read at `index(r * L + b')`; and so is b wherever the score program computes with it (slopes of ALiBi per head). r * L
is one more size of the spec, so that all parts share one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.ir import integers
from fusion.ir.expr import Expr, coord, load, loads, rebuild, size, substitute, walk
from fusion.ir.spec import AttentionSpec

Extent = int | None
"""Of an operand's dimension; None where nobody needs to know it."""


def accesses(spec: AttentionSpec) -> list[list[tuple[Expr, ...]]]:
    """Per operand, every index at which it is read."""
    found: list[list[tuple[Expr, ...]]] = [[] for _ in spec.operands]
    for number, index in enumerate((spec.q, spec.k, spec.v)):
        found[number].append(index)
    for part in loads(*spec.expressions()):
        found[part.operand].append(part.args)
    return found


def size_of_batch(spec: AttentionSpec, axis: int) -> str | None:
    """Name of the size that a batch coordinate's extent is; None if it is none, or another value is computed from
    it."""
    extent = spec.batch[axis]
    if extent.op != "size" or any(extent is other for k, other in enumerate(spec.batch) if k != axis):
        return None
    others = [e for e in spec.expressions() if e is not extent]
    return None if any(part is extent for part in walk(*others)) else extent.name


def split_dims(
    spec: AttentionSpec, axis: int, length: int, parts: int, shapes: Sequence[Sequence[Extent]]
) -> tuple[int | None, ...]:
    """Per operand, the dimension that is cut along with batch coordinate `axis`; None where each part needs all of it.
    length: of the coordinate's run in one part. shapes: extents of the operands before they are cut."""
    b = coord(f"b{axis}")

    def moves(index: Expr, extent: Extent) -> bool:
        if extent is None or extent % parts:
            return False
        step = extent // parts
        return all(
            substitute(index, {b: integers.add(b, r * length)}) is integers.add(index, r * step)
            for r in range(1, max(parts, 2))
        )

    def dim(indices: Sequence[tuple[Expr, ...]], shape: Sequence[Extent]) -> int | None:
        every = range(len(shape))
        return next((t for t in every if indices and all(moves(index[t], shape[t]) for index in indices)), None)

    return tuple(dim(indices, shape) for indices, shape in zip(accesses(spec), shapes, strict=True))


def one_part(spec: AttentionSpec, axis: int, dims: Sequence[int | None], offset: str) -> AttentionSpec:
    """Spec of one part, whose operands are cut along `dims`. Where it needs r * L, its last size is that, under the
    name `offset`."""
    b = coord(f"b{axis}")
    moved = integers.add(b, size(offset))

    def leaf(part: Expr) -> Expr | None:
        if part is b:
            return moved
        if part.op == "load":
            return load(part.operand, place(part.operand, part.args), part.kind)
        return None

    def shift(expr: Expr) -> Expr:
        return rebuild(expr, leaf)

    def place(operand: int, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(e if t == dims[operand] else shift(e) for t, e in enumerate(index))

    local = spec.mapped(shift, q=place(0, spec.q), k=place(1, spec.k), v=place(2, spec.v))
    return spec if local == spec else replace(local, sizes=(*spec.sizes, offset))
