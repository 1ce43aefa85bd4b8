"""Calls that replace each site: one for every attention of it. Sites whose scores or weights are needed elsewhere write
them as auxiliary outputs, or are not fused."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from fusion.ir.expr import walk
from fusion.refusals import Reason, Refusal
from fusion.torch_private.devices import in_context_parallel

from .. import marks, nodes
from ..building import Symbols, same_grad_mode_point
from ..nodes import Unsupported, packet
from ..pullback.contractions import products_above
from ..pullback.reductions import OPERATIONS, blocking_op, is_reduction
from ..recognize.ancestors import SOFTMAXES
from ..recognize.find import Site, defect, pending
from .aux_outputs import AuxUse, uses_of
from .specify import AttentionCall, specify

progress = logging.getLogger("fusion.progress")


def specify_sites(graph: Graph, sites: Iterable[Site]) -> None:
    """Give every pending site its calls, or the reason why there are none."""
    symbols = Symbols(graph)
    for site in pending(sites):
        try:
            _refuse_reordered_reads(site)
            site.calls = [call_of(site, number, symbols) for number in range(len(site.attentions))]
        except Unsupported as problem:
            site.refuse(problem.refusal, problem.node)
        except Exception as problem:  # no other attention is lost for it
            site.refuse(defect(problem), site.anchor)


def refuse(sites: Iterable[Site], reason: Callable[[Site], Refusal | None], work: str = "") -> None:
    """Refuse the pending sites for which `reason` returns a refusal. work: what that takes, in the log of progress."""
    waiting = pending(sites)
    for number, site in enumerate(waiting):
        progress.info("%s attention %d of %d: %s", work, number + 1, len(waiting), nodes.source_line(site.anchor))
        with site.assumed.hold():
            refusal = reason(site)
        if refusal is not None:
            site.refuse(refusal)


def call_of(site: Site, number: int, symbols: Symbols, uses: Sequence[AuxUse] = ()) -> AttentionCall:
    """Call of a site's attention of that number, with auxiliary outputs for `uses`. Raises `Unsupported`."""
    with site.assumed.hold():
        call = specify(site, site.attentions[number], uses)
    _refuse_distributed_dropout(call)
    _refuse_context_parallel(call)
    _refuse_narrowed(site, call)
    for extent in (*call.sizes, *(table.extent for _, table in call.tables)):
        symbols.require(extent)
    return call


def _refuse_distributed_dropout(call: AttentionCall) -> None:
    """Refuse dropout of DTensors: processes with the same weights would drop different ones, by different seeds."""
    random = any(part.op == "hash" for part in walk(*call.spec.expressions()))
    if random and (operand := next((o for o in call.operands if marks.dtensor(o)), None)) is not None:
        message = f"dropout on the weights of DTensors ({operand.name} is one), whose processes share no random numbers"
        raise Unsupported(Reason.DISTRIBUTED_DROPOUT, message)


def _refuse_context_parallel(call: AttentionCall) -> None:
    """Refuse DTensors in torch's context parallel, which deals their rows in an order that no placement tells."""
    operand = next((o for o in call.operands if marks.dtensor(o)), None)
    if operand is not None and in_context_parallel():
        message = f"{operand.name} is a DTensor in torch's context_parallel, whose rows are in an order of its own"
        raise Unsupported(Reason.CONTEXT_PARALLEL, message)


def _refuse_narrowed(site: Site, call: AttentionCall) -> None:
    """Refuse float64 programs with roundings: kernels leave them out, and scores of -1e9 are equal after them."""
    for node in site.scores if call.spec.dtype == "float64" else ():
        if nodes.dtype(node).is_floating_point and nodes.dtype(node) is not torch.float64:
            raise Unsupported(Reason.DTYPE, f"scores of float64 are rounded to {nodes.dtype(node)}", None, node)


def _refuse_reordered_reads(site: Site) -> None:
    """Refuse calls whose operands change in place before the call: it reads everything where the region ended."""
    for node in site.interior | {site.anchor}:
        for parent in node.all_input_nodes:
            for mutation in marks.mutations(parent):
                if node < mutation < site.root:
                    where = nodes.source_line(mutation) or mutation.name
                    message = f"a tensor that the attention reads is changed in place before it ends ({where})"
                    raise Unsupported(Reason.CHANGED_IN_PLACE, message, None, mutation)


def impurity() -> Callable[[Node], bool]:
    """Predicate of nodes with side effects, by torch's rule, but for dropout that a fused attention draws itself."""
    impure = nodes.impurity()
    return lambda node: not marks.seed.on(node) and not marks.is_seed(node) and impure(node)


def resolve_escaping(graph: Graph, sites: Sequence[Site], respecifies: bool = True) -> None:
    """Let sites whose scores or weights are needed elsewhere write them as auxiliary outputs, or refuse them, as these
    would be computed twice. Repeats until nothing changes. respecifies: whether sites may get auxiliary outputs."""
    impure = impurity()
    symbols, roots = Symbols(graph), [node for node in graph.nodes if node.op == "output" or impure(node)]
    wanted = collections.defaultdict[Node, dict[Node, None]](dict)  # by anchor: what was ever needed of its weights
    tried: dict[Node, set[Node]] = {}  # and by whom, at the last try

    def changed(site: Site, escaping: Sequence[Node], live: set[Node], needs: Mapping[Node, list[Node]]) -> bool:
        """Whether a site got auxiliary outputs that it had not, or was refused at the attempt."""
        outside = _outside(site, live, needs)
        users = {user for node in escaping for user in node.users if outside(user)}
        if wanted[site.anchor].keys() >= {*escaping} and tried[site.anchor] == users:
            return False
        wanted[site.anchor] |= dict.fromkeys(escaping)
        tried[site.anchor] = users
        plain = _needs(pending(sites), site)
        try:
            with site.assumed.hold():
                call = _with_auxiliary_outputs(site, [*wanted[site.anchor]], _live(roots, plain), plain, symbols)
        except Exception as problem:  # no other attention is lost for it
            site.refuse(defect(problem), site.anchor)
            return True
        if call is not None:
            site.calls = [call]
        return call is not None

    while True:
        needs = _needs(pending(sites))
        live = _live(roots, needs)
        escaping = [(site, used) for site in pending(sites) if (used := _escaping(site, live, needs))]
        if not escaping:
            return
        if respecifies and any(changed(*each, live, needs) for each in escaping):
            continue  # what one writes, or no longer reads, may be what others need
        _refuse_escaped(*escaping[-1], live, needs)  # those before it may do without what it needs of them


def _needs(sites: Sequence[Site], plain: Site | None = None) -> dict[Node, list[Node]]:
    """Operands of the nodes that calls write. plain: a site without its auxiliary outputs; others keep theirs."""
    written = {site.anchor: [site.root] for site in sites}
    for site in sites:
        if site is not plain:
            written[site.anchor] += [use.node for call in site.calls for use in call.uses]
    read = {site.anchor: [operand for call in site.calls for operand in call.operands] for site in sites}
    return {node: read[anchor] for anchor, written_node in written.items() for node in written_node}


def _refuse_escaped(site: Site, escaping: Sequence[Node], live: set[Node], needs: Mapping[Node, list[Node]]) -> None:
    """Refuse a site whose scores or weights are needed elsewhere; the message names the use."""
    own_scores = [operand for operand in needs[site.root] if site.products & products_above(operand)]
    if own_scores and (blocking := blocking_op(min(own_scores), site.products)) is not None:
        message = f"the attention reads the result of {nodes.producer(blocking).target} on its own scores"
        if packet(blocking) in SOFTMAXES:
            site.refuse(Refusal(Reason.OTHER_SOFTMAX, message), blocking)
        else:
            reduces = is_reduction(blocking)
            site.refuse(Refusal(Reason.FURTHER_REDUCTION if reduces else Reason.NOT_POINTWISE, message), blocking)
        return
    outside = _outside(site, live, needs)
    node, user = next(((n, u) for n in escaping for u in n.users if outside(u)), (escaping[0], None))
    blame = user if user is not None and user.op != "output" else node
    reader = next((written for written, read in needs.items() if node in read and written is not site.root), None)
    if user is None:
        where = None if reader is None else nodes.source_line(reader)
        use = f"{node.name} stays in use" if where is None else f"by another attention, at {where}"
    else:
        where = nodes.source_line(user)
        use = ("they are returned" if user.op == "output" else f"by {user.target}") + (f", at {where}" if where else "")
    message = f"the attention {_table_name(site, node)} are needed elsewhere ({use})"
    site.refuse(Refusal(Reason.WEIGHTS_NEEDED, message), blame)


def _table_name(site: Site, node: Node) -> str:
    """Weights, if rows of scores are reduced at or above a node of the region, else scores."""
    above = nodes.walk_up([node], lambda here: [parent for parent in here.all_input_nodes if parent in site.scores])
    return "weights" if any(packet(each) in OPERATIONS for each in above) else "scores"


def _outside(site: Site, live: set[Node], needs: Mapping[Node, list[Node]]) -> Callable[[Node], bool]:
    """Whether a user of the region is itself outside of it, and alive."""
    return lambda user: user in live and user not in site.scores and user not in needs


def _with_auxiliary_outputs(
    site: Site, escaping: Sequence[Node], live: set[Node], needs: Mapping[Node, list[Node]], symbols: Symbols
) -> AttentionCall | None:
    """Call of a site with auxiliary outputs for the escaping weights; None where there is none."""
    outside = _outside(site, live, needs)
    aux_uses, on_the_way = uses_of(site, escaping, outside)
    if not aux_uses or (any(marks.requires_grad(use.node) for use in aux_uses) and not marks.requires_grad(site.root)):
        return None
    try:
        call = call_of(site, 0, symbols, aux_uses)
    except Unsupported:
        return None
    users = {user for use in aux_uses for user in use.node.users if outside(user)}
    place = same_grad_mode_point(site.root, min({site.root, *users}))
    read = [*call.operands, *symbols.of(call.sizes)]
    if place is None or any(not node < place or node in site.scores or marks.dtensor(node) for node in read):
        return None
    if any(_reads_something_else(node, place) for node in site.interior | {site.anchor} | on_the_way):
        return None
    site.place = place
    return call


def _reads_something_else(node: Node, place: Node) -> bool:
    """Whether an input of a node is written in place between the node and the place of a call that reads it instead."""
    mutations = {m for parent in node.all_input_nodes for m in marks.mutations(parent)} - {node}
    return any((node < mutation) != (place <= mutation) for mutation in mutations)


def _live(roots: Sequence[Node], needs: Mapping[Node, list[Node]]) -> set[Node]:
    return {*nodes.walk_up(roots, lambda node: needs.get(node, node.all_input_nodes))}


def _escaping(site: Site, live: set[Node], needs: Mapping[Node, list[Node]]) -> list[Node]:
    """Nodes of the region that hold scores and stay alive, the last first; those used outside, if any."""
    outside, operands = _outside(site, live, needs), set(needs.get(site.root, ()))
    alive = [n for n in site.scores if n in live and n not in operands and n not in needs]
    used = [n for n in alive if any(map(outside, n.users))]
    return sorted(used or alive, reverse=True)
