"""Construction of nodes in the rewritten graph: sizes as values, calls with their metadata, and the nodes that replace
auxiliary outputs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.ir.expr import Expr, coord, walk
from fusion.ir.integers import Bounds
from fusion.ir.spec import AuxOutput
from fusion.refusals import Reason
from fusion.torch_private.autograd import SET_GRAD_ENABLED

from . import marks, nodes
from .nodes import Unsupported
from .recognize.find import Site
from .specify.aux_outputs import AuxUse

aten = torch.ops.aten


def derived(graph: Graph, origin: Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
    """Call at the graph's insertion point, with its fake value and the provenance of its first node argument."""
    node = graph.call_function(target, args, kwargs)
    nodes.copy_provenance(origin, node)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, nodes.fake), **kwargs)
    return node


def materialize_aux_output(
    graph: Graph, use: AuxUse, aux: AuxOutput, made: Node, symbols: Symbols, bounds: Bounds, trained: bool
) -> Node:
    """Node that replaces `use.node`: an auxiliary output in that node's shape, dtype and order in memory. made: the
    auxiliary output as the operator returns it. trained: whether gradients pass through it."""
    node, like = use.node, nodes.fake(use.node)

    def size(extent: Expr) -> Any:
        return nodes.fake(symbols.value(extent))

    dtype = getattr(torch, aux.dtype)
    made.meta["val"] = like.new_empty([size(bounds[coord(name)]) for name in use.dims], dtype=dtype)
    nodes.copy_provenance(node, made)
    result = made
    if trained and not marks.requires_grad(node):
        result = derived(graph, node, aten.detach.default, (result,))
    if use.divisor is not None:
        result = derived(graph, node, aten.div.Tensor, (result, symbols.value(use.divisor)))
    if nodes.dtype(result) != like.dtype:
        result = derived(graph, node, aten.to.dtype, (result, like.dtype))
    if use.dims != use.order:
        result = derived(graph, node, aten.permute.default, (result, [use.dims.index(d) for d in use.order]))
    if nodes.shape(result) != nodes.shape(node):
        result = derived(graph, node, aten.reshape.default, (result, [symbols.value(e) for e in nodes.shape(node)]))
    order = list(nodes.memory_order(node))
    if order != list(nodes.memory_order(result)):
        result = derived(graph, node, aten.permute.default, (result, order))
        result = derived(graph, node, aten.contiguous.default, (result,))
        result = derived(graph, node, aten.permute.default, (result, [order.index(k) for k in range(len(order))]))
    return result


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


_EXTREMA = {aten.amax.default: aten.amax.default, aten.max.default: aten.amax.default,
            aten.amin.default: aten.amin.default, aten.min.default: aten.amin.default}  # fmt: skip


def split_extrema(graph: Graph, sites: Sequence[Site]) -> None:
    """Apply `_split_extremum` to extrema of the nodes that sites analysed, or of pointwise functions of these."""
    region, read = _known(sites)
    todo, seen = [*region], region | read
    while todo:
        node = todo.pop()
        for user in [user for user in node.users if user not in seen]:
            seen.add(user)
            with contextlib.suppress(Unsupported):  # sizes that are data
                if nodes.is_tensor(user) and nodes.shape(user) == nodes.shape(node):
                    todo.append(user)
                elif user.target in _EXTREMA and not marks.requires_grad(user):
                    _split_extremum(graph, user)


def _known(sites: Sequence[Site]) -> tuple[set[Node], set[Node]]:
    """Nodes that sites analysed, with their inputs and roots."""
    region, read = set[Node](), {node for site in sites for node in (site.anchor, site.root)}
    for attention in (attention for site in sites for attention in site.attentions):
        walked = attention.pullback
        region.update(walked.interior)
        read.update(walked.loaded, [attention.value.node])
        read.update(node for p in walked.products for node in (p.node, p.query.node, p.key.node))
    return region, read


def _split_extremum(graph: Graph, node: Node) -> None:
    """Write an extremum over several dimensions as one over the last of them, which an auxiliary output may replace,
    and one over the rest. Only without a gradient: several equal elements would share it in another way."""
    args, dims = nodes.arguments(node), nodes.dims_of(node)
    if len(dims) < 2:
        return
    with graph.inserting_before(node):
        inner = derived(graph, node, _EXTREMA[node.target], (args["self"], dims[-1:], True))
        outer = derived(graph, node, _EXTREMA[node.target], (inner, dims, bool(args.get("keepdim"))))
    node.replace_all_uses_with(outer)
    graph.erase_node(node)


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
