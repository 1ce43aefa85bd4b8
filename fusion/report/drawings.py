"""Drawings of the page, as SVG: the mask at the sizes of the example, a region of the graph, and bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import Node

from fusion.ir import AttentionSpec, ops
from fusion.ir.expr import FALSE, TRUE, Expr, I, J, coordinates, walk
from fusion.ir.results import leaves, size_value
from fusion.passes import nodes
from fusion.passes.recognize.find import Site
from fusion.passes.region import DRAWN, LIMIT, inside, is_product
from fusion.planning.counted import load
from fusion.torch_private.tracing import user_path

if TYPE_CHECKING:
    from fusion.report.report import AttentionReport, Report

DEAD, MIXED, FULL, DATA = 0, 1, 2, 3
NAMES = {DEAD: "dead", MIXED: "mixed", FULL: "full", DATA: "decided by data"}
MOST_CELLS = 48
"""Cells along the longer side of a mask; each is a square of scores."""
MOST_SCORES = 1 << 24
"""Scores that are looked at one by one. Of larger masks, evenly spaced rows and columns of every cell."""
_WIDTH, _HEIGHT, _GAP, _LAYER = 168, 38, 14, 26
_CHARACTERS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskMap:
    """The mask of one batch element as squares of `cell` queries by as many keys: cells[r][c] is DEAD, MIXED, FULL or
    DATA (depends on scores, or on tensors whose values are not known). sampled: not every score was looked at. whose:
    which element it is, in words; "" where all have the same mask.
    """

    cells: tuple[tuple[int, ...], ...]
    cell: int
    n_q: int
    n_k: int
    shares: Mapping[int, float]
    sampled: bool
    whose: str


def mask_map(spec: AttentionSpec, sizes: Mapping[str, int], values: Mapping[int, Tensor]) -> MaskMap | None:
    """None where there is no mask or no score. values: of the tensors that the mask reads, as far as they are known."""
    n_q, n_k = size_value(spec.n_q, sizes), size_value(spec.n_k, sizes)
    if spec.mask is None or not n_q or not n_k:
        return None
    cell = 1 << max(0, math.ceil(math.log2(max(n_q, n_k) / MOST_CELLS)))
    sampled = n_q * n_k > MOST_SCORES
    i, j = _positions(n_q, cell, sampled), _positions(n_k, cell, sampled)
    element, whose = _least_live(_decided(spec.mask.live, values, True), spec, sizes, values)
    known = {**element, J: j[None, :]}

    def shares(expr: Expr) -> Tensor:
        """The share of the positions of each cell for which a predicate holds."""
        lines = []
        for rows in i.split((i // cell).unique_consecutive(return_counts=True)[1].tolist()):
            known[I] = rows[:, None]
            live = torch.as_tensor(ops.evaluate(expr, leaves(sizes, known, partial(load, values)))).broadcast_to(
                len(rows), len(j)
            )
            total = torch.zeros(int(j[-1]) // cell + 1, dtype=torch.float64)
            lines.append(total.index_add(0, j // cell, live.double().mean(0)))
        return torch.stack(lines) / torch.bincount(j // cell)

    may, must = (shares(_decided(spec.mask.live, values, optimistic)) for optimistic in (True, False))
    kinds = torch.full_like(may, MIXED, dtype=torch.int64)
    kinds[(may > 1 - 1e-9) & (must < 1 - 1e-9)] = DATA
    kinds[must > 1 - 1e-9] = FULL
    kinds[may == 0] = DEAD
    return MaskMap(
        cells=tuple(map(tuple, kinds.tolist())),
        cell=cell,
        n_q=n_q,
        n_k=n_k,
        shares={kind: float((kinds == kind).double().mean()) for kind in NAMES},
        sampled=sampled,
        whose=whose,
    )


def _least_live(
    live: Expr, spec: AttentionSpec, sizes: Mapping[str, int], values: Mapping[int, Tensor]
) -> tuple[dict[Expr, Tensor], str]:
    """The batch element and head with the fewest live scores, the first of several, by coordinates and in words. live:
    the mask, of which what is not known counts as live."""
    extents = {axis: size_value(extent, sizes) for axis, extent in zip(spec.axes, spec.batch, strict=True)}
    used = [axis for axis in spec.axes if axis.name in coordinates(live) and extents[axis] > 1]
    if not used:
        return dict.fromkeys(extents, torch.tensor(0)), ""
    heads = math.prod(extents[axis] for axis in used)
    grid = torch.unravel_index(torch.arange(heads), [extents[axis] for axis in used])
    most = max(1, math.isqrt(MOST_SCORES // heads))  # evenly spaced rows and keys
    lengths = [size_value(n, sizes) for n in (spec.n_q, spec.n_k)]
    i, j = (torch.arange(0, n, -(-n // most)) for n in lengths)
    known = dict.fromkeys(extents, torch.tensor(0)) | {I: i[:, None], J: j}
    known |= {axis: line[:, None, None] for axis, line in zip(used, grid, strict=True)}
    alive = torch.as_tensor(ops.evaluate(live, leaves(sizes, known, partial(load, values))))
    counts = alive.broadcast_to(heads, len(i), len(j)).sum((1, 2))
    element = {axis: line[counts.argmin()] for axis, line in zip(used, grid, strict=True)}
    whose = ", ".join(f"{axis.name} = {at} (of 0 to {extents[axis] - 1})" for axis, at in element.items())
    about = "about " * (most < max(lengths))
    fewest = f", which has {about}the fewest live scores" if counts.min() < counts.max() else ""
    return dict.fromkeys(extents, torch.tensor(0)) | element, whose + fewest


def _positions(extent: int, cell: int, sampled: bool) -> Tensor:
    every = torch.arange(extent)
    if not sampled:
        return every
    within = every % cell
    return every[(within % max(1, cell // 8) == 0) | (within == cell - 1) | (every == extent - 1)]


def _decided(expr: Expr, values: Mapping[int, Tensor], optimistic: bool) -> Expr:
    """The predicate with what depends on scores and unknown tensors replaced by true (optimistic) or false."""
    unknown = ("score", "row_max", "row_sum", "weight")
    if not any(part.op in unknown or (part.op == "load" and part.operand not in values) for part in walk(expr)):
        return expr
    if expr.op in ("and", "or"):
        return ops.apply(expr.op, *(_decided(arg, values, optimistic) for arg in expr.args))
    if expr.op == "not":
        return ops.apply("not", _decided(expr.args[0], values, not optimistic))
    return TRUE if optimistic else FALSE


def mask_svg(shown: MaskMap) -> str:
    """The map as a drawing: rows are queries from top to bottom, columns keys from left to right."""
    height, width = len(shown.cells), len(shown.cells[0])
    size = max(4, min(18, 360 // max(height, width)))
    parts = []
    for r, row in enumerate(shown.cells):
        c = 0
        for kind, alike in itertools.groupby(row):  # equal neighbours are one rectangle
            count = len(list(alike))
            x, y, w = c * size, r * size, count * size
            parts.append(f'<rect class="m{kind}" x="{x}" y="{y}" width="{w}" height="{size}"/>')
            c += count
    lines = "".join(f"M{c * size} 0V{height * size}" for c in range(width + 1))
    lines += "".join(f"M0 {r * size}H{width * size}" for r in range(height + 1))
    live = 1 - shown.shares[DEAD]
    label = f"Mask of {shown.n_q} queries by {shown.n_k} keys: {live:.0%} of the cells hold live scores"
    return (
        f'<svg class="mask" role="img" aria-label="{label}" width="{width * size + 1}" height="{height * size + 1}" '
        f'viewBox="-.5 -.5 {width * size + 1} {height * size + 1}">{"".join(parts)}'
        f'<path class="grid" d="{lines}"/></svg>'
    )


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


def before(sites: Sequence[Site]) -> list[Excerpt]:
    """The region of each site. Call before the rewrite."""
    return [_before(site) for site in sites]


def add(report: Report, pictures: Sequence[Excerpt]) -> None:
    """Add to a report the regions of its sites before the rewrite, and the calls that replace them."""
    for site, picture in zip(report.sites, pictures, strict=True):
        after = _after(picture, [attention.nodes for attention in site.attentions]) if site.attentions else None
        site.before, site.after = (shown and _renamed(shown, site.attentions) for shown in (picture, after))


def _renamed(shown: Excerpt, attentions: Sequence[AttentionReport]) -> Excerpt:
    """The excerpt with the names of tensors that the program has."""
    taken = {box.name for box in shown.nodes}
    read = [pair for part in attentions for pair in list(zip(part.names.values(), part.nodes, strict=True))[3:]]
    names = {node.name: name for name, node in dict(reversed(read)).items() if name not in taken}
    boxes = []
    for box in shown.nodes:
        text = box.text if "::" in box.text else names.get(box.name, box.text)
        parents = tuple(names.get(parent, parent) for parent in box.parents)
        boxes.append(replace(box, name=names.get(box.name, box.name), text=text, parents=parents))
    return replace(shown, nodes=tuple(boxes))


def _before(site: Site) -> Excerpt:
    """The region of a site, as the analysis walked it, and the tensors that it starts from."""
    region = inside(site)
    ordered = sorted(region)  # topological
    last = set(ordered[-LIMIT:])
    inputs = {parent for node in last for parent in node.all_input_nodes} - last
    boxes = [_box_of(node, "input", ()) for node in sorted(inputs) if isinstance(nodes.fake(node), DRAWN)]
    shown = {box.name for box in boxes} | {node.name for node in last}
    for node in ordered[-LIMIT:]:
        role = "blame" if node is site.blame else "product" if is_product(node) else "step"
        boxes.append(_box_of(node, role, tuple(p.name for p in node.all_input_nodes if p.name in shown)))
    return Excerpt(nodes=tuple(boxes), left_out=len(region) - len(last))


def _after(site: Excerpt, parts: Sequence[Sequence[Node]]) -> Excerpt:
    """Calls that replace a fused region."""
    known, root = {box.name: box for box in site.nodes}, site.nodes[-1]
    boxes: dict[str, ExcerptNode] = {}
    calls = []
    for number, part in enumerate(parts):
        parents = []
        for node in dict.fromkeys(part):
            boxes.setdefault(node.name, known.get(node.name) or _box_of(node, "input", ()))
            parents.append(node.name)
        call = ExcerptNode(name=f"attention{number or ''}", text="fusion::attention", shape=root.shape, role="fused")
        calls.append(replace(call, parents=tuple(parents)))
    if len(calls) > 1:
        total = tuple(call.name for call in calls)
        calls.append(ExcerptNode(name="sum", text="aten::add", shape=root.shape, role="step", parents=total))
    return Excerpt(nodes=(*(replace(box, role="input", parents=()) for box in boxes.values()), *calls))


def _box_of(node: Node, role: str, parents: tuple[str, ...]) -> ExcerptNode:
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


def graph_svg(region: Excerpt, label: str) -> str:
    """The region; `label` is what a screen reader says."""
    layers = _layers(region)
    across = max(len(layer) for layer in layers)
    width = across * (_WIDTH + _GAP)
    height = len(layers) * (_HEIGHT + _LAYER) - _LAYER + 2
    place: dict[str, tuple[float, float]] = {}
    for depth, layer in enumerate(layers):
        left = (width - len(layer) * (_WIDTH + _GAP)) / 2
        for position, box in enumerate(layer):
            place[box.name] = (left + position * (_WIDTH + _GAP) + _GAP / 2, depth * (_HEIGHT + _LAYER) + 1)
    edges = "".join(_edge(place[p], place[box.name]) for box in region.nodes for p in box.parents if p in place)
    boxes = "".join(_box(box, *place[box.name]) for layer in layers for box in layer)
    return (
        f'<svg class="graph" role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><g class="edges">{edges}</g>{boxes}</svg>'
    )


def _layers(region: Excerpt) -> list[list[ExcerptNode]]:
    """Boxes by distance from the end, inputs right above their first user; within a layer below their parents."""
    users: dict[str, list[str]] = {box.name: [] for box in region.nodes}
    for box in region.nodes:
        for parent in box.parents:
            if parent in users:
                users[parent].append(box.name)
    distance: dict[str, int] = {}
    for box in reversed(region.nodes):
        distance[box.name] = max((distance[user] + 1 for user in users[box.name]), default=0)
    depth = max(distance.values())
    layers: list[list[ExcerptNode]] = [[] for _ in range(depth + 1)]
    for box in region.nodes:
        layers[depth - distance[box.name]].append(box)
    order: dict[str, float] = {}
    for layer in reversed(layers):  # children are placed: parents above the middle of them
        layer.sort(key=lambda box: fmean([order[user] for user in users[box.name]] or [0.5]))
        for position, box in enumerate(layer):
            order[box.name] = (position + 0.5) / len(layer)
    return layers


def _edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    x, y = start[0] + _WIDTH / 2, start[1] + _HEIGHT
    to_x, to_y = end[0] + _WIDTH / 2, end[1]
    middle = (y + to_y) / 2
    return f'<path d="M{x:g} {y:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"/>'


def _box(box: ExcerptNode, x: float, y: float) -> str:
    title = f"{box.name}: {box.text} {box.shape}"
    text = box.name if box.role == "input" and "::" in box.text else box.text.removeprefix("aten::")
    return (
        f'<g class="box {box.role}" transform="translate({x:g} {y:g})"><title>{escape(title)}</title>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{_WIDTH // 2}" y="16">{escape(_short(text))}</text>'
        f'<text class="shape" x="{_WIDTH // 2}" y="30">{escape(_short(box.shape))}</text></g>'
    )


def _short(text: str) -> str:
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"


def bars_svg(title: str, entries: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars with their values: (name, length, text, class)."""
    largest = max((value for _, value, _, _ in entries), default=0) or 1
    parts = []
    for row, (name, value, text, kind) in enumerate(entries):
        y = 24 * row
        parts.append(
            f'<text x="0" y="{y + 15}">{escape(name)}</text><rect class="back" x="100" y="{y + 3}" width="170" '
            f'height="16"/><rect class="{kind}" x="100" y="{y + 3}" width="{170 * value / largest:.1f}" height="16"/>'
            f'<text x="278" y="{y + 15}">{escape(text)}</text>'
        )
    label = f"{title}: " + ", ".join(f"{name} {text}" for name, _, text, _ in entries)
    return (
        f'<figure><h3>{title}</h3><svg class="bar" role="img" aria-label="{escape(label)}" width="350" '
        f'height="{24 * len(entries)}" viewBox="0 0 350 {24 * len(entries)}">{"".join(parts)}</svg></figure>'
    )
