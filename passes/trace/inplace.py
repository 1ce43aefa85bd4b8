"""In-place operations, made functional where the memory has no other reader.

`scores.masked_fill_(mask, -inf)` and `scores[..., :4] = -inf` on a fresh product are the usual cases. A write that
could be seen through an alias (an input, a view that is used later) stays in place: the analysis then sees an operation
that it does not know (`aliases`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from fusion.torch_private.operators import OpOverload, schema
from fusion.torch_private.tensors import enable_python_dispatcher

from .. import nodes
from .aliases import family_of

aten = torch.ops.aten


def write_to_the_whole(graph: torch.fx.Graph) -> None:
    """Replace writes to slices that cover all of a tensor, which `x[:, :, mask] = 0` makes, by writes to the tensor."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or nodes.packet(node) is not aten.slice:
            continue
        args = nodes.arguments(node)
        covers_all = args["start"] in (None, 0) and args["end"] in (None, 2**63 - 1) and args["step"] == 1
        if covers_all and node.users and all(_out_of_place(u) is not None and u.args[0] is node for u in node.users):
            node.replace_all_uses_with(args["self"])
            graph.erase_node(node)


def make_functional(graph: torch.fx.Graph) -> None:
    """Replace in-place operations on tensors that this graph created, without other readers, by out-of-place ones. A
    write to a part of a tensor (slices, selected rows) becomes the part's new value, scattered into the tensor's; one
    through a view, the tensor's new value in the view's shape."""
    position: dict[Node, float] = {node: k for k, node in enumerate(graph.nodes)}
    recorded: dict[Any, bool] = {}
    for node, enabled in nodes.with_gradients(graph):
        recorded[node] = enabled
        if (function := _out_of_place(node)) is None or not isinstance(node.args[0], Node):
            continue
        parts = _parts(node.args[0])
        target: Any = parts[-1].args[0] if parts else node.args[0]
        if recorded[target] and not enabled:  # its gradient passes by the write
            continue
        family = family_of(target)
        is_outside = any(member.op != "call_function" for member in family)  # memory that comes from outside the graph
        if is_outside or not _only_through(target, node, family, position):
            continue
        if (computed := _computed(node, function, bool(parts))) is None:
            continue
        later = [user for user in target.users if user is not node and position[user] > position[node]]
        value = _rounded(node, computed, position)
        results = [user for user in value.users if user not in parts]
        new_tensor = _scattered(value, parts, position)
        recorded[new_tensor] = enabled
        for user in later:
            user.replace_input_with(target, new_tensor)
        if parts and results:
            part = _part(new_tensor, parts, position)
            recorded[part] = enabled
            for user in results:
                user.replace_input_with(value, part)


_SCATTER = {aten.slice: aten.slice_scatter.default, aten.select: aten.select_scatter.default,
            aten.diagonal: aten.diagonal_scatter.default}  # fmt: skip
_RESHAPES = (aten.view, aten.unflatten, aten.unsqueeze, aten.view_as)
"""Views of all elements, in their order."""
_EMPTY = (aten.empty_like, aten.new_empty, aten.zeros_like, aten.new_zeros, aten.ones_like, aten.new_ones)
"""Tensors without a gradient, though they are made in the shape of others."""
_ROUNDING = (aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor)
"""In-place operations that compute in the wider dtype of their operands, and round to that of the first."""


def _parts(target: Node) -> list[Node]:
    """Slices, selections and reshapes that lead to the written tensor, the last one first."""
    parts = []
    while target.op == "call_function" and nodes.packet(target) in {*_SCATTER, *_RESHAPES}:
        if not isinstance(origin := target.args[0], Node) or nodes.dtype(origin) is not nodes.dtype(target):
            break
        parts.append(target)
        target = origin
    return parts


@functools.lru_cache(maxsize=1024)
def _functional(target: OpOverload) -> OpOverload | None:
    """The functional overload with the arguments of an in-place one: `aten.add_.Tensor` -> `aten.add.Tensor`."""
    name = schema(target).name.removeprefix("aten::")
    if not name.endswith("_") or name.startswith("_") or not schema(target).is_mutable:
        return None
    if (packet := getattr(aten, name[:-1], None)) is None:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return next((found for found in overloads if _takes(found) == _takes(target)), None)


def _takes(overload: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema(overload).arguments]


def _out_of_place(node: Node) -> OpOverload | None:
    """The functional overload of an in-place operation."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    return _functional(node.target)


def _computed(node: Node, function: OpOverload, of_part: bool) -> torch.Tensor | None:
    """Make a write functional; returns its value, in a dtype that may have to be rounded still. None, without a change,
    where the written value is another one.

    of_part: whether the value is scattered into another tensor, so that its layout does not matter.
    """
    args, kwargs = node.args, node.kwargs
    if nodes.shape(args[0]) != nodes.shape(node):  # type: ignore[arg-type]  # squeeze_ and the like
        return None
    if function is aten.copy.default:  # which has no derivative
        source = args[1]
        if not nodes.is_tensor(source) or nodes.shape(source) != nodes.shape(node):  # type: ignore[arg-type]
            return None
        same = nodes.dtype(source) is nodes.dtype(node)  # type: ignore[arg-type]
        function, kwargs = (aten.clone.default, {}) if same else (aten.to.dtype, {"dtype": nodes.dtype(node)})
        args = (source,)
        if not of_part and node.args[0].all_input_nodes and nodes.packet(node.args[0]) not in _EMPTY:  # type: ignore
            if not (same and nodes.shape(node)):
                return None
            function, args = aten.slice_scatter.default, (node.args[0], source)  # its gradient is zero then, not None
    written = nodes.fake(node)
    try:
        with torch.no_grad(), enable_python_dispatcher():
            fake = function(*torch.fx.node.map_arg(args, nodes.fake), **torch.fx.node.map_arg(kwargs, nodes.fake))
    except (RuntimeError, TypeError):
        return None
    rounds = node.target in _ROUNDING and fake.is_floating_point()
    if fake.shape != written.shape or (fake.dtype is not written.dtype and not rounds):
        return None
    if node.target is aten.copy_.default and not of_part and fake.stride() != written.stride():
        return None
    node.target, node.args, node.kwargs = function, args, kwargs
    return fake


def _rounded(node: Node, computed: torch.Tensor, position: dict[Node, float]) -> Node:
    """Result of an operation that became functional, in the dtype of the tensor that it wrote to."""
    written = nodes.fake(node)
    if computed.dtype is written.dtype:
        return node
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(aten.to.dtype, (node, written.dtype))
    cast.meta = dict(node.meta)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    node.meta["val"] = computed
    position[cast] = position[node] + 2**-21
    return cast


def _scattered(value: Node, parts: list[Node], position: dict[Node, float]) -> Node:
    """Full tensor after `value` replaced the part of it that `parts` lead to."""
    for part in parts:
        origin, scatter = part.args[0], _SCATTER.get(nodes.packet(part))
        if scatter is None:
            value = _after(value, aten.reshape_as.default, (value, origin), {}, origin, position)
        else:
            value = _after(value, scatter, (origin, value, *part.args[1:]), part.kwargs, origin, position)
    return value


def _part(whole: Node, parts: list[Node], position: dict[Node, float]) -> Node:
    """The part of a tensor that `parts` lead to."""
    for part in reversed(parts):
        whole = _after(whole, part.target, (whole, *part.args[1:]), part.kwargs, part, position)
    return whole


def _after(node: Node, target: Any, args: Any, kwargs: Any, like: Any, position: dict[Node, float]) -> Node:
    """Call right after a node, with the fake value of another."""
    with node.graph.inserting_after(node):
        call = node.graph.call_function(target, args, kwargs)
    call.meta = {**node.meta, "val": nodes.fake(like)}
    position[call] = position[node] + 2**-20
    return call


def _only_through(target: Node, write: Node, family: set[Node], position: dict[Node, float]) -> bool:
    """Whether after the write the memory is read through `target`, the write's result and later views only."""
    own = {target, write}
    for node in sorted(family, key=position.__getitem__):
        if node in own or any(parent in own and position[node] > position[write] for parent in node.all_input_nodes):
            own.add(node)
            continue
        if any(position[user] > position[write] for user in node.users):
            return False
    return True
