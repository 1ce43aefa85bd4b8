"""Tensors in the shape of scores, as of `torch.rand_like(scores)`, are made of sizes: then nothing needs the scores."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.passes import marks, nodes
from fusion.passes.building import Symbols
from fusion.passes.contractions import products_above
from fusion.passes.nodes import Unsupported, packet, shape

aten = torch.ops.aten
_OF_SIZES: dict[Any, Any] = {
    aten.empty_like: aten.empty.memory_format, aten.zeros_like: aten.zeros.default, aten.ones_like: aten.ones.default,
    aten.full_like: aten.full.default, aten.rand_like: aten.rand.default, aten.randn_like: aten.randn.default,
}  # fmt: skip


def make_by_size(graph: Graph) -> None:
    """Rewrite such calls where the result is contiguous, as that of a call by sizes is."""
    symbols: Symbols | None = None
    for node in list(graph.nodes):
        if (target := _OF_SIZES.get(packet(node))) is None or not _is_plain(node):
            continue
        symbols, held = symbols or Symbols(graph), nodes.value(node)
        with graph.inserting_before(node), contextlib.suppress(Unsupported):  # sizes that are data
            node.args = ([symbols.value(extent) for extent in shape(node)], *node.args[1:])
            node.kwargs = {"dtype": held.dtype, "device": held.device}
            node.target = target


def _is_plain(node: Node) -> bool:
    like, held = node.args[0], nodes.value(node)
    if not isinstance(like, Node) or marks.dtensor(node) or not products_above(like):
        return False
    return held.layout is torch.strided and held.is_contiguous() and not node.kwargs.get("pin_memory")
