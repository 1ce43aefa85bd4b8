"""In-place operations: made functional where nobody else sees the memory, and marked where they stay.

`scores.masked_fill_(mask, -inf)` and `scores[..., :4] = -inf` on a fresh product are the usual cases. Anything that
could be seen through an alias (an input, a view that is used later) stays in place: the analysis then sees an operation
that it does not know.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from fusion.passes import marks, nodes

aten = torch.ops.aten


def write_to_the_whole(graph: torch.fx.Graph) -> None:
    """Write to tensors themselves in the place of slices of all of them, which `x[:, :, mask] = 0` makes."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or nodes.packet(node) is not aten.slice:
            continue
        args = nodes.arguments(node)
        whole = args["start"] in (None, 0) and args["end"] in (None, 2**63 - 1) and args["step"] == 1
        if whole and node.users and all(_out_of_place(u) is not None and u.args[0] is node for u in node.users):
            node.replace_all_uses_with(args["self"])
            graph.erase_node(node)


def make_functional(graph: torch.fx.Graph) -> None:
    """Replace in-place operations on tensors that this graph made and nobody else sees by out-of-place ones.

    A write to a part of a tensor (slices, selected rows) becomes the part's new value, scattered into the tensor's;
    one through a view, the tensor's new value in the view's shape.
    """
    position: dict[Node, float] = {node: k for k, node in enumerate(graph.nodes)}
    recorded: dict[Any, bool] = {}
    for node, enabled in nodes.with_gradients(graph):
        recorded[node] = enabled
        function = _out_of_place(node)
        if function is None or not isinstance(node.args[0], Node) or nodes.shape(node) != nodes.shape(node.args[0]):
            continue
        computed_in = _promoted(node, node.args[0])
        if computed_in is not nodes.dtype(node) and not (node.target in _ROUNDING and computed_in.is_floating_point):
            continue
        parts = _parts(node.args[0])
        target = parts[-1].args[0] if parts else node.args[0]
        if recorded[target] and not enabled:  # its gradient passes by the write
            continue
        family = _aliases(target)  # type: ignore[arg-type]
        if family is None or not _only_through(target, node, family, position):  # type: ignore[arg-type]
            continue
        later = [user for user in target.users if user is not node and position[user] > position[node]]  # type: ignore[union-attr]
        node.target = function
        whole = _scattered(_rounded(node, computed_in, position), parts, position)
        recorded[whole] = enabled
        for user in later:
            user.replace_input_with(target, whole)  # type: ignore[arg-type]


_SCATTER = {aten.slice: aten.slice_scatter.default, aten.select: aten.select_scatter.default}
_RESHAPES = (aten.view, aten.unflatten, aten.unsqueeze, aten.view_as)
"""Views of all elements, in their order."""
_ROUNDING = (aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor)
"""In-place operations that compute in the wider dtype of their operands, and round to that of the first."""


def _parts(target: Node) -> list[Node]:
    """The slices, selections and reshapes that lead to what is written, the last one first."""
    parts = []
    while target.op == "call_function" and nodes.packet(target) in {*_SCATTER, *_RESHAPES}:
        if not isinstance(origin := target.args[0], Node) or nodes.dtype(origin) is not nodes.dtype(target):
            break
        parts.append(target)
        target = origin
    return parts


def _rounded(node: Node, computed_in: torch.dtype, position: dict[Node, float]) -> Node:
    """The result of an operation that has become functional, in the dtype of its first operand."""
    held = nodes.value(node)
    if computed_in is held.dtype:
        return node
    with node.graph.inserting_after(node):
        made = node.graph.call_function(aten.to.dtype, (node, held.dtype))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    with torch.no_grad():
        node.meta["val"] = held.to(computed_in)
    position[made] = position[node] + 2**-21
    return made


def _scattered(value: Node, parts: list[Node], position: dict[Node, float]) -> Node:
    """The whole tensor after `value` took the place of the part of it that `parts` lead to."""
    for part in parts:
        origin, scatter = part.args[0], _SCATTER.get(nodes.packet(part))
        with value.graph.inserting_after(value):
            if scatter is None:
                made = value.graph.call_function(aten.reshape_as.default, (value, origin))
            else:
                made = value.graph.call_function(scatter, (origin, value, *part.args[1:]), part.kwargs)
        made.meta = {**value.meta, "val": nodes.value(origin)}  # type: ignore[arg-type]
        position[made] = position[value] + 2**-20
        value = made
    return value


def _out_of_place(node: Node) -> Any | None:
    """The functional overload of an in-place one (`aten.add_.Tensor` -> `aten.add.Tensor`)."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or node.kwargs.get("out"):
        return None
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.startswith("_") or not target._schema.is_mutable:
        return None
    functional = getattr(aten, name[:-1], None)
    return getattr(functional, target._overloadname, None) if functional is not None else None


def _promoted(node: Node, target: Node) -> torch.dtype:
    """The dtype that an operation computes in. In place, the result is cast to the target's. Positions that are written
    at are no values."""
    positions = nodes.arguments(node).get("index")
    dtype = nodes.dtype(target)
    for other in (a for a in node.args[1:] if nodes.is_tensor(a) and a is not positions):
        held = nodes.value(other)
        if held.dim() > 0 and held.dtype is not torch.bool:
            dtype = torch.promote_types(dtype, held.dtype)
    return dtype


MAYBE_ALIAS = (aten.reshape, aten.contiguous, aten.to, aten.flatten, aten.type_as)
"""Operations that return their input where they can and copy it where they must."""


def _is_view(node: Node) -> bool:
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # getitem and the like: assume it aliases
    if _converts(target) and nodes.dtype(node) is not nodes.dtype(node.all_input_nodes[0]):
        return False  # another dtype: a copy
    return _returns_alias(target) or _may_alias(target)


@functools.cache
def _converts(target: torch._ops.OpOverload) -> bool:
    return target.overloadpacket in (aten.to, aten._to_copy)


@functools.cache
def _may_alias(target: torch._ops.OpOverload) -> bool:
    return target.overloadpacket in MAYBE_ALIAS


@functools.cache
def _returns_alias(target: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None for r in target._schema.returns)


def may_copy(node: Node) -> bool:
    """Whether a node may have memory of its own: a clone, or a reshape of what is not laid out for it."""
    target = node.target
    views = isinstance(target, torch._ops.OpOverload) and _returns_alias(target)
    return not views or nodes.packet(node) in MAYBE_ALIAS


def _family(node: Node) -> set[Node]:
    """Every node that may share memory with this one."""
    root = node
    while _is_view(root) and root.all_input_nodes:
        root = root.all_input_nodes[0]
    family, stack = {root}, [root]
    while stack:
        for user in stack.pop().users:
            if user not in family and _is_view(user) and user.all_input_nodes[0] in family:
                family.add(user)
                stack.append(user)
    return family


def _aliases(node: Node) -> set[Node] | None:
    """Every node that may share memory with this one; None if that memory comes from outside the graph."""
    family = _family(node)
    return None if any(member.op != "call_function" for member in family) else family


def mark_mutations(graph: torch.fx.Graph) -> None:
    """meta["mutations"]: the nodes that change this node's memory in place, for those that are left.

    The analysis must not take such a tensor for what made it, nor move a read of it across a change.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        if not schema.is_mutable:
            continue
        written = [
            node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            for k, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for target in torch.utils._pytree.tree_leaves(written):
            if isinstance(target, Node):
                for member in _family(target) | {node}:
                    marks.mutations.set(member, (*marks.mutations(member), node))


def _only_through(target: Node, write: Node, family: set[Node], position: dict[Node, int]) -> bool:
    """Whether after the write the memory is read through `target`, the write's result and views made later only."""
    own = {target, write}
    for node in sorted(family, key=position.__getitem__):
        if node in own or any(parent in own and position[node] > position[write] for parent in node.all_input_nodes):
            own.add(node)
            continue
        if any(position[user] > position[write] for user in node.users):
            return False
    return True
