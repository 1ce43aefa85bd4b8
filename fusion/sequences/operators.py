"""Operators of sharded sequences. `torch.ops.fusion.ring_attention` and its gradient: a sharded attention on one of its
processes, by a ring or a mesh. `torch.ops.fusion.sequence_exchange`: a tensor that is sharded along one dimension, or a
sum over the processes, sharded along another.

Rows without a live key, or with an infinite score, have values that depend on all keys at once. Where any process has
one, all of them gather K and V, and compute as `gather` does; one number each tells them.

In place of an exchange torch gathers DTensors on CPUs, and sends whole sums (gloo has no reduce-scatter). Here each
process sends a piece to each other. Graphs take all operators as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import Partial as OpenSum

from fusion.ir import AttentionSpec, results
from fusion.ir.parts import run_of
from fusion.runtime.kernels import executor
from fusion.sequences import mesh, partial, ring
from fusion.sequences.blocks import Call, Rows
from fusion.sequences.partial import Merged, Partial
from fusion.sequences.transfers import Ring, Transfers
from fusion.torch_private.devices import group_of
from fusion.torch_private.operators import register_fake


def forward(
    operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, shards: str
) -> tuple[Tensor, Tensor]:
    """The output of this process's rows, and the statistics for `backward` (`partial.Merged`)."""
    call = Call.of(operands, sizes, spec, request, shards)
    transfers = call.transfers
    output, statistics, ordinary = (mesh if transfers.ring.groups else ring).forward(call, operands)
    if transfers.agree(ordinary, operands[0]):
        output = transfers.dealt(output.to(getattr(torch, call.spec.out_dtype)), output.dim() - 2, back=True)
        return partial.stored(call.spec, output), statistics
    whole = [operands[0], *transfers.whole(operands[1:3]), *operands[3:]]
    return call.kernels(call.spec).outputs(whole, sizes)[0], statistics


def backward(
    grad: Tensor,
    out: Tensor,
    statistics: Tensor,
    operands: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    request: str,
    needs: Sequence[bool],
    shards: str,
) -> list[Tensor]:
    """Gradients of the operands that `needs` marks, from that of this process's rows."""
    call = Call.of(operands, sizes, spec, request, shards)
    ordinary = Merged.unpacked(statistics).ordinary(call.spec)
    by_blocks = (mesh if call.transfers.ring.groups else ring).backward
    by = by_blocks if call.transfers.agree(ordinary, operands[0]) else _at_once
    result = by(call, grad, out, statistics, operands, list(needs))
    described = zip(operands, call.spec.operands, strict=True)
    return [results.laid_out(result[n], *place) for n, place in enumerate(described) if needs[n]]


def _at_once(
    call: Call, grad: Tensor, out: Tensor, statistics: Tensor, operands: Sequence[Tensor], needs: list[bool]
) -> list[Tensor]:
    """Gradients with all keys at once: rows of any process may have none that lives."""
    kernels, sizes = call.kernels(call.spec), [call.sizes[name] for name in call.spec.sizes]
    whole = [operands[0], *call.transfers.whole(operands[1:3]), *operands[3:]]
    out, statistics = kernels.outputs(whole, sizes)[:2]
    found = iter(kernels.backward(grad, out, statistics, whole, sizes, tuple(needs)))
    result = [next(found) if needed else operand for operand, needed in zip(operands, needs, strict=True)]
    result[1:3] = call.transfers.home(result[1:3], operands[1:3], needs[1:3])
    return result


def of_sharded_keys(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, shards: str) -> Tensor:
    """The output of all rows on every process: each computes with its own keys, and their sums are gathered."""
    parsed, transfers = AttentionSpec.from_json(spec), Transfers(Ring.from_json(shards), [])
    call = Call(parsed, request, operands[0].device.type, dict(zip(parsed.sizes, sizes, strict=True)), transfers)
    rows = Rows(transfers.rank, operands, call.sizes)
    sums = call.sums(rows)
    packed = sums.peak.packed()
    if transfers.ring.keys_of(transfers.rank)[1]:
        *_, block = call.outputs(rows.block(parsed, transfers.ring, transfers.rank, operands[1:3]))
        packed = Partial.of_block(*block).packed()
    for number, arrived in enumerate(transfers.gathered(packed)):
        sums.add(number, Partial.unpacked(arrived))
    output, merged = sums.finish()
    if merged.ordinary(parsed):  # the same on all processes
        return partial.stored(parsed, output.to(getattr(torch, parsed.out_dtype)))
    whole = [operands[0], *transfers.whole(operands[1:3]), *operands[3:]]
    return executor(spec, call.device, request)(whole, sizes)


def _fake_forward(
    operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, shards: str
) -> tuple[Tensor, Tensor]:
    parsed = AttentionSpec.from_json(spec)
    *batch, rows, _, columns = results.coordinate_extents(parsed, sizes).values()
    out = results.empty_result(parsed, 0, operands[0], sizes)
    return out, operands[0].new_empty((4 + columns, *batch, rows), dtype=getattr(torch, partial.wide(parsed)))


def _fake_backward(*arguments: Any) -> list[Tensor]:
    *_, operands, _, spec, _, needs, _ = arguments
    places = zip(operands, AttentionSpec.from_json(spec).operands, strict=True)
    return [results.empty_gradient(*place) for place in itertools.compress(places, needs)]


def moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """DTensor after an exchange for each dimension of the mesh that shards another dimension of the tensor in these
    placements, or on CPUs a sum. Where two dimensions of the mesh shard one of the tensor the move is left to torch."""
    mesh, before = tensor.device_mesh, list(tensor.placements)
    adds = lambda old: mesh.device_type == "cpu" and type(old) is OpenSum and old.reduce_op == "sum"
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


_CALL = "Tensor[] operands, SymInt[] sizes, str spec, str request"
_OPERATORS = {
    "attention_of_sharded_keys": (
        f"({_CALL}, str ring) -> Tensor",
        of_sharded_keys,
        lambda operands, sizes, spec, *_: results.empty_result(AttentionSpec.from_json(spec), 0, operands[0], sizes),
    ),
    "ring_attention": (f"({_CALL}, str ring) -> (Tensor, Tensor)", forward, _fake_forward),
    "ring_attention_backward": (
        f"(Tensor grad, Tensor out, Tensor statistics, {_CALL}, bool[] needs, str ring) -> Tensor[]",
        backward,
        _fake_backward,
    ),
}
_library = torch.library.Library("fusion", "FRAGMENT")
for _name, (_schema, _run, _shapes) in _OPERATORS.items():
    _library.define(_name + _schema, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))
    register_fake(_library, f"fusion::{_name}", _shapes, __file__)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
_library.define("sequence_exchange(Tensor local, int? old, int new, SymInt[] extents, str group) -> Tensor")
register_fake(_library, "fusion::sequence_exchange", lambda *given: given[0].new_empty(_shape(*given)), __file__)
for _key in ("CPU", "CUDA"):
    _library.impl("sequence_exchange", exchange, _key)
