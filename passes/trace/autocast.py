"""Automatic mixed precision: the casts that autocast would make, written into the graph.

Pre-dispatch graphs stand above autocast: `matmul(q, k)` of float32 tensors is recorded as such although its result is
bfloat16. Ambient regions (`with torch.autocast(...)` around the compiled function) are not in the graph at all. A fused
region replaces operations that autocast knows by one that it does not, so it must contain autocast's casts. Casting an
operation's arguments beforehand changes nothing else: autocast then has nothing left to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.torch_private import operators

from .. import nodes

aten = torch.ops.aten
enter, leave = operators.enter_autocast, operators.leave_autocast
_NARROWED = (torch.float32, torch.bfloat16, torch.float16)
States = dict[str, bool]
Regions = tuple[tuple[Any, ...], ...]
"""The arguments of regions of autocast, the outermost first: (device, dtype, enabled, whether casts are kept)."""


def write_casts(graph: Graph) -> None:
    """Insert `aten.to` before operations whose arguments autocast casts, where the result shows that it did."""
    casts_made: dict[tuple[Node, torch.dtype], Node] = {}
    ambient = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    for node, around in regions(graph):
        if node.target in (enter, leave):
            casts_made.clear()
        elif (dtype := _autocast_dtype(node, ambient | {str(r[0]): bool(r[2]) for r in around})) is not None:
            _cast_arguments(graph, node, dtype, casts_made)


def regions(graph: Graph) -> Iterator[tuple[Node, Regions]]:
    """Pairs of a node and the regions that it is in."""
    around: dict[Node, tuple[Any, ...]] = {}
    for node in list(graph.nodes):
        yield node, tuple(around.values())
        if node.target is enter:
            around[node] = (*node.args, *node.kwargs.values())
        elif node.target is leave:
            around.pop(node.all_input_nodes[0])


@contextlib.contextmanager
def inside(around: Regions) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for region in around:
            stack.enter_context(torch.amp.autocast_mode.autocast(*region))
        yield


def _autocast_dtype(node: Node, states: States) -> torch.dtype | None:
    """The dtype that autocast computes this operation in, or None where it changes nothing."""
    fake = nodes.fake(node)
    if not isinstance(node.target, operators.OpOverload) or nodes.writes(node) or not isinstance(fake, torch.Tensor):
        return None
    if not states.get(fake.device.type) or fake.dtype not in _NARROWED:
        return None
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[fake.device.type]
    ruled = operators.has_kernel(node.target, key)
    return fake.dtype if ruled or nodes.packet(node) is aten.einsum else None


def _cast_arguments(graph: Graph, node: Node, dtype: torch.dtype, made: dict[tuple[Node, torch.dtype], Node]) -> None:
    def cast(value: Any) -> Any:
        if not isinstance(value, Node) or not nodes.is_tensor(value):
            return value
        current = nodes.dtype(value)
        if current is dtype or current not in _NARROWED:
            return value
        if (value, dtype) not in made:
            with graph.inserting_before(node):
                converted = graph.call_function(aten.to.dtype, (value, dtype))
            converted.meta["val"] = nodes.fake(value).to(dtype)
            nodes.copy_provenance(node, converted)
            made[value, dtype] = converted
        return made[value, dtype]

    node.args = torch.fx.map_arg(node.args, cast)
    node.kwargs = torch.fx.map_arg(node.kwargs, cast)
