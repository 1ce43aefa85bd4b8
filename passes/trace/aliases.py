"""Tensors that share memory, and marks on those that are changed in place."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.fx import Node

from fusion.torch_private.operators import OpOverload, schema
from fusion.torch_private.tensors import tree_leaves

from .. import marks, nodes

aten = torch.ops.aten
MAYBE_ALIAS = (aten.reshape, aten.contiguous, aten.to, aten.flatten, aten.type_as)
"""Operations that return their input where they can and copy it where they must."""


def _shared(node: Node) -> list[Node]:
    """The inputs whose memory a node may share."""
    target, inputs = node.target, node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return []
    if marks.aliases.on(node):
        return list(marks.aliases(node))
    if not isinstance(target, OpOverload):
        return inputs  # getitem and the like: assume it aliases
    kind = nodes.packet(node)
    if kind in (aten.to, aten._to_copy) and nodes.dtype(node) is not nodes.dtype(inputs[0]):
        return []  # another dtype: a copy
    return inputs[:1] if _returns_alias(target) or kind in MAYBE_ALIAS else []


@functools.lru_cache(maxsize=1024)
def _returns_alias(target: OpOverload) -> bool:
    return any(r.alias_info is not None for r in schema(target).returns)


def may_copy(node: Node) -> bool:
    """Whether a node may allocate memory: a clone, or a reshape of a tensor whose layout does not allow a view."""
    target = node.target
    views = isinstance(target, OpOverload) and _returns_alias(target)
    return not views or nodes.packet(node) in MAYBE_ALIAS


def family_of(node: Node) -> set[Node]:
    """Every node that may share memory with this one."""
    family, stack = {node}, [node]
    while stack:
        member = stack.pop()
        near = {*_shared(member), *(user for user in member.users if member in _shared(user))} - family
        family |= near
        stack += near
    return family


def mark_mutations(graph: torch.fx.Graph) -> None:
    """Set `marks.mutations`: the nodes that still change a node's memory in place. The analysis must not replace such a
    tensor by its producer, nor move a read of it across a change."""
    for node in filter(nodes.writes, graph.nodes):
        written = [
            node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            for k, argument in enumerate(schema(node.target).arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for target in tree_leaves(written):
            if isinstance(target, Node):
                for member in family_of(target) | {node}:
                    marks.mutations.set(member, (*marks.mutations(member), node))


def changes(passed: Iterable[Node], anchor: Node | None) -> bool:
    """Whether an input of these nodes changes between them and the product with V: then their values must be loaded."""
    read = ((node, parent) for node in passed for parent in node.all_input_nodes)
    later = (by for node, parent in read for by in marks.mutations(parent) if node < by)
    return any(anchor is None or by < anchor for by in later)
