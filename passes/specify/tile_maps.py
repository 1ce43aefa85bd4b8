"""Tile maps of masks: which masks need one, the part that it covers, and the attention with a map.

A mask is data where its predicate loads something (padding, document numbers, a mask tensor), or where the score
program adds a tensor whose values may be 0 and a hard negative. Of predicates of positions alone those get a map that
are alternatives, whose live keys are in no single range (a window or the first keys). Remainders (dilated windows)
leave a live key in every tile, and get none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion.ir import AttentionSpec, Operand
from fusion.ir.expr import TRUE, ZERO, Expr, Kind, const, coord, coordinates, loads, renumbered, substitute, walk
from fusion.ir.mask_facts import MaskFacts
from fusion.ir.ops import apply, conjuncts
from fusion.ir.primitives import ROUNDED
from fusion.ir.results import size_value
from fusion.ir.spec import Normalizer
from fusion.ir.tile_map import HARD_BIAS, MapSpec, is_dense, lookup, mappable

from .. import marks, nodes
from ..building import Symbols
from ..recognize.find import Site, pending
from .masks import LEAST_FILL, full_range, holding
from .specify import AttentionCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A map that an attention could use, with its operands and sizes in the graph; equal where it can be shared."""

    spec: MapSpec
    operands: tuple[Node, ...]
    sizes: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """Contents of a tile map.

    predicates: conjuncts of the mask that it covers.
    biases: loads that are added to the score and may be hard masks.
    fill: the largest value of a score that the biases kill, but for the score itself.
    """

    predicates: tuple[Expr, ...]
    biases: tuple[Expr, ...]
    fill: float

    @property
    def live(self) -> Expr:
        hard = [apply("not", apply("fle", bias, const(HARD_BIAS))) for bias in self.biases]
        return _all([*self.predicates, *hard])

    @property
    def full(self) -> Expr:
        return _all([*self.predicates, *(apply("feq", bias, ZERO) for bias in self.biases)])


Pays = Callable[[MapSpec, Sequence[int], Sequence[tuple[AttentionSpec, Sequence[int]]], str], bool]
"""(the map, its example sizes, the attentions that would use it with theirs, device) -> whether the map pays."""


def map_tiles(graph: Graph, sites: Iterable[Site], pays: Pays, examples: Mapping[str, int]) -> None:
    """Give attentions whose masks are data a map of their live tiles, one for all that have the same mask."""
    symbols, users = Symbols(graph), dict[Mapped, list[tuple[Site, int]]]()
    for site in pending(sites):
        for number, call in enumerate(site.calls):
            if call.gathered is None and (wanted := mapped(call)) is not None:
                users.setdefault(wanted, []).append((site, number))
    for wanted, places in users.items():
        calls = [site.calls[number] for site, number in places]
        attentions = [(call.spec, [*call.example_sizes(examples).values()]) for call in calls]
        if not pays(wanted.spec, [size_value(e, examples) for e in wanted.sizes], attentions, calls[0].device):
            continue
        node: Node | None = None
        for site, number in places:
            place = site.place or site.root
            if node is None or not node < place:
                node = _map_before(graph, place, site.root, wanted, symbols)
            site.calls[number] = with_map(site.calls[number], node)


def _map_before(graph: Graph, place: Node, root: Node, wanted: Mapped, symbols: Symbols) -> Node:
    with graph.inserting_before(place):
        sizes = [symbols.value(extent) for extent in wanted.sizes]
        arguments = (list(wanted.operands), sizes, wanted.spec.to_json())
        node = graph.call_function(torch.ops.fusion.tile_map.default, arguments)
    nodes.copy_provenance(root, node)
    shape = wanted.spec.shape(dict(zip(wanted.spec.sizes, map(nodes.fake, sizes), strict=True)))
    node.meta["val"] = nodes.fake(root).new_empty(shape, dtype=torch.int32)
    return node


def mapped(call: AttentionCall) -> Mapped | None:
    """Map that an attention could use, or None where its mask is not data."""
    data = _data(call)
    if data is None or call.spec.needs_all_keys:
        return None
    spec = call.spec
    read = [part.operand for part in loads(data.live, data.full)]
    numbers = sorted(set(read))
    if not numbers and any(marks.dtensor(node) for node in call.operands):
        return None  # parts of it would have to be made from nothing
    operands = tuple(call.operands[number] for number in numbers) or (_on_device(call),)
    if any(marks.mutations(node) or nodes.fake(node).device.type != call.device for node in operands):
        return None
    names = _batch_axes(data)
    live, full = (_renumbered(expr, names, numbers) for expr in (data.live, data.full))
    batch = tuple(spec.batch[int(name[1:])] for name in names)
    used = {part.attr for part in walk(live, full, spec.n_q, spec.n_k, *batch) if part.op == "size"}
    sizes = [(name, value) for name, value in zip(spec.sizes, call.sizes, strict=True) if name in used]
    map_spec = MapSpec(
        sizes=tuple(name for name, _ in sizes), batch=batch, n_q=spec.n_q, n_k=spec.n_k, live=live, full=full,
        rows="i" in coordinates(live),
    )  # fmt: skip
    return Mapped(spec=map_spec, operands=operands, sizes=tuple(value for _, value in sizes))


def _batch_axes(data: _Data) -> list[str]:
    """Batch coordinates that the mask depends on, in order."""
    return sorted({n for n in coordinates(data.live) if n.startswith("b")}, key=lambda n: int(n[1:]))


def _renumbered(expr: Expr, names: Sequence[str], numbers: Sequence[int]) -> Expr:
    """An expression with its batch coordinates and loads numbered by their positions in these lists."""
    moved = substitute(expr, {coord(name): coord(f"b{k}") for k, name in enumerate(names)})
    return renumbered(moved, numbers.index)


def with_map(call: AttentionCall, tile_map: Node) -> AttentionCall:
    """Attention with the map as an additional operand, and with mask facts that refer to it."""
    data, spec = _data(call), call.spec
    assert data is not None
    batch = tuple(map(coord, _batch_axes(data)))
    tile_live, tile_mixed = lookup(len(spec.operands), batch, "i" in coordinates(data.live))
    facts = spec.mask or MaskFacts(live=TRUE, fill=-math.inf)
    low, high, known = full_range(_all([part for part in conjuncts(facts.live) if part not in data.predicates]))
    full = substitute(spec.score, holding([*known, *data.predicates]) | dict.fromkeys(data.biases, ZERO))
    facts = replace(
        facts,
        live=_all([facts.live, *(apply("not", apply("fle", bias, const(HARD_BIAS))) for bias in data.biases)]),
        fill=max(facts.fill, data.fill),
        full=full,
        full_lo=low,
        full_hi=high,
        tile_live=tile_live,
        tile_mixed=tile_mixed,
    )
    operand = Operand(dtype="int32", rank=len(batch) + 3, name="tiles")
    spec = replace(spec, operands=(*spec.operands, operand), mask=facts)
    return replace(call, spec=spec, operands=(*call.operands, tile_map))


def _all(predicates: list[Expr]) -> Expr:
    return functools.reduce(functools.partial(apply, "and"), predicates, TRUE)


def _data(call: AttentionCall) -> _Data | None:
    """Contents of a map for this attention, or None if there are none."""
    spec = call.spec
    known = conjuncts(spec.mask.live) if spec.mask is not None else []
    # Loads, or alternatives that leave keys alive in several places.
    data = [p for p in known if loads(p) or p.op == "or" and {"i", "j"} <= coordinates(p)]
    predicates = [p for p in data if "j" in coordinates(p) and mappable(p)]
    added = _addends(spec.score, 1.0) if spec.normalizer is not Normalizer.NONE else []
    fills = {bias: HARD_BIAS * factor for bias, factor in added if _may_be_hard(call, bias)}
    fills = {bias: fill for bias, fill in fills.items() if fill <= 100 * LEAST_FILL}
    if not predicates and not fills:
        return None
    return _Data(predicates=tuple(predicates), biases=tuple(fills), fill=max(fills.values(), default=-math.inf))


def _on_device(call: AttentionCall) -> Node:
    """Tensor on the device where a map is computed, the same for all attentions of a graph."""
    inputs = call.operands[0].graph.find_nodes(op="placeholder")
    candidates = ((node, nodes.fake(node)) for node in inputs if not (marks.mutations(node) or marks.dtensor(node)))
    alike = (node for node, value in candidates if isinstance(value, Tensor) and value.device.type == call.device)
    return next(alike, call.operands[0])


def _addends(score: Expr, factor: float) -> list[tuple[Expr, float]]:
    """(load, c): tensors that the score program adds to what depends on the score, as c * load."""
    if score.op == "load":
        return [(score, factor)]
    if score.op == "fadd":
        return [addend for arg in score.args for addend in _addends(arg, factor)]
    if score.op == "where":
        return [addend for arg in score.args[1:] if not arg.is_const for addend in _addends(arg, factor)]
    if score.op in ROUNDED.values():
        return _addends(score.args[0], factor)
    if score.op == "fmul":
        value, by = score.args if score.args[1].is_const else score.args[::-1]
        if by.is_const and by.value > 0:
            return _addends(value, factor * by.value)
    return []


def _may_be_hard(call: AttentionCall, bias: Expr) -> bool:
    """Whether a tensor may be a mask: the same for all features, and without parameters."""
    node = call.operands[bias.operand]
    if call.differentiable and marks.requires_grad(node):
        return False
    return bias.kind is Kind.FLOAT and "j" in coordinates(bias) and is_dense(bias)
