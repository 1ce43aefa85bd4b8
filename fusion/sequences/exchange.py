"""All-to-all: a tensor that is sharded along one dimension, sharded along another.

torch has none for DTensors on CPUs, and gathers there instead. `torch.ops.fusion.sequence_exchange` is an operator,
which graphs take as a whole; each process sends a piece to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from fusion.ir.parts import run_of
from fusion.torch_private.devices import group_of
from fusion.torch_private.operators import register_fake


def moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """DTensor after an exchange for each dimension of the mesh that shards another dimension of the tensor in these
    placements. Where two dimensions of the mesh shard one of the tensor the move is left to torch."""
    mesh, before = tensor.device_mesh, list(tensor.placements)
    for number, (old, new) in enumerate(zip(before, placements, strict=True)):
        if type(old) is Shard and type(new) is Shard and old != new:
            rest = [p for n, p in enumerate(tensor.placements) if n != number]
            if old in rest or new in rest:
                continue
            extents, group = [tensor.shape[old.dim], tensor.shape[new.dim]], mesh.get_group(number).group_name
            local = torch.ops.fusion.sequence_exchange(tensor.to_local(), [old.dim, new.dim], extents, group)
            shape, places = tensor.shape, [*tensor.placements]
            places[number] = new
            tensor = DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=tensor.stride())
    return tensor


def _shape(local: Tensor, dims: list[int], extents: list[int], group: str) -> list[int]:
    here, shape = group_of(group), list(local.shape)
    shape[dims[0]], shape[dims[1]] = extents[0], run_of(extents[1], here.size(), here.rank())[1]
    return shape


def exchange(local: Tensor, dims: list[int], extents: list[int], group: str) -> Tensor:
    """Local tensor of this process. dims: those that are sharded before and after; extents: of the whole tensor."""
    here, parts = group_of(group), range(group_of(group).size())
    old, new = ([run_of(extent, len(parts), part) for part in parts] for extent in extents)
    sent = [local.narrow(dims[1], *run).contiguous() for run in new]
    shape = _shape(local, dims, extents, group)
    received = [local.new_empty([n if d == dims[0] else m for d, m in enumerate(shape)]) for _, n in old]
    received[here.rank()] = sent[here.rank()]
    others = [part for part in parts if part != here.rank()]
    pairs = [(dist.isend, sent[p], p) for p in others] + [(dist.irecv, received[p], p) for p in others]
    work = [dist.P2POp(f, tensor, group=here, group_peer=p) for f, tensor, p in pairs if tensor.numel()]
    for waiting in dist.batch_isend_irecv(work) if work else ():
        waiting.wait()
    return torch.cat(received, dims[0])


_library = torch.library.Library("fusion", "FRAGMENT")
_library.define("sequence_exchange(Tensor local, int[] dims, SymInt[] extents, str group) -> Tensor")
register_fake(_library, "fusion::sequence_exchange", lambda *given: given[0].new_empty(_shape(*given)), __file__)
for _key in ("CPU", "CUDA"):
    _library.impl("sequence_exchange", exchange, _key)
