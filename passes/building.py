"""Construction of nodes in the rewritten graph: calls with their metadata, and sizes as values."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.ir.expr import Expr, walk
from fusion.refusals import Reason
from fusion.torch_private.autograd import SET_GRAD_ENABLED

from . import nodes
from .nodes import Unsupported

aten = torch.ops.aten


def derived(graph: Graph, origin: Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
    """Call at the graph's insertion point, with its fake value and the provenance of its first node argument."""
    node = graph.call_function(target, args, kwargs)
    nodes.copy_provenance(origin, node)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, nodes.fake), **kwargs)
    return node


def same_grad_mode_point(root: Node, place: Node) -> Node | None:
    """The last node from `place` upwards with gradients enabled as at the root, or None."""
    node: Node | None = place
    while node is not None and _enabled(node)[0] != _enabled(root)[0]:
        node = _enabled(node)[1]
    return node


def _enabled(node: Node) -> tuple[bool, Node | None]:
    """Whether gradients are enabled at a node, and the node that says so; None where they are as at the start."""
    while (node := node.prev).op != "root":
        if node.target is SET_GRAD_ENABLED:
            return bool(node.args[0]), node
    return torch.is_grad_enabled(), None


class Symbols:
    """Graph values of size expressions: integers, or nodes computed from the nodes that carry each symbol."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.carriers: dict[str, tuple[Node, int | None]] = {}
        for node in graph.nodes:
            fake = nodes.fake(node) if node.op != "output" else None
            if isinstance(fake, torch.SymInt) and fake.node.expr.is_symbol:
                self.carriers.setdefault(str(fake.node.expr), (node, None))
            elif isinstance(fake, torch.Tensor) and node.op == "placeholder":
                for dim, extent in enumerate(fake.shape):
                    if isinstance(extent, torch.SymInt) and extent.node.expr.is_symbol:
                        self.carriers.setdefault(str(extent.node.expr), (node, dim))

    def require(self, expr: Expr) -> None:
        """Raise `Unsupported` unless `value` can compute this expression."""
        for part in walk(expr):
            if part.op == "size" and part.attr not in self.carriers:
                raise Unsupported(Reason.SIZE, f"the size {part.attr} is not carried by any input of the graph")
            if part.op not in ("size", "const") and part.op not in _OPERATORS:
                raise Unsupported(Reason.SIZE, f"a size written as {expr}")

    def of(self, sizes: Iterable[Expr]) -> list[Node]:
        """Nodes that carry the symbols of these sizes."""
        return [self.carriers[part.name][0] for part in walk(*sizes) if part.op == "size"]

    def value(self, expr: Expr) -> int | Node:
        """Integer, or a node inserted at the graph's insertion point."""
        if expr.op == "const":
            return expr.integer
        if expr.op == "size":
            return self._symbol(expr.name)
        result = self.value(expr.args[0])
        for arg in expr.args[1:]:
            operands, function = (result, self.value(arg)), _OPERATORS[expr.op]
            result = self.graph.call_function(function, operands)
            result.meta["val"] = function(*map(nodes.fake, operands))
        return result

    def _symbol(self, name: str) -> Node:
        node, dim = self.carriers[name]
        if dim is None:
            return node
        extent = self.graph.call_function(aten.sym_size.int, (node, dim))
        extent.meta["val"] = nodes.fake(node).shape[dim]
        return extent


_OPERATORS = {"add": operator.add, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
              "imax": torch.sym_max, "imin": torch.sym_min}  # fmt: skip
