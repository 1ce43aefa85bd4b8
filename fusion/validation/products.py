"""Replay of operations whose elements come from several places, or from none: contractions (matrix products, einsum,
attention as one call), operations that pick elements of tensors, or join tensors, and those that create tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fusion.ir.results import size_value
from fusion.passes import nodes
from fusion.passes.pullback.heads import head_sum
from fusion.validation.operations import at_keys, dropout_mask
from fusion.validation.replay import Index, NotReplayable, Replay, rule, within

aten = torch.ops.aten
_FACTORS = ("self", "mat2"), ("self", "other"), ("batch1", "batch2"), ("mat1", "mat2")


@rule(aten.matmul, aten.bmm, aten.mm, aten.baddbmm, aten.addmm)
def _product(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args, region = nodes.arguments(node), replay.region
    added = nodes.packet(node) in (aten.baddbmm, aten.addmm)
    left, right = next((args[x], args[y]) for x, y in reversed(_FACTORS) if {x, y} <= args.keys())
    shapes = [region.shape(t) for t in (left, right)]
    rows, columns = (len(shape) > 1 for shape in shapes)
    split = len(index) - rows - columns
    at, batch = replay.further(index), region.shape(node)[:split]
    summed = _positions(replay, node, shapes[0][-1], rank)
    one, other = (replay.broadcast(at[:split], batch, shape[:-2]) for shape in shapes)
    inner = split + rows
    first, second = (*one, *at[split:inner], summed), (*other, summed, *at[inner:])
    result = _sum_of_products(replay, node, (left, first), (right, second), rank)
    if not added:
        return result
    bias = replay.argument(args["self"], index, region.shape(node), rank)
    alpha, beta = replay.plain(args["alpha"]), replay.plain(args["beta"])
    return result * alpha if beta == 0 else beta * bias + alpha * result


def _positions(replay: Replay, node: Node, extent: int, rank: int) -> Tensor:
    """The positions that a product sums over, on one more axis."""
    if node is not replay.region.anchor:
        return replay.region.positions(extent).view([1] * rank + [-1])
    return at_keys(replay, extent, rank)


def _sum_of_products(replay: Replay, node: Node, left: Any, right: Any, rank: int) -> Tensor:
    return _summed(replay, node, *(replay.value(tensor, at, rank + 1) for tensor, at in (left, right)))


def _summed(replay: Replay, node: Node, one: Tensor, other: Tensor) -> Tensor:
    """Sum of products over the last axis, in float32 at least, rounded to the node's dtype."""
    dtype = replay.dtype(nodes.dtype(node))
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return (one.to(wide) * other.to(wide)).sum(-1).to(dtype)


@rule(aten.linalg_vecdot)
def _vecdot(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args = nodes.arguments(node)
    shapes = {args[name]: replay.region.shape(args[name]) for name in ("x", "y")}
    extents = torch.broadcast_shapes(*shapes.values())
    dim, at = nodes.normalize_dim(args["dim"], len(extents)), list(replay.further(index))
    at.insert(dim, _positions(replay, node, extents[dim], rank))
    x, y = ((tensor, replay.broadcast(tuple(at), extents, shapes[tensor])) for tensor in (args["x"], args["y"]))
    return _sum_of_products(replay, node, x, y, rank)


@rule(aten.einsum)
def _einsum(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    args, region = nodes.arguments(node), replay.region
    tensors = args["tensors"]
    shapes = [region.shape(t) for t in tensors]
    if len(tensors) != 2:
        raise NotReplayable
    left, right, output = _einsum_letters(args["equation"], [len(s) for s in shapes])
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


def _einsum_letters(equation: str, ranks: list[int]) -> list[list[str]]:
    """Names of the dimensions of two operands and of the result; those of an ellipsis are numbers from the right."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    dots = max(rank - len(t) + 3 if "..." in t else 0 for t, rank in zip(terms, ranks, strict=True))

    def names(term: str, count: int) -> list[str]:
        before, ellipsis, after = term.partition("...")
        return [*before, *(str(k) for k in range(count, 0, -1) if ellipsis), *after]

    operands = [names(t, rank - len(t) + 3) for t, rank in zip(terms, ranks, strict=True)]
    if arrow:
        return [*operands, names(output, dots)]
    letters = [x for t in operands for x in t]
    alone = sorted(x for x in set(letters) if not x.isdigit() and letters.count(x) == 1)
    return [*operands, [str(k) for k in range(dots, 0, -1)] + alone]


@rule("heads")
def _heads(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """A sum over heads, one after the other."""
    summed = head_sum(node)
    assert summed is not None
    dtype = replay.dtype(nodes.dtype(node))
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros([1] * rank, dtype=wide)
    for head in map(replay.number, range(size_value(summed.extent, replay.region.examples))):
        value = replay.value(summed.mixed, summed.mixed_index(index, head), rank)
        factor = replay.value(summed.matrix, summed.matrix_index(index, head, replay.zero), rank)
        total = total + value.to(wide) * factor.to(wide)
    if summed.bias is not None:
        total = total + replay.value(summed.bias, (index[summed.to],), rank).to(wide)
    return total.to(dtype)


@rule(aten.scaled_dot_product_attention)
def _sdpa(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    """Scores, mask, softmax, dropout and product, as its documentation says."""
    args, region = nodes.arguments(node), replay.region
    query, key, value = args["query"], args["key"], args["value"]
    (n_k, d), batch = region.shape(key)[-2:], region.shape(node)[:-2]
    at = replay.further(index)
    keys = at_keys(replay, n_k, rank)
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
        p = replay.plain(args["dropout_p"])
        remaining = dropout_mask(replay, node, p, weights_at, extents)
        weights = torch.where(remaining, weights / (1 - p), 0.0) if p < 1 else weights * 0.0
    place = _sdpa_batch(replay, value, at[:-2], batch, args["enable_gqa"], query)
    return _summed(replay, node, weights, replay.value(value, (*place, keys, at[-1]), rank + 1))


def _sdpa_batch(replay: Replay, tensor: Node, index: Index, batch: Any, grouped: bool, query: Node) -> Index:
    own = replay.region.shape(tensor)[:-2]
    if grouped and own and own[-1] != (heads := replay.region.shape(query)[-3]):
        return (*replay.broadcast(index[:-1], batch[:-1], own[:-1]), index[-1] // (heads // own[-1]))
    return replay.broadcast(index, batch, own)


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
    line = node.target(*replay.plain(tuple(node.args)), **kwargs)  # type: ignore[operator]
    return line[index[0]].to(replay.dtype(nodes.dtype(node)))


@rule(aten.eye)
def _eye(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    return (index[0] == index[1]).to(replay.dtype(nodes.dtype(node)))


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
