"""Sites whose scores or weights are needed elsewhere: they write them, too, or stay as they are."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

from torch.fx import Graph, Node

from fusion.refusals import Ground, Refusal

from .. import marks, nodes
from ..building import Symbols, in_mode_of
from ..nodes import Unsupported, packet
from ..pullback.contractions import products_above
from ..pullback.reductions import is_reduction
from ..recognize.ancestors import SOFTMAXES
from ..recognize.blame import first_not_followed
from ..recognize.defects import defect
from ..recognize.find import Site
from .aux_outputs import Use, uses
from .specify import Specified

Anew = Callable[[Site, Sequence[Use]], Specified]


def impurity() -> Callable[[Node], bool]:
    """What has an effect, by torch's own rule, but for dropout whose mask a fused attention makes itself."""
    impure = nodes.impurity()
    return lambda node: not marks.seed.on(node) and not marks.is_seed(node) and impure(node)


def refuse_escaping(
    graph: Graph, sites: Sequence[Site], specified: dict[int, list[Specified]], anew: Anew | None, symbols: Symbols
) -> None:
    """Drop sites whose scores or weights stay alive: they would be computed twice. Repeats until nothing changes. anew:
    specifies a site anew, with what was ever needed of its weights as further outputs; None where none are to be."""
    impure, met = impurity(), collections.defaultdict[int, dict[Node, None]](dict)
    tried: dict[int, set[Node]] = {}
    kept = [node for node in graph.nodes if node.op == "output" or impure(node)]
    while True:
        needs = _needs(sites, specified)
        live = _live(kept, needs)
        escaped = {n: found for n in specified if (found := _escaping(sites[n], live, needs))}
        if not escaped:
            return
        for number, nodes_ in escaped.items() if anew is not None else ():
            outside = _outside(sites[number], live, needs)
            users = {user for node in nodes_ for user in node.users if outside(user)}
            if met[number].keys() >= {*nodes_} and tried[number] == users:
                continue
            met[number] |= dict.fromkeys(nodes_)
            tried[number] = users
            plain = _needs(sites, specified, number)
            try:
                with sites[number].assumed.hold():
                    part = _with_further(sites[number], [*met[number]], _live(kept, plain), plain, anew, symbols)
            except Exception as problem:  # no other attention is lost for it
                sites[number].refusal, sites[number].blame = defect(problem), sites[number].anchor
                del specified[number]
                break
            if part is not None:
                specified[number] = [part]
                break  # what it writes may be what others need
        else:
            number, nodes_ = max(escaped.items())  # those before it may do without what it needs of them
            _refuse_escaped(sites[number], nodes_, live, needs)
            del specified[number]


def _needs(
    sites: Sequence[Site], specified: Mapping[int, list[Specified]], plain: int | None = None
) -> dict[Node, list[Node]]:
    """The operands of what calls make. plain: a site whose call makes its output alone; others keep their promises."""
    further = {n: [use.node for part in parts for use in part.uses] for n, parts in specified.items()}
    made = {n: [sites[n].root, *(further[n] if n != plain else ())] for n in specified}
    if plain is not None:
        number_of = {sites[n].anchor: n for n in specified if n != plain}
        for node in sites[plain].anchor.graph.nodes:
            if (number := number_of.get(marks.statistic_of(node))) is not None:
                made[number].append(node)
    read = {n: [operand for part in parts for operand in part.operands] for n, parts in specified.items()}
    return {node: read[n] for n, found in made.items() for node in found}


def _refuse_escaped(site: Site, escaping: Sequence[Node], live: set[Node], needs: Mapping[Node, list[Node]]) -> None:
    """Say of a site that its weights are needed, and by what."""
    own = [operand for operand in needs[site.root] if products_of(site) & products_above(operand)]
    if own and (met := first_not_followed(min(own), products_of(site))) is not None:
        site.blame = met
        message = f"the attention reads the result of {nodes.producer(met).target} on its own scores"
        site.refusal = Refusal(Ground.NOT_POINTWISE, message)
        if is_reduction(met) and packet(met) not in SOFTMAXES:
            site.refusal = Refusal(Ground.FURTHER_REDUCTION, message)
        return
    outside = _outside(site, live, needs)
    node, user = next(((n, u) for n in escaping for u in n.users if outside(u)), (escaping[0], None))
    site.blame = user if user is not None and user.op != "output" else node
    reader = next((made for made, read in needs.items() if node in read and made is not site.root), None)
    if user is None:
        where = None if reader is None else nodes.source_line(reader)
        use = f"{node.name} stays in use" if where is None else f"by another attention, at {where}"
    else:
        where = nodes.source_line(user)
        use = ("they are returned" if user.op == "output" else f"by {user.target}") + (f", at {where}" if where else "")
    site.refusal = Refusal(Ground.WEIGHTS_NEEDED, f"the attention weights are needed elsewhere ({use})")


def _outside(site: Site, live: set[Node], needs: Mapping[Node, list[Node]]) -> Callable[[Node], bool]:
    """Whether a user of the region is itself outside of it, and alive."""
    scores = downstream_of_products(site)
    return lambda user: user in live and user not in scores and user not in needs


def _with_further(
    site: Site,
    escaping: Sequence[Node],
    live: set[Node],
    needs: Mapping[Node, list[Node]],
    anew: Anew,
    symbols: Symbols,
) -> Specified | None:
    """A site that also writes what is needed of its weights; None where it cannot."""
    outside, scores = _outside(site, live, needs), downstream_of_products(site)
    if (met := uses(site, escaping, outside)) is None:
        return None
    found, on_the_way = met
    if not found or (any(marks.requires_grad(use.node) for use in found) and not marks.requires_grad(site.root)):
        return None
    try:
        part = anew(site, found)
    except Unsupported:
        return None
    users = {user for use in found for user in use.node.users if outside(user)}
    place = in_mode_of(site.root, min({site.root, *users}))
    read = [*part.operands, *symbols.of(part.sizes)]
    if place is None or any(not node < place or node in scores or marks.dtensor(node) for node in read):
        return None
    if any(_reads_something_else(node, place) for node in site.interior() | {site.anchor} | on_the_way):
        return None
    site.place = place
    return part


def _reads_something_else(node: Node, place: Node) -> bool:
    """Whether what a node reads is written in place between it and the place of a call that reads it instead."""
    mutations = {m for parent in node.all_input_nodes for m in marks.mutations(parent)} - {node}
    return any((node < mutation) != (place <= mutation) for mutation in mutations)


def _live(kept: Sequence[Node], needs: Mapping[Node, list[Node]]) -> set[Node]:
    return {*nodes.walk_up(kept, lambda node: needs.get(node, node.all_input_nodes))}


def _escaping(site: Site, live: set[Node], needs: Mapping[Node, list[Node]]) -> list[Node]:
    """The nodes of the region that hold scores and stay alive, the last first; those used outside, if any."""
    outside, operands = _outside(site, live, needs), set(needs.get(site.root, ()))
    alive = [n for n in downstream_of_products(site) if n in live and n not in operands and n not in needs]
    used = [n for n in alive if any(map(outside, n.users))]
    return sorted(used or alive, reverse=True)


def products_of(site: Site) -> set[Node]:
    """The products of queries and keys."""
    return {product.node for attention in site.attentions for product in attention.pullback.products}


def downstream_of_products(site: Site) -> set[Node]:
    """The nodes of a region that are made of scores, those included."""
    interior = site.interior()
    reached = (products_of(site) & interior) - {site.anchor}  # others were met when further outputs were looked for
    for node in sorted(interior):  # topological
        if any(parent in reached for parent in node.all_input_nodes):
            reached.add(node)
    return reached
