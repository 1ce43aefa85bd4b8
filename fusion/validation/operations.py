"""Replay of each kind of operation on a sample of its elements: pointwise operations, views, and operations along one
dimension. Contractions, operations that pick or join elements, and created tensors are in `products`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusion.ir.primitives import hashed
from fusion.passes import marks, nodes
from fusion.passes.pullback import views
from fusion.passes.pullback.contractions import is_contraction
from fusion.passes.pullback.roundings import is_coarser
from fusion.validation.replay import (
    ALONG_DIMENSIONS,
    MOST_ELEMENTS,
    RESHAPES,
    Index,
    NotReplayable,
    Region,
    Replay,
    along_dimensions,
    number_of,
    of_view,
    rule,
    rule_of,
)

aten = torch.ops.aten
_COPIES = (aten.clone, aten.contiguous, aten.alias, aten.detach, aten.detach_, aten.lift_fresh_copy, aten.lift_fresh,
           aten.to, aten._to_copy, aten.type_as)  # fmt: skip
_SOFTMAXES = (aten.softmax, aten._softmax, aten.special_softmax, aten._safe_softmax, aten.log_softmax,
              aten._log_softmax, aten.special_log_softmax)  # fmt: skip
BESIDE = range(9)
"""Numbers of columns without keys (sinks) that may stand beside the keys."""
_REDUCTIONS = (aten.sum, aten.all, aten.amax, aten.amin, aten.mean, aten.logsumexp, aten.special_logsumexp,
               aten.linalg_vector_norm)  # fmt: skip


class _Rounded(torch.autograd.Function):
    """A value rounded to a dtype. Its gradient is not: it arrives in parts, one for each sampled index."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


@rule(*_COPIES)
def _copy(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """A copy or a cast. Integers are rounded as the graph asks in every run, distances above 256 in bfloat16, and so
    are casts to a dtype that is coarser than that of the weights."""
    value, dtype = replay.value(nodes.arguments(node)["self"], index, rank), nodes.dtype(node)
    if not value.is_floating_point():
        value = value.to(dtype)
    elif dtype.is_floating_point and is_coarser(dtype, replay.region.precision):
        value = _Rounded.apply(value, dtype)
    value = value.to(replay.dtype(dtype))
    return value.detach() if nodes.packet(node) in (aten.detach, aten.detach_) else value


@rule("pointwise")
def _pointwise(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    extents = replay.region.shape(node)
    if any(nodes.is_tensor(a) and len(replay.region.shape(a)) > len(extents) for a in node.all_input_nodes):
        raise NotReplayable
    args = [replay.argument(arg, index, extents, rank) for arg in node.args]
    kwargs = {name: replay.argument(arg, index, extents, rank) for name, arg in node.kwargs.items()}
    if node.target is aten.masked_fill.Tensor:  # which takes a number alone, not one for each element
        args = [args[1], args[2].to(args[0].dtype), args[0]]
    function: Any = torch.where if node.target is aten.masked_fill.Tensor else node.target
    return function(*args, **kwargs).to(replay.dtype(nodes.dtype(node)))


@rule(*RESHAPES, *ALONG_DIMENSIONS)
def _view(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    return _moved(replay, node, node, None, index, rank)


def _moved(replay: Replay, node: Node, call: Node, item: int | None, index: Index, rank: int) -> Tensor:
    """An element of a view: `node` is the call, or item number `item` of its results."""
    region = replay.region
    origin = nodes.arguments(call)["self"]
    if node not in region.maps:
        args = replay.plain(_shapes(call, region))
        kwargs = {k: replay.plain(v) for k, v in call.kwargs.items() if k != "output_size"}  # which follows anyway

        def run(tensor: Tensor) -> Any:
            return call.target(tensor, *args[1:], **kwargs)  # type: ignore[operator]

        shape = region.shape(origin)
        along = nodes.packet(call) in ALONG_DIMENSIONS
        index_map = along_dimensions(run, shape) if along else of_view(run, shape, item)
        if index_map is None:
            raise NotReplayable
        region.maps[node] = index_map
    return replay.value(origin, tuple(map(_narrowed, region.maps[node](index))), rank)


def _narrowed(entry: Tensor) -> Tensor:
    """An index entry without the axes along which it is the same, of dimensions that are merged and taken apart again:
    lines within lines would multiply what is read."""
    for axis in range(1, entry.dim()):
        if entry.shape[axis] > 1 and bool((entry == entry.narrow(axis, 0, 1)).all()):
            entry = entry.narrow(axis, 0, 1)
    return entry


def _shapes(call: Node, region: Region) -> tuple[Any, ...]:
    """Arguments with shapes in the place of tensors that only define one (view_as, expand_as)."""
    args: tuple[Any, ...] = call.args
    blank = functools.partial(torch.empty, dtype=torch.float32, device="meta")
    return tuple(blank(region.shape(arg)) if nodes.is_tensor(arg) else arg for arg in args)


@rule(operator.getitem)
def _item(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    origin, item = node.args
    if not isinstance(origin, Node) or not isinstance(item, int):
        raise NotReplayable
    if nodes.packet(origin) in views.PIECES:
        return _moved(replay, node, origin, item, index, rank)
    if nodes.packet(origin) in (aten.max, aten.min) and item == 0:
        return _reduction(replay, origin, index, rank)
    if nodes.packet(origin) is aten.native_dropout and item == 0:
        return _dropout(replay, origin, index, rank)
    raise NotReplayable


def _along(node: Node, rank: int) -> tuple[Node, int]:
    """The argument of an operation along one dimension, and that dimension."""
    args = nodes.arguments(node)
    if (dim := nodes.one_dim(args.get("dim"), rank)) is None:
        raise NotReplayable
    return args["self"], dim


@rule(*_SOFTMAXES)
def _softmax(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    origin, dim = _along(node, len(index))
    extent = replay.region.shape(origin)[dim]
    keys = replay.region.keys
    aligned = index[dim].dim() == rank and index[dim].shape[-1] == keys.shape[1] and index[dim].shape[0] == len(keys)
    offset = index[dim] - keys.view(len(keys), *[1] * (rank - 2), -1) if aligned else torch.tensor([-1])
    if int(offset.min()) < 0 or int(offset.min()) < int(offset.max()) or extent - replay.region.n_k not in BESIDE:
        return _on_whole_lines(replay, node, origin, dim, index, rank)
    columns = [_line(replay, origin, index, rank, keys.shape[1])]
    for place in _beside(replay.region, int(offset.min()), extent):
        spot = torch.full([1] * rank, place)
        at = tuple(spot if k == dim else _first_key(entry, rank) for k, entry in enumerate(index))
        columns.append(replay.value(origin, at, rank))
    return _run_along(replay, node, columns)[..., : keys.shape[1]]


def _beside(region: Region, first: int, extent: int) -> list[int]:
    """The columns of a dimension that are no keys, which begin at `first`."""
    return [*range(first), *range(first + region.n_k, extent)]


def _first_key(entry: Tensor, rank: int) -> Tensor:
    """An index entry for columns that are no keys: where it varies by key, that of the first."""
    return entry[..., :1] if entry.dim() == rank and entry.shape[-1] > 1 else entry


def _line(replay: Replay, origin: Node, index: Sequence[Tensor], rank: int, extent: int) -> Tensor:
    """Elements of `origin` that an operation along the last axis runs on, however few of them differ."""
    value = replay.value(origin, tuple(index), rank)
    return value.expand(*value.shape[:-1], extent)


def _run_along(replay: Replay, node: Node, columns: list[Tensor]) -> Tensor:
    """The operation on columns side by side."""
    leading = torch.broadcast_shapes(*(c.shape[:-1] for c in columns))
    joined = torch.cat([c.expand(*leading, c.shape[-1]) for c in columns], -1)
    args, own = nodes.arguments(node), {}
    for name, value in args.items():
        if name == "self":
            continue
        listed = isinstance(value, (list, tuple))
        own[name] = ([-1] if listed else -1) if name == "dim" else False if name == "keepdim" else replay.plain(value)
    result = node.target(joined, **own)  # type: ignore[operator]
    result = result[0] if isinstance(result, tuple) else result
    fake = nodes.fake(node)
    return result.to(replay.dtype((fake[0] if isinstance(fake, tuple) else fake).dtype))


def _on_whole_lines(replay: Replay, node: Node, origin: Node, dim: int, index: Index, rank: int) -> Tensor:
    """An operation whose result has an index on the line (softmax, cumsum), on whole lines."""
    extent, at = replay.region.shape(origin)[dim], list(replay.further(index))
    at[dim] = torch.zeros([1] * (rank + 1), dtype=torch.int64)
    different_lines = replay.value(origin, tuple(at), rank + 1)  # of constants there is but one
    if extent * different_lines.numel() > MOST_ELEMENTS:
        raise NotReplayable
    at[dim] = torch.arange(extent).view([1] * rank + [-1])
    lines = _run_along(replay, node, [_line(replay, origin, at, rank + 1, extent)])
    shape = torch.broadcast_shapes(lines.shape[:-1], index[dim].shape)
    places = index[dim].expand(shape).unsqueeze(-1)
    return lines.expand(*shape, lines.shape[-1]).gather(-1, places).squeeze(-1)


@rule(aten.cumsum)
def _cumulative(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    origin, dim = _along(node, len(index))
    return _on_whole_lines(replay, node, origin, dim, index, rank)


def at_keys(replay: Replay, extent: int, rank: int) -> Tensor:
    """The keys of the sample, on one more axis."""
    if extent != replay.region.n_k:
        raise NotReplayable
    return _columns(replay.region, 0, extent, rank)


def _columns(region: Region, first: int, extent: int, rank: int) -> Tensor:
    """The keys of the sample, which begin at `first`, and the columns beside them, on one more axis."""
    beside = torch.tensor(_beside(region, first, extent), dtype=torch.int64).expand(len(region.keys), -1)
    columns = torch.cat([region.keys + first, beside], 1)
    return columns.view(len(columns), *[1] * (rank - 1), -1)


def _first_of_keys(region: Region, here: Node, dim: int) -> int | None:
    """Start of the keys along a dimension of a joined tensor; None where it is unknown."""
    first = 0
    while (extent := region.shape(here)[dim]) != region.n_k:
        if extent - region.n_k not in BESIDE:
            return None
        holds = [(n, start) for n, start in _pieces(region, here, dim) if region.shape(n)[dim] >= region.n_k]
        if not holds:
            return None
        here, first = holds[0][0], first + holds[0][1]
    return first


def _pieces(region: Region, here: Node, dim: int) -> list[tuple[Node, int]]:
    """Tensors that a tensor is joined from along a dimension, and their starts."""
    rank = len(region.shape(here))
    if rule_of(here) in (_copy, _pointwise):
        return [(n, 0) for n in here.all_input_nodes if nodes.is_tensor(n) and len(region.shape(n)) == rank]
    args, first, result = nodes.arguments(here), 0, []
    if nodes.packet(here) in (aten.cat, aten.concat) and nodes.normalize_dim(args.get("dim", 0), rank) == dim:
        for tensor in (n for n in args["tensors"] if len(region.shape(n)) == rank):
            result.append((tensor, first))
            first += region.shape(tensor)[dim]
    return result


@rule(*_REDUCTIONS)
def _reduction(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    shape = replay.region.shape(args["self"])
    origin, dim = _along(node, len(shape))
    extent, at = shape[dim], list(replay.further(index))
    if not args.get("keepdim"):
        at.insert(dim, replay.zero)
    if is_contraction(node) and node is not replay.region.anchor:  # of Q and K, written as a sum
        at[dim] = replay.region.positions(extent).view([1] * rank + [-1])
    elif (first := _first_of_keys(replay.region, origin, dim)) is not None:
        at[dim] = _columns(replay.region, first, extent, rank)
    elif extent <= 64:
        at[dim] = torch.arange(extent).view([1] * rank + [-1])
    else:
        raise NotReplayable
    return _run_along(replay, node, [_line(replay, origin, at, rank + 1, at[dim].shape[-1])])


@rule(aten.dropout, aten.feature_dropout)
def _dropout(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """Dropout with the mask that the attention draws from its seed, since eager's draws other numbers."""
    args = nodes.arguments(node)
    origin, p = args["input"], replay.plain(args["p"])
    value = replay.value(origin, index, rank)
    if not args.get("train", True) or p == 0:
        return value
    drawn = dropout_mask(replay, node, p, index, replay.region.shape(origin))
    return value * (drawn.to(value.dtype) / (1 - p) if p < 1 else 0.0)


def dropout_mask(replay: Replay, node: Node, p: float, index: Index, extents: tuple[int, ...]) -> Tensor:
    """Mask of the elements that dropout keeps: by the hash of seed, row and column."""
    if (drawn := marks.seed(node)) is None:
        raise NotReplayable
    rank = max(entry.dim() for entry in index)
    seed = replay.value(drawn, (replay.zero,), rank)
    row = number_of(index[:-1], extents[:-1])
    return hashed(hashed(seed, row), index[-1]) < round((1 - p) * 2**31)
