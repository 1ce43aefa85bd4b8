"""Tables that are read at a function of the distance between query and key, read once per distance.

    table[bucket(j - i)]   =   line[j - i + n_q - 1]   with line = table[bucket(distances)]

There are n_q n_k pairs, but n_q + n_k - 1 distances. The operations that compute positions from distances (clamps, T5's
buckets with their logarithm) run on these alone. The attention then reads an index that is linear in query and
key: the bias [H, N_q, N_k] is never materialised, and its gradient is added up along the diagonals, where neighbours go
to different elements. In the table neighbours share few elements, and each addition waits for the one before. All
values are unchanged, since the same operations take the same numbers.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion.ir import integers
from fusion.ir.expr import Expr, I, J, Kind, loads
from fusion.ir.reads import is_shift_free
from fusion.torch_private.tensors import detect_fake_mode, enable_python_dispatcher

from .. import marks, nodes
from ..building import Symbols, derived
from ..nodes import Unsupported, arguments, packet, shape
from ..pullback.pullback import PullBack

aten = torch.ops.aten
_ELEMENTWISE = (aten._to_copy, aten.to, aten.clone, aten.contiguous, aten.alias, aten.detach, aten.full_like,
                aten.zeros_like, aten.ones_like)  # fmt: skip
"""Operations besides those that torch calls pointwise."""
ONE = integers.integer(1)


def read_by_distance(graph: Graph) -> None:
    """Rewrite such reads (`embedding`, indexing) by positions [.., N_q, N_k] that the graph computes from `arange`."""
    symbols: Symbols | None = None
    for node in list(graph.nodes):
        if (positions := _positions(node)) is None:
            continue
        symbols = symbols or Symbols(graph)
        with graph.inserting_before(node), contextlib.suppress(Unsupported):  # sizes that are data
            result = _Line(graph, node, positions, symbols).read()
            if result is not None and nodes.memory_order(result) == nodes.memory_order(node):
                node.replace_all_uses_with(result)
    if symbols is not None:
        nodes.erase_unused(graph, nodes.impurity())


def _positions(node: Node) -> Node | None:
    """Positions at which a node reads a table, if they are computed, and have a query and a key dimension."""
    positions = None
    if marks.mutations(node) or marks.dtensor(node):
        return None
    if packet(node) is aten.embedding:
        args = arguments(node)
        positions = None if args.get("scale_grad_by_freq") or args.get("sparse") else args["indices"]
    elif packet(node) is aten.index:
        indices = [index for index in arguments(node)["indices"] if index is not None]
        positions = indices[0] if len(indices) == 1 else None
    if positions is None or nodes.fake(positions).ndim < 2 or nodes.dtype(positions) not in (torch.int64, torch.int32):
        return None
    return positions if positions.op == "call_function" else None


class _Line:
    """The values that a node reads, as a tensor over distances: element t belongs to the distance t - (n_q - 1) between
    key and query."""

    def __init__(self, graph: Graph, node: Node, positions: Node, symbols: Symbols):
        self.graph, self.node, self.positions, self.symbols = graph, node, positions, symbols
        *self.outer, self.n_q, self.n_k = shape(positions)
        self.walk = PullBack({I: self.n_q, J: self.n_k}, self.n_k)
        self.lines: dict[Node, Node | None] = {}
        args, is_embedding = arguments(node), packet(node) is aten.embedding
        self.table, self.dim = (args["weight"], 0) if is_embedding else (args["self"], args["indices"].index(positions))

    def read(self) -> Node | None:
        """Replacement of the node, or None."""
        line = None if self._is_followed() else self._of(self.positions)
        return None if line is None else self._spread(line)

    def _is_followed(self) -> bool:
        """Whether the pull-back reads the positions itself: linear in query and key, and provably within the table."""
        if not self._has_pairs(self.positions) or (expr := self._integer(self.positions)) is None:
            return False
        return _slope(expr) is not None and integers.is_below(expr, shape(self.table)[self.dim], self.walk.bounds)

    def _of(self, here: Node) -> Node | None:
        """Tensor of n_q + n_k - 1 elements with the value of a tensor [.., n_q, n_k] at each distance; None where that
        value depends on more than the distance."""
        if here not in self.lines:
            ways = (self._linear, self._pointwise, self._looked_up) if self._has_pairs(here) else ()
            self.lines[here] = next((line for way in ways if (line := way(here)) is not None), None)
        return self.lines[here]

    def _looked_up(self, here: Node) -> Node | None:
        """Line of a read of a table of one dimension at such positions. It is read at each call: values may change."""
        positions = _positions(here)
        if positions is None or nodes.fake(here.args[0]).ndim != 1 or any(map(marks.mutations, here.all_input_nodes)):
            return None
        if (line := self._of(positions)) is None:
            return None
        args, kwargs = torch.fx.node.map_arg((here.args, here.kwargs), lambda x: line if x is positions else x)
        return self._call(here.target, args, **kwargs)

    def _pointwise(self, here: Node) -> Node | None:
        """Line of a pointwise operation on such tensors and numbers."""
        target: Any = here.target
        tags = getattr(target, "tags", ())
        pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        changing = any(marks.mutations(node) for node in (here, *here.all_input_nodes))
        if changing or not (pointwise or packet(here) in _ELEMENTWISE):
            return None
        if any(isinstance(argument, Node) for argument in here.kwargs.values()):
            return None
        lines = {}
        for parent in here.all_input_nodes:
            fake = nodes.fake(parent)
            if isinstance(fake, torch.Tensor) and fake.ndim:
                if (line := self._of(parent)) is None:
                    return None
                lines[parent] = line
        if not lines:
            return None
        args, kwargs = torch.fx.node.map_arg((here.args, here.kwargs), lambda argument: lines.get(argument, argument))
        return self._call(target, args, **kwargs)

    def _has_pairs(self, here: Node) -> bool:
        *outer, rows, keys = shape(here) if nodes.fake(here).ndim > 1 else (ONE, ONE)
        several = not any(extent.is_const and extent.integer < 2 for extent in (rows, keys))
        pairs = here.op == "call_function" and (rows, keys) == (self.n_q, self.n_k)
        return pairs and several and all(extent is ONE for extent in outer)

    def _linear(self, here: Node) -> Node | None:
        """Line of integers a (j - i) + c, with a = 1 or -1 and c an expression of sizes."""
        expr = self._integer(here)
        if expr is None or (slope := _slope(expr)) is None:
            return None
        last = integers.sub(self.n_q, 1)
        start = integers.sub(slope[1], integers.mul(slope[0], last))
        end = integers.add(start, integers.mul(slope[0], integers.add(last, self.n_k)))
        fake = nodes.fake(here)
        bounds = (self.symbols.value(start), self.symbols.value(end), slope[0])
        return self._call(aten.arange.start_step, bounds, dtype=fake.dtype, device=fake.device)

    def _integer(self, here: Node) -> Expr | None:
        """Element at query and key as an expression of these and sizes."""
        if nodes.dtype(here) not in (torch.int64, torch.int32):
            return None
        expr = self.walk.value(here, (*[integers.integer(0)] * (nodes.fake(here).ndim - 2), I, J))
        return None if expr.kind is not Kind.INT or loads(expr) else expr

    def _spread(self, line: Node) -> Node:
        """Result of the node, [.., n_q, n_k], from the line."""
        args, kwargs = torch.fx.node.map_arg(
            (self.node.args, self.node.kwargs), lambda argument: line if argument is self.positions else argument
        )
        read = self._marked(self.node.target, args, **kwargs)
        result = self._marked(aten.index.Tensor, (read, [None] * self.dim + [self._distances()]))
        if not self.outer:
            return result
        return self._marked(aten.reshape.default, (result, [self.symbols.value(n) for n in shape(self.node)]))

    def _marked(self, target: Any, args: Any, **kwargs: Any) -> Node:
        """Call whose result has the node's gradient."""
        call = self._call(target, args, **kwargs)
        marks.requires_grad.set(call, marks.requires_grad(self.node))
        marks.stop_gradient.set(call, marks.stop_gradient(self.node))
        return call

    def _distances(self) -> Node:
        """j - i + n_q - 1, [n_q, n_k]."""
        device, last = nodes.fake(self.positions).device, self.symbols.value(integers.sub(self.n_q, 1))
        keys = self._call(aten.arange.default, (self.symbols.value(self.n_k),), device=device)
        from_last = self._call(aten.arange.start_step, (last, -1, -1), device=device)
        return self._call(aten.add.Tensor, (self._call(aten.unsqueeze.default, (from_last, 1)), keys))

    def _call(self, target: Any, args: Any, **kwargs: Any) -> Node:
        mode = detect_fake_mode(nodes.fake(self.node))
        assert mode is not None
        with mode, torch.no_grad(), enable_python_dispatcher():
            return derived(self.graph, self.node, target, args, **kwargs)


def _slope(expr: Expr) -> tuple[int, Expr] | None:
    """(a, c) of a (j - i) + c, with a = 1 or -1 and c free of i and j."""
    parts = integers.linear(expr, J)
    if parts is None or parts[0] not in (ONE, integers.integer(-1)) or not is_shift_free(expr):
        return None
    return parts[0].integer, integers.sub(expr, integers.mul(parts[0], integers.sub(J, I)))
