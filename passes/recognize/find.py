"""Find attention: every product with V whose weights pull back to a normalised function of a product of Q and K.

`find_sites(graph)` changes nothing but marks, and has torch guard on nothing. A site says what to replace (`root`, the
last node of the region) and by which attentions (usually one; several for a difference of attentions), or why it is
not fused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from fusion.errors import FusionError
from fusion.ir import integers
from fusion.ir.expr import E, Expr, J, coord, coordinates, substitute, walk
from fusion.ir.ops import apply
from fusion.ir.spec import Normalizer
from fusion.refusals import Reason, Refusal

from .. import marks, nodes
from ..assumptions import Assumptions
from ..nodes import Unsupported, packet, shape
from ..pullback.contractions import ADDING, MOVES, behind_moves, factors, is_contraction, is_parameter, products_above
from ..pullback.loads import forget_constants
from ..pullback.operands import is_float8, locate, mark_stored, scale_of_values
from ..pullback.pullback import PullBack
from ..pullback.roundings import is_coarser
from ..pullback.views import Index, broadcast_index, source
from .ancestors import AncestorKind, AncestorKinds, is_listed, is_statistic, scales_rows
from .core import Attention
from .recognize import attentions
from .sdpa import is_sdpa, pull_back_sdpa

if TYPE_CHECKING:
    from ..specify.specify import AttentionCall

aten = torch.ops.aten
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Site:
    """A product with V.

    anchor: that product (or SDPA call).
    root: the last node of the region, a view of it.
    dims: the coordinate of each dimension of the root.
    bounds: extents of the coordinates.
    attentions: the root is their sum; usually there is one.
    assumed: values of dynamic sizes and numbers, in force whenever the graph is read for this site.

    The stages of the backend add
    calls: one for each attention, until the site is refused.
    place: the node before which the call is inserted; None: the root.
    refusal: the reason why it is not fused, or None.
    blame: the node that the refusal is about.
    validated: the outcome of validation, for the report.
    """

    anchor: Node
    root: Node
    dims: tuple[str, ...] = ()
    bounds: dict[Expr, Expr] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    assumed: Assumptions = field(default_factory=Assumptions)
    calls: list[AttentionCall] = field(default_factory=list)
    place: Node | None = None
    refusal: Refusal | None = None
    blame: Node | None = None
    validated: str | None = None

    def refuse(self, refusal: Refusal, blame: Node | None = None) -> None:
        self.refusal, self.calls, self.place = refusal, [], None
        self.blame = blame or self.blame

    @functools.cached_property
    def interior(self) -> frozenset[Node]:
        """Nodes that the analysis looked into. Those of N_q x N_k elements must disappear with the region."""
        return frozenset(node for attention in self.attentions for node in attention.pullback.interior)

    @functools.cached_property
    def products(self) -> frozenset[Node]:
        """The products of queries and keys."""
        return frozenset(product.node for attention in self.attentions for product in attention.pullback.products)

    @functools.cached_property
    def scores(self) -> frozenset[Node]:
        """Nodes of the interior that depend on scores, the scores included."""
        reached = {*(self.products & self.interior) - {self.anchor}}
        for node in sorted(self.interior):  # topological
            if any(parent in reached for parent in node.all_input_nodes):
                reached.add(node)
        return frozenset(reached)

    def tail(self) -> Iterator[Node]:
        """The nodes from the root up to the product with V, both included."""
        node = self.root
        while node is not self.anchor:
            yield node
            node = node.all_input_nodes[0]
        yield node


def defect(problem: Exception) -> Refusal:
    """Refusal of a site at which a pass failed; raises errors that are meant for the user."""
    if isinstance(problem, FusionError):
        raise problem
    log.error("a defect of fusion: an attention stays as it was", exc_info=problem)
    first, *_ = str(problem).strip().splitlines() or [""]
    return Refusal(Reason.DEFECT, f"its analysis failed ({type(problem).__name__}: {first})")


def pending(sites: Iterable[Site]) -> list[Site]:
    """Sites that are not refused."""
    return [site for site in sites if site.refusal is None]


Reads = Callable[[torch.dtype, torch.device], bool]
ANY: Reads = lambda dtype, device: True


def find_sites(graph: Graph, reads: Reads = ANY) -> list[Site]:
    """All candidates in the order of the graph, refused ones with the reason. reads: whether kernels of a device can
    read a float8."""
    mark_stored(graph, reads)
    for node in graph.nodes:  # of an analysis before
        marks.attention_root.drop(node)
    sites = []
    with Assumptions().hold():  # where to look follows from no site's
        kinds = AncestorKinds(graph)
        for node in graph.nodes:
            if kinds.may_be_product_with_values(node) and (site := _confined(node, kinds)) is not None:
                sites.append(site)
                _ = site.scores  # the region as it is now: walks for auxiliary outputs go further
                marks.attention_root.set(site.root, site.refusal is None)
    forget_constants(graph)
    return sites


def unlisted(graph: Graph) -> Iterator[Site]:
    """Products of products of two activations that `find_sites` leaves out, each with its reason."""
    with Assumptions().hold():
        kinds = AncestorKinds(graph)
        for node in filter(kinds.is_product, graph.nodes):
            operands = node.all_input_nodes
            above = set[Node]().union(*map(products_above, operands))
            if any(map(is_parameter, operands)) or all(any(map(is_parameter, p.all_input_nodes)) for p in above):
                continue
            site = _confined(node, kinds, everything=True)
            if site is not None and site.refusal is not None:
                yield site
    forget_constants(graph)


def _confined(anchor: Node, kinds: AncestorKinds, everything: bool = False) -> Site | None:
    """`_examine`, with failures turned into refusals of this one site."""
    try:
        return _examine(anchor, kinds, everything)
    except Exception as problem:
        return Site(anchor=anchor, root=anchor, refusal=defect(problem), blame=anchor)


def _examine(anchor: Node, kinds: AncestorKinds, everything: bool) -> Site | None:
    """Site at a product, with the lowest root that keeps rows and columns apart; None if it is no attention. If there
    is none, the rows are split where they were merged for the product (an einsum): the outer part becomes a batch
    dimension. everything: a refused product is a site even where a person would not call it attention."""
    if not is_sdpa(anchor) and not is_contraction(anchor):
        if not (everything or is_listed(anchor, kinds)):
            return None
        message = f"the product with V is written as {packet(anchor)}, which is not supported"
        return Site(anchor=anchor, root=anchor, refusal=Refusal(Reason.PRODUCT_FORM, message), blame=anchor)
    if not nodes.dtype(anchor).is_floating_point:
        return None
    refused: Site | None = None
    for apart, root in itertools.product((False, True), reversed(_chain(anchor, kinds))):
        try:
            site = _specializing(anchor, root, kinds, apart)
        except Unsupported as problem:
            refused = Site(anchor=anchor, root=anchor, refusal=problem.refusal, blame=problem.node)
        else:
            if site is not None:
                return None if _is_feed_forward(site) else site
    return refused if everything or is_listed(anchor, kinds) else None


def _specializing(anchor: Node, root: Node, kinds: AncestorKinds, apart: bool) -> Site | None:
    assumed = Assumptions()
    while True:
        with contextlib.suppress(nodes.Specialized), assumed.hold():
            site = _at_root(anchor, root, kinds, apart)
            if site is not None:
                site.assumed = assumed
                nodes.specialize(nodes.fake(root).shape[site.dims.index("e")])
            return site


_MAX_CHAIN = 8


def _chain(anchor: Node, kinds: AncestorKinds) -> list[Node]:
    """The product, and the views, copies, float casts and factors from sums of scores that follow it one by one."""
    chain = [anchor]
    while len(chain) < _MAX_CHAIN and len(chain[-1].users) == 1:
        user = next(iter(chain[-1].users))
        if user.op != "call_function" or not nodes.is_tensor(user):
            break
        if packet(user) not in MOVES and not (scales_rows(user, kinds) and _factor_dies(user, anchor, kinds)):
            break
        narrowed = nodes.dtype(chain[-1])
        if is_float8(nodes.dtype(user)):
            break  # which no kernel writes
        if nodes.dtype(user) is not narrowed and is_coarser(narrowed, nodes.dtype(anchor)):
            break  # the model rounds to that, and a kernel only what it writes
        same_device = nodes.fake(user).device == nodes.fake(anchor).device
        widened = nodes.dtype(user) is torch.float64 is not nodes.dtype(anchor)  # which kernels do not write
        if user.args[0] is not chain[-1] or not nodes.dtype(user).is_floating_point or not same_device or widened:
            break
        chain.append(user)
    return chain


def _factor_dies(scaling: Node, anchor: Node, kinds: AncestorKinds) -> bool:
    """Whether the statistics in the factor of `scaling` are those of the weights' own scores, and are used nowhere but
    in the weights. Else they would have to be auxiliary outputs of the scaled product; beside the plain product they
    suffice."""

    def made_of_scores(here: Node) -> list[Node]:
        ends = here is not anchor and is_contraction(here)
        return [] if ends else [parent for parent in here.all_input_nodes if AncestorKind.PRODUCT in kinds[parent]]

    inside = {scaling, *nodes.walk_up([anchor], made_of_scores)}
    factor = scaling.args[1]
    assert isinstance(factor, Node)
    todo = {factor}
    while todo:
        todo.remove(here := max(todo))
        if is_statistic(here):
            if not inside.issuperset(map(behind_moves, here.all_input_nodes)):
                return False
        else:
            if not inside.issuperset(here.users):
                return False
            inside.add(here)
            todo |= {parent for parent in here.all_input_nodes if AncestorKind.STATISTIC in kinds[parent]}
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factor:
    """Factor or divisor of the product's rows (op "fmul", "div"): `node[index]`."""

    op: str
    node: Node
    index: Index


def _at_root(anchor: Node, root: Node, kinds: AncestorKinds, apart: bool) -> Site | None:
    """Site that ends at this root, or None if that splits rows or columns. apart: the row is an inner part."""
    extents = shape(root)
    atoms = tuple(coord(f"r{k}") for k in range(len(extents)))
    walked = _walk_down(root, anchor, atoms, dict(zip(atoms, extents, strict=True)))
    if walked is None:
        return None
    index, after = walked
    if packet(anchor) is aten.matmul and any(len(shape(x)) < 2 for x in anchor.all_input_nodes):
        raise Unsupported(Reason.PRODUCT_FORM, "a product with a vector", node=anchor)
    row, column = (index[-2], index[-1]) if is_sdpa(anchor) else _roles(anchor, index, kinds, apart)
    if row not in atoms or column not in atoms or row is column or (is_sdpa(anchor) and (after or apart)):
        return None
    batch = iter(range(len(atoms)))
    names = {atom: "i" if atom is row else "e" if atom is column else f"b{next(batch)}" for atom in atoms}
    renamed = {atom: coord(name) for atom, name in names.items()}
    bounds = {renamed[atom]: extent for atom, extent in zip(atoms, extents, strict=True)}
    index = _substituted(index, renamed)
    after = [replace(factor, index=_substituted(factor.index, renamed)) for factor in after]
    terms = (
        [pull_back_sdpa(anchor, index, bounds)] if is_sdpa(anchor) else _pull_back(anchor, index, bounds, after, kinds)
    )
    if terms is None:
        return None
    dims = tuple(names[atom] for atom in atoms)
    return Site(anchor=anchor, root=root, dims=dims, bounds=bounds, attentions=terms)


def _substituted(index: Index, renamed: dict[Expr, Expr]) -> Index:
    return tuple(substitute(entry, renamed) for entry in index)


def _walk_down(root: Node, anchor: Node, index: Index, bounds: dict[Expr, Expr]) -> tuple[Index, list[_Factor]] | None:
    """Index of the product for an element of the root, and the factors from there on; None where a view has no rule."""
    here: Any = root
    scalings: list[_Factor] = []
    while here is not anchor:
        if packet(here) in (aten.mul, aten.div):
            op = "fmul" if packet(here) is aten.mul else "div"
            here, factor = here.args
            at = broadcast_index(shape(here), shape(factor), index)
            scalings.insert(0, _Factor(op=op, node=factor, index=at))
        elif packet(here) in (aten.to, aten._to_copy):
            here = here.args[0]
        elif (moved := source(here, index, bounds)) is not None:
            here, index = moved
        else:
            return None
    return index, scalings


def _roles(anchor: Node, index: Index, kinds: AncestorKinds, apart: bool) -> tuple[Expr | None, Expr | None]:
    """Output coordinates of the query row and of V's column: the last coordinate that only one of the operands has."""
    parts = kinds.weights_first(factors(anchor, index, J))

    def last(own: Index, others: Index, inner: bool) -> Expr | None:
        shared = {J.name}.union(*map(coordinates, others))
        for entry in reversed(own):
            for at in map(coord, sorted(coordinates(entry) - shared)):
                linear = integers.linear(entry, at)
                if entry is at or inner and linear is not None and linear[0] is integers.integer(1):
                    return at
        return None

    whole, inner = (last(parts.left_index, parts.right_index, way) for way in (False, True))
    row = whole if not apart else None if inner is whole else inner  # the same has been tried
    return row, last(parts.right_index, parts.left_index, False)


def _pull_back(
    anchor: Node, index: Index, bounds: dict[Expr, Expr], after: Sequence[_Factor], kinds: AncestorKinds
) -> list[Attention] | None:
    """Attentions of a product with V; None where an operation behind the product does not scale its rows."""
    parts = kinds.weights_first(factors(anchor, index, J))
    pullback = PullBack(bounds | {J: parts.extent}, parts.extent, anchor)
    weight = pullback.value(parts.left, parts.left_index)
    if packet(anchor) in ADDING:
        weight = weight * _factor_of_sum(anchor)
    for factor in after:
        by = pullback.value(factor.node, factor.index)
        if "e" in coordinates(by) or not any(part.op == "reduce" for part in walk(by)):
            return None
        weight = apply(factor.op, weight, by)
    try:
        cores = attentions(weight)
    except Unsupported as problem:
        raise pullback.explained(problem) from problem
    accept = scale_of_values(parts.right, cores[0].normalizer, bool(marks.requires_grad(anchor)))
    value, scale = locate(pullback, parts.right, parts.right_index, J, E, bounds[E], accept)
    rest = {"value": value, "value_scale": scale, "pullback": pullback, "keys": parts.extent, "d_v": bounds[E]}
    return [Attention(core=core, **rest) for core in cores]


def _factor_of_sum(anchor: Node) -> float:
    """Factor alpha of baddbmm(x, w, v, beta, alpha) = beta * x + alpha * w @ v; raises `Unsupported` where x counts."""
    args = nodes.arguments(anchor)
    if args["beta"] != 0 or not isinstance(args["alpha"], (int, float)):
        message = f"the product with V is added to another tensor by the same operation ({packet(anchor)})"
        raise Unsupported(Reason.ADDED_TO_PRODUCT, message)
    return float(args["alpha"])


def _is_feed_forward(site: Site) -> bool:
    """act(x @ W1) @ W2 has the form of attention without a normaliser; it is one only if K and V are activations."""
    if any(attention.core.normalizer is not Normalizer.NONE for attention in site.attentions):
        return False
    first = site.attentions[0]
    return any(is_parameter(access.node) for access in (first.pullback.products[0].key, first.value))
