"""Automatic mixed precision: the casts that autocast would make, written into the graph.

Pre-dispatch graphs stand above autocast: `matmul(q, k)` of float32 tensors is recorded as such although its result is
bfloat16. Ambient regions (`with torch.autocast(...)` around the compiled function) are not in the graph at all. A fused
region replaces operations that autocast knows by one that it does not, so it must see, and take over, what autocast
would have cast. Casting an operation's arguments beforehand changes nothing else: autocast then finds what it wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.passes import nodes

aten = torch.ops.aten
enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
States = dict[str, bool]


def write_casts(graph: Graph) -> None:
    """Insert `aten.to` in front of every operation whose arguments autocast would cast, where the result shows that
    it did."""
    made: dict[tuple[Node, torch.dtype], Node] = {}
    ambient = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    for node, open_ in regions(graph):
        if node.target in (enter, leave):
            made.clear()
        elif (dtype := _autocast_dtype(node, ambient | {str(r[0]): bool(r[2]) for r in open_})) is not None:
            _cast_arguments(graph, node, dtype, made)


def regions(graph: Graph) -> Iterator[tuple[Node, tuple[tuple[Any, ...], ...]]]:
    """Every node, with the arguments of the regions of autocast that are open there: (device, dtype, enabled, ..)."""
    stack: list[tuple[Any, ...]] = []
    for node in list(graph.nodes):
        if node.target is enter:
            stack.append((*node.args, *node.kwargs.values()))
        elif node.target is leave:
            stack.pop()
        yield node, tuple(stack)


def _autocast_dtype(node: Node, states: States) -> torch.dtype | None:
    """The dtype that autocast computes this operation in, or None where it changes nothing."""
    held = nodes.value(node)
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or node.target._schema.is_mutable
        or not isinstance(held, torch.Tensor)
    ):
        return None
    if not states.get(held.device.type) or held.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[held.device.type]
    ruled = torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), key)
    return held.dtype if ruled or nodes.packet(node) is aten.einsum else None


def _cast_arguments(graph: Graph, node: Node, dtype: torch.dtype, made: dict[tuple[Node, torch.dtype], Node]) -> None:
    def cast(value: Any) -> Any:
        if not isinstance(value, Node) or not nodes.is_tensor(value):
            return value
        given = nodes.dtype(value)
        if given is dtype or given not in (torch.float32, torch.bfloat16, torch.float16):
            return value
        if (value, dtype) not in made:
            with graph.inserting_before(node):
                converted = graph.call_function(aten.to.dtype, (value, dtype))
            converted.meta["val"] = nodes.value(value).to(dtype)
            nodes.copy_provenance(node, converted)
            made[value, dtype] = converted
        return made[value, dtype]

    node.args = torch.fx.map_arg(node.args, cast)
    node.kwargs = torch.fx.map_arg(node.kwargs, cast)
