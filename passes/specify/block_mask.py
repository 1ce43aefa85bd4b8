"""A mask that the user gives for every attention of a model, beside the model's own: `options={"block_mask": ...}`.

A callable `keep(b, h, i, j)` gets integer tensors that broadcast against each other and returns a bool tensor, as
FlexAttention's `mask_mod` does; it is pulled back like a model's own mask, so that nothing of size N_q x N_k is made. A
bool tensor [.., rows, columns] says which blocks of queries and keys meet; its leading dimensions are heads, or batch
and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusion.errors import BlockMaskError
from fusion.ir import integers
from fusion.ir.expr import Expr, I, J, Kind, coord, coordinates, load, loads, rebuild
from fusion.ir.ops import evaluate
from fusion.torch_private.fake import unset_fake_temporarily
from fusion.torch_private.tracing import disable_proxy_modes_tracing, make_fx

from .. import marks, nodes
from ..pullback.pullback import PullBack
from ..pullback.views import Index

BlockMask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | Tensor
_TRACED = (2, 3, 5, 7)
"""Extents of b, h, i and j at which a callable is traced: any will do, as it is pointwise."""
_MANY = integers.integer(1 << 20)


def predicate(
    mask: BlockMask, module: GraphModule, bounds: integers.Bounds, device: torch.device
) -> tuple[Expr, list[Node]]:
    """(where the mask lets a key be seen, the nodes that the predicate's loads are numbered by).

    bounds: of the attention's coordinates b0, b1, ..., i and j.
    device: where the attention is computed.

    Captured tensors become buffers of `module` there. Raises BlockMaskError where the mask does not fit the attention.
    """
    batch = sorted((c for c in bounds if c.name.startswith("b")), key=lambda c: int(c.name[1:]))
    if isinstance(mask, Tensor):
        return _from_blocks(mask, module, bounds, batch, device)
    return _from_callable(mask, module, bounds, batch, device)


def _heads(bounds: integers.Bounds, batch: list[Expr]) -> tuple[Expr, Expr] | None:
    """(b, h) in terms of the attention's batch coordinates, where these are batch and (maybe grouped) heads."""
    if len(batch) == 2:
        return batch[0], batch[1]
    if len(batch) == 3:
        return batch[0], integers.add(integers.mul(batch[1], bounds[batch[2]]), batch[2])
    return None


def _from_blocks(
    mask: Tensor, module: GraphModule, bounds: integers.Bounds, batch: list[Expr], device: torch.device
) -> tuple[Expr, list[Node]]:
    index: list[Expr] = []
    leading = mask.shape[:-2]
    if leading:
        heads = _heads(bounds, batch)
        if heads is None:
            raise BlockMaskError(
                f"block_mask has the shape {list(mask.shape)}, but an attention has {len(batch)} batch dimensions "
                "instead of batch and heads; give a mask of two dimensions"
            )
        extents = [bounds[batch[0]], integers.mul(*(bounds[b] for b in batch[1:]))]
        for place, have, wanted in zip(heads[-len(leading) :], leading, extents[-len(leading) :], strict=True):
            if have != 1 and wanted is not integers.integer(have):
                raise BlockMaskError(
                    f"block_mask has the shape {list(mask.shape)}, but an attention has {wanted} where it has {have}"
                )
            index.append(integers.integer(0) if have == 1 else place)
    for position, blocks in ((I, mask.shape[-2]), (J, mask.shape[-1])):
        extent = bounds[position]
        what = "queries" if position is I else "keys"
        if not extent.is_const:
            raise BlockMaskError(
                f"block_mask is a tensor and the number of {what} is dynamic; compile with dynamic=False, or give a "
                "callable of (b, h, i, j)"
            )
        if extent.integer % blocks:
            raise BlockMaskError(
                f"block_mask has {blocks} blocks for {extent} {what}, which is no multiple of that; give a mask whose "
                "number of blocks divides it"
            )
        index.append(integers.floordiv(position, extent.integer // blocks, bounds))
    return load(0, tuple(index), Kind.BOOL), [_buffer(mask, module, device)]


def _buffer(tensor: Tensor, module: GraphModule, device: torch.device) -> Node:
    """A node that holds this tensor on a device; one per tensor."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and marks.block_mask(node) is tensor and nodes.value(node).device == device:
            return node
    held = tensor.detach()
    if held.device != device:
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            held = held.to(device)
    number = sum(name.startswith("block_mask_") for name, _ in module.named_buffers())
    module.register_buffer(name := f"block_mask_{number}", held, persistent=False)
    first = next(iter(module.graph.nodes))
    with module.graph.inserting_before(first):
        made = module.graph.get_attr(name)
    made.meta["val"] = held
    marks.block_mask.set(made, tensor)
    return made


def _from_callable(
    keep: Callable[..., Tensor], module: GraphModule, bounds: integers.Bounds, batch: list[Expr], device: torch.device
) -> tuple[Expr, list[Node]]:
    traced = _trace(keep, device)
    output = traced.graph.output_node().args[0]
    heads = _heads(bounds, batch)
    extents = (bounds[batch[0]], integers.mul(*(bounds[b] for b in batch[1:]))) if heads else (_MANY, _MANY)
    walk = PullBack({coord("B"): extents[0], coord("H"): extents[1], I: bounds[I], J: bounds[J]}, bounds[J])
    index: Index = (coord("B"), coord("H"), I, J)
    try:
        value = walk.value(output, index)
    except nodes.Unsupported as problem:
        raise BlockMaskError(f"block_mask cannot be followed: {problem}") from problem
    operands = [_buffer(_held(traced, node), module, device) for node in walk.loaded]
    _check_traced(keep, value)
    if heads is None and {"B", "H"} & coordinates(value):
        raise BlockMaskError(
            f"block_mask depends on the batch or the head, but an attention has {len(batch)} batch dimensions instead "
            "of these two; give a mask of positions only"
        )
    places = dict(zip((coord("B"), coord("H")), heads or (), strict=False))
    return rebuild(value, places.get), operands


def _positions(extents: Sequence[int], device: torch.device | None) -> list[Tensor]:
    """Integers below each extent, along an axis of their own."""
    lines = (torch.arange(extent, device=device) for extent in extents)
    return [line.reshape([-1 if k == axis else 1 for k in range(len(extents))]) for axis, line in enumerate(lines)]


def _trace(keep: Callable[..., Tensor], device: torch.device) -> GraphModule:
    """The callable as a graph, over positions that the graph makes itself on a device."""

    def positions() -> Tensor:
        found = keep(*_positions(_TRACED, device))
        if not isinstance(found, Tensor) or found.dtype is not torch.bool:
            kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise BlockMaskError(f"block_mask returned {kind}; return a bool tensor, true where key j may be seen")
        return found.expand(_TRACED)

    try:
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            return make_fx(positions, tracing_mode="real")()
    except BlockMaskError:
        raise
    except Exception as problem:
        raise BlockMaskError(
            f"block_mask cannot be called with integer tensors b, h, i and j of the shapes [B, 1, 1, 1] .. "
            f"[1, 1, 1, N_k]: {type(problem).__name__}: {problem}"
        ) from problem


def _held(traced: GraphModule, node: Node) -> Tensor:
    if node.op != "get_attr":
        raise BlockMaskError(f"block_mask computes something that cannot be followed ({node.name}: {node.target})")
    return getattr(traced, str(node.target))


def _check_traced(keep: Callable[..., Tensor], value: Expr) -> None:
    """What was understood must be what the callable returns, at other positions than it was traced at."""
    if loads(value):
        return
    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        axes = _positions((3, 4, 190, 230), None)
        names = dict(zip(("B", "H", "i", "j"), axes, strict=True))
        understood = evaluate(value, lambda leaf: names[leaf.name]).expand(3, 4, 190, 230)
        if not torch.equal(understood, keep(*axes).expand(3, 4, 190, 230)):
            raise BlockMaskError("block_mask is not a pointwise function of b, h, i and j; write it without shapes")
