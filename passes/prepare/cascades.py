"""Cascades: scores or weights that depend on a whole row or column of scores, computed by one attention per reduction.

In a softmax of a softmax, weights normalised over the queries, or scores less the largest of all, a weight is no
function of its own score alone. Such a reduction becomes a separate attention, with a column of ones in the place of V:
one number per row, stored as a tensor, so that memory is linear in the length.

    sum, mean          of x: x @ 1
    amax, logsumexp    of x: an auxiliary output of softmax(x) @ 1
    softmax            of x: exp(x - m) / z, with m the maximum and z the sum of exp(x - m), both auxiliary outputs

Done where a product becomes an attention by it, where no gradient is needed, and where a product of Q and K costs less
than the passes over a table of scores that other compilers make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.ir.results import size_value
from fusion.refusals import Reason

from .. import marks, nodes
from ..assumptions import are_plain
from ..building import Symbols, derived
from ..nodes import Unsupported, arguments, packet, shape
from ..pullback.contractions import is_contraction, products_above
from ..recognize.ancestors import SOFTMAXES, AncestorKind, AncestorKinds
from ..recognize.find import Site
from . import Change, Promise

aten = torch.ops.aten
_REASONS = (
    Reason.FURTHER_REDUCTION, Reason.OTHER_NORMALISER, Reason.NOT_POINTWISE, Reason.WEIGHTS_ADDED, Reason.NOT_LINEAR,
)  # fmt: skip
Strategy = Callable[[list[Node]], list[Node]]
MOST = 6
"""Reductions above one product: each costs a product of Q and K."""
FEW = 32
"""Up to so many queries or keys another kernel may multiply Q and K, whose scores differ in their last digits. But a
maximum must be that of the very scores that it is subtracted from."""
Pays = Callable[[Iterable[int], bool], bool]
"""(elements of the table of scores that each reduction is of, whether a softmax over the queries is all of them) ->
whether attentions of their own are worth their cost."""


def changes(pays: Pays | None) -> list[Change]:
    """Strategies that turn reductions into attentions, in the order in which they are tried. pays: None for no way."""
    ways = () if pays is None or are_plain() else (_all_but_the_last_softmax, _softmaxes, list)
    return [Change(may_help=_may_be_cascade, apply=partial(_cut_for, way, pays)) for way in ways]


def _cut_for(way: Strategy, pays: Pays, graph: Graph, products: Mapping[Node, Site]) -> dict[str, Promise]:
    """Extract the reductions above products as separate attentions; each product has to be an attention then, and so
    does each extracted reduction."""
    kinds, hints = AncestorKinds(graph), nodes.size_hints(graph)
    asked = {node: _wanted(site, _reductions(node, kinds), way, hints, pays) for node, site in products.items()}
    cuts = {node: _cut(node) for node in sorted({node for reductions in asked.values() for node in reductions})}
    promises = dict[str, Promise]()
    for product, reductions in asked.items():
        if reductions:
            needed = {product.name, *(cut and cut.name for cut in map(cuts.get, reductions))}
            promises[product.name] = lambda attentions, needed=needed: needed <= attentions.keys()
    return promises


def _may_be_cascade(site: Site) -> bool:
    """Whether extracting reductions may make this product an attention: it is none, or reads reductions of its own
    scores."""
    if marks.requires_grad(site.anchor) or not is_contraction(site.anchor):
        return False
    if site.refusal is not None:
        return site.refusal.kind in _REASONS
    walks = [attention.pullback for attention in site.attentions]
    products = {product.node for walk in walks for product in walk.products}
    return any(products & products_above(node) for walk in walks for node in walk.loaded)


def _reductions(product: Node, kinds: AncestorKinds) -> list[Node]:
    """Reductions and softmaxes of scores above the weights of a product, in order of the graph."""

    def parents(here: Node) -> list[Node]:
        return [p for p in made_of_scores(here) if p.op == "call_function" and not is_contraction(p)]

    def made_of_scores(here: Node) -> list[Node]:
        return [parent for parent in here.all_input_nodes if AncestorKind.PRODUCT in kinds[parent]]

    every = nodes.walk_up(parents(product), parents)
    return sorted(here for here in every if here.target in _CUTS and made_of_scores(here))


def _all_but_the_last_softmax(reductions: list[Node]) -> list[Node]:
    softmaxes = _softmaxes(reductions)
    return [node for node in reductions if node is not softmaxes[-1]] if softmaxes else []


def _softmaxes(reductions: list[Node]) -> list[Node]:
    return [node for node in reductions if packet(node) in SOFTMAXES]


def _wanted(site: Site, above: list[Node], way: Strategy, hints: Mapping[str, int], pays: Pays) -> list[Node]:
    """Reductions above a site that are to be extracted: none where that does not pay, and no softmax of an
    attention."""
    reductions = way(above)
    if len(reductions) > MOST or (site.refusal is None and any(packet(node) in SOFTMAXES for node in reductions)):
        return []
    try:
        tables = [[size_value(n, hints) for n in shape(arguments(node)["self"])] for node in reductions]
    except Unsupported:  # sizes that are data
        return []
    if any(min(table[-2:]) <= FEW for table in tables):
        return []
    column = len(above) == 1 and packet(above[0]) in SOFTMAXES
    return reductions if pays(map(math.prod, tables), column) else []


def _cut(node: Node) -> Node | None:
    """Compute a reduction by an attention. Returns its product with a column of ones; None where that is impossible."""
    try:
        return None if marks.mutations(node) else _CUTS[node.target](node)
    except Unsupported:  # sizes that are data
        return None


class _Builder:
    """Inserts nodes before the node that they replace."""

    def __init__(self, node: Node):
        self.node, self.graph = node, node.graph

    def __call__(self, target: Any, *args: Any) -> Node:
        with self.graph.inserting_before(self.node):
            return derived(self.graph, self.node, target, args)

    def times_ones(self, x: Node) -> Node:
        """Sums over the last dimension, which stays with 1 element, as a product with ones."""
        like = nodes.fake(x)
        with self.graph.inserting_before(self.node):
            length = Symbols(self.graph).value(shape(x)[-1])
            how = {"dtype": like.dtype, "device": like.device}
            ones = self.graph.call_function(aten.ones.default, ([length, 1],), how)
        ones.meta["val"] = like.new_ones((*like.shape[-1:], 1))
        return self(aten.matmul.default, x, ones)


def _dim(node: Node) -> int | None:
    """Dimension that a node reduces, or normalises over; None where there are several."""
    args = arguments(node)
    return nodes.one_dim(args.get("dim"), len(shape(args["self"])))


def _of_sum(node: Node) -> Node | None:
    args, dim = arguments(node), _dim(node)
    if dim is None or nodes.dtype(args["self"]) != nodes.dtype(node):
        return None
    build = _Builder(node)
    product = build.times_ones(build(aten.movedim.int, args["self"], dim, -1))
    value = build(aten.movedim.int, product, -1, dim) if args["keepdim"] else build(aten.squeeze.dim, product, -1)
    if packet(node) is aten.mean:
        with node.graph.inserting_before(node):
            length = Symbols(node.graph).value(shape(args["self"])[dim])
        value = build(aten.div.Tensor, value, length)
    node.replace_all_uses_with(value)
    return product


def _of_extremum(node: Node) -> Node | None:
    """Extremum as an auxiliary output of the attention; of several dimensions, the extremum over the last of them."""
    args = arguments(node)
    origin, dims, build = args["self"], nodes.dims_of(node), _Builder(node)
    product = build.times_ones(build(aten.softmax.int, build(aten.movedim.int, origin, dims[-1], -1), -1))
    if len(dims) == 1:
        marks.statistic_of.set(node, product)
        return product
    operation = node.target if "dim" in args else aten.amax.default
    inner = build(operation, origin, dims[-1:], True)
    marks.statistic_of.set(inner, product)
    node.replace_all_uses_with(build(operation, inner, dims, bool(args.get("keepdim"))))
    return product


def _of_softmax(node: Node) -> Node | None:
    args, dim = arguments(node), _dim(node)
    if dim is None:
        return None
    build, x = _Builder(node), args["self"]
    if nodes.dtype(x) != nodes.dtype(node):
        x = build(aten.to.dtype, x, nodes.dtype(node))
    product = build.times_ones(build(aten.softmax.int, build(aten.movedim.int, x, dim, -1), -1))
    # Inside, eager's softmax computes in float32.
    wide = build(aten.to.dtype, x, torch.promote_types(nodes.dtype(x), torch.float32))
    largest = build(aten.amax.default, wide, [dim], True)
    exponential = build(aten.exp.default, build(aten.sub.Tensor, wide, largest))
    total = build(aten.sum.dim_IntList, exponential, [dim], True)
    value = build(aten.to.dtype, build(aten.div.Tensor, exponential, total), nodes.dtype(node))
    for statistic in (largest, total):
        marks.statistic_of.set(statistic, product)
    node.replace_all_uses_with(value)
    return product


_CUTS: dict[Any, Callable[[Node], Node | None]] = {
    aten.sum.dim_IntList: _of_sum, aten.mean.dim: _of_sum, aten.amax.default: _of_extremum,
    aten.max.default: _of_extremum, aten.logsumexp.default: _of_extremum, aten.softmax.int: _of_softmax,
    aten._softmax.default: _of_softmax,
}  # fmt: skip
