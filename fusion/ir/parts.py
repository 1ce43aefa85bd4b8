"""Parts of an attention: its spec over a run of one coordinate, a batch coordinate, the query rows or the keys.

Coordinate x of extent B is cut into runs; a part has x = offset + x', 0 <= x' < L. An operand can be cut along with it
where its index in one dimension moves along,

    index(x + L) = index(x) + D / parts        as x itself does, or x // group of grouped heads

for then the part reads nothing but its own run of that dimension, at `index(x')`. Every other operand is needed whole
and read at `index(offset + x')`; and so is x wherever the score program computes with it: masks, distances, slopes of
ALiBi per head, the counters of dropout. The offset is one more size of the spec, so that all parts share one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fusion.ir import integers
from fusion.ir.expr import I0, I1, J0, J1, Expr, coord, coordinates, load, loads, rebuild, size, substitute, walk
from fusion.ir.mask_facts import MaskFacts
from fusion.ir.request import Request
from fusion.ir.spec import AttentionSpec

Extent = int | None
"""Extent of an operand's dimension; None where the placement does not depend on it."""
LENGTHS = {"i": "rows", "j": "keys"}
"""Sizes that are the numbers of query rows and of keys of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Split of a coordinate ("b0", "i" or "j") of extent `count` in runs of `length`, the last of which may be shorter.

    size: the spec's size that is the length of a run.
    dims: per operand the dimension that is cut along with it, or None where each process needs the whole operand.
    output: the coordinate by which the output is split in the end; "" where that is the same.
    keys: dimensions of K and V that stay cut though each part needs all keys, which come to it by a ring; else None.
    runs, groups: of a part in that ring, or of a mesh (`fusion.sequences.transfers.Ring`).
    """

    coordinate: str
    count: int
    length: int
    size: str
    dims: tuple[int | None, ...]
    output: str = ""
    keys: tuple[int, int] | None = None
    runs: int = 1
    groups: int = 0

    def run(self, part: int) -> tuple[int, int]:
        """First element and length of a part's run."""
        return _run(self.count, self.length, part)

    def dim(self, operand: int) -> int | None:
        """Dimension of an operand that is cut before the call."""
        return self.keys[operand - 1] if self.keys is not None and operand in (1, 2) else self.dims[operand]


def run_of(count: int, parts: int, part: int) -> tuple[int, int]:
    """First element and length of a part's run where `count` elements are split as DTensors are."""
    return _run(count, -(-count // parts), part)


def _run(count: int, length: int, part: int) -> tuple[int, int]:
    first = min(part * length, count)
    return first, min(length, count - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call whose operands are sharded over a dimension of a mesh, of `parts` processes.

    sizes: of the spec, by name; {} where they are not known.
    sharded: per operand the dimension that is sharded there.
    shapes, lengths: extents of operands and batch coordinates, None where one cannot be split.
    taken: splits over other dimensions of the mesh.
    device: its type.
    """

    spec: AttentionSpec
    sizes: Mapping[str, int]
    parts: int
    sharded: Sequence[int | None]
    shapes: Sequence[Sequence[Extent]]
    lengths: Sequence[Extent]
    taken: Sequence[Split | None]
    device: str
    request: Request

    def free(self, dims: Sequence[int | None]) -> bool:
        """Whether none of these dimensions, one per operand, is cut by another split."""
        return not any(d is not None and d in self.cut(n) for n, d in enumerate(dims))

    def cut(self, operand: int) -> set[int | None]:
        """Dimensions of an operand that other splits cut."""
        return {split.dims[operand] for split in self.taken if split is not None}

    def split_of_batch(self, axis: int) -> Split | None:
        """Split along a batch coordinate; None where that is not possible."""
        length, name = self.lengths[axis], size_of_batch(self.spec, axis)
        if length is None or name is None or length % self.parts:
            return None
        run = length // self.parts
        dims = split_dims(self.spec, axis, run, self.parts, self.shapes)
        if not self.free(dims):
            return None
        return Split(coordinate=f"b{axis}", count=length, length=run, size=name, dims=dims)


@lru_cache(maxsize=1024)
def accesses(spec: AttentionSpec) -> tuple[tuple[tuple[Expr, ...], ...], ...]:
    """Per operand, every index at which it is read."""
    result: list[list[tuple[Expr, ...]]] = [[] for _ in spec.operands]
    for number, index in enumerate((spec.q, spec.k, spec.v)):
        result[number].append(index)
    for part in loads(*spec.expressions()):
        result[part.operand].append(part.args)
    return tuple(map(tuple, result))


def size_of_batch(spec: AttentionSpec, axis: int) -> str | None:
    """Name of the size that a batch coordinate's extent is; None if it is none, or is used otherwise."""
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


def dims_along(spec: AttentionSpec, coordinate: Expr) -> tuple[int | None, ...]:
    """Per operand, the dimension whose index is the coordinate itself (the query row or the key) at every read; None
    where there is none."""

    def dim(indices: Sequence[tuple[Expr, ...]]) -> int | None:
        every = range(len(indices[0])) if indices else ()
        return next((t for t in every if all(_alone(coordinate, index, t) for index in indices)), None)

    return tuple(map(dim, accesses(spec)))


def _alone(coordinate: Expr, index: tuple[Expr, ...], dim: int) -> bool:
    """Whether an index is a coordinate in this dimension, and free of it in all others."""
    rest = (*index[:dim], *index[dim + 1 :])
    return index[dim] is coordinate and not any(coordinate.name in coordinates(part) for part in rest)


def one_part(spec: AttentionSpec, coordinate: str, dims: Sequence[int | None], offset: str) -> AttentionSpec:
    """Spec of one part, whose operands are cut along `dims`. Where it needs the offset, its last size is that, under
    the name `offset`. A part of the query rows or keys has their number as a size, too (`LENGTHS`)."""
    by = size(offset)
    tile = {"i": (I0, I1), "j": (J0, J1)}.get(coordinate, ())
    moved = {x: integers.add(x, by) for x in (coord(coordinate), *tile)}

    def leaf(part: Expr) -> Expr | None:
        if part.op == "load":
            return load(part.operand, place(part.operand, part.args), part.kind)
        return moved.get(part)

    def shift(expr: Expr) -> Expr:
        return rebuild(expr, leaf)

    def place(operand: int, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(e if t == dims[operand] else shift(e) for t, e in enumerate(index))

    part = spec.mapped(shift, q=place(0, spec.q), k=place(1, spec.k), v=place(2, spec.v))
    if coordinate == "j" and part.mask is not None:
        part = replace(part, mask=_with_moved_keys(part.mask, by))
    if coordinate in LENGTHS:
        field, length = {"i": "n_q", "j": "n_k"}[coordinate], LENGTHS[coordinate]
        part = replace(part, **{field: size(length)}, sizes=(*part.sizes, length))
    used = {inner.name for inner in walk(*part.expressions()) if inner.op == "size"}
    return replace(part, sizes=(*part.sizes, offset)) if offset in used else part


def _with_moved_keys(mask: MaskFacts, by: Expr) -> MaskFacts:
    """Facts with ranges of keys that are counted from the part's first key."""
    names = ("key_lo", "key_hi", "full_lo", "full_hi")
    ends = {name: end for name in names if (end := getattr(mask, name)) is not None}
    return replace(mask, **{name: integers.sub(end, by) for name, end in ends.items()})
