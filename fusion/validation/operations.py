"""How each kind of operation is replayed on a sample of its elements.

One file over the usual length: it is one table of operations with their rules.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusion.ir.primitives import hashed
from fusion.passes import marks, nodes
from fusion.validation import layouts
from fusion.validation.layouts import Index
from fusion.validation.replay import MOST_ELEMENTS, NotReplayable, Replay, rule

aten = torch.ops.aten
_COPIES = (aten.clone, aten.contiguous, aten.alias, aten.detach, aten.detach_, aten.lift_fresh_copy, aten.lift_fresh,
           aten.to, aten._to_copy, aten.type_as)  # fmt: skip
_SOFTMAXES = (aten.softmax, aten._softmax, aten.special_softmax, aten._safe_softmax, aten.log_softmax,
              aten._log_softmax, aten.special_log_softmax)  # fmt: skip
_REDUCTIONS = (aten.sum, aten.amax, aten.amin, aten.mean, aten.logsumexp, aten.special_logsumexp)


@rule(*_COPIES)
def _copy(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """A copy or a cast."""
    value = replay.value(nodes.arguments(node)["self"], index, rank).to(replay.dtype(nodes.dtype(node)))
    return value.detach() if nodes.packet(node) in (aten.detach, aten.detach_) else value


@rule("pointwise")
def _pointwise(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    extents = replay.region.shape(node)
    if any(nodes.is_tensor(a) and len(replay.region.shape(a)) > len(extents) for a in node.all_input_nodes):
        raise NotReplayable
    args = [replay.argument(arg, index, extents, rank) for arg in node.args]
    kwargs = {name: replay.argument(arg, index, extents, rank) for name, arg in node.kwargs.items()}
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    return result.to(replay.dtype(nodes.dtype(node)))


@rule(*layouts.RESHAPES, *layouts.ALONG_DIMENSIONS)
def _view(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    return _moved(replay, node, node, None, index, rank)


def _moved(replay: Replay, node: Node, call: Node, item: int | None, index: Index, rank: int) -> Tensor:
    """An element of a view: `node` is the call, or item number `item` of its results."""
    region = replay.region
    origin = nodes.arguments(call)["self"]
    if node not in region.maps:
        args, kwargs = replay.plain(_without(call.args, origin)), {k: replay.plain(v) for k, v in call.kwargs.items()}

        def run(tensor: Tensor) -> Any:
            return call.target(tensor, *args[1:], **kwargs)  # type: ignore[operator]

        shape = region.shape(origin)
        along = nodes.packet(call) in layouts.ALONG_DIMENSIONS
        found = layouts.along_dimensions(run, shape) if along else layouts.of_view(run, shape, item)
        if found is None:
            raise NotReplayable
        region.maps[node] = found
    return replay.value(origin, region.maps[node](index), rank)


def _without(args: tuple[Any, ...], origin: Node) -> tuple[Any, ...]:
    """Arguments with shapes in the place of tensors that only give theirs (view_as, expand_as)."""
    return tuple(
        None if a is origin else torch.empty([int(n) for n in nodes.value(a).shape], device="meta")
        if nodes.is_tensor(a) else a for a in args
    )  # fmt: skip


@rule(operator.getitem)
def _item(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    origin, item = node.args
    if not isinstance(origin, Node) or not isinstance(item, int):
        raise NotReplayable
    if nodes.packet(origin) in layouts.PIECES:
        return _moved(replay, node, origin, item, index, rank)
    if nodes.packet(origin) in (aten.max, aten.min) and item == 0:
        return _reduction(replay, origin, index, rank)
    if nodes.packet(origin) is aten.native_dropout and item == 0:
        return _dropout(replay, origin, index, rank)
    raise NotReplayable


# Contractions


@rule(aten.matmul, aten.bmm, aten.mm, aten.baddbmm)
def _product(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args, region = nodes.arguments(node), replay.region
    added = nodes.packet(node) is aten.baddbmm
    left, right = (
        (args["batch1"], args["batch2"]) if added else (args["self"], args["mat2" if "mat2" in args else "other"])
    )
    shapes, batch = [region.shape(t) for t in (left, right)], region.shape(node)[:-2]
    if min(map(len, shapes)) < 2:
        raise NotReplayable
    at = replay.further(index)
    summed = _positions(replay, node, shapes[0][-1], rank)
    one, other = (replay.broadcast(at[:-2], batch, shape[:-2]) for shape in shapes)
    result = _sum_of_products(replay, node, (left, (*one, at[-2], summed)), (right, (*other, summed, at[-1])), rank)
    if not added:
        return result
    bias = replay.argument(args["self"], index, region.shape(node), rank)
    alpha, beta = replay.plain(args["alpha"]), replay.plain(args["beta"])
    return result * alpha if beta == 0 else beta * bias + alpha * result


def _positions(replay: Replay, node: Node, extent: int, rank: int) -> Tensor:
    """The positions that a product sums over, on one more axis."""
    if node is not replay.region.anchor:
        return replay.region.positions(extent).view([1] * rank + [-1])
    return _at_keys(replay, extent, rank)


def _at_keys(replay: Replay, extent: int, rank: int) -> Tensor:
    keys = replay.region.keys
    if extent != replay.region.n_k:
        raise NotReplayable
    return keys.view(keys.shape[0], *[1] * (rank - 1), keys.shape[1])


def _sum_of_products(replay: Replay, node: Node, left: Any, right: Any, rank: int) -> Tensor:
    one, other = (replay.value(tensor, at, rank + 1) for tensor, at in (left, right))
    dtype = replay.dtype(nodes.dtype(node))
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return (one.to(wide) * other.to(wide)).sum(-1).to(dtype)


@rule(aten.einsum)
def _einsum(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args, region = nodes.arguments(node), replay.region
    tensors = args["tensors"]
    shapes = [region.shape(t) for t in tensors]
    if len(tensors) != 2:
        raise NotReplayable
    left, right, output = einsum_letters(args["equation"], [len(s) for s in shapes])
    summed = (set(left) | set(right)) - set(output)
    if len(summed) != 1 or not summed <= set(left) & set(right):
        raise NotReplayable
    (letter,) = summed
    extent = shapes[0][left.index(letter)]
    at = dict(zip(output, replay.further(index), strict=True)) | {letter: _positions(replay, node, extent, rank)}
    places = [
        tuple(replay.zero if n == 1 and x != letter else at[x] for x, n in zip(letters, shape, strict=True))
        for letters, shape in zip((left, right), shapes, strict=True)
    ]
    return _sum_of_products(replay, node, (tensors[0], places[0]), (tensors[1], places[1]), rank)


def einsum_letters(equation: str, ranks: list[int]) -> list[list[str]]:
    """Names of the dimensions of two operands and of the result; those of an ellipsis are numbers from the right."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    dots = max(rank - len(t) + 3 if "..." in t else 0 for t, rank in zip(terms, ranks, strict=True))

    def names(term: str, count: int) -> list[str]:
        before, ellipsis, after = term.partition("...")
        return [*before, *(str(k) for k in range(count, 0, -1) if ellipsis), *after]

    found = [names(t, rank - len(t) + 3) for t, rank in zip(terms, ranks, strict=True)]
    if arrow:
        return [*found, names(output, dots)]
    letters = [x for t in found for x in t]
    alone = sorted(x for x in set(letters) if not x.isdigit() and letters.count(x) == 1)
    return [*found, [str(k) for k in range(dots, 0, -1)] + alone]


@rule(aten.scaled_dot_product_attention)
def _sdpa(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """Scores, mask, softmax, dropout and product, as its documentation says."""
    args, region = nodes.arguments(node), replay.region
    query, key, value = args["query"], args["key"], args["value"]
    (n_k, d), batch = region.shape(key)[-2:], region.shape(node)[:-2]
    at = replay.further(index)
    keys = _at_keys(replay, n_k, rank)
    inner = (*replay.further(at), region.positions(d).view([1] * (rank + 1) + [-1]))
    places = [_sdpa_batch(replay, t, inner[:-3], batch, args["enable_gqa"], query) for t in (query, key)]
    row, column = (*places[0], inner[-3], inner[-1]), (*places[1], keys.unsqueeze(-1), inner[-1])
    score = _sum_of_products(replay, node, (query, row), (key, column), rank + 1)
    scale = replay.plain(args["scale"])
    score = score * (d**-0.5 if scale is None else scale)
    if args["is_causal"]:
        score = score.masked_fill(keys > at[-2], -torch.inf)
    extents = (*batch, region.shape(query)[-2], n_k)
    weights_at = (*at[:-1], keys)
    if (mask := args["attn_mask"]) is not None:
        added = replay.argument(mask, weights_at, extents, rank + 1)
        score = score.masked_fill(~added, -torch.inf) if added.dtype is torch.bool else score + added
    weights = aten._safe_softmax(score, -1)
    if args["dropout_p"]:
        kept = _kept(replay, node, replay.plain(args["dropout_p"]), weights_at, extents)
        weights = torch.where(kept, weights / (1 - replay.plain(args["dropout_p"])), 0.0)
    place = _sdpa_batch(replay, value, at[:-2], batch, args["enable_gqa"], query)
    held = replay.value(value, (*place, keys, at[-1]), rank + 1)
    dtype = replay.dtype(nodes.dtype(node))
    wide = torch.promote_types(dtype, torch.float32)
    return (weights.to(wide) * held.to(wide)).sum(-1).to(dtype)


def _sdpa_batch(replay: Replay, tensor: Node, index: Index, batch: Any, grouped: bool, query: Node) -> Index:
    own = replay.region.shape(tensor)[:-2]
    if grouped and own and own[-1] != (heads := replay.region.shape(query)[-3]):
        return (*replay.broadcast(index[:-1], batch[:-1], own[:-1]), index[-1] // (heads // own[-1]))
    return replay.broadcast(index, batch, own)


# Along a dimension


def _along(node: Node, rank: int) -> tuple[Node, int]:
    """The argument of an operation along one dimension, and that dimension."""
    args = nodes.arguments(node)
    dims = args.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    if len(dims) != 1:
        raise NotReplayable
    return args["self"], nodes.normalize_dim(dims[0], rank)


@rule(*_SOFTMAXES)
def _softmax(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    origin, dim = _along(node, len(index))
    extent = replay.region.shape(origin)[dim]
    keys = replay.region.keys
    aligned = index[dim].dim() == rank and index[dim].shape[-1] == keys.shape[1] and index[dim].shape[0] == len(keys)
    offset = index[dim] - keys.view(len(keys), *[1] * (rank - 2), -1) if aligned else torch.tensor([-1])
    if int(offset.min()) < 0 or int(offset.min()) < int(offset.max()) or extent - replay.region.n_k not in range(9):
        return _on_whole_lines(replay, node, origin, dim, index, rank)
    first = int(offset.min())
    others = [*range(first), *range(first + replay.region.n_k, extent)]
    columns = [replay.value(origin, index, rank)]
    for place in others:
        spot = torch.full([1] * rank, place)
        at = tuple(spot if k == dim else _first_key(entry, rank) for k, entry in enumerate(index))
        columns.append(replay.value(origin, at, rank))
    return _run_along(replay, node, columns)[..., : keys.shape[1]]


def _first_key(entry: Tensor, rank: int) -> Tensor:
    """An index entry for columns that are no keys: where it varies by key, that of the first."""
    return entry[..., :1] if entry.dim() == rank and entry.shape[-1] > 1 else entry


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
    held = nodes.value(node)
    return result.to(replay.dtype((held[0] if isinstance(held, tuple) else held).dtype))


def _on_whole_lines(replay: Replay, node: Node, origin: Node, dim: int, index: Index, rank: int) -> Tensor:
    """An operation whose result has a place on the line (softmax, cumsum), on whole lines."""
    extent = replay.region.shape(origin)[dim]
    here = torch.broadcast_shapes(*(entry.shape for entry in index))
    if extent * torch.Size(here).numel() > MOST_ELEMENTS:
        raise NotReplayable
    at = list(replay.further(index))
    at[dim] = torch.arange(extent).view([1] * rank + [-1])
    lines = _run_along(replay, node, [replay.value(origin, tuple(at), rank + 1)])
    shape = torch.broadcast_shapes(lines.shape[:-1], index[dim].shape)
    places = index[dim].expand(shape).unsqueeze(-1)
    return lines.expand(*shape, lines.shape[-1]).gather(-1, places).squeeze(-1)


@rule(aten.cumsum)
def _cumulative(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    origin, dim = _along(node, len(index))
    return _on_whole_lines(replay, node, origin, dim, index, rank)


@rule(*_REDUCTIONS)
def _reduction(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    shape = replay.region.shape(args["self"])
    origin, dim = _along(node, len(shape))
    extent, at = shape[dim], list(replay.further(index))
    if not args.get("keepdim"):
        at.insert(dim, replay.zero)
    if extent == replay.region.n_k:
        at[dim] = _at_keys(replay, extent, rank)
    elif extent <= 64:
        at[dim] = torch.arange(extent).view([1] * rank + [-1])
    else:
        raise NotReplayable
    return _run_along(replay, node, [replay.value(origin, tuple(at), rank + 1)])


# Random numbers


@rule(aten.dropout, aten.feature_dropout)
def _dropout(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """Dropout draws other numbers in eager: which elements it keeps is what the attention draws from its seed."""
    args = nodes.arguments(node)
    origin, p = args["input"], replay.plain(args["p"])
    value = replay.value(origin, index, rank)
    if not args.get("train", True) or p == 0:
        return value
    kept = _kept(replay, node, p, index, replay.region.shape(origin))
    return value * (kept.to(value.dtype) / (1 - p))


def _kept(replay: Replay, node: Node, p: float, index: Index, extents: tuple[int, ...]) -> Tensor:
    """Which elements are kept: by the hash of seed, row and column."""
    if (drawn := marks.seed(node)) is None:
        raise NotReplayable
    rank = max(entry.dim() for entry in index)
    seed = replay.value(drawn, (replay.zero,), rank)
    row = layouts.number_of(index[:-1], extents[:-1])
    return hashed(hashed(seed, row), index[-1]) < round((1 - p) * 2**31)


# Picking and making


@rule(aten.tril, aten.triu)
def _triangle(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    above = index[-1] - index[-2] - replay.plain(args["diagonal"])
    keep = above <= 0 if nodes.packet(node) is aten.tril else above >= 0
    value = replay.value(args["self"], index, rank)
    return torch.where(keep, value, torch.zeros((), dtype=value.dtype))


@rule(aten.cat, aten.concat)
def _cat(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    dim, first, pieces = nodes.normalize_dim(args.get("dim", 0), len(index)), 0, []
    for tensor in args["tensors"]:
        shape = replay.region.shape(tensor)
        if shape == (0,):
            continue
        pieces.append((tensor, first, shape[dim]))
        first += shape[dim]
    return _chosen(replay, node, index, dim, pieces, rank)


@rule(aten.stack)
def _stack(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    dim = nodes.normalize_dim(args.get("dim", 0), len(index))
    result = None
    for k, tensor in enumerate(args["tensors"]):
        inside = index[dim] == k
        if bool(inside.any()):
            value = replay.value(tensor, (*index[:dim], *index[dim + 1 :]), rank)
            result = value if result is None else torch.where(inside, value, result)
    assert result is not None
    return result.to(replay.dtype(nodes.dtype(node)))


def _chosen(replay: Replay, node: Node, index: Index, dim: int, pieces: Any, rank: int) -> Tensor:
    """Of pieces (tensor, first position, extent) along a dimension, that which holds each element."""
    result = None
    for tensor, first, extent in pieces:
        place = index[dim] - first
        inside = (place >= 0) & (place < extent)
        if bool(inside.any()):
            at = (*index[:dim], place.clamp(0, extent - 1), *index[dim + 1 :])
            value = replay.value(tensor, at, rank)
            result = value if result is None else torch.where(inside, value, result)
    assert result is not None
    return result.to(replay.dtype(nodes.dtype(node)))


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
        place = replay.value(tensors[k], replay.broadcast(own, common, region.shape(tensors[k])), rank).to(torch.int64)
        picked.append(torch.where(place < 0, place + shape[k], place))
    return replay.value(args["self"], (*index[: given[0]], *picked, *index[given[0] + wide :]), rank)


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


@rule(aten.slice_scatter, aten.select_scatter)
def _scatter(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """A tensor of which a slice, or what one position of a dimension holds, is written."""
    args, region = nodes.arguments(node), replay.region
    dim = nodes.normalize_dim(args["dim"], len(index))
    extent, place = region.shape(node)[dim], index[dim]
    if nodes.packet(node) is aten.select_scatter:
        inside, at = place == replay.plain(args["index"]) % extent, (*index[:dim], *index[dim + 1 :])
    else:
        start, end, step = (replay.plain(args[name]) for name in ("start", "end", "step"))
        first, last, step = slice(start, end, step).indices(extent)
        inside = (place >= first) & (place < last) & ((place - first) % step == 0)
        at = (*index[:dim], torch.where(inside, (place - first) // step, 0), *index[dim + 1 :])
    whole = replay.value(args["self"], index, rank)
    if not bool(inside.any()):
        return whole
    written = replay.argument(args["src"], at, region.shape(args["src"]), rank)
    return torch.where(inside, written.to(whole.dtype), whole)


@rule(aten.copy, aten.fill)
def _overwritten(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args, shape = nodes.arguments(node), replay.region.shape(node)
    written = replay.argument(args["src"] if "src" in args else args["value"], index, shape, rank)
    if not isinstance(written, Tensor):
        written = torch.full([1] * rank, written, dtype=nodes.dtype(node))
    return written.to(replay.dtype(nodes.dtype(node)))


@rule(aten.zeros, aten.ones, aten.full, aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like,
      aten.full_like, aten.scalar_tensor)  # fmt: skip
def _filled(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    packet, args = nodes.packet(node), nodes.arguments(node)
    ones = packet in (aten.ones, aten.new_ones, aten.ones_like)
    zeros = packet in (aten.zeros, aten.new_zeros, aten.zeros_like)
    fill = 1 if ones else 0 if zeros else replay.plain(args.get("fill_value", args.get("s")))
    return torch.full([1] * rank, fill, dtype=nodes.dtype(node)).to(replay.dtype(nodes.dtype(node)))


@rule(aten.arange, aten.linspace)
def _range(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    kwargs = {name: replay.plain(value) for name, value in node.kwargs.items()} | {"device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    made = node.target(*replay.plain(tuple(node.args)), **kwargs)  # type: ignore[operator]
    return made[index[0]].to(replay.dtype(nodes.dtype(node)))


@rule(aten.eye)
def _eye(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    return (index[0] == index[1]).to(replay.dtype(nodes.dtype(node)))
