"""Replacement of attention sites by calls of `fusion::attention`.

Dense biases and masks in which neighbouring keys lie apart are copied with keys innermost. A bias that a linear layer
or a table computes for each pair of tokens has its heads innermost: [N, N, H], read as `bias.permute(2, 0, 1)`. Kernels
would gather its keys one by one, for every batch element that shares it. Inductor fuses the copy with the operation
that computes the bias, and the gradient has the copy's layout. Where the gradient is added up
in a table, that takes longer than before: a trained bias that is read once stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from fusion.ir.derivative import reached
from fusion.ir.expr import SCORE, WEIGHT, Expr, J, coordinates
from fusion.ir.reads import dense_loads, key_dimension
from fusion.ir.results import empty_result, size_value
from fusion.ir.spec import Mixing

from . import marks, nodes
from .building import Symbols, derived
from .pullback.loads import Table
from .recognize.find import Site, pending
from .specify.aux_outputs import materialize
from .specify.calls import impurity
from .specify.gathered_keys import with_merged_heads
from .specify.specify import AttentionCall
from .trace.normalize import drop_seeds

aten = torch.ops.aten


def replace_sites(module: GraphModule, sites: Iterable[Site], request: str, examples: Mapping[str, int]) -> None:
    """Replace the region of every pending site by its calls, and remove nodes that became unused.

    module: the compiler's own copy, whose graph is changed.
    """
    graph, symbols, results = module.graph, Symbols(module.graph), dict[Node, Node]()
    for site in pending(sites):
        site.assumed.guard()
    _check_tables(graph, pending(sites), symbols)
    for site in pending(sites):
        results |= _replace(graph, site, symbols, request, results, examples)
    nodes.erase_unused(graph, impurity())
    drop_seeds(graph)
    graph.lint()
    module.recompile()


def _check_tables(graph: Graph, sites: Iterable[Site], symbols: Symbols) -> None:
    """Pass tables to attentions through `fusion::table`, which checks them; one check for all at the same index."""
    known: dict[Table, Node] = {}
    for site in sites:
        for place, call in enumerate(site.calls):
            operands = list(call.operands)
            for number, table in call.tables:
                if table not in known or not known[table] < table.call:
                    known[table] = _checked(graph, table, symbols)
                operands[number] = known[table]
            site.calls[place] = replace(call, operands=tuple(operands))


def _checked(graph: Graph, table: Table, symbols: Symbols) -> Node:
    with graph.inserting_before(table.call):
        arguments = (table.positions, symbols.value(table.extent), table.dim, table.operation)
        call = graph.call_function(torch.ops.fusion.table.default, arguments)
    nodes.copy_provenance(table.call, call)
    call.meta["val"] = nodes.fake(table.positions).new_empty(nodes.fake(table.positions).shape)
    return call


def _replace(
    graph: Graph, site: Site, symbols: Symbols, request: str, results: dict[Node, Node], examples: Mapping[str, int]
) -> dict[Node, Node]:
    """Replace a site's root by its calls; returns the replacement of each node. results: those of earlier sites."""
    root = site.root
    with graph.inserting_before(site.place or root):
        terms, aux = [], dict[Node, Node]()
        for call in site.calls:
            operands = [_operand(graph, root, operand, results) for operand in call.operands]
            call, operands = with_keys_innermost(graph, call, operands, examples)
            term, written = _inserted(graph, site, call, operands, symbols, request)
            terms.append(term)
            aux |= written
        result = terms[0]
        for term in terms[1:]:
            result = derived(graph, root, aten.add.Tensor, (result, term))
        if nodes.dtype(result) != nodes.dtype(root):
            result = derived(graph, root, aten.to.dtype, (result, nodes.dtype(root)))
        if marks.mutations(root) and marks.requires_grad(root):  # the backward reads what the call returned
            result = derived(graph, root, aten.clone.default, (result,))
    for node, written in aux.items():  # users before it are in the region, which is erased
        node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: written < user)
    root.replace_all_uses_with(result)
    graph.erase_node(root)
    return aux | {root: result}


def _operand(graph: Graph, root: Node, operand: Node, results: dict[Node, Node]) -> Node:
    """Operand of the call that replaces `root`, on its device: a copy if it is written later in the graph and a
    backward reads it again."""
    replacement = results.get(operand, operand)
    device = nodes.fake(root).device
    if nodes.fake(replacement).device != device:  # a number on the host, which eager mode combines with any device's
        replacement = derived(graph, root, aten.to.device, (replacement, device, nodes.dtype(replacement)))
    if marks.requires_grad(root) and any(root < mutation for mutation in marks.mutations(operand)):
        return derived(graph, root, aten.clone.default, (replacement,))
    return replacement


def _without_gradient(graph: Graph, root: Node, call: AttentionCall, operands: Sequence[Node]) -> list[Node]:
    """Operands of a call, detached where no gradient flows to them: it is None then, as in eager mode, not zero."""
    trained = _trained(call) if call.differentiable else set()
    return [
        node
        if number in trained or not marks.requires_grad(node)
        else derived(graph, root, aten.detach.default, (node,))
        for number, node in enumerate(operands)
    ]


def _trained(call: AttentionCall) -> set[int]:
    """Numbers of the operands to which a gradient of the result flows."""
    spec = call.spec
    programs = [
        spec.score,
        spec.weight,
        spec.row_scale,
        *spec.sinks,
        *spec.values,
        *(f.value for f in spec.aux_outputs),
    ]
    leaves = reached(*(program for program in programs if program is not None))
    if spec.mixing is not None:
        leaves = _reached_through(spec.mixing, leaves)
    trained = {load.operand for load in leaves if load.op == "load"} | {2} | ({0, 1} if SCORE in leaves else set())
    return trained | call.reached


def _reached_through(mixing: Mixing, of_head: Set[Expr]) -> Set[Expr]:
    """Leaves of a program that receive a gradient that arrives at the mixed weights. of_head: those that receive one
    through a single head."""
    behind = reached(mixing.weighted, *([] if mixing.weights is None else [mixing.weights]))
    if WEIGHT not in behind:
        return reached(mixing.weighted)
    if mixing.scores is None or SCORE not in of_head:
        return behind | of_head
    return behind | (of_head - {SCORE}) | reached(mixing.scored, mixing.scores)


def _inserted(
    graph: Graph, site: Site, call: AttentionCall, operands: list[Node], symbols: Symbols, request: str
) -> tuple[Node, dict[Node, Node]]:
    """Output of the call, and the replacement of each node that it computes as an auxiliary output."""
    root, sizes = site.root, [symbols.value(extent) for extent in call.sizes]
    operands = _without_gradient(graph, root, call, operands)
    arguments = (operands, sizes, call.spec.to_json(), request)
    size_fakes, written = list(map(nodes.fake, sizes)), dict[Node, Node]()
    if call.uses:
        every = graph.call_function(torch.ops.fusion.attention_outputs.default, arguments)
        node = graph.call_function(operator.getitem, (every, 0))
        bounds = site.bounds | {J: site.attentions[0].keys}
        for k, (use, aux) in enumerate(zip(call.uses, call.spec.aux_outputs, strict=True)):
            made = graph.call_function(operator.getitem, (every, 2 + k))
            written[use.node] = materialize(graph, use, aux, made, symbols, bounds, marks.requires_grad(root))
    elif call.differentiable:  # the second result only the gradient reads
        both = graph.call_function(torch.ops.fusion.attention_forward.default, arguments)
        node = graph.call_function(operator.getitem, (both, 0))
    else:
        node = graph.call_function(torch.ops.fusion.attention.default, arguments)
    nodes.copy_provenance(root, node)
    node.meta["val"] = empty_result(call.spec, 0, nodes.fake(root), size_fakes)
    node = with_merged_heads(graph, root, node, call.spec)
    return node, written


Order = tuple[int, ...]


def with_keys_innermost(
    graph: Graph, call: AttentionCall, operands: Sequence[Node], examples: Mapping[str, int]
) -> tuple[AttentionCall, list[Node]]:
    """A call and its operands with copies, made at the graph's insertion point, where these pay: of what more than one
    batch element reads, or what is made in the graph and not trained."""
    laid_out, described = list(operands), list(call.spec.operands)
    for number, order in _wanted(call, operands, examples).items():
        laid_out[number] = _laid_out(graph, operands[number], order)
        if described[number].order:
            described[number] = replace(described[number], order=order)
    return replace(call, spec=replace(call.spec, operands=tuple(described))), laid_out


def _wanted(call: AttentionCall, operands: Sequence[Node], examples: Mapping[str, int]) -> dict[int, Order]:
    """Orders of dimensions in memory, slowest first, of the operands that are copied."""
    sizes, orders_by_operand = call.example_sizes(examples), dict[int, set[Order | None]]()
    extents = {axis.name: size_value(size, sizes) for axis, size in zip(call.spec.axes, call.spec.batch, strict=True)}
    for read in dense_loads(call.spec.score, call.spec.weight):
        node = operands[read.operand]
        again = any(extent > 1 for name, extent in extents.items() if name not in coordinates(read))
        computed = node.op == "call_function" and not call.spec.operands[read.operand].order
        pays = read.operand > 2 and (again or computed) and not marks.dtensor(node)
        orders_by_operand.setdefault(read.operand, set()).add(_order(read, node) if pays else None)
    return {
        number: order for number, orders in orders_by_operand.items() if len(orders) == 1 for order in orders if order
    }


def _order(read: Expr, node: Node) -> Order | None:
    """Order with keys innermost, rows beside them; None if it is so, or keys are not one dimension in memory."""
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
