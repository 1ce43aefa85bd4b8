"""Copies of dense biases and masks in which neighbouring keys lie apart, with keys innermost.

A bias that a linear layer or a table computes for each pair of tokens has its heads innermost: [N, N, H], read as
`bias.permute(2, 0, 1)`. Kernels would gather its keys one by one, for every batch element that shares it. Inductor
fuses the copy with the operation that computes the bias, and the gradient has the copy's layout. Where that is added to
a table, it takes longer than before: a trained bias that is read once stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fusion.ir.expr import Expr, coordinates
from fusion.ir.reads import dense_loads, key_dimension
from fusion.ir.sizes import size_value

from .. import marks, nodes
from ..building import derived
from .specify import AttentionCall

aten = torch.ops.aten
Order = tuple[int, ...]


def with_keys_innermost(
    graph: Graph, part: AttentionCall, operands: Sequence[Node], hints: Mapping[str, int]
) -> tuple[AttentionCall, list[Node]]:
    """A part and its operands with copies, made at the graph's insertion point, where these pay: of what more than one
    batch element reads, or what is made in the graph and not trained."""
    laid_out, described = list(operands), list(part.spec.operands)
    for number, order in _wanted(part, operands, hints).items():
        laid_out[number] = _laid_out(graph, operands[number], order)
        if described[number].order:
            described[number] = replace(described[number], order=order)
    return replace(part, spec=replace(part.spec, operands=tuple(described))), laid_out


def _wanted(part: AttentionCall, operands: Sequence[Node], hints: Mapping[str, int]) -> dict[int, Order]:
    """Orders of dimensions in memory, slowest first, of the operands that are copied."""
    sizes, orders_by_operand = part.example_sizes(hints), dict[int, set[Order | None]]()
    extents = {axis.name: size_value(size, sizes) for axis, size in zip(part.spec.axes, part.spec.batch, strict=True)}
    for read in dense_loads(part.spec.score, part.spec.weight):
        node = operands[read.operand]
        again = any(extent > 1 for name, extent in extents.items() if name not in coordinates(read))
        computed = node.op == "call_function" and not part.spec.operands[read.operand].order  # see the module
        pays = read.operand > 2 and (again or computed) and not marks.dtensor(node)
        orders_by_operand.setdefault(read.operand, set()).add(_order(read, node) if pays else None)
    return {
        number: order for number, orders in orders_by_operand.items() if len(orders) == 1 for order in orders if order
    }


def _order(read: Expr, node: Node) -> Order | None:
    """Order with keys innermost, rows beside them; None where it is so already, or keys are not one dimension in
    memory."""
    column, order = key_dimension(read), nodes.memory_order(node)
    if column is None or order[-1] == column or 0 in nodes.fake(node).stride():
        return None
    rest = [dim for dim in order if dim != column]
    return (*sorted(rest, key=lambda dim: "i" in coordinates(read.args[dim])), column)


def _laid_out(graph: Graph, node: Node, order: Order) -> Node:
    permuted = derived(graph, node, aten.permute.default, (node, list(order)))
    copied = derived(graph, node, aten.clone.default, (permuted,), memory_format=torch.contiguous_format)
    back = derived(graph, node, aten.permute.default, (copied, [order.index(dim) for dim in range(len(order))]))
    marks.requires_grad.set(back, marks.requires_grad(node))
    return back
