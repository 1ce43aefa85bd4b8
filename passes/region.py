"""The region of a site, and as a separate graph that can be run alone, for scripts that reproduce one attention and for
`verify`."""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fusion.torch_private.tracing import user_name

from . import marks, nodes
from .pullback.contractions import is_contraction
from .recognize.ancestors import LINEAR
from .recognize.find import Site
from .recognize.sdpa import is_sdpa

DRAWN = (torch.Tensor, tuple, list)
LIMIT = 48
"""Nodes in a picture. A region with more (masks made in many steps) shows those nearest to the product with V."""


def inside(site: Site) -> set[Node]:
    """Nodes of a site's region; of a refused site also those above its product that a person would include."""
    region = {*site.interior, *site.tail()}
    if site.refusal is not None:  # the walk ended early: show what a person would call the attention
        region |= _upstream(site.anchor)
        if site.blame is not None and site.blame.op == "call_function":
            region.add(site.blame)
    return {node for node in region if node.op == "call_function" and isinstance(nodes.fake(node), DRAWN)}


def _upstream(anchor: Node) -> set[Node]:
    """All nodes above a product, up to and including the products before it."""
    seen: set[Node] = set()
    stack = list(anchor.all_input_nodes)
    while stack and len(seen) < LIMIT:
        node = stack.pop(0)
        if node in seen or node.op != "call_function" or not nodes.is_tensor(node):
            continue
        seen.add(node)
        if not is_product(node):
            stack.extend(node.all_input_nodes)
    return seen


def is_product(node: Node) -> bool:
    return is_contraction(node) or is_sdpa(node) or nodes.packet(node) in LINEAR


_TAKEN = ("torch", "float16", "bfloat16", "float32")
"""Names that a script has for something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOut:
    """Region of a site as a module. module: returns the value of the site's root. inputs: the nodes that its
    placeholders stand for."""

    module: GraphModule
    inputs: tuple[Node, ...]


def cut_out(site: Site) -> CutOut | None:
    """Region of a recognised site, equal for equal sites; None if it draws random numbers. Call before the rewrite."""
    region = _feeding(site.root, inside(site))
    if any(nodes.is_active_dropout(node) for node in region):
        return None
    inputs = sorted({parent for node in region for parent in node.all_input_nodes} - region)
    graph = Graph()
    copies: dict[Node, Node] = {}
    seen: Counter[str] = Counter()
    for node in inputs:
        name = user_name(node)
        if not name.isidentifier() or name in _TAKEN:
            name = re.sub(r"_?\d+", "", node.name)
        copies[node] = placeholder = graph.placeholder(f"{name}_{seen[name]}" if seen[name] else name)
        placeholder.target = placeholder.name  # of the argument: `sum`, `and` and the like are not free for one
        seen[name] += 1
    for node in sorted(region):  # topological
        args, kwargs = (map_arg(arguments, copies.__getitem__) for arguments in (node.args, node.kwargs))
        copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        if marks.stop_gradient(node):
            copies[node] = graph.call_function(torch.ops.aten.detach.default, (copies[node],))
    graph.output(copies[site.root])
    return CutOut(module=GraphModule({}, graph), inputs=tuple(inputs))


def _feeding(root: Node, inside: set[Node]) -> set[Node]:
    """Nodes of `inside` on a path to `root` within `inside`, without items of tuples computed outside of it."""
    eligible = {node for node in inside if node.target is not operator.getitem or node.args[0] in inside}
    return {*nodes.walk_up([root], lambda node: eligible.intersection(node.all_input_nodes))}
