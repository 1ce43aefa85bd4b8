"""Linear layers that are products of two tensors."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .. import nodes
from ..nodes import arguments, shape
from ..pullback.contractions import is_parameter
from ..pullback.heads import head_sum

aten = torch.ops.aten


def write_products(graph: Graph) -> None:
    """Write a linear layer whose weight is no parameter, nor computed from parameters alone, as a product of two
    tensors, `F.linear(q, k)`, unless it mixes heads."""
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        args = arguments(node)
        weight = args["weight"]
        if args["bias"] is not None or len(shape(weight)) != 2 or not _is_data(weight) or head_sum(node):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(aten.t.default, (weight,))
        turned.meta = {**weight.meta, "val": nodes.fake(weight).t()}
        node.target, node.args, node.kwargs = aten.matmul.default, (args["input"], turned), {}


def _is_data(node: Node) -> bool:
    """Whether a tensor depends on anything but parameters."""
    origins = nodes.walk_up([node], lambda origin: origin.all_input_nodes)
    return any(origin.op == "placeholder" and not is_parameter(origin) for origin in origins)
