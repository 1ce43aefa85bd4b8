"""Automatic mixed precision: the casts that autocast would make, written into the graph.

Pre-dispatch graphs stand above autocast: `matmul(q, k)` of float32 tensors is recorded as such although its result is
bfloat16. Ambient regions (`with torch.autocast(...)` around the compiled function) are not in the graph at all. A fused
region replaces operations that autocast knows by one that it does not, so it must contain autocast's casts. Casting an
operation's arguments beforehand changes nothing else: autocast then has nothing left to do.

Casts of expanded tensors: the cast of an expanded view is the view of the cast. K is often repeated for the query heads
in float32 (its rotary factors are), and cast where it is multiplied. Read there, it has an element for every query
head. The cast goes before the expansion: fewer elements are rounded, each as before, and the heads that share keys are
seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusion.torch_private import operators
from fusion.torch_private.tensors import statically_known_true

from .. import marks, nodes
from ..building import derived
from ..nodes import packet
from ..pullback.contractions import is_contraction
from ..pullback.views import CASTS, EXPANSIONS, is_view
from .retrace import regions

aten = torch.ops.aten
_NARROWED = (torch.float32, torch.bfloat16, torch.float16)
States = dict[str, bool]


def write_casts(graph: Graph) -> None:
    """Insert `aten.to` before operations whose arguments autocast casts, where the result shows that it did."""
    casts_made: dict[tuple[Node, torch.dtype], Node] = {}
    ambient = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    for node, around in regions(graph):
        if node.target in (operators.enter_autocast, operators.leave_autocast):
            casts_made.clear()
        elif (dtype := _autocast_dtype(node, ambient | {str(r[0]): bool(r[2]) for r in around})) is not None:
            _cast_arguments(graph, node, dtype, casts_made)


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


def _cast_arguments(
    graph: Graph, node: Node, dtype: torch.dtype, casts_made: dict[tuple[Node, torch.dtype], Node]
) -> None:
    def cast(value: Any) -> Any:
        if not isinstance(value, Node) or not nodes.is_tensor(value):
            return value
        current = nodes.dtype(value)
        if current is dtype or current not in _NARROWED:
            return value
        if (value, dtype) not in casts_made:
            with graph.inserting_before(node):
                converted = graph.call_function(aten.to.dtype, (value, dtype))
            converted.meta["val"] = nodes.fake(value).to(dtype)
            nodes.copy_provenance(node, converted)
            casts_made[value, dtype] = converted
        return casts_made[value, dtype]

    node.args = torch.fx.map_arg(node.args, cast)
    node.kwargs = torch.fx.map_arg(node.kwargs, cast)


_REPEATS = (*EXPANSIONS, aten.repeat, aten.repeat_interleave, aten.tile)
_TRANSPOSES = (aten.transpose, aten.permute, aten.t, aten.mT, aten.unsqueeze)


def cast_before_expansions(graph: Graph) -> None:
    """Move casts between floating-point dtypes before the expansions of their input."""
    for node in graph.nodes:
        if packet(node) in CASTS and (views := _views(node)):
            _move(graph, node, views)
    nodes.erase_unused(graph, nodes.impurity())


def _views(cast: Node) -> list[Node]:
    """Views between an expansion and a cast of floating-point numbers, the expansion first; none where there is no
    expansion or a value changes."""
    origin, views, expanded = cast.all_input_nodes[0], [], 0
    if not nodes.is_tensor(origin) or not all(nodes.dtype(n).is_floating_point for n in (origin, cast)):
        return []
    if nodes.dtype(origin) is nodes.dtype(cast) or nodes.fake(origin).device != nodes.fake(cast).device:
        return []
    while _moves_elements(origin):
        views.append(origin)
        expanded = len(views) if packet(origin) in _REPEATS else expanded
        origin = origin.all_input_nodes[0]
    return views[:expanded][::-1]


def _moves_elements(node: Node) -> bool:
    """Whether the elements of a node are those of its one input, and no later write changes them."""
    if node.op != "call_function" or not is_view(node) or packet(node) in CASTS or not nodes.is_tensor(node):
        return False
    inputs = [n for n in node.all_input_nodes if nodes.is_tensor(n)]
    if len(inputs) != 1 or inputs[0] is not node.all_input_nodes[0] or nodes.dtype(inputs[0]) != nodes.dtype(node):
        return False
    return not any(marks.mutations(n) or marks.stop_gradient(n) for n in (node, *inputs))


def _move(graph: Graph, cast: Node, views: list[Node]) -> None:
    origin = views[0].all_input_nodes[0]
    with graph.inserting_before(cast):
        moved = derived(graph, cast, aten.to.dtype, (origin, nodes.dtype(cast)))
        marks.requires_grad.set(moved, marks.requires_grad(cast))
        for view in views:
            source, last = view.all_input_nodes[0], moved
            moved = graph.node_copy(view, lambda n, source=source, last=last: last if n is source else n)
            args, kwargs = map_arg((moved.args, moved.kwargs), nodes.fake)
            call: Any = view.target
            moved.meta["val"] = call(*args, **kwargs)
    strides = zip(nodes.fake(cast).stride(), nodes.fake(moved).stride(), strict=True)
    if all(statically_known_true(a == b) for a, b in strides) or _only_multiplied(cast):
        cast.replace_all_uses_with(moved)


def _only_multiplied(node: Node) -> bool:
    """Whether a tensor is read by products alone, which take any strides."""
    products = (user for user in node.users if packet(user) not in _TRANSPOSES or not _only_multiplied(user))
    return bool(node.users) and all(
        is_contraction(user) or packet(user) is aten.scaled_dot_product_attention for user in products
    )
