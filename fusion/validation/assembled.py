"""Replay of operations that pick elements of tensors, or join tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fusion.passes import nodes
from fusion.validation.replay import Index, NotReplayable, Replay, rule, within

aten = torch.ops.aten


@rule(aten.tril, aten.triu)
def _triangle(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    above = index[-1] - index[-2] - replay.plain(args["diagonal"])
    keep = above <= 0 if nodes.packet(node) is aten.tril else above >= 0
    value = replay.value(args["self"], index, rank)
    return torch.where(keep, value, torch.zeros((), dtype=value.dtype))


@rule(aten.cat, aten.concat, aten.stack, aten.slice_scatter, aten.select_scatter)
def _assembled(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    dim = nodes.normalize_dim(args.get("dim", 0), len(index))
    return _joined(replay, node, node.target, args, dim, index, rank)


def _joined(replay: Replay, node: Node, run: Any, args: dict[str, Any], dim: int, index: Index, rank: int) -> Tensor:
    """Elements of the result of `run`, which joins tensors along one dimension. torch says which elements these are:
    `run` is called on the numbers of elements along that dimension alone."""
    pieces, count = [], 0

    def numbers(tensor: Node) -> Tensor:
        nonlocal count
        shape = replay.region.shape(tensor)
        lies_along = len(shape) == len(index)
        extent = shape[dim] if lies_along else 0 if shape == (0,) else 1
        pieces.append((tensor, count, extent, lies_along))
        count += extent
        line = torch.arange(count - extent, count)
        return line if lies_along or not extent else line[0]

    own = map_arg(args | {"dim": 0}, lambda arg: numbers(arg) if nodes.is_tensor(arg) else replay.plain(arg))
    number, result = run(**own)[index[dim]], torch.zeros((), dtype=replay.dtype(nodes.dtype(node)))
    for tensor, first, extent, lies_along in pieces:
        inside = (number >= first) & (number < first + extent)
        if bool(inside.any()):
            place = torch.where(inside, number - first, index[dim].clamp(0, extent - 1))
            value = replay.value(tensor, (*index[:dim], *[place] * lies_along, *index[dim + 1 :]), rank)
            result = torch.where(inside, value.to(result.dtype), result)
    return result


@rule(aten.diff)
def _difference(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    if args["n"] != 1:
        raise NotReplayable
    dim = nodes.normalize_dim(args["dim"], len(index))
    whole = {"tensors": [args[name] for name in ("prepend", "self", "append") if args[name] is not None]}
    places = [(*index[:dim], index[dim] + k, *index[dim + 1 :]) for k in (0, 1)]
    pair = [_joined(replay, node, aten.cat, whole, dim, at, rank) for at in places]
    return aten.diff(torch.stack(torch.broadcast_tensors(*pair), -1))[..., 0]


@rule(aten.constant_pad_nd, aten.pad)
def _pad(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    pad, shape = replay.plain(args["pad"]), replay.region.shape(args["self"])
    at, inside = list(index), torch.ones((), dtype=torch.bool)
    for k in range(len(pad) // 2):
        dim = len(index) - 1 - k
        place = index[dim] - pad[2 * k]
        inside = inside & (place >= 0) & (place < shape[dim])
        at[dim] = place.clamp(0, shape[dim] - 1)
    if args.get("mode", "constant") != "constant":
        raise NotReplayable
    value = replay.value(args["self"], tuple(at), rank)
    return torch.where(inside, value, torch.tensor(replay.plain(args.get("value")) or 0, dtype=value.dtype))


@rule(aten.index)
def _index(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args, region = nodes.arguments(node), replay.region
    tensors, shape = args["indices"], region.shape(args["self"])
    given = [k for k, t in enumerate(tensors) if t is not None]
    if given != list(range(given[0], given[-1] + 1)) or any(nodes.dtype(tensors[k]) is torch.bool for k in given):
        raise NotReplayable
    wide = max(len(region.shape(tensors[k])) for k in given)
    common = region.shape(node)[given[0] : given[0] + wide]
    own = index[given[0] : given[0] + wide]
    picked = []
    for k in given:
        place = replay.value(tensors[k], replay.broadcast(own, common, region.shape(tensors[k])), rank)
        picked.append(within(place, shape[k]))
    return replay.value(args["self"], (*index[: given[0]], *picked, *index[given[0] + wide :]), rank)


@rule(aten.index_select, aten.gather)
def _picked(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """Elements that a tensor of positions along one dimension names."""
    args = nodes.arguments(node)
    dim = nodes.normalize_dim(args["dim"], len(index))
    own = index if nodes.packet(node) is aten.gather else (index[dim],)
    place = within(replay.value(args["index"], own, rank), replay.region.shape(args["self"])[dim])
    return replay.value(args["self"], (*index[:dim], place, *index[dim + 1 :]), rank)


@rule(aten.index_put)
def _index_put(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args, region = nodes.arguments(node), replay.region
    masks = [(k, t) for k, t in enumerate(args["indices"]) if t is not None]
    if len(masks) != 1 or nodes.dtype(masks[0][1]) is not torch.bool or region.shape(args["values"]) != ():
        raise NotReplayable
    first, mask = masks[0]
    inside = replay.value(mask, index[first : first + len(region.shape(mask))], rank)
    value = replay.value(args["self"], index, rank)
    return torch.where(inside, replay.value(args["values"], (), rank).to(value.dtype), value)


@rule(aten.copy, aten.fill)
def _overwritten(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args, shape = nodes.arguments(node), replay.region.shape(node)
    written = replay.argument(args["src"] if "src" in args else args["value"], index, shape, rank)
    if not isinstance(written, Tensor):
        written = torch.full([1] * rank, written, dtype=nodes.dtype(node))
    return written.to(replay.dtype(nodes.dtype(node)))
