"""Calls that replace each site: one for every attention of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Graph

from fusion.ir.expr import walk
from fusion.refusals import Reason, Refusal

from .. import marks, nodes
from ..building import Symbols
from ..nodes import Unsupported
from ..recognize.find import Site, defect, pending
from .aux_outputs import AuxUse
from .specify import AttentionCall, specify


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


def refuse(sites: Iterable[Site], reason: Callable[[Site], Refusal | None]) -> None:
    """Refuse the pending sites for which `reason` returns a refusal."""
    for site in pending(sites):
        with site.assumed.hold():
            refusal = reason(site)
        if refusal is not None:
            site.refuse(refusal)


def call_of(site: Site, number: int, symbols: Symbols, uses: Sequence[AuxUse] = ()) -> AttentionCall:
    """Call of a site's attention of that number, with auxiliary outputs for `uses`. Raises `Unsupported`."""
    with site.assumed.hold():
        call = specify(site, site.attentions[number], uses)
    _refuse_distributed_dropout(call)
    _refuse_narrowed(site, call)
    for extent in (*call.sizes, *(table.extent for _, table in call.tables)):
        symbols.require(extent)
    return call


def _refuse_distributed_dropout(call: AttentionCall) -> None:
    """Refuse dropout of DTensors: processes that compute the same weights would drop different ones, by different
    seeds."""
    random = any(part.op == "hash" for part in walk(*call.spec.expressions()))
    if random and (operand := next((o for o in call.operands if marks.dtensor(o)), None)) is not None:
        message = f"dropout on the weights of DTensors ({operand.name} is one), whose processes share no random numbers"
        raise Unsupported(Reason.DISTRIBUTED_DROPOUT, message)


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
