"""Choice of the refused products that the report lists: those that a person would call attention.

Weights that select one of their operands (greedy decoding, experts of a router), and those of a linear layer and a
softmax (a classifier's probabilities, an expectation over classes), are not listed.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .. import nodes
from ..nodes import packet, shape
from ..pullback.contractions import (
    MOVES,
    behind_moves,
    extended_factors,
    is_contraction,
    is_parameter,
    products_above,
)
from ..pullback.heads import is_batch
from ..pullback.sdpa import is_sdpa
from .ancestors import SOFTMAXES, AncestorKind, AncestorKinds, looks_like_attention

aten = torch.ops.aten


def is_listed(anchor: Node, kinds: AncestorKinds) -> bool:
    """Whether a person would call a refused product attention: a function of a product, normalised before or after
    it."""
    if is_sdpa(anchor):
        return True
    weights = [parent for parent in anchor.all_input_nodes if looks_like_attention(kinds[parent])]
    if weights:
        return not all(_is_of_classes(parent, kinds) for parent in weights)
    above = kinds.inputs(anchor)
    normalised = (
        AncestorKind.PRODUCT | AncestorKind.GATE | AncestorKind.SUM in above
        or AncestorKind.PRODUCT | AncestorKind.EXP | AncestorKind.STATISTIC in above
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

    def parents(here: Node) -> list[Node]:
        return [] if is_contraction(here) else here.all_input_nodes

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
