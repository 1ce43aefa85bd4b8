"""Auxiliary outputs of an attention: other values computed from its weights, written beside the output.

`uses_of(site, ...)` follows the weights of a site downstream, to where they leave the region. Every node on the way is
pulled back as the weights were, so that it is an expression of one normalised weight, and ends in one of

    a reduction over the keys      a statistic of rows: entropy, largest weight, largest logit, log-sum-exp
    a reduction over the queries   a statistic of keys: how much attention each gets
    anything else                  the node itself is written, of size N_q x N_k

so that the weights themselves are written only where a user needs them. Where none of these applies, the site stays as
it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.ir import integers
from fusion.ir.expr import LOG_WEIGHT, ROW_MAX, ROW_SUM, WEIGHT, Expr, I, J, Kind, coord, coordinates, walk
from fusion.ir.integers import Bounds
from fusion.ir.spec import AuxOutput, Normalizer, Reduction
from fusion.lowering.rows import in_log_sums

from .. import marks, nodes
from ..assumptions import are_plain
from ..building import Symbols, derived
from ..nodes import Unsupported, arguments, packet, shape
from ..pullback.contractions import products_above
from ..pullback.views import RESHAPES, Index, order_of, reshape_index, source
from ..recognize.find import Site
from ..recognize.recognize import in_terms_of

aten = torch.ops.aten
_REDUCTIONS = {aten.sum: Reduction.SUM, aten.mean: Reduction.SUM, aten.amax: Reduction.MAX, aten.amin: Reduction.MIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxUse:
    """A node that an auxiliary output replaces.

    value: as in `AuxOutput`, in terms of the walk; it is the element `of[at]`.
    reduction, over, dims: likewise.
    order: the coordinates of the node's elements, row-major.
    divisor: of the reduction, or None.
    """

    node: Node
    of: Node
    at: Index
    value: Expr
    order: tuple[str, ...]
    reduction: Reduction = Reduction.NONE
    over: str = ""
    divisor: Expr | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the output is as large as the weights."""
        return {"i", "j"} <= {*self.order}

    @property
    def dims(self) -> tuple[str, ...]:
        last = "j" if "j" in self.order else "i"
        return (*(name for name in self.order if name != last), last)


def uses_of(site: Site, escaping: Sequence[Node], outside: Callable[[Node], bool]) -> tuple[list[AuxUse], set[Node]]:
    """Auxiliary outputs that replace the escaping nodes of a site, and the nodes on the way to them; nothing where
    some node cannot be replaced.

    escaping: nodes of the region that are used outside of it.
    outside: whether a node is such a user.
    """
    if len(site.attentions) != 1 or are_plain() or site.attentions[0].core.mixes_heads:
        return [], set()
    pullback = site.attentions[0].pullback
    before = dict(pullback.interior)
    try:
        walk, uses_by_node = _Walk(site, outside), dict[Node, AuxUse]()
        for node in escaping:
            if (index := walk.index_of(node)) is None or (ends := walk.ends(node, index)) is None:
                return [], set()
            uses_by_node |= {use.node: use for use in ends}
        on_the_way = pullback.interior.keys() - before.keys()
        return list(uses_by_node.values()), on_the_way | uses_by_node.keys()
    finally:
        pullback.interior = before  # what was looked at now is no part of the region


class _Walk:
    def __init__(self, site: Site, outside: Callable[[Node], bool]):
        self.attention = site.attentions[0]
        self.pullback, self.outside = self.attention.pullback, outside
        self.batch = {name for name in site.dims if name.startswith("b")}

    def index_of(self, node: Node) -> Index | None:
        """The element of a node of the region that belongs to the weight of (b.., i, j); None if there are several."""
        indices = {index for visited, index in self.pullback._memo if visited is node}
        return indices.pop() if len(indices) == 1 else None

    def ends(self, node: Node, index: Index) -> list[AuxUse] | None:
        """Outputs that replace the uses of `node`, whose element at `index` belongs to the weight of (b.., i, j)."""
        uses_of_users = [self._beyond(user, node, index) for user in node.users if self.outside(user)]
        ends = [use for part in uses_of_users for use in part or ()]
        if None not in uses_of_users and sum(use.is_whole for use in ends) < 2:
            return ends
        materialized = self._whole(node, index)
        return None if materialized is None else [materialized]

    def _beyond(self, user: Node, node: Node, index: Index) -> list[AuxUse] | None:
        """Outputs that replace a user of the node; None where the user needs the node itself."""
        if user.op != "call_function" or not nodes.is_tensor(user) or marks.mutations(user):
            return None
        product_nodes = {product.node for product in self.pullback.products}
        if J.name not in set().union(*map(coordinates, index)) and not products_above(user) <= product_nodes:
            return None  # it may be another attention's statistic that is read, and that one's call may read ours
        if packet(user) in _REDUCTIONS or packet(user) in (aten.logsumexp, aten.special_logsumexp):
            use = self._reduced(user, node, index)
            return None if use is None else [use]
        moved = _index_after(user, node, index, self.pullback.bounds)
        return None if moved is None else self.ends(user, moved)

    def _value(self, node: Node, index: Index) -> Expr | None:
        """The element in terms of its weight and row."""
        try:
            value = self.pullback.value(node, index)
            return in_terms_of(value, self.attention.core) if value.kind is Kind.FLOAT else None
        except Unsupported:
            return None

    def _whole(self, node: Node, index: Index) -> AuxUse | None:
        """The node itself: of weights, or of their rows."""
        if J.name not in set().union(*map(coordinates, index)):
            return self._of_rows(node, index)
        value, order = self._value(node, index), self._order(node, index, {"i", "j"})
        if value is None or order is None or not _is_of_weights(value):
            return None
        if marks.mutations(node) or not nodes.dtype(node).is_floating_point:
            return None
        return AuxUse(node=node, of=node, at=index, value=value, order=order)

    def _reduced(self, user: Node, node: Node, index: Index) -> AuxUse | None:
        """A reduction of the node over its keys or its queries."""
        args = arguments(user)
        dim = nodes.one_dim(args.get("dim"), len(index))
        if dim is None or not nodes.dtype(user).is_floating_point:
            return None
        over, extent = index[dim], shape(node)[dim]
        if over not in (I, J) or self.pullback.bounds[over] is not extent:
            return None
        at = (*index[:dim], *([integers.integer(0)] if args.get("keepdim") else []), *index[dim + 1 :])
        if over is J and (use := self._of_rows(user, at)) is not None:
            return use
        order, value = self._order(user, at, {"i", "j"} - {over.name}), self._value(node, index)
        if order is None or value is None or not _is_of_weights(value) or packet(user) not in _REDUCTIONS:
            return None
        return AuxUse(
            node=user, of=node, at=index, value=value, order=order, reduction=_REDUCTIONS[packet(user)],
            over=over.name, divisor=extent if packet(user) is aten.mean else None,
        )  # fmt: skip

    def _of_rows(self, node: Node, index: Index) -> AuxUse | None:
        """A statistic of rows as a function of their maximum and sum."""
        row, order = self._value(node, index), self._order(node, index, {"i"})
        if row is None or order is None or not {ROW_MAX, ROW_SUM} & {*walk(row)} or marks.mutations(node):
            return None
        if self.attention.core.normalizer is Normalizer.SAFE_SOFTMAX and ROW_SUM in walk(in_log_sums(row)):
            return None  # eager's is NaN for a row without a live key, a kernel's 0
        return AuxUse(node=node, of=node, at=index, value=row, order=order)

    def _order(self, node: Node, index: Index, rest: set[str]) -> tuple[str, ...] | None:
        """The coordinates of a node's elements, the slowest first: b.. and `rest`, each once; else None."""
        order = order_of(index, shape(node), self.pullback.bounds)
        return order if order is not None and sorted(order) == sorted(self.batch | rest) else None


def _is_of_weights(value: Expr) -> bool:
    return any(part in (WEIGHT, LOG_WEIGHT) for part in walk(value))


def _index_after(user: Node, node: Node, index: Index, bounds: integers.Bounds) -> Index | None:
    """Index of the element of a user that depends on `node[index]` and corresponds to it; None where that is unknown.
    The index may be a guess: the user is pulled back from there."""
    extents, old = shape(user), shape(node)
    if packet(user) in RESHAPES:
        try:
            return reshape_index(old, extents, index, bounds)
        except Unsupported:
            return None
    atoms = tuple(coord(f"r{k}") for k in range(len(extents)))
    moved = source(user, atoms, dict(zip(atoms, extents, strict=True)))
    if moved is None:
        return index if extents == old else None
    if moved[0] is not node:  # which gives no more than its shape
        return None
    places: dict[Any, Expr] = dict(zip(moved[1], index, strict=True))
    if any(e not in atoms and e is not integers.integer(0) for e in moved[1]):
        return None
    return tuple(places.get(atom, integers.integer(0)) for atom in atoms)


def materialize(
    graph: Graph, use: AuxUse, aux: AuxOutput, made: Node, symbols: Symbols, bounds: Bounds, trained: bool
) -> Node:
    """Node that replaces `use.node`: an auxiliary output in that node's shape, dtype and order in memory. made: the
    auxiliary output as the operator returns it. trained: whether gradients pass through it."""
    node, like = use.node, nodes.fake(use.node)
    shape = [nodes.fake(symbols.value(bounds[coord(name)])) for name in use.dims]
    made.meta["val"] = like.new_empty(shape, dtype=getattr(torch, aux.dtype))
    nodes.copy_provenance(node, made)
    result = made
    if trained and not marks.requires_grad(node):
        result = derived(graph, node, aten.detach.default, (result,))
    if use.divisor is not None:
        result = derived(graph, node, aten.div.Tensor, (result, symbols.value(use.divisor)))
    if nodes.dtype(result) != like.dtype:
        result = derived(graph, node, aten.to.dtype, (result, like.dtype))
    if use.dims != use.order:
        result = derived(graph, node, aten.permute.default, (result, [use.dims.index(d) for d in use.order]))
    if nodes.shape(result) != nodes.shape(node):
        result = derived(graph, node, aten.reshape.default, (result, [symbols.value(e) for e in nodes.shape(node)]))
    order = list(nodes.memory_order(node))
    if order != list(nodes.memory_order(result)):
        result = derived(graph, node, aten.permute.default, (result, order))
        result = derived(graph, node, aten.contiguous.default, (result,))
        result = derived(graph, node, aten.permute.default, (result, [order.index(k) for k in range(len(order))]))
    return result


_EXTREMA = {aten.amax.default: aten.amax.default, aten.max.default: aten.amax.default,
            aten.amin.default: aten.amin.default, aten.min.default: aten.amin.default}  # fmt: skip


def split_extrema(graph: Graph, sites: Sequence[Site]) -> None:
    """Apply `_split_extremum` to extrema of the nodes that sites analysed, or of pointwise functions of these."""
    region, read = _known(sites)
    todo, seen = [*region], region | read
    while todo:
        node = todo.pop()
        for user in [user for user in node.users if user not in seen]:
            seen.add(user)
            with contextlib.suppress(Unsupported):  # sizes that are data
                if nodes.is_tensor(user) and nodes.shape(user) == nodes.shape(node):
                    todo.append(user)
                elif user.target in _EXTREMA and not marks.requires_grad(user):
                    _split_extremum(graph, user)


def _known(sites: Sequence[Site]) -> tuple[set[Node], set[Node]]:
    """Nodes that sites analysed, with their inputs and roots."""
    region, read = set[Node](), {node for site in sites for node in (site.anchor, site.root)}
    for attention in (attention for site in sites for attention in site.attentions):
        walked = attention.pullback
        region.update(walked.interior)
        read.update(walked.loaded, [attention.value.node])
        read.update(node for p in walked.products for node in (p.node, p.query.node, p.key.node))
    return region, read


def _split_extremum(graph: Graph, node: Node) -> None:
    """Write an extremum over several dimensions as one over the last of them, which an auxiliary output may replace,
    and one over the rest. Only without a gradient: several equal elements would share it in another way."""
    args, dims = nodes.arguments(node), nodes.dims_of(node)
    if len(dims) < 2:
        return
    with graph.inserting_before(node):
        inner = derived(graph, node, _EXTREMA[node.target], (args["self"], dims[-1:], True))
        outer = derived(graph, node, _EXTREMA[node.target], (inner, dims, bool(args.get("keepdim"))))
    node.replace_all_uses_with(outer)
    graph.erase_node(node)
