"""Kinds of operations above every node of a graph, up to products and linear layers: one forward pass over the graph.

They show which products may be those of attention weights with V, before anything is pulled back, and which of the
refused products the report lists: those that a person would call attention. Weights that select one of their operands
(greedy decoding, experts of a router), and those of a linear layer and a softmax (a classifier's probabilities, an
expectation over classes), are not listed.
"""

from __future__ import annotations

import enum
import functools
import operator

import torch
from torch.fx import Graph, Node

from fusion.ir import integers
from fusion.ir.expr import Expr

from .. import nodes
from ..nodes import packet, shape
from ..pullback.contractions import (
    MOVES,
    Factors,
    behind_moves,
    extended_factors,
    is_contraction,
    is_distance,
    is_parameter,
    products_above,
)
from ..pullback.heads import head_sum, is_batch
from .sdpa import is_sdpa

aten = torch.ops.aten


SOFTMAXES = {aten.softmax, aten._softmax, aten._safe_softmax, aten.special_softmax, aten.log_softmax, aten._log_softmax}
_GATES = {aten.sigmoid, aten.relu, aten.tanh, aten.silu, aten.softplus, aten.gelu, aten.elu, aten.square, aten.sin,
          aten.pow, aten.abs, aten.special_expit, aten.erf, aten.cos, aten.leaky_relu, aten.clamp}  # fmt: skip
_SUMS = {aten.sum, aten.linalg_vector_norm, aten.logsumexp, aten.special_logsumexp}
_STATISTICS = {aten.amax, aten.max} | _SUMS
LINEAR = (aten.linear, aten.addmm)
_OTHER_PRODUCTS = (aten.linear, aten.mv, aten.addmv, aten.addbmm, aten.dot, aten.inner, aten.tensordot,
                     aten.linalg_vecdot)  # fmt: skip
"""Products that the analysis does not take apart. What they make of attention weights is listed all the same."""


class AncestorKind(enum.Flag):
    """Kinds of operations above a node."""

    PRODUCT = enum.auto()
    SOFTMAX = enum.auto()
    EXP = enum.auto()
    SUM = enum.auto()
    STATISTIC = enum.auto()
    GATE = enum.auto()
    MIXED_HEADS = enum.auto()


_NOTHING = AncestorKind(0)
NORMALISED = AncestorKind.SOFTMAX | AncestorKind.EXP | AncestorKind.GATE


class AncestorKinds:
    """Kinds of operations above every node of a graph, that node included."""

    def __init__(self, graph: Graph):
        self._kinds: dict[Node, AncestorKind] = {}
        for node in graph.nodes:
            self._kinds[node] = self._of(node) if node.op == "call_function" else _NOTHING

    def __getitem__(self, node: Node) -> AncestorKind:
        return self._kinds.get(node, _NOTHING)

    def inputs(self, node: Node) -> AncestorKind:
        """Union of the kinds above the inputs of a node."""
        return functools.reduce(operator.or_, (self[parent] for parent in node.all_input_nodes), _NOTHING)

    def weights_first(self, parts: Factors) -> Factors:
        """Factors of a product with V with the weights on the left: the operand that is normalised. It rarely is the
        right one (v^T @ w^T). V may contain a normalised gate."""
        left, right = self[parts.left], self[parts.right]
        if looks_like_attention(left) != looks_like_attention(right):
            return parts if looks_like_attention(left) else parts.swapped()
        return parts.swapped() if right & NORMALISED and not left & NORMALISED else parts

    def is_product(self, node: Node) -> bool:
        """Whether a node is a product of two tensors, in a form that the analysis can take apart or in another."""
        return node.op == "call_function" and (is_contraction(node) or packet(node) in _OTHER_PRODUCTS)

    def may_be_product_with_values(self, node: Node) -> bool:
        """Whether a node may be the product with V: one operand was normalised since the last product."""
        if is_sdpa(node):
            return True
        if node.op != "call_function" or (AncestorKind.MIXED_HEADS in self[node] and head_sum(node) is not None):
            return False
        if is_contraction(node):
            one = packet(node) is aten.einsum and len(nodes.arguments(node)["tensors"]) == 1  # a trace, for one
            return not one and bool(self.inputs(node) & NORMALISED)
        unknown_form = packet(node) in _OTHER_PRODUCTS and looks_like_attention(self.inputs(node))
        return unknown_form or self.is_hidden_product_with_values(node)

    def is_hidden_product_with_values(self, node: Node) -> bool:
        """Whether a node multiplies attention weights of one query with V, by a product and a sum."""
        return any(looks_like_attention(self[factor]) for factor in extended_factors(node))

    def _of(self, node: Node) -> AncestorKind:
        kind = packet(node)
        dtype = nodes.dtype(node) if nodes.is_tensor(node) else torch.bool
        if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
            return _NOTHING  # positions, of the largest weights perhaps, and no weights
        kinds = self.inputs(node)
        if AncestorKind.PRODUCT in kinds and head_sum(node) is not None:
            return kinds | AncestorKind.MIXED_HEADS
        if is_contraction(node) or is_distance(node):
            return AncestorKind.PRODUCT
        if self.is_hidden_product_with_values(node):
            return AncestorKind.PRODUCT
        if kind in LINEAR or is_sdpa(node) or _normalizes_features(node) and AncestorKind.MIXED_HEADS not in kinds:
            return _NOTHING  # heads may be normalised after they were mixed
        if extended_factors(node):  # what was normalised before is a factor, unless it is attention weights
            kinds = kinds | AncestorKind.PRODUCT if looks_like_attention(kinds) else AncestorKind.PRODUCT
        if kind in SOFTMAXES | {aten.exp, aten.exp2} and nodes.is_tensor(node) and len(nodes.fake(node).shape) >= 2:
            kinds |= AncestorKind.SOFTMAX if kind in SOFTMAXES else AncestorKind.EXP
        if is_statistic(node):
            kinds |= AncestorKind.STATISTIC | (AncestorKind.SUM if kind in _SUMS else _NOTHING)
        return kinds | AncestorKind.GATE if kind in _GATES and AncestorKind.PRODUCT in kinds else kinds


def _normalizes_features(node: Node) -> bool:
    """Whether a node is a layer norm with parameters. One without may be that of the scores of a row."""
    return packet(node) is aten.layer_norm and nodes.arguments(node)["weight"] is not None


def is_statistic(node: Node) -> bool:
    """Whether a node reduces its input."""
    return node.op == "call_function" and packet(node) in _STATISTICS


def looks_like_attention(kinds: AncestorKind) -> bool:
    """Whether a person would call weights with these ancestors attention: normalised, and computed from a product."""
    return AncestorKind.PRODUCT in kinds and (
        AncestorKind.SOFTMAX in kinds or AncestorKind.EXP | AncestorKind.SUM in kinds
    )


def escaping_weights(graph: Graph) -> list[Node]:
    """Attention weights that a graph returns, or passes to the next graph; functions of a statistic of them, such as a
    loss, do not count."""
    kinds, made_by = AncestorKinds(graph), SOFTMAXES | {aten.exp, aten.exp2}
    whole = lambda node: [] if is_contraction(node) or is_statistic(node) else node.all_input_nodes

    def count(node: Node) -> Expr | None:
        try:
            return integers.mul(*nodes.shape(node))
        except nodes.Unsupported:  # a size that is no expression
            return None

    def holds(out: Node) -> bool:
        weights = (n for n in nodes.walk_up([out], whole) if packet(n) in made_by and AncestorKind.PRODUCT in kinds[n])
        return any(count(node) is count(out) for node in weights)

    return [out for out in graph.output_node().all_input_nodes if looks_like_attention(kinds[out]) and holds(out)]


def is_listed(anchor: Node, kinds: AncestorKinds) -> bool:
    """Whether a person would call a refused product attention: a function of a product, normalised before or after."""
    if is_sdpa(anchor):
        return True
    weights = [parent for parent in anchor.all_input_nodes if looks_like_attention(kinds[parent])]
    if weights:
        return not all(_is_of_classes(parent, kinds) for parent in weights)
    above = kinds.inputs(anchor)
    normalised = AncestorKind.PRODUCT | AncestorKind.STATISTIC in above and above & (
        AncestorKind.EXP | AncestorKind.GATE
    )
    if normalised and not any(map(is_parameter, anchor.all_input_nodes)):
        return True
    users = list(anchor.users)
    while len(users) == 1 and packet(users[0]) in MOVES:
        users = list(users[0].users)
    return AncestorKind.PRODUCT | AncestorKind.EXP in above and any(scales_rows(user, kinds) for user in users)


def scales_rows(node: Node, kinds: AncestorKinds) -> bool:
    """Whether a node multiplies or divides a product by statistics of the scores, as in `(e @ v) / e.sum(-1)`."""
    if packet(node) not in (aten.mul, aten.div) or node.kwargs or len(node.args) != 2:
        return False
    product, factor = node.args
    if not (isinstance(product, Node) and isinstance(factor, Node) and nodes.is_tensor(factor)):
        return False
    return shape(product) == shape(node) and AncestorKind.STATISTIC | AncestorKind.PRODUCT in kinds[factor]


def _is_of_classes(weights: Node, kinds: AncestorKinds) -> bool:
    """Whether weights are softmaxes over the last dimension of outputs of linear layers alone. Products with one query
    and sums over heads are none."""
    parents = lambda here: [] if is_contraction(here) else here.all_input_nodes
    above, products = list(nodes.walk_up([weights], parents)), products_above(weights)
    normalised = [here for here in above if packet(here) in SOFTMAXES]
    return (
        bool(normalised)
        and bool(products)
        and AncestorKind.MIXED_HEADS not in kinds[weights]
        and not any(map(extended_factors, above))
        and all(nodes.dims_of(here) == [len(shape(here)) - 1] for here in normalised)
        and all(map(_is_linear_layer, products))
    )


def _is_linear_layer(product: Node) -> bool:
    """Whether a product's last factor is one matrix for the whole batch, which is an input of the graph."""
    tensors = [x for x in product.all_input_nodes if nodes.is_tensor(x)]
    matrix = tensors[-1]
    if is_batch(tensors[0], len(shape(tensors[0])) - 1):
        return False  # heads of scores are mixed
    if is_parameter(matrix):
        return True
    shared = len(shape(matrix)) == 2 < max(len(shape(x)) for x in tensors)
    return shared and behind_moves(matrix).op == "placeholder"
