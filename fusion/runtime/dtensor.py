"""Sharding rule of fusion's ops on DTensors: every process computes its own batches or heads.

For each dimension of the mesh, the batch coordinate along which Q (or else K, V, another operand) is sharded there is
split between the processes (`fusion.ir.parts`), or the rows of the sequence (`fusion.sequences`). Operands that can be
cut along with it are; all others are replicated over that dimension, as are operands whose placement fits no coordinate
(columns of a head, partial sums). The gradient of a replicated operand then is the sum over the processes (`Partial`),
as for DTensor's own products. Where nothing can be split, every process computes everything: slower, and right.

Importing this module registers the rule; it is imported once DTensors exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fusion import sequences
from fusion.errors import ShardingError
from fusion.ir import AttentionSpec, results
from fusion.ir.expr import coordinates
from fusion.ir.parts import Call, Extent, Split, accesses, one_part, size_of_batch
from fusion.ir.request import Request
from fusion.runtime import op
from fusion.torch_private.operators import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Division of a call: per dimension of the mesh its split, or None where every process does the same; and the spec
    of the call of one process, in which `offset<n>` is the start of its run in the n-th."""

    spec: AttentionSpec
    splits: tuple[Split | None, ...]

    def operand(self, number: int) -> list[Placement]:
        """Placements that an operand needs."""
        dims = [None if split is None else split.dim(number) for split in self.splits]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def gradient(self, number: int) -> list[Placement]:
        """Placements of the gradient of an operand."""
        whole = [Replicate() if split is None else Partial() for split in self.splits]
        return [w if isinstance(p, Replicate) else p for w, p in zip(whole, self.operand(number), strict=True)]

    def result(self, names: Sequence[str], final: bool = False) -> list[Placement]:
        """Placements of a result whose dimensions are these coordinates, as computed or as returned."""
        along = [split and (final and split.output or split.coordinate) for split in self.splits]
        return [Shard(names.index(name)) if name in names else Replicate() for name in along]


@lru_cache(maxsize=1024)
def layout(
    spec: str,
    lengths: tuple[Extent, ...],
    sizes: tuple[int, ...],
    shapes: tuple[tuple[Extent, ...], ...],
    sharded: tuple[tuple[int | None, ...], ...],
    mesh: tuple[int, ...],
    device: str,
    request: str,
    trained: bool,
) -> Layout:
    """The layout of a call on a mesh of this shape.

    lengths: of the batch coordinates, None where one cannot be split.
    sizes: those of the spec, or () where only the lengths are known.
    shapes: of the operands.
    sharded: per operand and dimension of the mesh, the dimension of the tensor that is sharded.
    trained: whether there is a gradient.
    """
    local, splits = AttentionSpec.from_json(spec), []
    known, asked = dict(zip(local.sizes, sizes, strict=False)), Request.parse(request)
    left, extents = list(lengths), [list(shape) for shape in shapes]
    for number, parts in enumerate(mesh):
        call = Call(
            spec=local, sizes=known, parts=parts, sharded=[dims[number] for dims in sharded],
            shapes=extents, lengths=left, taken=splits, device=device, request=asked,
        )  # fmt: skip
        split = _split(call) or sequences.split(call) or (None if trained else sequences.split_of_keys(call))
        splits.append(split)
        if split is None or split.coordinate == "j":
            continue
        if split.coordinate != "i":
            left[int(split.coordinate[1:])] = split.length
            for shape, dim in zip(extents, split.dims, strict=True):
                if dim is not None:
                    shape[dim] = cast("int", shape[dim]) // parts
        local = one_part(local, split.coordinate, split.dims, f"offset{number}")
        known |= {split.size: split.length, f"offset{number}": 0} if known else {}
    return Layout(spec=local, splits=tuple(splits))


def _split(call: Call) -> Split | None:
    """Split along the batch coordinate by which the first sharded operand is cut."""
    for operand, dim in enumerate(call.sharded):
        for axis in range(len(call.lengths)) if dim is not None else ():
            split = call.split_of_batch(axis)
            if split is not None and split.dims[operand] == dim:
                return split
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
    def of(
        cls, operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str, trained: bool = True
    ) -> _Call:
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
        extents = tuple(mesh.size(n) for n in range(mesh.ndim))
        whole: tuple[int, ...] = ()
        whole = sequences.sizes_of(parsed, sharded[0], sizes)
        result = layout(spec, lengths, whole, shapes, sharded, extents, mesh.device_type, emitter, trained)
        return cls(mesh=mesh, layout=result, spec=parsed, sizes=sizes, operands=operands, emitter=emitter)

    def ring(self) -> str | None:
        """The ring by which keys come to this process's queries, where there is one."""
        result = None
        for number, split in enumerate(self.layout.splits):
            if split is not None and split.keys is not None:
                n_k, group = int(results.coordinate_extents(self.spec, self.sizes)["j"]), self.mesh.get_group(number)
                result = sequences.ring_of(group.group_name, self.mesh.size(number), f"offset{number}", split, n_k)
        return result

    def arguments(self) -> tuple[list[Tensor], list[int], str, str]:
        """Arguments of the op for this process's part."""
        local = [
            self.local(operand, self.layout.operand(number)) if isinstance(operand, DTensor) else operand
            for number, operand in enumerate(self.operands)
        ]
        known = dict(zip(self.spec.sizes, self.sizes, strict=True))
        for number, split in enumerate(self.layout.splits):
            if split is not None and split.coordinate != "j":
                known[f"offset{number}"], known[split.size] = split.run(self.mesh.get_local_rank(number))
        spec = self.layout.spec
        return local, [known[name] for name in spec.sizes], spec.to_json(), self.emitter

    def local(self, tensor: Tensor, placements: Sequence[Placement]) -> Tensor:
        """Local part of a tensor in these placements."""
        if not isinstance(tensor, DTensor):
            raise ShardingError(
                f"fusion::attention of DTensors got a plain {type(tensor).__name__} of shape {list(tensor.shape)} "
                "among its results' gradients; convert it with DTensor.from_local"
            )
        return _moved(tensor, placements).to_local()

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
        out = self.whole(local, shape, order, self.output_placements())
        return _moved(out, self.layout.result(output.dims, final=True))

    def output_placements(self) -> list[Placement]:
        return self.layout.result(self.spec.output.dims)

    def statistics(self, local: Tensor) -> DTensor:
        shape = results.statistics_shape(self.spec, self.sizes)
        shape[0] = local.shape[0]  # a ring has others
        return self.whole(local, shape, range(len(shape)), self.statistics_placements(len(shape)))

    def statistics_placements(self, rank: int) -> list[Placement]:
        """Placements of the statistics: `results.statistics_shape` is [numbers, b.., i], or [0] without them."""
        names = ["", *(f"b{axis}" for axis in range(len(self.spec.batch))), "i"]
        return self.layout.result(names) if rank > 1 else [Replicate()] * self.mesh.ndim

    def gradient(self, number: int, local: Tensor) -> Tensor:
        operand, described = self.operands[number], self.spec.operands[number]
        order = described.order or range(described.rank)
        result = self.whole(local, operand.shape, order, self.layout.gradient(number))
        if not isinstance(operand, DTensor):
            return result.full_tensor()
        pairs = zip(result.placements, operand.placements, strict=True)
        kept = [own if isinstance(own, Shard) else p for p, own in pairs]
        return _moved(result, kept)  # of a sum a process needs its own shard only


def _moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """DTensor in these placements."""
    tensor = sequences.moved(tensor, placements)
    return tensor.redistribute(tensor.device_mesh, placements)


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
    call = _Call.of(*arguments, trained=False)
    if (ring := call.ring()) is None:
        return call.output(called(*call.arguments()))
    if any(split is not None and split.coordinate == "j" for split in call.layout.splits):
        return call.output(torch.ops.fusion.attention_of_sharded_keys(*call.arguments(), ring))
    return call.output(torch.ops.fusion.ring_attention(*call.arguments(), ring)[0])


def _forward(called: Any, *arguments: Any) -> tuple[DTensor, DTensor]:
    call = _Call.of(*arguments)
    given, ring = call.arguments(), call.ring()
    out, statistics = called(*given) if ring is None else torch.ops.fusion.ring_attention(*given, ring)
    return call.output(out), call.statistics(statistics)


def _backward(called: Any, grad: Tensor, out: Tensor, statistics: Tensor, *arguments: Any) -> list[Tensor]:
    *described, needs = arguments
    call = _Call.of(*described)
    at = call.output_placements()
    results = call.local(grad, at), call.local(out, at)
    kept = call.local(statistics, call.statistics_placements(statistics.dim()))
    given = *results, kept, *call.arguments(), needs
    ring = call.ring()
    result = called(*given) if ring is None else torch.ops.fusion.ring_attention_backward(*given, ring)
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
