"""The region of a site: as data for a picture, before the rewrite and after it, and as a separate graph that can be run
alone, for scripts that reproduce one attention and for `verify`.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fusion.torch_private.tracing import user_name, user_path

from . import marks, nodes
from .pullback.contractions import is_contraction
from .recognize.ancestors import LINEAR
from .recognize.core import is_sdpa
from .recognize.find import Site
from .specify.specify import AttentionCall

_DRAWN = (torch.Tensor, tuple, list)
LIMIT = 48
"""Nodes in a picture. A region with more (masks made in many steps) shows those nearest to the product with V."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcerptNode:
    """One box. text: its operation. role: "input" (stays in the graph), "product", "step", "blame" (stopped the
    analysis) or "fused"."""

    name: str
    text: str
    shape: str
    role: str
    parents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Boxes in topological order; `left_out` counts those beyond the limit."""

    nodes: tuple[ExcerptNode, ...]
    left_out: int = 0


def before(site: Site) -> Excerpt:
    """The region of a site, as the analysis walked it, and the tensors that it starts from. Call before the rewrite."""
    region = inside(site)
    ordered = sorted(region)  # topological
    last = set(ordered[-LIMIT:])
    inputs = {parent for node in last for parent in node.all_input_nodes} - last
    boxes = [_box(node, "input", ()) for node in sorted(inputs) if isinstance(nodes.fake(node), _DRAWN)]
    shown = {box.name for box in boxes} | {node.name for node in last}
    for node in ordered[-LIMIT:]:
        role = "blame" if node is site.blame else "product" if _is_product(node) else "step"
        boxes.append(_box(node, role, tuple(p.name for p in node.all_input_nodes if p.name in shown)))
    return Excerpt(nodes=tuple(boxes), left_out=len(region) - len(last))


def after(site: Excerpt, parts: Sequence[AttentionCall]) -> Excerpt:
    """Calls that replace a fused region."""
    known, root = {box.name: box for box in site.nodes}, site.nodes[-1]
    boxes: dict[str, ExcerptNode] = {}
    calls = []
    for number, part in enumerate(parts):
        parents = []
        for node in dict.fromkeys(part.operands):
            boxes.setdefault(node.name, known.get(node.name) or _box(node, "input", ()))
            parents.append(node.name)
        call = ExcerptNode(name=f"attention{number or ''}", text="fusion::attention", shape=root.shape, role="fused")
        calls.append(replace(call, parents=tuple(parents)))
    if len(calls) > 1:
        total = tuple(call.name for call in calls)
        calls.append(ExcerptNode(name="sum", text="aten::add", shape=root.shape, role="step", parents=total))
    return Excerpt(nodes=(*(replace(box, role="input", parents=()) for box in boxes.values()), *calls))


def inside(site: Site) -> set[Node]:
    """Nodes of a site's region; of a refused site also those above its product that a person would include."""
    region = {*site.interior, *site.tail()}
    if site.refusal is not None:  # the walk ended early: show what a person would call the attention
        region |= _upstream(site.anchor)
        if site.blame is not None and site.blame.op == "call_function":
            region.add(site.blame)
    return {node for node in region if node.op == "call_function" and isinstance(nodes.fake(node), _DRAWN)}


def _upstream(anchor: Node) -> set[Node]:
    """All nodes above a product, up to and including the products before it."""
    seen: set[Node] = set()
    stack = list(anchor.all_input_nodes)
    while stack and len(seen) < LIMIT:
        node = stack.pop(0)
        if node in seen or node.op != "call_function" or not nodes.is_tensor(node):
            continue
        seen.add(node)
        if not _is_product(node):
            stack.extend(node.all_input_nodes)
    return seen


def _is_product(node: Node) -> bool:
    return is_contraction(node) or is_sdpa(node) or nodes.packet(node) in LINEAR


def _box(node: Node, role: str, parents: tuple[str, ...]) -> ExcerptNode:
    fake, shape, text = nodes.fake(node), "", node.op
    if isinstance(fake, torch.Tensor):
        shape = f"{str(fake.dtype).removeprefix('torch.')}[{', '.join(map(str, fake.shape))}]"
    if (packet := nodes.packet(node)) is not None:
        text = str(packet).replace(".", "::")
    elif node.op == "placeholder":
        text = user_path(node) or node.name
    elif node.op == "call_function":
        text = getattr(node.target, "__name__", str(node.target))
    return ExcerptNode(name=node.name, text=text, shape=shape, role=role, parents=parents)


def name_in_code(node: Node) -> str:
    """Path of a tensor in the user's code (`self.bias`), else the operation that makes it."""
    if (path := user_path(node)) or node.op != "call_function":
        return path or node.name
    return str(getattr(nodes.packet(nodes.producer(node)), "__name__", node.name)).strip("_")


_TAKEN = ("torch", "float16", "bfloat16", "float32")
"""Names that a script has for something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOut:
    """Region of a site as a module. module: returns the value of the site's root. inputs: the nodes that its
    placeholders stand for."""

    module: GraphModule
    inputs: tuple[Node, ...]


def cut_out(site: Site) -> CutOut | None:
    """Region of a recognised site, equal for equal sites; None where it draws random numbers. Call before the
    rewrite."""
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
        placeholder.target = (
            placeholder.name
        )  # as the argument is called: `sum`, `and` and the like are not free for one
        seen[name] += 1
    for node in sorted(region):  # topological
        args, kwargs = (map_arg(arguments, copies.__getitem__) for arguments in (node.args, node.kwargs))
        copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        if marks.stop_gradient(node):
            copies[node] = graph.call_function(torch.ops.aten.detach.default, (copies[node],))
    graph.output(copies[site.root])
    return CutOut(module=GraphModule({}, graph), inputs=tuple(inputs))


def _feeding(root: Node, inside: set[Node]) -> set[Node]:
    """Nodes of `inside` on a path to `root` within `inside`, without items of tuples that are computed outside of
    it."""
    eligible = {node for node in inside if node.target is not operator.getitem or node.args[0] in inside}
    return {*nodes.walk_up([root], lambda node: eligible.intersection(node.all_input_nodes))}
