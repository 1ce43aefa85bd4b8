"""Changes of a normalized graph that compute the same function with less work, or make an attention recognisable.

`find_attention` is the search for attention, also after a change of the graph that makes an attention recognisable. A
change is tried on a copy of the graph, which is used if every product that it was changed for is an attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from fusion.torch_private.tracing import carry_source

from .. import marks
from ..recognize.find import ANY, Reads, Site, find_sites, pending

Promise = Callable[[Mapping[str, Site]], bool]
"""(the attentions by the names of their products) -> whether a change has given what it was made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Rewrite of the graph that computes the same function, for products that are no attentions without it.

    may_help: whether a site is worth trying it for.
    apply: (graph, products with their sites) -> promises that have to be fulfilled, by the names of the changed
    products.
    """

    may_help: Callable[[Site], bool]
    apply: Callable[[Graph, Mapping[Node, Site]], Mapping[str, Promise]]


def find_attention(
    module: GraphModule, reads: Reads = ANY, changes: Sequence[Change] = (), excluded: Set[str] = frozenset()
) -> tuple[GraphModule, list[Site], dict[str, Promise]]:
    """(the graph or a changed copy of it, its sites, the promises of the changes).

    excluded: names of products for which nothing is changed.
    """
    sites, promised = find_sites(module.graph, reads), dict[str, Promise]()
    for change in changes:
        if (trial := _tried(module, sites, change, reads, excluded | promised.keys())) is not None:
            module, sites, promises = trial
            promised |= promises
    return module, sites, promised


def _tried(
    module: GraphModule, sites: Sequence[Site], change: Change, reads: Reads, excluded: Set[str]
) -> tuple[GraphModule, list[Site], Mapping[str, Promise]] | None:
    """Copy of the graph with a change for the products that it helps; None where it helps none."""
    candidates = [site for site in sites if site.anchor.name not in excluded and change.may_help(site)]
    while candidates:
        copy, copies = copied(module)
        promises = change.apply(copy.graph, {copies[site.anchor]: site for site in candidates})
        if not promises:
            return None
        new_sites = find_sites(copy.graph, reads)
        attentions = {site.anchor.name: site for site in pending(new_sites)}
        candidates = [s for s in candidates if (n := s.anchor.name) in promises and promises[n](attentions)]
        if len(candidates) == len(promises):
            return copy, new_sites, promises
    return None


def copied(module: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """Copy of a graph with its annotations, and the copy of each node."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for node in module.graph.nodes:
        copy = copies.setdefault(node, graph.output_node())
        copy.meta = dict(node.meta)
        marks.carry_nodes(copy, copies)
        if node.op == "placeholder":
            carry_source(node, copy)
    copied_module = GraphModule(module, graph)
    copied_module.meta = dict(module.meta)
    return copied_module, copies
