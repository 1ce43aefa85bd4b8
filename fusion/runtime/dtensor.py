"""Sharding rule of fusion's ops on DTensors: every process computes its own batches or heads.

For each dimension of the mesh, the batch coordinate along which Q (or else K, V, another operand) is sharded there is
split between the processes (`fusion.runtime.dtensor`). Operands that can be cut along with it are; all others are
replicated over that dimension, as are operands whose placement fits no batch coordinate (rows of a sequence, columns of
a head, partial sums). The gradient of a replicated operand then is the sum over the processes (`Partial`), as for
DTensor's own products. Where nothing can be split, every process computes everything: slower, and right.

Importing this module registers the rule; it is imported once DTensors exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fusion.errors import ShardingError
from fusion.ir import AttentionSpec, integers, results
from fusion.ir.expr import Expr, coord, coordinates, load, loads, rebuild, size, substitute, walk
from fusion.runtime import op
from fusion.torch_private.operators import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Split along one dimension of the mesh: batch coordinate `axis` in runs of `length`; per operand the dimension
    that is cut along with it, or None where each process needs the whole operand."""

    axis: int
    length: int
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Division of a call: per dimension of the mesh its split, or None where every process does the same; and the spec
    of the call of one process, in which `offset<n>` is the start of its run in the n-th."""

    spec: AttentionSpec
    splits: tuple[Split | None, ...]

    def operand(self, number: int) -> list[Placement]:
        """Placements that an operand needs."""
        dims = [None if split is None else split.dims[number] for split in self.splits]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def gradient(self, number: int) -> list[Placement]:
        """Placements of the gradient of an operand."""
        whole = [Replicate() if split is None else Partial() for split in self.splits]
        return [w if isinstance(p, Replicate) else p for w, p in zip(whole, self.operand(number), strict=True)]

    def batched(self, dim: Callable[[int], int]) -> list[Placement]:
        """Placements of a tensor whose dimension `dim(axis)` is a batch coordinate."""
        return [Replicate() if split is None else Shard(dim(split.axis)) for split in self.splits]


@lru_cache(maxsize=1024)
def layout(
    spec: str,
    lengths: tuple[Extent, ...],
    shapes: tuple[tuple[Extent, ...], ...],
    sharded: tuple[tuple[int | None, ...], ...],
    mesh: tuple[int, ...],
) -> Layout:
    """The layout of a call on a mesh of this shape.

    lengths: of the batch coordinates, None where one cannot be split.
    shapes: of the operands.
    sharded: per operand and dimension of the mesh, the dimension of the tensor that is sharded.
    """
    local, splits = AttentionSpec.from_json(spec), []
    left, extents = list(lengths), [list(shape) for shape in shapes]
    for number, parts in enumerate(mesh):
        split = _split(local, left, extents, [dims[number] for dims in sharded], parts, splits)
        splits.append(split)
        if split is None:
            continue
        left[split.axis] = split.length
        for shape, dim in zip(extents, split.dims, strict=True):
            if dim is not None:
                shape[dim] = cast("int", shape[dim]) // parts
        local = one_part(local, split.axis, split.dims, f"offset{number}")
    return Layout(spec=local, splits=tuple(splits))


def _split(
    spec: AttentionSpec,
    lengths: Sequence[Extent],
    shapes: Sequence[Sequence[Extent]],
    sharded: Sequence[int | None],
    parts: int,
    taken: Sequence[Split | None],
) -> Split | None:
    """Split along the batch coordinate by which the first sharded operand is cut; none that cuts what `taken` cuts."""
    cut = [{s.dims[operand] for s in taken if s is not None} - {None} for operand in range(len(shapes))]
    for operand, dim in enumerate(sharded):
        for axis, length in enumerate(lengths):
            if dim is None or length is None or length % parts:
                continue
            dims = split_dims(spec, axis, length // parts, parts, shapes)
            if dims[operand] == dim and not any(d in before for d, before in zip(dims, cut, strict=True)):
                return Split(axis=axis, length=length // parts, dims=dims)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call on DTensors: the part that this process computes, and its place in the result. Sizes may be symbolic."""

    mesh: DeviceMesh
    layout: Layout
    spec: AttentionSpec
    sizes: Sequence[int]
    operands: Sequence[Tensor]
    emitter: str

    @classmethod
    def of(cls, operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> _Call:
        mesh = _mesh(operands)
        parsed = AttentionSpec.from_json(spec)
        known = dict(zip(parsed.sizes, sizes, strict=True))
        names = [size_of_batch(parsed, axis) for axis in range(len(parsed.batch))]
        lengths = tuple(None if name is None else int(known[name]) for name in names)
        used = _batch_dims(spec)
        shapes = tuple(
            tuple(int(extent) if t in dims else None for t, extent in enumerate(operand.shape))
            for operand, dims in zip(operands, used, strict=True)
        )
        sharded = tuple(_sharded(operand, mesh.ndim) for operand in operands)
        result = layout(spec, lengths, shapes, sharded, tuple(mesh.size(n) for n in range(mesh.ndim)))
        return cls(mesh=mesh, layout=result, spec=parsed, sizes=sizes, operands=operands, emitter=emitter)

    def arguments(self) -> tuple[list[Tensor], list[int], str, str]:
        """Arguments of the op for this process's part."""
        local = [
            self.local(operand, self.layout.operand(number)) if isinstance(operand, DTensor) else operand
            for number, operand in enumerate(self.operands)
        ]
        known = dict(zip(self.spec.sizes, self.sizes, strict=True))
        for number, split in enumerate(self.layout.splits):
            if split is not None:
                known[cast("str", size_of_batch(self.spec, split.axis))] = split.length
                known[f"offset{number}"] = self.mesh.get_local_rank(number) * split.length
        spec = self.layout.spec
        return local, [known[name] for name in spec.sizes], spec.to_json(), self.emitter

    def local(self, tensor: Tensor, placements: Sequence[Placement]) -> Tensor:
        """Local part of a tensor in these placements."""
        if not isinstance(tensor, DTensor):
            raise ShardingError(
                f"fusion::attention of DTensors got a plain {type(tensor).__name__} of shape {list(tensor.shape)} "
                "among its results' gradients; convert it with DTensor.from_local"
            )
        return tensor.redistribute(self.mesh, placements).to_local()

    def whole(self, local: Tensor, shape: Sequence[Any], order: Sequence[int], at: Sequence[Placement]) -> DTensor:
        """The DTensor of this shape, packed in this order of dimensions, of which the process holds `local`."""
        strides: list[Any] = [0] * len(shape)
        step: Any = 1
        for dim in reversed(order):
            strides[dim], step = step, step * torch.sym_max(shape[dim], 1)
        size, stride = torch.Size(shape), tuple(strides)
        return DTensor.from_local(local, self.mesh, at, run_check=False, shape=size, stride=stride)

    def output(self, local: Tensor) -> DTensor:
        extents, output = results.coordinate_extents(self.spec, self.sizes), self.spec.output
        shape = [extents[name] for name in output.dims]
        order = [output.dims.index(name) for name in output.order]
        return self.whole(local, shape, order, self.output_placements())

    def output_placements(self) -> list[Placement]:
        return self.layout.batched(lambda axis: self.spec.output.dims.index(f"b{axis}"))

    def statistics(self, local: Tensor) -> DTensor:
        shape = results.statistics_shape(self.spec, self.sizes)
        return self.whole(local, shape, range(len(shape)), self.statistics_placements(len(shape)))

    def statistics_placements(self, rank: int) -> list[Placement]:
        """Placements of the statistics: `results.statistics_shape` is [numbers, b.., i], or [0] where there are
        none."""
        return self.layout.batched(lambda axis: 1 + axis) if rank > 1 else [Replicate()] * self.mesh.ndim

    def gradient(self, number: int, local: Tensor) -> Tensor:
        operand, described = self.operands[number], self.spec.operands[number]
        order = described.order or range(described.rank)
        result = self.whole(local, operand.shape, order, self.layout.gradient(number))
        return result if isinstance(operand, DTensor) else result.full_tensor()


def _mesh(operands: Sequence[Tensor]) -> DeviceMesh:
    meshes = [operand.device_mesh for operand in operands if isinstance(operand, DTensor)]
    if not meshes or any(mesh != meshes[0] for mesh in meshes):
        raise ShardingError(
            f"fusion::attention was asked for on DTensors of different meshes ({', '.join(map(str, meshes))}); "
            "redistribute its operands to one"
        )
    if meshes[0].get_coordinate() is None:
        raise ShardingError(
            f"fusion::attention was asked for on DTensors of {meshes[0]}, to which this process does not belong; "
            "call it on the processes of the mesh only"
        )
    return meshes[0]


def _sharded(operand: Tensor, rank: int) -> tuple[int | None, ...]:
    """Per dimension of the mesh, the dimension of a tensor that is sharded in equal runs."""
    if not isinstance(operand, DTensor):
        return (None,) * rank
    return tuple(p.dim if type(p) is Shard else None for p in operand.placements)


@lru_cache(maxsize=1024)
def _batch_dims(spec: str) -> tuple[frozenset[int], ...]:
    """Per operand, the dimensions whose index depends on a batch coordinate."""
    return tuple(
        frozenset(
            t
            for index in indices
            for t, expr in enumerate(index)
            if any(name.startswith("b") for name in coordinates(expr))
        )
        for indices in accesses(AttentionSpec.from_json(spec))
    )


def _attention(called: Any, *arguments: Any) -> DTensor:
    call = _Call.of(*arguments)
    return call.output(called(*call.arguments()))


def _forward(called: Any, *arguments: Any) -> tuple[DTensor, DTensor]:
    call = _Call.of(*arguments)
    out, statistics = called(*call.arguments())
    return call.output(out), call.statistics(statistics)


def _backward(called: Any, grad: Tensor, out: Tensor, statistics: Tensor, *arguments: Any) -> list[Tensor]:
    *described, needs = arguments
    call = _Call.of(*described)
    at = call.output_placements()
    results = call.local(grad, at), call.local(out, at)
    kept = call.local(statistics, call.statistics_placements(statistics.dim()))
    result = called(*results, kept, *call.arguments(), needs)
    wanted = [number for number, needed in enumerate(needs) if needed]
    return [call.gradient(number, local) for number, local in zip(wanted, result, strict=True)]


def _tile_map(called: Any, operands: Sequence[Tensor], sizes: Sequence[int], spec: str) -> DTensor:
    """Tile map as a replicated DTensor. Masks are small: every process computes the complete map."""
    mesh = _mesh(operands)
    everywhere = [Replicate()] * mesh.ndim
    local = [o.redistribute(mesh, everywhere).to_local() if isinstance(o, DTensor) else o for o in operands]
    return DTensor.from_local(called(local, sizes, spec), mesh, everywhere, run_check=False)


def _rule(compute: Callable[..., Any]) -> Callable[..., Any]:
    def rule(_: type, called: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        names = [argument.name for argument in schema(called).arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        with torch.no_grad():  # gradients have been taken care of above
            return compute(called, *(given[name] for name in names))

    return rule


for _name, _compute in {
    "attention": _attention,
    "attention_below_autograd": _attention,
    "attention_forward": _forward,
    "attention_backward": _backward,
    "tile_map": _tile_map,
}.items():
    torch.library.register_torch_dispatch(f"fusion::{_name}", DTensor, _rule(_compute), lib=op._library)


Extent = int | None
"""Extent of an operand's dimension; None where the placement does not depend on it."""


def accesses(spec: AttentionSpec) -> list[list[tuple[Expr, ...]]]:
    """Per operand, every index at which it is read."""
    result: list[list[tuple[Expr, ...]]] = [[] for _ in spec.operands]
    for number, index in enumerate((spec.q, spec.k, spec.v)):
        result[number].append(index)
    for part in loads(*spec.expressions()):
        result[part.operand].append(part.args)
    return result


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
    name `offset`.

    Coordinate b of extent B is cut into `parts` runs of L = B / parts; part r has b = r * L + b', 0 <= b' < L. An
    operand can be cut along with it where its index in one dimension of extent D moves by D / parts from part to part,

        index(b + L) = index(b) + D / parts        as b itself does, or b // group of grouped heads

    for then part r reads nothing but its own run of that dimension, at `index(b')`. Every other operand is needed whole
    and read at `index(r * L + b')`; and so is b wherever the score program computes with it (slopes of ALiBi per head).
    r * L is one more size of the spec, so that all parts share one kernel.
    """
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
