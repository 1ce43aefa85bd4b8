"""Put `fusion::attention` calls in the place of attentions, where nothing else needs what they would not store."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion.ir import AttentionSpec
from fusion.ir.expr import Expr, walk
from fusion.ir.tile_map import MapSpec
from fusion.passes import marks, nodes
from fusion.passes.block_mask import BlockMask
from fusion.passes.find import Attention, Site
from fusion.passes.nodes import Unsupported
from fusion.passes.normalize import drop_seeds
from fusion.passes.specify import Specified, specify
from fusion.passes.tables import Table
from fusion.passes.tile_maps import Mapped, mapped, with_map
from fusion.refusals import Ground, Refusal

aten = torch.ops.aten
Supports = Callable[[AttentionSpec, torch.device, Sequence[int], bool], Refusal | None]
Validate = Callable[[Site, Sequence[Specified], Mapping[str, int]], Refusal | None]
Pays = Callable[[MapSpec, Sequence[int], Sequence[tuple[AttentionSpec, Sequence[int]]], str], bool]


def rewrite(
    module: GraphModule,
    sites: Sequence[Site],
    supports: Supports,
    emitter: str = "auto",
    pays: Pays | None = None,
    block_mask: BlockMask | None = None,
    validate: Validate | None = None,
) -> dict[int, list[Specified]]:
    """Replace every site that can be; the others get a refusal. Returns the specs by position in `sites`.

    module: the compiler's own copy, whose graph is changed.
    supports: (spec, device, sizes, whether it is differentiated) -> why no kernel can be made for it, or None.
    emitter: handed to the op.
    pays: whether a map of the tiles of a mask is worth its cost on a device; None makes no maps.
    block_mask: the user's mask for every attention.
    validate: (site, specs, example sizes) -> how the specs differ from the graph, or None.
    """
    symbols = _Symbols(module.graph)
    specified = _specify_all(sites, symbols, block_mask)
    _refuse_escaping(module.graph, sites, specified)  # first: these are not validated, and no kernels built for them
    if validate is not None:
        _refuse_different(module.graph, sites, specified, validate)
    if pays is not None:
        _map_tiles(module.graph, sites, specified, symbols, pays)
    _refuse_unsupported(module.graph, sites, specified, supports)
    _refuse_escaping(module.graph, sites, specified)
    _check_tables(module.graph, specified, symbols)
    results: dict[Node, Node] = {}
    for number, parts in specified.items():
        site = sites[number]
        results[site.root] = _replace(module.graph, site, parts, symbols, emitter, results)
    module.graph.eliminate_dead_code(_impure)
    drop_seeds(module.graph)
    module.graph.lint()
    module.recompile()
    return specified


def _specify_all(sites: Sequence[Site], symbols: _Symbols, block_mask: BlockMask | None) -> dict[int, list[Specified]]:
    specified: dict[int, list[Specified]] = {}
    for number, site in enumerate(sites):
        if site.refusal is not None:
            continue
        try:
            _refuse_reordered_reads(site)
            specified[number] = [_specify(site, a, symbols, block_mask) for a in site.attentions]
        except Unsupported as problem:
            site.refusal, site.blame = problem.refusal, problem.node
    return specified


def _refuse_different(
    graph: Graph, sites: Sequence[Site], specified: dict[int, list[Specified]], validate: Validate
) -> None:
    """Drop sites whose specs do not compute what the graph does."""
    hints = nodes.size_hints(graph)
    for number, parts in list(specified.items()):
        if (refusal := validate(sites[number], parts, hints)) is not None:
            sites[number].refusal = refusal
            del specified[number]


def _refuse_unsupported(
    graph: Graph, sites: Sequence[Site], specified: dict[int, list[Specified]], supports: Supports
) -> None:
    """Drop sites that no kernel can be made for."""
    hints = nodes.size_hints(graph)
    for number, parts in list(specified.items()):
        device = nodes.value(sites[number].root).device
        sizes = ([nodes.evaluate_size(n, hints) for n in part.sizes] for part in parts)
        refusals = (supports(p.spec, device, values, p.differentiable) for p, values in zip(parts, sizes, strict=True))
        if (refusal := next(filter(None, refusals), None)) is not None:
            sites[number].refusal = refusal
            del specified[number]


def _specify(site: Site, attention: Attention, symbols: _Symbols, block_mask: BlockMask | None) -> Specified:
    found = specify(site, attention, block_mask)
    _refuse_distributed_dropout(found)
    for extent in found.sizes:
        symbols.require(extent)
    for _, table in found.tables:
        symbols.require(table.extent)
    return found


def _refuse_distributed_dropout(found: Specified) -> None:
    """Processes that compute the same weights would drop different ones, each by a seed of its own."""
    random = any(part.op == "hash" for part in walk(*found.spec.expressions()))
    if random and (held := next((o for o in found.operands if marks.dtensor(o)), None)) is not None:
        raise Unsupported(
            Ground.DISTRIBUTED_DROPOUT,
            f"dropout on the weights of DTensors ({held.name} is one), which have no common random numbers",
        )


def _map_tiles(
    graph: Graph, sites: Sequence[Site], specified: dict[int, list[Specified]], symbols: _Symbols, pays: Pays
) -> None:
    """Give attentions whose masks are data a map of their live tiles, one for all that have the same mask."""
    wanted: dict[Mapped, list[tuple[int, int]]] = {}
    for number, parts in specified.items():
        for position, part in enumerate(parts):
            if (found := mapped(part)) is not None:
                wanted.setdefault(found, []).append((number, position))
    hints = nodes.size_hints(graph)
    for found, users in wanted.items():
        parts = [specified[number][position] for number, position in users]
        if not pays(found.spec, [nodes.evaluate_size(e, hints) for e in found.sizes], [
            (part.spec, [nodes.evaluate_size(e, hints) for e in part.sizes]) for part in parts
        ], parts[0].device):  # fmt: skip
            continue
        made: Node | None = None
        for (number, position), part in zip(users, parts, strict=True):
            root = sites[number].root
            if made is None or not made < root:
                with graph.inserting_before(root):
                    sizes = [symbols.value(extent) for extent in found.sizes]
                    made = graph.call_function(
                        torch.ops.fusion.tile_map.default,
                        (list(found.operands), sizes, found.spec.to_json()),
                    )
                _copy_provenance(root, made)
                held = [nodes.value(s) if isinstance(s, Node) else s for s in sizes]
                like = nodes.value(root)
                shape = found.spec.shape(dict(zip(found.spec.sizes, held, strict=True)))
                made.meta["val"] = like.new_empty(shape, dtype=torch.int32)
            specified[number][position] = with_map(part, made)


def _check_tables(graph: Graph, specified: dict[int, list[Specified]], symbols: _Symbols) -> None:
    """Let attentions read tables whose positions are known to be there: copies made by `fusion::table`, one for all
    that are read at the same places."""
    known: dict[Table, Node] = {}
    for parts in specified.values():
        for place, part in enumerate(parts):
            operands = list(part.operands)
            for number, table in part.tables:
                if table not in known or not known[table] < table.call:
                    known[table] = _checked(graph, table, symbols)
                operands[number] = known[table]
            parts[place] = replace(part, operands=tuple(operands))


def _checked(graph: Graph, table: Table, symbols: _Symbols) -> Node:
    with graph.inserting_before(table.call):
        arguments = (table.positions, symbols.value(table.extent), table.dim, table.operation)
        made = graph.call_function(torch.ops.fusion.table.default, arguments)
    _copy_provenance(table.call, made)
    made.meta["val"] = nodes.value(table.positions).new_empty(nodes.value(table.positions).shape)
    return made


def _refuse_reordered_reads(site: Site) -> None:
    """The op reads everything where the region ended: nothing that it reads may change in place before that."""
    for node in site.interior() | {site.anchor}:
        for parent in node.all_input_nodes:
            for mutation in marks.mutations(parent):
                if node < mutation < site.root:
                    where = nodes.source_line(mutation) or mutation.name
                    problem = Unsupported(
                        Ground.CHANGED_IN_PLACE,
                        f"a tensor that the attention reads is changed in place before it ends ({where})",
                    )
                    problem.node = mutation
                    raise problem


def _impure(node: Node) -> bool:
    """Keep what has an effect, by torch's own rule, but for dropout whose mask a fused attention makes itself."""
    return not marks.seed.on(node) and not marks.is_seed(node) and node.is_impure()


def _refuse_escaping(graph: Graph, sites: Sequence[Site], specified: dict[int, list[Specified]]) -> None:
    """Drop sites whose scores or weights stay alive: they would be computed twice. Repeats until nothing changes."""
    while True:
        needs = {sites[n].root: _inputs(parts) for n, parts in specified.items()}
        live = _live(graph, needs)
        escaped = {n: blame for n in specified if (blame := _escape(sites[n], live, needs)) is not None}
        if not escaped:
            return
        for number, (node, user) in escaped.items():
            site = sites[number]
            site.blame = user if user is not None and user.op != "output" else node
            where = nodes.source_line(user) if user is not None else None
            use = _describe_use(node, user) + (f", at {where}" if where else "")
            site.refusal = Refusal(Ground.WEIGHTS_NEEDED, f"the attention weights are needed elsewhere ({use})")
            del specified[number]


def _describe_use(node: Node, user: Node | None) -> str:
    if user is None or user.op == "output":
        return "they are returned" if user is not None else f"{node.name} stays in use"
    return f"by {user.target}"


def _inputs(parts: Sequence[Specified]) -> list[Node]:
    return [operand for part in parts for operand in part.operands]


def _live(graph: Graph, needs: dict[Node, list[Node]]) -> set[Node]:
    live: set[Node] = set()
    stack = [node for node in graph.nodes if node.op == "output" or _impure(node)]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(needs.get(node, node.all_input_nodes))
    return live


def _escape(site: Site, live: set[Node], needs: dict[Node, list[Node]]) -> tuple[Node, Node | None] | None:
    """A node of the region that holds scores and stays alive, and the live node that uses it."""
    interior = site.interior()
    scores = _downstream_of_products(site, interior)
    operands = {operand for node in needs.get(site.root, ()) for operand in (node,)}
    alive = sorted((n for n in scores - {site.root} if n in live and n not in operands), reverse=True)
    for node in alive:
        for user in node.users:
            if user in live and user not in scores and user not in needs:
                return node, user
    return (alive[0], None) if alive else None


def _downstream_of_products(site: Site, interior: set[Node]) -> set[Node]:
    reached = {product.node for attention in site.attentions for product in attention.pullback.products}
    reached.discard(site.anchor)
    for node in sorted(interior):  # topological
        if any(parent in reached for parent in node.all_input_nodes):
            reached.add(node)
    return reached


def _replace(
    graph: Graph, site: Site, parts: Sequence[Specified], symbols: _Symbols, emitter: str, results: dict[Node, Node]
) -> Node:
    """Put the calls in the place of a site's root. `results`: what stands in the place of roots before it."""
    root = site.root
    with graph.inserting_before(root):
        terms = []
        for part in parts:
            operands = [_operand(graph, root, operand, results) for operand in part.operands]
            terms.append(_call(graph, root, part, operands, symbols, emitter))
        result = terms[0]
        for term in terms[1:]:
            result = _derived(graph, root, aten.add.Tensor, (result, term))
        if nodes.dtype(result) != nodes.dtype(root):
            result = _derived(graph, root, aten.to.dtype, (result, nodes.dtype(root)))
        if marks.mutations(root) and marks.requires_grad(root):  # the backward reads what the call returned
            result = _derived(graph, root, aten.clone.default, (result,))
    root.replace_all_uses_with(result)
    graph.erase_node(root)
    return result


def _operand(graph: Graph, root: Node, operand: Node, results: dict[Node, Node]) -> Node:
    """What the call in the place of `root` takes: a copy of what is written to later, if a backward reads it again."""
    found = results.get(operand, operand)
    if marks.requires_grad(root) and any(root < mutation for mutation in marks.mutations(operand)):
        return _derived(graph, root, aten.clone.default, (found,))
    return found


def _call(graph: Graph, root: Node, part: Specified, operands: list[Node], symbols: _Symbols, emitter: str) -> Node:
    sizes = [symbols.value(extent) for extent in part.sizes]
    arguments = (operands, sizes, part.spec.to_json(), emitter)
    call = (
        _differentiable_call(graph, arguments)
        if part.differentiable
        else graph.call_function(torch.ops.fusion.attention.default, arguments)
    )
    _copy_provenance(root, call)
    output = part.spec.output
    extents = dict(zip(output.dims, nodes.value(root).shape, strict=True))
    like = nodes.value(root)
    packed = like.new_empty([extents[d] for d in output.order], dtype=getattr(torch, part.spec.out_dtype))
    call.meta["val"] = packed.permute([output.order.index(d) for d in output.dims])
    return call


def _differentiable_call(graph: Graph, arguments: tuple[Any, ...]) -> Node:
    """The output of `attention_forward`, whose second result only the gradient reads."""
    both = graph.call_function(torch.ops.fusion.attention_forward.default, arguments)
    return graph.call_function(operator.getitem, (both, 0))


def _derived(graph: Graph, root: Node, target: Any, args: tuple[Any, ...]) -> Node:
    node = graph.call_function(target, args)
    _copy_provenance(root, node)
    node.meta["val"] = target(*(nodes.value(a) if isinstance(a, Node) else a for a in args))
    return node


def _copy_provenance(origin: Node, target: Node) -> None:
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if key in origin.meta:
            target.meta[key] = origin.meta[key]


class _Symbols:
    """Graph values of size expressions: integers, or nodes computed from the nodes that carry each symbol."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.carriers: dict[str, tuple[Node, int | None]] = {}
        for node in graph.nodes:
            held = nodes.value(node) if node.op != "output" else None
            if isinstance(held, torch.SymInt) and held.node.expr.is_symbol:
                self.carriers.setdefault(str(held.node.expr), (node, None))
            elif isinstance(held, torch.Tensor) and node.op == "placeholder":
                for dim, extent in enumerate(held.shape):
                    if isinstance(extent, torch.SymInt) and extent.node.expr.is_symbol:
                        self.carriers.setdefault(str(extent.node.expr), (node, dim))

    def require(self, expr: Expr) -> None:
        """Raise `Unsupported` unless `value` can make this expression."""
        for part in walk(expr):
            if part.op == "size" and part.attr not in self.carriers:
                raise Unsupported(Ground.SIZE, f"the size {part.attr} is not carried by any input of the graph")
            if part.op not in ("size", "const") and part.op not in _OPERATORS:
                raise Unsupported(Ground.SIZE, f"a size written as {expr}")

    def value(self, expr: Expr) -> int | Node:
        """An int, or a node inserted at the graph's insertion point."""
        if expr.op == "const":
            return expr.integer
        if expr.op == "size":
            return self._symbol(expr.name)
        result = self.value(expr.args[0])
        for arg in expr.args[1:]:
            result = self._combine(_OPERATORS[expr.op], result, self.value(arg))
        return result

    def _symbol(self, name: str) -> Node:
        node, dim = self.carriers[name]
        if dim is None:
            return node
        extent = self.graph.call_function(aten.sym_size.int, (node, dim))
        extent.meta["val"] = nodes.value(node).shape[dim]
        return extent

    def _combine(self, function: Any, left: int | Node, right: int | Node) -> Node:
        node = self.graph.call_function(function, (left, right))
        held = [nodes.value(x) if isinstance(x, Node) else x for x in (left, right)]
        node.meta["val"] = function(*held)
        return node


_OPERATORS = {"add": operator.add, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
              "imax": torch.sym_max, "imin": torch.sym_min}  # fmt: skip
