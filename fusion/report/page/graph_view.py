"""A region of the graph as a drawing: boxes in layers from top to bottom, SVG."""

from __future__ import annotations

from html import escape
from statistics import fmean

from fusion.passes.graph_excerpt import Excerpt, ExcerptNode

_WIDTH, _HEIGHT, _GAP, _LAYER = 168, 38, 14, 26
_CHARACTERS = 25


def to_svg(region: Excerpt, label: str) -> str:
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
    text = box.name if box.role == "input" else box.text.removeprefix("aten::")
    return (
        f'<g class="box {box.role}" transform="translate({x:g} {y:g})"><title>{escape(title)}</title>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{_WIDTH // 2}" y="16">{escape(_short(text))}</text>'
        f'<text class="shape" x="{_WIDTH // 2}" y="30">{escape(_short(box.shape))}</text></g>'
    )


def _short(text: str) -> str:
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
