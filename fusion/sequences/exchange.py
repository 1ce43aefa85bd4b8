"""All-to-all: a tensor that is sharded along one dimension, or a sum over the processes, sharded along another.

For DTensors on CPUs torch gathers in place of the one, and in place of the other sends whole sums (gloo has no
reduce-scatter). `torch.ops.fusion.sequence_exchange` is an operator, which graphs take as a whole; each process sends a
piece to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from fusion.ir.parts import run_of
from fusion.torch_private.devices import group_of
from fusion.torch_private.operators import register_fake


def moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """DTensor after an exchange for each dimension of the mesh that shards another dimension of the tensor in these
    placements, or on CPUs a sum. Where two dimensions of the mesh shard one of the tensor the move is left to torch."""
    mesh, before = tensor.device_mesh, list(tensor.placements)
    adds = lambda old: mesh.device_type == "cpu" and type(old) is Partial and old.reduce_op == "sum"
    for number, (old, new) in enumerate(zip(before, placements, strict=True)):
        if type(new) is Shard and old != new and (type(old) is Shard or adds(old)):
            rest = [p for n, p in enumerate(tensor.placements) if n != number]
            if old in rest and type(old) is Shard or new in rest:
                continue
            dims = [old.dim if type(old) is Shard else None, new.dim]
            extents, group = [1 if dim is None else tensor.shape[dim] for dim in dims], mesh.get_group(number)
            local = torch.ops.fusion.sequence_exchange(tensor.to_local(), *dims, extents, group.group_name)
            shape, places = tensor.shape, [*tensor.placements]
            places[number] = new
            tensor = DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=tensor.stride())
    return tensor


def _shape(local: Tensor, old: int | None, new: int, extents: list[int], group: str) -> list[int]:
    here, shape = group_of(group), list(local.shape)
    if old is not None:
        shape[old] = extents[0]
    shape[new] = run_of(extents[1], here.size(), here.rank())[1]
    return shape


def exchange(local: Tensor, old: int | None, new: int, extents: list[int], group: str) -> Tensor:
    """Local tensor of this process. old, new: the dimensions that are sharded before and after, old None for a sum over
    the processes, which is added up in float32 at least; extents: of both, in the whole tensor."""
    here, parts = group_of(group), range(group_of(group).size())
    lengths, runs = ([run_of(extent, len(parts), part) for part in parts] for extent in extents)
    sent = [local.narrow(new, *run).contiguous() for run in runs]
    shape = _shape(local, old, new, extents, group)
    received = [local.new_empty([n if dim == old else m for dim, m in enumerate(shape)]) for _, n in lengths]
    received[here.rank()] = sent[here.rank()]
    others = [part for part in parts if part != here.rank()]
    pairs = [(dist.isend, sent[p], p) for p in others] + [(dist.irecv, received[p], p) for p in others]
    work = [dist.P2POp(f, tensor, group=here, group_peer=p) for f, tensor, p in pairs if tensor.numel()]
    for waiting in dist.batch_isend_irecv(work) if work else ():
        waiting.wait()
    if old is not None:
        return torch.cat(received, old)
    wide = torch.promote_types(local.dtype, torch.float32)
    return sum((piece.to(wide) for piece in received[1:]), received[0].to(wide)).to(local.dtype)


_library = torch.library.Library("fusion", "FRAGMENT")
_library.define("sequence_exchange(Tensor local, int? old, int new, SymInt[] extents, str group) -> Tensor")
register_fake(_library, "fusion::sequence_exchange", lambda *given: given[0].new_empty(_shape(*given)), __file__)
for _key in ("CPU", "CUDA"):
    _library.impl("sequence_exchange", exchange, _key)
