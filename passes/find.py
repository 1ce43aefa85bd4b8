"""Find attention: every product with V whose weights pull back to a normalised function of a product of Q and K.

`find_sites(graph)` only reads the graph. A site says what to replace (`root`, the last node of the region) and by
which attentions (usually one; several for a difference of attentions), or why it must be left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from fusion.ir.expr import ONE, E, Expr, J, const, coord, coordinates, substitute, walk
from fusion.ir.ops import apply
from fusion.passes import nodes
from fusion.passes.checkpointing import bodies
from fusion.passes.contractions import factors, is_contraction
from fusion.passes.folding import forget
from fusion.passes.nodes import Unsupported, packet, shape
from fusion.passes.operands import Access, locate, mark_stored, scale_of_values
from fusion.passes.pullback import PullBack, is_made_from_product
from fusion.passes.recognize import Core, attentions
from fusion.passes.sdpa import is_sdpa, pull_back_sdpa
from fusion.passes.views import Index, broadcast_index, source

aten = torch.ops.aten


@dataclass(slots=True, kw_only=True)
class Attention:
    """One attention of a site, still in terms of graph nodes. value_scale: what rows of V are multiplied by."""

    core: Core
    value: Access
    value_scale: Expr = ONE
    pullback: PullBack
    keys: Expr
    d_v: Expr


@dataclass(slots=True, kw_only=True)
class Site:
    """A product with V.

    anchor: that product (or SDPA call). root: the last node of the region, a view of it. dims: the coordinate of each
    dimension of the root. reason: why it stays as it was, or None.
    """

    anchor: Node
    root: Node
    dims: tuple[str, ...] = ()
    bounds: dict[Expr, Expr] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)
    reason: str | None = None
    blame: Node | None = None

    def interior(self) -> set[Node]:
        """Nodes that were looked into, among which those of N_q x N_k must die with the region."""
        return {node for attention in self.attentions for node in attention.pullback.interior}


def find_sites(
    graph: Graph, reads: Callable[[torch.dtype, torch.device], bool] = lambda dtype, device: True
) -> list[Site]:
    """Every candidate in topological order, those that cannot be fused with a reason. reads: whether kernels on a
    device can read tensors of a float8 dtype."""
    mark_stored(graph, reads)
    heads = _normalizers_upstream(graph)
    sites = []
    for node in graph.nodes:
        if is_sdpa(node) or (is_contraction(node) and heads(node)):
            site = _examine(node)
            if site is not None:
                sites.append(site)
                site.root.meta["attention_root"] = site.reason is None
    forget(graph)
    return sites


_PRODUCT_NAMES = ("matmul", "bmm", "einsum", "mm", "attention", "encoder_layer")


def may_hold_attention(module: GraphModule) -> bool:
    """Whether a graph, as Dynamo made it, has any product of two activations: else there is nothing to look for.

    Checkpointed graphs within it count.
    """
    if any(may_hold_attention(body) for body, _ in bodies(module).values()):
        return True
    for node in module.graph.nodes:
        if node.op == "call_module":
            return True
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
        if node.op.startswith("call") and any(part in name for part in _PRODUCT_NAMES) and "addmm" not in name:
            return True
    return False


# --- candidates -------------------------------------------------------------------------------------------------

_SOFTMAX = {aten.softmax, aten._softmax, aten._safe_softmax, aten.special_softmax, aten.log_softmax, aten._log_softmax}
_SOFTMAX_LIKE = _SOFTMAX | {aten.exp}
_GATES = {aten.sigmoid, aten.relu, aten.tanh, aten.silu, aten.softplus, aten.gelu, aten.elu, aten.square, aten.sin,
          aten.pow, aten.abs, aten.special_expit, aten.erf, aten.cos, aten.leaky_relu, aten.clamp}  # fmt: skip


def _normalizers_upstream(graph: Graph) -> Callable[[Node], bool]:
    """Whether a product has an operand that was normalised since the last product: a cheap test before pulling back."""
    marked: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            marked[node] = False
            continue
        kind = packet(node)
        if kind in _SOFTMAX_LIKE:
            marked[node] = nodes.is_tensor(node) and len(shape_or_empty(node)) >= 2
        elif kind in _GATES:
            marked[node] = is_made_from_product(node)
        elif is_contraction(node) or is_sdpa(node) or kind in (aten.linear, aten.addmm, aten.layer_norm):
            marked[node] = False
        else:
            marked[node] = any(marked.get(parent, False) for parent in node.all_input_nodes)
    return lambda node: any(marked.get(parent, False) for parent in node.all_input_nodes)


def shape_or_empty(node: Node) -> tuple:
    """The shape of a tensor node, () for anything else."""
    held = nodes.value(node)
    return tuple(held.shape) if isinstance(held, torch.Tensor) else ()


# --- one candidate ----------------------------------------------------------------------------------------------


def _examine(anchor: Node) -> Site | None:
    """The site at a product, with the farthest root that keeps rows and columns whole; None if it is no attention."""
    refused: Site | None = None
    for root in reversed(_chain(anchor)):
        try:
            return _specializing(anchor, root)
        except _OtherRoot:
            continue
        except _NoAttention:
            return None
        except Unsupported as problem:
            if not _worth_reporting(anchor):
                return None
            refused = Site(anchor=anchor, root=anchor, reason=str(problem), blame=problem.node)
            if root is anchor:
                return refused
    return refused


def _specializing(anchor: Node, root: Node) -> Site:
    while True:
        try:
            site = _at_root(anchor, root)
            nodes.specialize(nodes.value(root).shape[site.dims.index("e")])
            return site
        except nodes.Specialized:
            continue


def _worth_reporting(anchor: Node) -> bool:
    """Whether a refused product looks like attention to a person: normalised weights made from another product."""
    if is_sdpa(anchor):
        return True
    return any(
        (_reaches(parent, _SOFTMAX) or (_reaches(parent, {aten.exp}) and _reaches(parent, {aten.sum})))
        and is_made_from_product(parent)
        for parent in anchor.all_input_nodes
    )


class _OtherRoot(Exception):
    """Rows or columns of the result are split or merged at this root: try one nearer to the product."""


class _NoAttention(Exception):
    """Not an attention at all (a product with the output of an ordinary activation): not worth a report."""


_MOVES = {aten.view, aten.reshape, aten._unsafe_view, aten.permute, aten.transpose, aten.contiguous, aten.clone,
          aten.unsqueeze, aten.squeeze, aten.movedim, aten.flatten, aten.unflatten, aten.swapaxes, aten.to,
          aten._to_copy}  # fmt: skip
_MAX_CHAIN = 8


def _chain(anchor: Node) -> list[Node]:
    """The product and the views, copies, float casts, and factors made of sums of scores that follow it one by one."""
    chain = [anchor]
    while len(chain) < _MAX_CHAIN and len(chain[-1].users) == 1:
        user = next(iter(chain[-1].users))
        if user.op != "call_function" or not nodes.is_tensor(user):
            break
        if packet(user) not in _MOVES and not _scales_rows(user):
            break
        same_device = nodes.value(user).device == nodes.value(anchor).device
        if user.args[0] is not chain[-1] or not nodes.dtype(user).is_floating_point or not same_device:
            break
        chain.append(user)
    return chain


_STATISTICS = {aten.sum, aten.amax, aten.max, aten.logsumexp, aten.special_logsumexp}


def _scales_rows(node: Node) -> bool:
    """Whether this multiplies or divides a product by statistics of the scores, as in `(e @ v) / e.sum(-1)`."""
    if packet(node) not in (aten.mul, aten.div) or node.kwargs or len(node.args) != 2:
        return False
    product, factor = node.args
    if not (isinstance(product, Node) and isinstance(factor, Node) and nodes.is_tensor(factor)):
        return False
    return shape(product) == shape(node) and _reaches(factor, _STATISTICS) and is_made_from_product(factor)


def _at_root(anchor: Node, root: Node) -> Site:
    extents = shape(root)
    if not nodes.dtype(anchor).is_floating_point:
        raise _NoAttention
    marks = tuple(coord(f"r{k}") for k in range(len(extents)))
    bounds = dict(zip(marks, extents, strict=True))
    index, factors_after = _walk_down(root, anchor, marks, bounds)
    if is_sdpa(anchor):
        row, column = index[-2], index[-1]
    else:
        row, column = _roles(anchor, index)
    if row not in marks or column not in marks or row is column:
        raise _OtherRoot
    names = _names(marks, row, column)
    renamed = {mark: coord(name) for mark, name in names.items()}
    bounds = {renamed[mark]: extent for mark, extent in bounds.items()}
    index = tuple(substitute(entry, renamed) for entry in index)
    site = Site(anchor=anchor, root=root, dims=tuple(names[mark] for mark in marks), bounds=bounds)
    if is_sdpa(anchor):
        if factors_after:
            raise _OtherRoot
        cores, (value, scale), pullback, keys = pull_back_sdpa(anchor, index, bounds)
    else:
        for factor in factors_after:
            factor.index = tuple(substitute(entry, renamed) for entry in factor.index)
        cores, (value, scale), pullback, keys = _pull_back(anchor, index, bounds, factors_after)
    for core in cores:
        site.attentions.append(
            Attention(core=core, value=value, value_scale=scale, pullback=pullback, keys=keys, d_v=bounds[E])
        )
    return site


@dataclass(slots=True, kw_only=True)
class _Factor:
    """What rows of the product are multiplied or divided by (op "fmul", "div"): `node[index]`."""

    op: str
    node: Node
    index: Index


def _walk_down(root: Node, anchor: Node, index: Index, bounds: dict[Expr, Expr]) -> tuple[Index, list[_Factor]]:
    """The product's index of the root's element, and the factors on the way, those nearest to the product first."""
    here, found = root, []
    while here is not anchor:
        if packet(here) in (aten.mul, aten.div):
            op = "fmul" if packet(here) is aten.mul else "div"
            here, factor = here.args  # type: ignore[assignment]
            at = broadcast_index(shape(here), shape(factor), index)  # type: ignore[arg-type]
            found.insert(0, _Factor(op=op, node=factor, index=at))  # type: ignore[arg-type]
            continue
        if packet(here) in (aten.to, aten._to_copy):
            here = here.args[0]  # type: ignore[assignment]
            continue
        moved = source(here, index, bounds)
        if moved is None:
            raise _OtherRoot
        here, index = moved
    return index, found


def _names(marks: Index, row: Expr, column: Expr) -> dict[Expr, str]:
    batch = iter(range(len(marks)))
    return {mark: "i" if mark is row else "e" if mark is column else f"b{next(batch)}" for mark in marks}


def _roles(anchor: Node, index: Index) -> tuple[Expr | None, Expr | None]:
    """The output coordinates that are the query row and V's column: the last that only one of the operands has."""
    parts = factors(anchor, index, J)
    left = {name for entry in parts.left_index for name in coordinates(entry)}
    right = {name for entry in parts.right_index for name in coordinates(entry)}

    def last(own: Index, other: set[str]) -> Expr | None:
        bare = [e for e in own if e.op == "coord" and e is not J and e.name not in other]
        return bare[-1] if bare else None

    weights_left = _weights_are_left(parts.left, parts.right)
    own, other = (parts.left_index, right) if weights_left else (parts.right_index, left)
    theirs, ours = (parts.right_index, left) if weights_left else (parts.left_index, right)
    return last(own, other), last(theirs, ours)


def _weights_are_left(left: Node, right: Node) -> bool:
    """Which operand is the normalised one. Weights on the right are rare (v^T @ w^T)."""
    return _reaches_normalizer(left) or not _reaches_normalizer(right)


def _reaches_normalizer(node: Node) -> bool:
    return _reaches(node, _SOFTMAX_LIKE, lambda here: packet(here) in _GATES and is_made_from_product(here))


def _reaches(node: Node, kinds: set, accept: Callable[[Node], bool] | None = None) -> bool:
    """Whether one of these operations is met on the way up from a node, before any product or linear layer."""
    seen, stack = set(), [node]
    while stack:
        here = stack.pop()
        if here in seen or here.op != "call_function":
            continue
        seen.add(here)
        if packet(here) in kinds or (accept is not None and accept(here)):
            return True
        if not is_contraction(here) and packet(here) not in (aten.linear, aten.addmm, aten.layer_norm):
            stack.extend(here.all_input_nodes)
    return False


def _pull_back(anchor: Node, index: Index, bounds: dict[Expr, Expr], factors_after: list[_Factor]):
    parts = factors(anchor, index, J)
    weights, at, other, other_at = parts.left, parts.left_index, parts.right, parts.right_index
    if not _weights_are_left(weights, other):
        weights, at, other, other_at = other, other_at, weights, at
    pullback = PullBack(bounds | {J: parts.extent}, parts.extent, anchor)
    weight = pullback.value(weights, at)
    if packet(anchor) is aten.baddbmm:
        weight = apply("fmul", weight, const(_factor_of_sum(anchor)))
    for factor in factors_after:
        by = pullback.value(factor.node, factor.index)
        if "e" in coordinates(by) or not any(part.op == "reduce" for part in walk(by)):
            raise _OtherRoot
        weight = apply(factor.op, weight, by)
    try:
        cores = attentions(weight)
    except Unsupported as problem:
        problem.node = pullback.suspect(problem)
        raise
    accept = scale_of_values(other, cores[0].normalizer, bool(anchor.meta.get("requires_grad")))
    value = locate(pullback, other, other_at, J, E, bounds[E], accept)
    if all(core.normalizer.value == "none" for core in cores):
        _check_not_feed_forward(pullback, value[0])
    return cores, value, pullback, parts.extent


def _factor_of_sum(anchor: Node) -> float:
    """alpha of baddbmm(x, w, v, beta, alpha) = beta * x + alpha * w @ v; raises `Unsupported` where x counts."""
    args = nodes.arguments(anchor)
    if args["beta"] != 0 or not isinstance(args["alpha"], (int, float)):
        raise Unsupported("the product with V is added to another tensor by the same operation (baddbmm)")
    return float(args["alpha"])


def _check_not_feed_forward(pullback: PullBack, value: Access) -> None:
    """act(x @ W1) @ W2 has the form of attention without a normaliser; it is one only if K and V are activations."""
    for access in (pullback.products[0].key, value):
        if _is_parameter(access.node):
            raise _NoAttention


def _is_parameter(node: Node) -> bool:
    """Whether a node is a parameter, up to views and casts."""
    while node.op == "call_function" and packet(node) in (_MOVES | {aten.t}) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    if node.op == "get_attr":
        return True
    return node.op == "placeholder" and isinstance(
        node.meta.get("example_value", node.meta.get("val")), torch.nn.Parameter
    )
