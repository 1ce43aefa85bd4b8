"""Weights that are divided by their own sum: the division moves behind the product with V.

`w = softmax(s) * m; (w / (w.sum(-1, keepdim=True) + 1e-13)) @ v` makes the weights that a mask leaves of a softmax add
up to 1 again. The divisor of a row is the same for all of its keys, so that `(w / g) @ v` is `(w @ v) / g`: an
attention that also writes the sum (`passes.specify.aux_outputs`). Products are rewritten so on a copy of the
graph, which is used if they become attentions by it.

Both forms round alike, and differ where numbers leave their range: the product before the division is as large as the
sum. In float32 and bfloat16, weights that grow with the score at most as fast as itself reach that only with scores
beyond 1e30; others, and float16, stay as they are. A row whose weights are all 0 is 0 / 0 on both sides. Its gradient
is NaN before the division. `w.masked_fill(dead, 0)` keeps that NaN from the scores, `w * live` does not, and the
analysis treats one as the other. So in training a division stays where a sum may be 0 because of a selection, unless
the scores are selected by the same predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from fusion.ir import integers
from fusion.ir.expr import Expr, J, Kind, coord
from fusion.ir.integers import Bounds
from fusion.ir.ops import apply
from fusion.ir.primitives import ROUNDED, is_bounded
from fusion.ir.spec import Normalizer
from fusion.refusals import Reason
from fusion.torch_private.tracing import carry_source

from .. import marks, nodes
from ..building import Symbols, derived
from ..nodes import Unsupported, packet, shape
from ..pullback.contractions import factors, is_contraction
from ..pullback.reductions import depends_on_product
from ..pullback.roundings import is_coarser
from ..pullback.views import Index, broadcast_index, order_of, source
from ..recognize.ancestors import SOFTMAXES, AncestorKind, AncestorKinds, is_statistic
from ..recognize.find import ANY, Reads, Site, find_sites, pending

aten = torch.ops.aten
_REASONS = (Reason.FURTHER_REDUCTION, Reason.OTHER_NORMALISER)
_SCALINGS = (aten.dropout, aten.native_dropout, aten.to, aten._to_copy)
"""Operations that a factor of a row passes through, beside products and views."""
Promise = Callable[[Mapping[str, Site]], bool]
"""(the attentions by the names of their products) -> whether a moved division has given an attention as it should."""


def move_divisions(
    module: GraphModule, sites: list[Site], reads: Reads = ANY, excluded: Set[str] = frozenset()
) -> tuple[GraphModule, list[Site], Mapping[str, Promise]]:
    """(a copy of the graph in which divisions of the refused products moved, its sites, the promises by the names of
    these products); the arguments where that makes no attention. excluded: names of products that stay as they are."""
    refused = (site for site in sites if site.refusal is not None and site.refusal.kind in _REASONS)
    candidates = [site for site in refused if site.anchor.name not in excluded]
    while candidates:
        copy, copies = copied(module)
        kinds, products = AncestorKinds(copy.graph), [copies[site.anchor] for site in candidates]
        promises = {p.name: promise for p in products if (promise := _moved(p, kinds)) is not None}
        if not promises:
            break
        new_sites = find_sites(copy.graph, reads)
        attentions = {site.anchor.name: site for site in pending(new_sites)}
        candidates = [s for s in candidates if (n := s.anchor.name) in promises and promises[n](attentions)]
        if len(candidates) == len(promises):
            return copy, new_sites, promises
    return module, sites, {}


def copied(module: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """Copy of a graph with its annotations, and the copy of each node."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for node in module.graph.nodes:
        copy = copies.setdefault(node, graph.output_node())
        copy.meta = dict(node.meta)
        marks.carry_nodes(copy, copies)
        if node.op == "placeholder":
            carry_source(node, copy)
    copied_module = GraphModule(module, graph)
    copied_module.meta = dict(module.meta)
    return copied_module, copies


def _is_wanted(site: Site, risky: bool) -> bool:
    """Whether the product of a moved division is to stay: weights grow at most as fast as scores. risky: a NaN in its
    gradient must not reach the scores, so that exactly the weights whose scores are a mask's fill have to be set to
    0."""
    for core in (attention.core for attention in site.attentions):
        live = {_selected_by(core.score), _selected_by(core.weight)}
        if core.normalizer is Normalizer.NONE and not _grows_slowly(core.score):
            return False
        if risky and (len(live) > 1 or None in live):
            return False
    return True


def _selected_by(value: Expr) -> Expr | None:
    """The condition under which a value is not a constant."""
    if value.op != "where" or not (value.args[1].is_const or value.args[2].is_const):
        return None
    condition = value.args[0]
    return condition if value.args[2].is_const else apply("not", condition)


def _grows_slowly(value: Expr) -> bool:
    parts = [arg for arg in value.args if arg.kind is Kind.FLOAT and depends_on_product(arg)]
    if value.op == "dot" or is_bounded(value.op) or not parts:
        return True
    if value.op in ("fmul", "div"):
        parts = [arg for arg in parts if not is_bounded(arg.op)]
        if len(parts) > 1 or (value.op == "div" and depends_on_product(value.args[1])):
            return False
    elif value.op not in _SLOW:
        return False
    return all(map(_grows_slowly, parts))


_SLOW = {"fadd", "fsub", "neg", "abs", "maximum", "minimum", "where", "detach", "detach_nan", *ROUNDED.values()}


def _moved(product: Node, kinds: AncestorKinds) -> Promise | None:
    """Move the division of a product's weights behind the product; None where there is none, or it cannot move."""
    if not is_contraction(product) or nodes.dtype(product) is torch.float16:
        return None
    try:
        location = _division(product, kinds)
        places = None if location is None else _places(location)
    except Unsupported:  # a product, a view or sizes that are not understood
        return None
    if location is None or places is None:
        return None
    division, weights, factor, user = location.node, location.weights, location.factor, location.user
    if any(map(marks.mutations, (product, division, factor))) or weights in user.all_input_nodes:
        return None
    risky = marks.requires_grad(product) and _is_bare(factor, kinds) and _is_selected(weights, kinds)
    graph = product.graph
    user.replace_input_with(division, weights)
    last, name = _sink(location, product, kinds), product.name
    with graph.inserting_before(last.next):
        rows = _in_rows_of(product, factor, places)
        quotient = derived(graph, product, division.target, (product, rows))
        if nodes.dtype(quotient) != nodes.dtype(product):
            quotient = derived(graph, product, aten.to.dtype, (quotient, nodes.dtype(product)))
    marks.requires_grad.set(quotient, marks.requires_grad(product))
    product.replace_all_uses_with(quotient, delete_user_cb=lambda later: later > quotient)
    return lambda attentions: name in attentions and _is_wanted(attentions[name], risky)


def _is_bare(factor: Node, kinds: AncestorKinds) -> bool:
    """Whether a factor may be a division by 0, or 0: a statistic to which nothing is added and that is not clamped."""
    while not is_statistic(factor):
        statistics = [x for x in factor.all_input_nodes if AncestorKind.STATISTIC in kinds[x]]
        if len(statistics) != 1 or packet(factor) in (aten.add, aten.clamp, aten.clamp_min, aten.maximum):
            return False
        factor = statistics[0]
    return True


def _is_selected(weights: Node, kinds: AncestorKinds) -> bool:
    """Whether some of a normaliser's results are replaced by a selection."""
    while packet(weights) not in SOFTMAXES:
        if packet(weights) in (aten.where, aten.masked_fill):
            return True
        operands = [
            x for x in weights.all_input_nodes if AncestorKind.PRODUCT in kinds[x] and shape(x) == shape(weights)
        ]
        if len(operands) != 1:
            return False
        weights = operands[0]
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """weights / factor, or weights * factor, above a product that needs its element at an index.

    user: the node on the way that reads it.
    index: of the element of the factor, in coordinates of the product's result and the key.
    bounds: their extents.
    """

    node: Node
    weights: Node
    factor: Node
    user: Node
    index: Index
    bounds: Bounds


def _division(product: Node, kinds: AncestorKinds) -> _Division | None:
    """First division above the weights of a product, if no other node reads the values in between."""
    extents = shape(product)
    atoms = tuple(coord(f"r{k}") for k in range(len(extents)))
    parts = kinds.weights_first(factors(product, atoms, J))
    current, index = parts.left, parts.left_index
    bounds, user = dict(zip(atoms, extents, strict=True)) | {J: parts.extent}, product
    while current.op == "call_function":
        if packet(current) in (aten.mul, aten.div) and len(current.args) == 2 and not current.kwargs:
            pairs = [current.args, current.args[::-1]][: 2 if packet(current) is aten.mul else 1]
            for weights, factor in pairs:
                of_row = nodes.is_tensor(factor) and AncestorKind.STATISTIC | AncestorKind.PRODUCT in kinds[factor]
                if of_row and nodes.is_tensor(weights) and shape(weights) == shape(current):
                    at = broadcast_index(shape(current), shape(factor), index)
                    return _Division(node=current, weights=weights, factor=factor, user=user, index=at, bounds=bounds)
            operands = [
                x
                for x, _ in pairs
                if nodes.is_tensor(x) and AncestorKind.PRODUCT in kinds[x] and shape(x) == shape(current)
            ]
            origin = operands[0] if len(operands) == 1 else None
        elif packet(current) in _SCALINGS and not is_coarser(nodes.dtype(current), nodes.dtype(product)):
            origin = current.args[0]
        elif (moved := source(current, index, bounds)) is not None:
            origin, index = moved
        else:
            return None
        if not isinstance(origin, Node) or len(current.users) > 1 or marks.mutations(current):
            return None
        current, user = origin, current
    return None


def _places(division: _Division) -> tuple[int, ...] | None:
    """Dimension of the product for each dimension of a factor; None where the factor depends on the key."""
    names = order_of(division.index, shape(division.factor), division.bounds)
    return None if names is None or J.name in names else tuple(int(name[1:]) for name in names)


def _sink(division: _Division, product: Node, kinds: AncestorKinds) -> Node:
    """Move the nodes between a statistic and its divisions behind the product, where the call that writes it stands.
    Returns the last node that the quotient must follow."""
    if division.node.users:
        return product
    chain, todo = {division.node}, [division.factor]
    while todo:
        here = todo.pop()
        movable = AncestorKind.STATISTIC in kinds[here] and not is_statistic(here) and not marks.stop_gradient(here)
        if movable and chain.issuperset(here.users) and not any(map(marks.mutations, (here, *here.all_input_nodes))):
            chain.add(here)
            todo += here.all_input_nodes
    product.append(division.node)
    sunk = sorted(chain - {division.node})
    for node in sunk:
        division.node.prepend(node)
    return sunk[-1] if sunk else product


def _in_rows_of(product: Node, factor: Node, places: tuple[int, ...]) -> Node:
    """Factor as a tensor that is broadcast along the product's columns, at the graph's insertion point."""
    graph, extents = product.graph, shape(product)
    symbols, one = Symbols(graph), integers.integer(1)

    def reshaped(node: Node, sizes: list[Expr]) -> Node:
        if list(shape(node)) == sizes:
            return node
        return derived(graph, factor, aten.reshape.default, (node, [symbols.value(size) for size in sizes]))

    rows = reshaped(factor, [extents[place] for place in places])
    if list(places) != sorted(places):
        order = [places.index(place) for place in sorted(places)]
        rows = derived(graph, factor, aten.permute.default, (rows, order))
    return reshaped(rows, [extent if place in places else one for place, extent in enumerate(extents)])
