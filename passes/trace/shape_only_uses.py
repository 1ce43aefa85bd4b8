"""Uses of scores for their shape alone, as in `torch.rand_like(scores)` or `prior.expand_as(weights)`, rewritten with
sizes: then they do not need the scores."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import marks, nodes
from ..building import Symbols
from ..nodes import Unsupported, packet, shape
from ..pullback.contractions import products_above

aten = torch.ops.aten
_OF_SIZES: dict[Any, Any] = {
    aten.empty_like: aten.empty.memory_format, aten.zeros_like: aten.zeros.default, aten.ones_like: aten.ones.default,
    aten.full_like: aten.full.default, aten.rand_like: aten.rand.default, aten.randn_like: aten.randn.default,
}  # fmt: skip
_VIEWS: dict[Any, Any] = {
    aten.expand_as: aten.expand.default, aten.view_as: aten.view.default, aten.reshape_as: aten.reshape.default,
}  # fmt: skip


def make_by_size(graph: Graph) -> None:
    """Rewrite such calls where the result is contiguous, as that of a call by sizes is."""
    symbols: Symbols | None = None
    for node in list(graph.nodes):
        target, is_view = _OF_SIZES.get(packet(node)), packet(node) in _VIEWS
        if not (_takes_shape_of_scores(node) if is_view else target is not None and _is_plain(node)):
            continue
        symbols, fake = symbols or Symbols(graph), nodes.fake(node)
        with graph.inserting_before(node), contextlib.suppress(Unsupported):  # sizes that are data
            extents = [symbols.value(extent) for extent in shape(node)]
            node.args = (node.args[0], extents) if is_view else (extents, *node.args[1:])
            node.kwargs = {} if is_view else {"dtype": fake.dtype, "device": fake.device}
            node.target = _VIEWS[packet(node)] if is_view else target


def _takes_shape_of_scores(node: Node) -> bool:
    like = nodes.arguments(node)["other"]
    return isinstance(like, Node) and not marks.dtensor(node) and bool(products_above(like))


def _is_plain(node: Node) -> bool:
    like, fake = node.args[0], nodes.fake(node)
    if not isinstance(like, Node) or marks.dtensor(node) or not products_above(like):
        return False
    return fake.layout is torch.strided and fake.is_contiguous() and not node.kwargs.get("pin_memory")
