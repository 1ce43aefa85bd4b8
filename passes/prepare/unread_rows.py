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
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusion.ir.expr import Expr
from fusion.torch_private.fake import detect_fake_mode, enable_python_dispatcher

from .. import marks, nodes
from ..building import Symbols, derived
from ..nodes import Unsupported, arguments, normalize_dim, packet, shape
from ..pullback.views import EXPANSIONS, RESHAPES, is_view
from .row_wise import ONE, Inputs, NotRowWise, Rows, row_wise

aten = torch.ops.aten
_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.scaled_dot_product_attention)
END = 2**63 - 1
"""What a slice to the end of a dimension ends at."""


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
