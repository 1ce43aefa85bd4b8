"""Put `fusion::attention` calls in the place of attentions, where nothing else needs what they would not store."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from fusion.ir import AttentionSpec
from fusion.ir.derivative import reached
from fusion.ir.expr import SCORE, WEIGHT, Expr, J, walk
from fusion.ir.mixing import Mixing
from fusion.ir.results import empty_result
from fusion.ir.sizes import size_value
from fusion.ir.tile_map import MapSpec
from fusion.refusals import Ground, Refusal

from . import marks, nodes
from .building import Symbols, derived, in_place_of, split_extrema
from .nodes import Unsupported
from .pullback.tables import Table
from .recognize.defects import defect
from .recognize.find import Attention, Site
from .specify.aux_outputs import Use
from .specify.by_rows import Pays as SetsPay
from .specify.by_rows import read_sets, with_merged_heads
from .specify.escaping import Anew, downstream_of_products, impurity, refuse_escaping
from .specify.layout import with_keys_innermost
from .specify.specify import Specified, specify
from .specify.tile_maps import Mapped, mapped, with_map
from .trace.normalize import drop_seeds

aten = torch.ops.aten
Supports = Callable[[Specified, torch.device, Sequence[int]], Refusal | None]
Validate = Callable[[Site, Sequence[Specified], Mapping[str, int]], Refusal | None]
Pays = Callable[[MapSpec, Sequence[int], Sequence[tuple[AttentionSpec, Sequence[int]]], str], bool]


def rewrite(
    module: GraphModule,
    sites: Sequence[Site],
    supports: Supports,
    emitter: str = "auto",
    pays: Pays | None = None,
    validate: Validate | None = None,
    sets_pay: SetsPay | None = None,
) -> dict[int, list[Specified]]:
    """Replace every site that can be; the others get a refusal. Returns the specs by position in `sites`.

    module: the compiler's own copy, whose graph is changed.
    supports: (spec and its call, device, example sizes) -> why no kernel is to be made for it, or None.
    pays: whether a map of a mask's tiles is worth its cost on a device; None makes none.
    validate: (site, specs, example sizes) -> how the specs differ from the graph, or None.
    sets_pay: whether keys are read by the sets of their rows (see `by_rows`); None keeps masks.
    """
    symbols, hints = Symbols(module.graph), nodes.size_hints(module.graph)
    split_extrema(module.graph, sites)
    specified = _specify_all(sites, symbols)
    anew: Anew = lambda site, found: _specify(site, site.attentions[0], symbols, found)
    # First: what is refused here is not validated, and no kernels are built for it.
    refuse_escaping(module.graph, sites, specified, anew, symbols)
    if validate is not None:
        _refuse(sites, specified, lambda site, parts: validate(site, parts, hints))
    read_sets(specified, sets_pay, hints)
    _map_tiles(module.graph, sites, specified, symbols, pays, hints)
    _refuse(sites, specified, lambda site, parts: _unsupported(site, parts, supports, hints))
    refuse_escaping(module.graph, sites, specified, None, symbols)
    _guard(sites[number] for number in specified)
    _check_tables(module.graph, specified, symbols)
    results: dict[Node, Node] = {}
    for number, parts in specified.items():
        results |= _replace(module.graph, sites[number], parts, symbols, emitter, results, hints)
    nodes.erase_unused(module.graph, impurity())
    drop_seeds(module.graph)
    module.graph.lint()
    module.recompile()
    return specified


def _guard(taken: Iterable[Site]) -> None:
    for site in taken:
        site.assumed.guard()


def _specify_all(sites: Sequence[Site], symbols: Symbols) -> dict[int, list[Specified]]:
    specified: dict[int, list[Specified]] = {}
    for number, site in enumerate(sites):
        if site.refusal is not None:
            continue
        try:
            _refuse_reordered_reads(site)
            specified[number] = [_specify(site, a, symbols) for a in site.attentions]
        except Unsupported as problem:
            site.refusal, site.blame = problem.refusal, problem.node
        except Exception as problem:  # no other attention is lost for it
            site.refusal, site.blame = defect(problem), site.anchor
    return specified


def _refuse(
    sites: Sequence[Site],
    specified: dict[int, list[Specified]],
    reason: Callable[[Site, list[Specified]], Refusal | None],
) -> None:
    """Drop the sites that there is a reason against."""
    for number, parts in list(specified.items()):
        with sites[number].assumed.hold():
            refusal = reason(sites[number], parts)
        if refusal is not None:
            sites[number].refusal, sites[number].place = refusal, None
            del specified[number]


def _unsupported(
    site: Site, parts: Sequence[Specified], supports: Supports, hints: Mapping[str, int]
) -> Refusal | None:
    """Why no kernels can be made for a site."""
    device = nodes.value(site.root).device
    refusals = (supports(part, device, [*part.example_sizes(hints).values()]) for part in parts)
    return next(filter(None, refusals), None)


def _specify(site: Site, attention: Attention, symbols: Symbols, found_uses: Sequence[Use] = ()) -> Specified:
    with site.assumed.hold():
        found = specify(site, attention, found_uses)
    _refuse_distributed_dropout(found)
    _refuse_narrowed(site, found)
    for extent in found.sizes:
        symbols.require(extent)
    for _, table in found.tables:
        symbols.require(table.extent)
    return found


def _refuse_distributed_dropout(found: Specified) -> None:
    """Processes that compute the same weights would drop different ones, each by a seed of its own."""
    random = any(part.op == "hash" for part in walk(*found.spec.expressions()))
    if random and (held := next((o for o in found.operands if marks.dtensor(o)), None)) is not None:
        message = f"dropout on the weights of DTensors ({held.name} is one), whose processes share no random numbers"
        raise Unsupported(Ground.DISTRIBUTED_DROPOUT, message)


def _refuse_narrowed(site: Site, found: Specified) -> None:
    """A float64 program does not round what the model rounds on the way, and scores of -1e9 are equal after that."""
    made = downstream_of_products(site) if found.spec.dtype == "float64" else ()
    for node in made:
        if nodes.dtype(node).is_floating_point and nodes.dtype(node) is not torch.float64:
            raise Unsupported(Ground.DTYPE, f"scores of float64 are rounded to {nodes.dtype(node)}", None, node)


def _map_tiles(
    graph: Graph,
    sites: Sequence[Site],
    specified: dict[int, list[Specified]],
    symbols: Symbols,
    pays: Pays | None,
    hints: Mapping[str, int],
) -> None:
    """Give attentions whose masks are data a map of their live tiles, one for all that have the same mask."""
    wanted: dict[Mapped, list[tuple[int, int]]] = {}
    if pays is None:
        return
    for number, parts in specified.items():
        for position, part in enumerate(parts):
            if part.by_rows is None and (found := mapped(part)) is not None:
                wanted.setdefault(found, []).append((number, position))
    for found, users in wanted.items():
        parts = [specified[number][position] for number, position in users]
        of_parts = [(part.spec, [*part.example_sizes(hints).values()]) for part in parts]
        if not pays(found.spec, [size_value(e, hints) for e in found.sizes], of_parts, parts[0].device):
            continue
        made: Node | None = None
        for (number, position), part in zip(users, parts, strict=True):
            root = sites[number].root
            place = sites[number].place or root
            if made is None or not made < place:
                with graph.inserting_before(place):
                    sizes = [symbols.value(extent) for extent in found.sizes]
                    arguments = (list(found.operands), sizes, found.spec.to_json())
                    made = graph.call_function(torch.ops.fusion.tile_map.default, arguments)
                nodes.copy_provenance(root, made)
                held = list(map(nodes.value, sizes))
                like = nodes.value(root)
                shape = found.spec.shape(dict(zip(found.spec.sizes, held, strict=True)))
                made.meta["val"] = like.new_empty(shape, dtype=torch.int32)
            specified[number][position] = with_map(part, made)


def _check_tables(graph: Graph, specified: dict[int, list[Specified]], symbols: Symbols) -> None:
    """Let attentions read tables as `fusion::table` has checked them, one for all that are read at the same places."""
    known: dict[Table, Node] = {}
    for parts in specified.values():
        for place, part in enumerate(parts):
            operands = list(part.operands)
            for number, table in part.tables:
                if table not in known or not known[table] < table.call:
                    known[table] = _checked(graph, table, symbols)
                operands[number] = known[table]
            parts[place] = replace(part, operands=tuple(operands))


def _checked(graph: Graph, table: Table, symbols: Symbols) -> Node:
    with graph.inserting_before(table.call):
        arguments = (table.positions, symbols.value(table.extent), table.dim, table.operation)
        made = graph.call_function(torch.ops.fusion.table.default, arguments)
    nodes.copy_provenance(table.call, made)
    made.meta["val"] = nodes.value(table.positions).new_empty(nodes.value(table.positions).shape)
    return made


def _refuse_reordered_reads(site: Site) -> None:
    """The op reads everything where the region ended: nothing that it reads may change in place before that."""
    for node in site.interior() | {site.anchor}:
        for parent in node.all_input_nodes:
            for mutation in marks.mutations(parent):
                if node < mutation < site.root:
                    where = nodes.source_line(mutation) or mutation.name
                    message = f"a tensor that the attention reads is changed in place before it ends ({where})"
                    raise Unsupported(Ground.CHANGED_IN_PLACE, message, None, mutation)


def _replace(
    graph: Graph,
    site: Site,
    parts: Sequence[Specified],
    symbols: Symbols,
    emitter: str,
    results: dict[Node, Node],
    hints: Mapping[str, int],
) -> dict[Node, Node]:
    """Put the calls in the place of a site's root; returns what stands in whose place. results: of sites before."""
    root = site.root
    with graph.inserting_before(site.place or root):
        terms, further = [], dict[Node, Node]()
        for part in parts:
            operands = [_operand(graph, root, operand, results) for operand in part.operands]
            part, operands = with_keys_innermost(graph, part, operands, hints)
            term, written = _call(graph, site, part, operands, symbols, emitter)
            terms.append(term)
            further |= written
        result = terms[0]
        for term in terms[1:]:
            result = derived(graph, root, aten.add.Tensor, (result, term))
        if nodes.dtype(result) != nodes.dtype(root):
            result = derived(graph, root, aten.to.dtype, (result, nodes.dtype(root)))
        if marks.mutations(root) and marks.requires_grad(root):  # the backward reads what the call returned
            result = derived(graph, root, aten.clone.default, (result,))
    for node, written in further.items():  # what stands before it is the region, which dies
        node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: written < user)
    root.replace_all_uses_with(result)
    graph.erase_node(root)
    return further | {root: result}


def _operand(graph: Graph, root: Node, operand: Node, results: dict[Node, Node]) -> Node:
    """What the call in the place of `root` takes: a copy of what is written to later, if a backward reads it again."""
    found = results.get(operand, operand)
    if marks.requires_grad(root) and any(root < mutation for mutation in marks.mutations(operand)):
        return derived(graph, root, aten.clone.default, (found,))
    return found


def _without_gradient(graph: Graph, root: Node, part: Specified, operands: Sequence[Node]) -> list[Node]:
    """The operands, those detached that no gradient flows to: theirs is None then, as in eager mode, and not zero."""
    spec = part.spec
    programs = [spec.score, spec.weight, spec.row_scale, *spec.sinks, *spec.values, *(f.value for f in spec.further)]
    found = reached(*(program for program in programs if program is not None))
    if spec.mixing is not None:
        found = _reached_through(spec.mixing, found)
    trained = {load.operand for load in found if load.op == "load"} | {2} | ({0, 1} if SCORE in found else set())
    trained |= part.reached
    return [
        node
        if number in trained or not marks.requires_grad(node)
        else derived(graph, root, aten.detach.default, (node,))
        for number, node in enumerate(operands)
    ]


def _reached_through(mixing: Mixing, of_head: Set[Expr]) -> Set[Expr]:
    """What a gradient reaches that arrives at weights. of_head: what it reaches of a head that it does reach."""
    behind = reached(mixing.weighted, *([] if mixing.weights is None else [mixing.weights]))
    if WEIGHT not in behind:
        return reached(mixing.weighted)
    if mixing.scores is None or SCORE not in of_head:
        return behind | of_head
    return behind | (of_head - {SCORE}) | reached(mixing.scored, mixing.scores)


def _call(
    graph: Graph, site: Site, part: Specified, operands: list[Node], symbols: Symbols, emitter: str
) -> tuple[Node, dict[Node, Node]]:
    """The output, and what takes the place of each node that is written beside it."""
    root, sizes = site.root, [symbols.value(extent) for extent in part.sizes]
    if part.differentiable:
        operands = _without_gradient(graph, root, part, operands)
    arguments = (operands, sizes, part.spec.to_json(), emitter)
    held, written = list(map(nodes.value, sizes)), dict[Node, Node]()
    if part.uses:
        every = graph.call_function(torch.ops.fusion.attention_outputs.default, arguments)
        call = graph.call_function(operator.getitem, (every, 0))
        written = {
            use.node: in_place_of(
                graph, use, further, graph.call_function(operator.getitem, (every, 2 + k)), symbols,
                site.bounds | {J: site.attentions[0].keys}, marks.requires_grad(root),
            )
            for k, (use, further) in enumerate(zip(part.uses, part.spec.further, strict=True))
        }  # fmt: skip
    elif part.differentiable:  # the second result only the gradient reads
        both = graph.call_function(torch.ops.fusion.attention_forward.default, arguments)
        call = graph.call_function(operator.getitem, (both, 0))
    else:
        call = graph.call_function(torch.ops.fusion.attention.default, arguments)
    nodes.copy_provenance(root, call)
    call.meta["val"] = empty_result(part.spec, 0, nodes.value(root), held)
    return with_merged_heads(graph, root, call, part.spec), written
