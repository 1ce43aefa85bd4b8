"""Rows that no node reads are not computed.

A classifier reads the first row of its last layer, generation the last one. Between the layer's attention and that
selection, and in the queries of the attention, every operation works row by row: linear layers, normalisations,
residuals, views. There the selection is moved to the front:

    norm(x + mlp(attend(q(x), k(x), v(x))))[:, -1:]   =   norm(y + mlp(attend(q(y), k(x), v(x))))   with y = x[:, -1:]

The rows that are computed go through the same operations as before, in products of fewer rows. Random numbers are drawn
for all rows, writes in place see all of them, and the graph's results keep their layout: such nodes are computed for
all rows. NaN and infinities in rows that are left out reach no gradient of a weight; in eager mode, 0 * inf does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusion.ir import integers
from fusion.ir.expr import Expr, contains, coord
from fusion.torch_private.tensors import detect_fake_mode, enable_python_dispatcher, tree_leaves

from .. import marks, nodes
from ..building import Symbols, derived
from ..nodes import Unsupported, arguments, normalize_dim, packet, shape
from ..pullback.pointwise import is_pointwise
from ..pullback.views import EXPANSIONS, RESHAPES, is_view, source

aten = torch.ops.aten


ONE = integers.integer(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a tensor that are read: a range of one dimension, or of a factor of one.

    dim: the dimension, of size outer * extent * inner; a row is the middle digit of a position.
    start, end: the range, as in a slice.
    extent, count: the number of rows there are, and of those read.
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
        """Whether the rows are only a factor of the dimension."""
        return self.outer is not ONE or self.inner is not ONE

    def at(self, dim: int) -> Rows:
        """Equal rows of another tensor, at its dimension `dim`."""
        return replace(self, dim=dim)

    def within(self, extents: tuple[Expr, ...]) -> list[Expr]:
        """Shape of the tensor with only the rows that are read."""
        size = integers.mul(self.outer, self.count, self.inner)
        return [*extents[: self.dim], size, *extents[self.dim + 1 :]]


Inputs = dict[Node, Rows]
"""Inputs of which a node does not read all rows -> the rows that it reads."""
Rule = Callable[[Node, dict[str, Any], Rows], Inputs]
"""(node, its arguments, the rows that are read of it) -> what it reads; raises `NotRowWise`."""


class NotRowWise(Exception):
    """A node does not work row by row, or has to be computed for all rows."""


def row_wise(node: Node, rows: Rows, symbols: Symbols) -> Inputs:
    """Inputs that a node reads for these rows of its result, with the rows read of each."""
    if node.op != "call_function" or marks.mutations.on(node) or marks.dtensor(node) or nodes.is_active_dropout(node):
        raise NotRowWise
    rule = _RULES.get(packet(node))
    if nodes.is_tensor(node):
        for extent in rows.within(shape(node)):
            symbols.require(extent)
    elif rule is None:
        raise NotRowWise
    if is_pointwise(node):
        return _broadcast(node, node.all_input_nodes, rows)
    inputs = _of_view(node, rows) if rule is None else rule(node, arguments(node), rows)
    leaves = tree_leaves((node.args, node.kwargs))
    for origin, wanted in inputs.items():
        if sum(argument is origin for argument in leaves) > 1:
            raise NotRowWise  # an operand that is read in two ways
        for extent in shape(origin) if wanted.is_factor and nodes.is_tensor(origin) else ():
            symbols.require(extent)
    return inputs


def _broadcast(node: Node, operands: Iterable[Node], rows: Rows) -> Inputs:
    """Rows of operands that are broadcast with each other."""
    result, inputs = shape(node), {}
    for operand in filter(nodes.is_tensor, operands):
        extents = shape(operand)
        dim = rows.dim - len(result) + len(extents)
        if dim < 0 or extents[dim] is ONE:
            continue
        if extents[dim] is not result[rows.dim]:
            raise NotRowWise
        inputs[operand] = rows.at(dim)
    return inputs


_RULES: dict[Any, Rule] = {}
_rule = nodes.rules(_RULES)


@_rule(aten.linear)
def _linear(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim == len(shape(node)) - 1:
        raise NotRowWise
    return {args["input"]: rows}


@_rule(aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
def _product(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    *added, left, right = filter(nodes.is_tensor, args.values())
    rank = len(shape(node))
    if min(len(shape(left)), len(shape(right)), rank) < 2:
        raise NotRowWise
    behind = rank - 1 - rows.dim
    inputs = _broadcast(node, added, rows)
    if behind > 1:
        return inputs | _broadcast(node, (left, right), rows)
    operand = left if behind else right
    return inputs | {operand: rows.at(len(shape(operand)) - 1 - behind)}


@_rule(aten.scaled_dot_product_attention)
def _attention(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim != len(shape(node)) - 2 or rows.is_factor:
        raise NotRowWise
    query, mask = args["query"], args["attn_mask"]
    inputs = {query: rows.at(len(shape(query)) - 2)}
    if mask is not None and len(extents := shape(mask)) > 1 and extents[-2] is not ONE:
        inputs[mask] = rows.at(len(extents) - 2)
    return inputs


@_rule(aten.layer_norm, aten.rms_norm)
def _normalisation(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if rows.dim >= len(shape(node)) - len(args["normalized_shape"]):
        raise NotRowWise
    return {args["input"]: rows}


@_rule(aten.softmax, aten._softmax, aten.log_softmax, aten.glu, aten.cumsum)
def _along(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    if normalize_dim(args["dim"], len(shape(node))) == rows.dim:
        raise NotRowWise
    return {args["self"]: rows}


@_rule(aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.linalg_vector_norm)
def _reduction(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    rank = len(shape(args["self"]))
    if not (reduced := nodes.normalize_dims(args.get("dim"), rank)):
        raise NotRowWise
    left = [dim for dim in range(rank) if args["keepdim"] or dim not in reduced]
    if left[rows.dim] in reduced:
        raise NotRowWise
    return {args["self"]: rows.at(left[rows.dim])}


@_rule(aten.cat, aten.stack)
def _joined(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    rank, stacked = len(shape(node)), packet(node) is aten.stack
    dim = normalize_dim(args["dim"], rank)
    if dim == rows.dim or any(len(shape(tensor)) != rank - stacked for tensor in args["tensors"]):
        raise NotRowWise
    return dict.fromkeys(args["tensors"], rows.at(rows.dim - (stacked and dim < rows.dim)))


@_rule(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
def _pieces(node: Node, args: dict[str, Any], rows: Rows) -> Inputs:
    """Rows of the input of an operation with several results; `rows` are those of each result."""
    dim = normalize_dim(args["dim"], len(shape(args["self"])))
    if packet(node) is aten.unbind:
        return {args["self"]: rows.at(rows.dim + (dim <= rows.dim))}
    if dim == rows.dim:
        raise NotRowWise
    return {args["self"]: rows}


def _of_view(node: Node, rows: Rows) -> Inputs:
    """Rows of the input of a view: of the dimension in which the row is a digit of the position."""
    if node.target is operator.getitem:
        return {node.args[0]: rows}  # type: ignore[dict-item]
    extents = shape(node)
    index = [coord(f"x{dim}") for dim in range(len(extents))]
    bounds = dict(zip(index, extents, strict=True))
    row, outer, inner = coord("row"), coord("outer"), coord("inner")
    bounds |= {row: rows.extent, outer: rows.outer, inner: rows.inner}
    high, low = (integers.integer(0) if bounds[x] is ONE else x for x in (outer, inner))
    index[rows.dim] = integers.add(integers.mul(integers.add(integers.mul(high, rows.extent), row), rows.inner), low)
    if (element := source(node, tuple(index), bounds)) is None:
        raise NotRowWise
    origin, places = element
    depending = [dim for dim, place in enumerate(places) if contains(place, row)]
    if not depending and packet(node) in EXPANSIONS:
        return {}
    if len(depending) != 1 or depending[0] in _counted(node):
        raise NotRowWise
    return {origin: _digit(shape(origin), depending[0], places[depending[0]], row, rows, bounds)}


def _counted(node: Node) -> list[int]:
    """Dimensions of the input in which a view's arguments count positions, which change when there are fewer rows."""
    args, kind = arguments(node), packet(node)
    extents = shape(args["self"])
    if kind not in _POSITIONS or (kind is aten.slice and shape(node) == extents):
        return []
    return nodes.normalize_dims(args[_POSITIONS[kind]], len(extents))


def _digit(extents: tuple[Expr, ...], dim: int, place: Expr, row: Expr, rows: Rows, bounds: integers.Bounds) -> Rows:
    """Rows as a factor of a dimension of these extents, where `place` is the position in it."""
    parts = integers.linear(place, row)
    if parts is None:
        raise NotRowWise
    inner = parts[0]
    outer = integers.quotient(extents[dim], integers.mul(rows.extent, inner))
    digit = integers.mod(integers.floordiv(place, inner, bounds), rows.extent, bounds)
    if digit is not row or outer is None:
        raise NotRowWise
    return replace(rows, dim=dim, outer=outer, inner=inner)


_POSITIONS = {aten.slice: "dim", aten.narrow: "dim", aten.unfold: "dimension", aten.repeat_interleave: "dim",
              aten.flip: "dims", aten.roll: "dims"}  # fmt: skip


_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.scaled_dot_product_attention)
END = 2**63 - 1
"""End of a slice that goes to the end of a dimension."""


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
    """Rows that are read of each node (None: all), and the inputs that row-wise nodes and selections then read."""
    read: dict[Node, Rows | None] = {}
    inputs: dict[Node, Inputs] = {}
    symbols = Symbols(graph)
    for node in reversed(graph.nodes):
        if (rows := read.setdefault(node, None)) is not None:
            try:
                inputs[node] = row_wise(node, rows, symbols)
            except (Unsupported, NotRowWise):
                read[node] = None
        if read[node] is None and (selected := _selected(node)) is not None:
            inputs[node] = {node.all_input_nodes[0]: selected}
        for parent in node.all_input_nodes:
            wanted = inputs.get(node, {}).get(parent)
            read[parent] = wanted if read.setdefault(parent, wanted) == wanted else None
    return read, inputs


def _selected(node: Node) -> Rows | None:
    """Rows of its input that a slice or a selection reads. None for other nodes, and where it reads more than half: to
    copy these may cost more than it saves."""
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
    if not count.is_const or not count.integer or (extent.is_const and 2 * count.integer > extent.integer):
        return None
    if start < 0 and extent.is_const:
        start = max(start + extent.integer, 0)
    return Rows(dim=dim, start=start, end=start + count.integer or END, extent=extent, count=count)


def _is_returned(node: Node) -> bool:
    """Whether the graph returns a view of this node, whose layout users may see."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def _rewrite(graph: Graph, read: Mapping[Node, Rows | None], inputs: Mapping[Node, Inputs]) -> None:
    """Replace nodes by ones that compute only the rows that are read."""
    symbols, replacements = Symbols(graph), dict[Node, Node]()
    mode = detect_fake_mode([nodes.fake(node) for node in graph.nodes])
    assert mode is not None
    for node in list(graph.nodes):
        with graph.inserting_before(node), mode, torch.no_grad(), enable_python_dispatcher():
            if (rows := read[node]) is not None:
                if node.target is operator.getitem and node.args[0] not in replacements:
                    continue  # several results, made whole
                parts = {
                    origin: replacements.get(origin) or _part(graph, origin, wanted, symbols)
                    for origin, wanted in inputs[node].items()
                }
                replacements[node] = _of_parts(graph, node, rows, parts, symbols)
            elif node in inputs and (origin := node.all_input_nodes[0]) in replacements:
                _select_all(node, replacements[origin])
    nodes.erase_unused(graph, nodes.impurity())


def _part(graph: Graph, origin: Node, rows: Rows, symbols: Symbols) -> Node:
    """Selected rows of a tensor of which all rows are computed."""
    extents, dim, part = shape(origin), rows.dim, origin
    steps: list[tuple[Any, tuple[Any, ...]]] = [(aten.slice.Tensor, (dim + rows.is_factor, rows.start, rows.end))]
    if rows.is_factor:
        split = [*extents[:dim], rows.outer, rows.extent, rows.inner, *extents[dim + 1 :]]
        apart, together = ([symbols.value(n) for n in sizes] for sizes in (split, rows.within(extents)))
        steps = [(aten.reshape.default, (apart,)), *steps, (aten.reshape.default, (together,))]
    for target, args in steps:
        part = derived(graph, origin, target, (part, *args))
        marks.requires_grad.set(part, marks.requires_grad(origin))
    return part


def _of_parts(graph: Graph, node: Node, rows: Rows, parts: Mapping[Node, Node], symbols: Symbols) -> Node:
    """Node over the selected rows of its inputs."""
    target: Any = node.target
    kind = packet(node)
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: parts.get(given, given))
    if kind in (*RESHAPES, *EXPANSIONS, aten.squeeze, aten.unsqueeze):
        target = aten.expand.default if kind in EXPANSIONS else aten.reshape.default
        args, kwargs = (args[0], [symbols.value(n) for n in rows.within(shape(node))]), {}
    elif kind is aten.scaled_dot_product_attention and arguments(node)["is_causal"]:
        given = arguments(node) | {"is_causal": False, "attn_mask": _causal(graph, node, rows)}
        args, kwargs = (), map_arg(given, lambda given: parts.get(given, given))
    call = graph.call_function(target, args, kwargs)
    value = target(*map_arg(args, nodes.fake), **map_arg(kwargs, nodes.fake))
    call.meta = {**node.meta, "val": value}
    assert not nodes.is_tensor(node) or list(shape(call)) == rows.within(shape(node)), (node, rows)
    return call


def _select_all(node: Node, part: Node) -> None:
    """Let a slice, or the selection of a row, take all of a tensor that has no other rows any more."""
    dim = arguments(node)["dim"]
    node.args, node.kwargs = (part, dim, 0, END) if packet(node) is aten.slice else (part, dim, 0), {}
    target: Any = node.target
    node.meta["val"] = target(*map_arg(node.args, nodes.fake))


def _causal(graph: Graph, node: Node, rows: Rows) -> Node:
    """Mask [rows, N_k] of the selected queries under `is_causal`."""
    query, key = (arguments(node)[name] for name in ("query", "key"))

    def positions(of: Node) -> Node:
        count: Any = nodes.fake(of).shape[-2]
        if not isinstance(count, int):
            count = derived(graph, node, aten.sym_size.int, (of, -2))
        return derived(graph, node, aten.arange.default, (count,), device=nodes.fake(of).device)

    queries = derived(graph, node, aten.slice.Tensor, (positions(query), 0, rows.start, rows.end))
    queries = derived(graph, node, aten.unsqueeze.default, (queries, 1))
    return derived(graph, node, aten.ge.Tensor, (queries, positions(key)))
