"""Kinds of operations above every node of a graph, up to products and linear layers: one forward pass over the graph.

They show which products may be those of attention weights with V, before anything is pulled back.
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
from ..nodes import packet
from ..pullback.contractions import Factors, extended_factors, is_contraction, is_distance
from ..pullback.heads import head_sum
from ..pullback.sdpa import is_sdpa

aten = torch.ops.aten
SOFTMAXES = {aten.softmax, aten._softmax, aten._safe_softmax, aten.special_softmax, aten.log_softmax, aten._log_softmax}
_GATES = {aten.sigmoid, aten.relu, aten.tanh, aten.silu, aten.softplus, aten.gelu, aten.elu, aten.square, aten.sin,
          aten.pow, aten.abs, aten.special_expit, aten.erf, aten.cos, aten.leaky_relu, aten.clamp}  # fmt: skip
_SUMS = {aten.sum, aten.linalg_vector_norm, aten.logsumexp, aten.special_logsumexp}
_STATISTICS = {aten.amax, aten.max} | _SUMS
LINEAR = (aten.linear, aten.addmm)
FURTHER_PRODUCTS = (aten.linear, aten.mv, aten.addmv, aten.addbmm, aten.dot, aten.inner, aten.tensordot,
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

    def weights_are_left(self, parts: Factors) -> bool:
        """Whether the left operand holds the weights: the one that is normalised. Weights on the right are rare (v^T @
        w^T). V may contain a normalised gate."""
        left, right = self[parts.left], self[parts.right]
        if looks_like_attention(left) != looks_like_attention(right):
            return looks_like_attention(left)
        return bool(left & NORMALISED) or not right & NORMALISED

    def is_hidden_product_with_values(self, node: Node) -> bool:
        """Whether a node multiplies attention weights of one query with V, by a product and a sum."""
        return any(looks_like_attention(self[factor]) for factor in extended_factors(node))

    def _of(self, node: Node) -> AncestorKind:
        kind = packet(node)
        if nodes.is_tensor(node) and _holds_integers(nodes.fake(node)):
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


def _holds_integers(held: torch.Tensor) -> bool:
    return not (held.is_floating_point() or held.is_complex() or held.dtype is torch.bool)


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
    kinds = AncestorKinds(graph)

    def whole(node: Node) -> list[Node]:
        return [] if is_contraction(node) or is_statistic(node) else node.all_input_nodes

    def are_weights(node: Node) -> bool:
        return packet(node) in SOFTMAXES | {aten.exp, aten.exp2} and AncestorKind.PRODUCT in kinds[node]

    def count(node: Node) -> Expr | None:
        try:
            return integers.mul(*nodes.shape(node))
        except nodes.Unsupported:  # a size that is no expression
            return None

    def holds(out: Node) -> bool:
        return any(are_weights(node) and count(node) is count(out) for node in nodes.walk_up([out], whole))

    return [out for out in graph.output_node().all_input_nodes if looks_like_attention(kinds[out]) and holds(out)]
