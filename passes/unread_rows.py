"""Rows that nothing reads are not computed.

A classifier reads the first row of its last layer, generation the last one. Between the layer's attention and that
selection, and in the queries of the attention, every operation works row by row: linear layers, normalisations,
residuals, views. There the selection comes first:

    norm(x + mlp(attend(q(x), k(x), v(x))))[:, -1:]   =   norm(y + mlp(attend(q(y), k(x), v(x))))   with y = x[:, -1:]

The rows that are computed go through the same operations as before, in products of fewer rows. Random numbers are drawn
for all rows, writes in place see all of them, and what is returned keeps its layout: such nodes are computed whole.
NaN and infinities in rows that are left out reach no gradient of a weight, as they do in eager mode by 0 * inf.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusion.ir import integers
from fusion.ir.expr import Expr, contains, coord
from fusion.passes import marks, nodes
from fusion.passes.building import Symbols, derived
from fusion.passes.nodes import Unsupported, arguments, normalize_dim, packet, shape
from fusion.passes.views import is_view, source

aten = torch.ops.aten
ONE = integers.integer(1)
END = 2**63 - 1
"""What a slice to the end of a dimension ends at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The part of a tensor that is read: a range of one dimension, or of a factor of one.

    dim: the dimension, of size outer * extent * inner; a row is the middle digit of a position.
    start, end: the range, as in a slice.
    extent, count: how many rows there are, and are read.
    """

    dim: int
    outer: Expr = ONE
    inner: Expr = ONE
    start: int
    end: int
    extent: Expr
    count: Expr

    @property
    def is_factor(self) -> bool:
        """Whether the dimension holds more than the rows."""
        return self.outer is not ONE or self.inner is not ONE

    def at(self, dim: int) -> Rows:
        """The same rows of another tensor."""
        return replace(self, dim=dim)

    def within(self, extents: tuple[Expr, ...]) -> list[Expr]:
        """A shape with the rows that are read alone."""
        size = integers.mul(self.outer, self.count, self.inner)
        return [*extents[: self.dim], size, *extents[self.dim + 1 :]]


Inputs = dict[Node, Rows]
"""Of a node: the inputs of which it does not read all rows, and those that it reads."""
Rule = Callable[[Node, dict[str, Any], Rows], Inputs]
"""(node, its arguments, the rows that are read of it) -> what it reads; raises `Whole`."""


class Whole(Exception):
    """A node does not work row by row, or has to be computed whole."""


def skip_unread_rows(graph: Graph) -> list[str]:
    """Compute only the rows that are read, where this makes a product smaller. Returns notes for the report."""
    read, inputs = _reads(graph)
    first: dict[tuple[Expr, Expr], Node] = {}
    for node in graph.nodes:
        if (rows := read[node]) is not None and packet(node) in _PRODUCTS:
            first.setdefault((rows.count, rows.extent), node)
    if not first:
        return []
    _rewrite(graph, read, inputs)
    places = {rows: nodes.module_path(node) or nodes.source_line(node) or node.name for rows, node in first.items()}
    return [
        f"from {place} on, {count} of {extent} rows are computed: nothing reads the others"
        for (count, extent), place in places.items()
    ]


def _reads(graph: Graph) -> tuple[dict[Node, Rows | None], dict[Node, Inputs]]:
    """The rows that are read of each node (None: all), and what row-wise nodes and selections then read."""
    read: dict[Node, Rows | None] = {}
    inputs: dict[Node, Inputs] = {}
    symbols = Symbols(graph)
    for node in reversed(graph.nodes):
        if (rows := read.setdefault(node, None)) is not None:
            try:
                inputs[node] = _row_wise(node, rows, symbols)
            except (Unsupported, Whole):
                read[node] = None
        if read[node] is None and (selected := _selected(node)) is not None:
            inputs[node] = {node.all_input_nodes[0]: selected}
        for parent in node.all_input_nodes:
            wanted = inputs.get(node, {}).get(parent)
            read[parent] = wanted if read.setdefault(parent, wanted) == wanted else None
    return read, inputs


def _selected(node: Node) -> Rows | None:
    """The rows of its input that a slice or a selection reads; None where it is neither, and where it reads more than
    half: to take these out may cost what it saves."""
    if packet(node) not in (aten.slice, aten.select) or _is_returned(node):
        return None
    args = arguments(node)
    start = args["index"] if packet(node) is aten.select else args["start"] or 0
    if not isinstance(start, int) or args.get("step", 1) != 1:
        return None
    try:
        extents = shape(args["self"])
        dim = normalize_dim(args["dim"], len(extents))
        extent, count = extents[dim], ONE if packet(node) is aten.select else shape(node)[dim]
    except Unsupported:
        return None
    if not count.is_const or (extent.is_const and 2 * count.integer > extent.integer):
        return None
    if start < 0 and extent.is_const:
        start = max(start + extent.integer, 0)
    return Rows(dim=dim, start=start, end=start + count.integer or END, extent=extent, count=count)


def _is_returned(node: Node) -> bool:
    """Whether the graph returns a view of this node, whose layout users may see."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def _row_wise(node: Node, rows: Rows, symbols: Symbols) -> Inputs:
    """What a node reads for these rows of its result."""
    if node.op != "call_function" or marks.mutations.on(node) or marks.dtensor(node) or nodes.is_active_dropout(node):
        raise Whole
    rule = _RULES.get(packet(node))
    if nodes.is_tensor(node):
        for extent in rows.within(shape(node)):
            symbols.require(extent)
    elif rule is None:
        raise Whole
    if _is_pointwise(node):
        return _broadcast(node, node.all_input_nodes, rows)
    found = _of_view(node, rows) if rule is None else rule(node, arguments(node), rows)
    given = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    for origin, wanted in found.items():
        if sum(argument is origin for argument in given) > 1:
            raise Whole  # an operand that is read in two ways
        for extent in shape(origin) if wanted.is_factor else ():
            symbols.require(extent)
    return found


_ELEMENTWISE = (aten.to, aten._to_copy, aten.type_as, aten.contiguous, aten.detach, aten.__and__, aten.__or__,
                aten.multiply, aten.divide, aten.subtract, aten.hardswish, aten.log_sigmoid)  # fmt: skip
"""Operations that torch does not tag as working element by element."""


def _is_pointwise(node: Node) -> bool:
    target = node.target
    if packet(node) in _ELEMENTWISE:
        return True
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def _broadcast(node: Node, operands: Iterable[Node], rows: Rows) -> Inputs:
    """Of operands that are broadcast with each other."""
    own, found = shape(node), {}
    for operand in filter(nodes.is_tensor, operands):
        extents = shape(operand)
        dim = rows.dim - len(own) + len(extents)
        if dim < 0 or extents[dim] is ONE:
            continue
        if extents[dim] is not own[rows.dim]:
            raise Whole
        found[operand] = rows.at(dim)
    return found


_RULES: dict[Any, Rule] = {}


def _rule(*packets: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(packets, rule))
        return rule

    return register


@_rule(aten.linear)
def _linear(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim == len(shape(node)) - 1:
        raise Whole
    return {args["input"]: rows}


@_rule(aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
def _product(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    *added, left, right = filter(nodes.is_tensor, args.values())
    rank = len(shape(node))
    if min(len(shape(left)), len(shape(right)), rank) < 2:
        raise Whole
    behind = rank - 1 - rows.dim
    found = _broadcast(node, added, rows)
    if behind > 1:
        return found | _broadcast(node, (left, right), rows)
    operand = left if behind else right
    return found | {operand: rows.at(len(shape(operand)) - 1 - behind)}


@_rule(aten.scaled_dot_product_attention)
def _attention(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim != len(shape(node)) - 2 or rows.is_factor:
        raise Whole
    query, mask = args["query"], args["attn_mask"]
    found = {query: rows.at(len(shape(query)) - 2)}
    if mask is not None and len(extents := shape(mask)) > 1 and extents[-2] is not ONE:
        found[mask] = rows.at(len(extents) - 2)
    return found


@_rule(aten.layer_norm, aten.rms_norm)
def _normalisation(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim >= len(shape(node)) - len(args["normalized_shape"]):
        raise Whole
    return {args["input"]: rows}


@_rule(aten.softmax, aten._softmax, aten.log_softmax, aten.glu, aten.cumsum)
def _along(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if normalize_dim(args["dim"], len(shape(node))) == rows.dim:
        raise Whole
    return {args["self"]: rows}


@_rule(aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.linalg_vector_norm)
def _reduction(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    rank, dims = len(shape(args["self"])), args.get("dim")
    if not dims:
        raise Whole
    reduced = {normalize_dim(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)}
    left = [dim for dim in range(rank) if args["keepdim"] or dim not in reduced]
    if left[rows.dim] in reduced:
        raise Whole
    return {args["self"]: rows.at(left[rows.dim])}


@_rule(aten.cat, aten.stack)
def _joined(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    rank, stacked = len(shape(node)), packet(node) is aten.stack
    dim = normalize_dim(args["dim"], rank)
    if dim == rows.dim or any(len(shape(tensor)) != rank - stacked for tensor in args["tensors"]):
        raise Whole
    return dict.fromkeys(args["tensors"], rows.at(rows.dim - (stacked and dim < rows.dim)))


@_rule(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
def _pieces(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    """Of an operation of several results; rows are those of each."""
    dim = normalize_dim(args["dim"], len(shape(args["self"])))
    if packet(node) is aten.unbind:
        return {args["self"]: rows.at(rows.dim + (dim <= rows.dim))}
    if dim == rows.dim:
        raise Whole
    return {args["self"]: rows}


def _of_view(node: Node, rows: Rows) -> Inputs:
    """What a view reads: the dimension of its input in which the row is a digit of the position."""
    if node.target is operator.getitem:
        return {node.args[0]: rows}  # type: ignore[dict-item]
    extents = shape(node)
    index = [coord(f"x{dim}") for dim in range(len(extents))]
    bounds = dict(zip(index, extents, strict=True))
    row, outer, inner = coord("row"), coord("outer"), coord("inner")
    bounds |= {row: rows.extent, outer: rows.outer, inner: rows.inner}
    high, low = (integers.integer(0) if bounds[x] is ONE else x for x in (outer, inner))
    index[rows.dim] = integers.add(integers.mul(integers.add(integers.mul(high, rows.extent), row), rows.inner), low)
    if (found := source(node, tuple(index), bounds)) is None:
        raise Whole
    origin, places = found
    depending = [dim for dim, place in enumerate(places) if contains(place, row)]
    if not depending and packet(node) in _EXPANSIONS:
        return {}
    if len(depending) != 1:
        raise Whole
    return {origin: _digit(shape(origin), depending[0], places[depending[0]], row, rows, bounds)}


def _digit(extents: tuple[Expr, ...], dim: int, place: Expr, row: Expr, rows: Rows, bounds: integers.Bounds) -> Rows:
    """The rows as a factor of a dimension of these extents, where `place` is the position in it."""
    parts = integers.linear(place, row)
    if parts is None:
        raise Whole
    inner = parts[0]
    outer = integers.quotient(extents[dim], integers.mul(rows.extent, inner))
    digit = integers.mod(integers.floordiv(place, inner, bounds), rows.extent, bounds)
    if digit is not row or outer is None:
        raise Whole
    return replace(rows, dim=dim, outer=outer, inner=inner)


_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.scaled_dot_product_attention)
_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.view_as, aten.reshape_as,
             aten.squeeze, aten.unsqueeze)  # fmt: skip
_EXPANSIONS = (aten.expand, aten.expand_as, aten.broadcast_to)


def _rewrite(graph: Graph, read: Mapping[Node, Rows | None], inputs: Mapping[Node, Inputs]) -> None:
    """Put nodes that make the rows alone in the places of those of which no more is read."""
    symbols, made = Symbols(graph), dict[Node, Node]()
    mode = detect_fake_mode([nodes.value(node) for node in graph.nodes])
    assert mode is not None
    for node in list(graph.nodes):
        with graph.inserting_before(node), mode, torch.no_grad():
            if (rows := read[node]) is not None:
                if node.target is operator.getitem and node.args[0] not in made:
                    continue  # several results, made whole
                parts = {
                    origin: made.get(origin) or _part(graph, origin, wanted, symbols)
                    for origin, wanted in inputs[node].items()
                }
                made[node] = _of_parts(graph, node, rows, parts, symbols)
            elif node in inputs and (origin := node.all_input_nodes[0]) in made:
                node.replace_all_uses_with(_selection(graph, node, made[origin]))
                graph.erase_node(node)
    graph.eliminate_dead_code(nodes.impurity())


def _part(graph: Graph, origin: Node, rows: Rows, symbols: Symbols) -> Node:
    """These rows of a tensor that is made whole."""
    extents, part, dim = shape(origin), origin, rows.dim
    if rows.is_factor:
        split = [*extents[:dim], rows.outer, rows.extent, rows.inner, *extents[dim + 1 :]]
        part, dim = derived(graph, origin, aten.reshape.default, (part, [symbols.value(n) for n in split])), dim + 1
        marks.requires_grad.set(part, marks.requires_grad(origin))
    part = derived(graph, origin, aten.slice.Tensor, (part, dim, rows.start, rows.end))
    marks.requires_grad.set(part, marks.requires_grad(origin))
    if rows.is_factor:
        sizes = [symbols.value(n) for n in rows.within(extents)]
        part = derived(graph, origin, aten.reshape.default, (part, sizes))
        marks.requires_grad.set(part, marks.requires_grad(origin))
    return part


def _of_parts(graph: Graph, node: Node, rows: Rows, parts: Mapping[Node, Node], symbols: Symbols) -> Node:
    """The node over parts of its inputs."""
    target: Any = node.target
    kind = packet(node)
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: parts.get(given, given))
    if kind in _RESHAPES or kind in _EXPANSIONS:
        target = aten.reshape.default if kind in _RESHAPES else aten.expand.default
        args, kwargs = (args[0], [symbols.value(n) for n in rows.within(shape(node))]), {}
    elif kind is aten.scaled_dot_product_attention and arguments(node)["is_causal"]:
        given = arguments(node) | {"is_causal": False, "attn_mask": _causal(graph, node, rows)}
        args, kwargs = (), map_arg(given, lambda given: parts.get(given, given))
    made = graph.call_function(target, args, kwargs)
    value = target(*map_arg(args, nodes.value), **map_arg(kwargs, nodes.value))
    made.meta = {**node.meta, "val": value}
    assert not nodes.is_tensor(node) or list(shape(made)) == rows.within(shape(node)), (node, rows)
    return made


def _selection(graph: Graph, node: Node, part: Node) -> Node:
    """A slice, or the selection of a row, of a tensor of which no more was made."""
    if packet(node) is aten.slice:
        return part
    made = derived(graph, node, aten.select.int, (part, arguments(node)["dim"], 0))
    made.meta = {**node.meta, "val": nodes.value(made)}
    return made


def _causal(graph: Graph, node: Node, rows: Rows) -> Node:
    """The mask [rows, N_k] of the queries that are left of `is_causal`."""
    query, key = (arguments(node)[name] for name in ("query", "key"))

    def positions(of: Node) -> Node:
        count: Any = nodes.value(of).shape[-2]
        if not isinstance(count, int):
            count = derived(graph, node, aten.sym_size.int, (of, -2))
        return derived(graph, node, aten.arange.default, (count,), device=nodes.value(of).device)

    queries = derived(graph, node, aten.slice.Tensor, (positions(query), 0, rows.start, rows.end))
    queries = derived(graph, node, aten.unsqueeze.default, (queries, 1))
    return derived(graph, node, aten.ge.Tensor, (queries, positions(key)))
