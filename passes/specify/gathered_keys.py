"""Attention over a set of keys per row: K and V are read at the positions of the set, and at no others.

A mask that `pullback.indexing` recognised leaves to row i the keys at `positions[.., i, :]`. Where it fills with -inf
the other keys have no weight at all, so that the attention is one over `count` keys, read through that table:

    x[i, t] = score program at key j = positions[.., i, t]          out[i] = sum over t of w[i, t] * v[j]

Queries with different sets become a batch coordinate. The rows that remain are the heads that read the same keys, so
that these are gathered once for all of them. Kernels, schedules and reports see an ordinary spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fusion.ir import AttentionSpec, Operand, Output, integers
from fusion.ir.expr import FALSE, Expr, I, J, Kind, coord, coordinates, load, loads, renumbered, size, substitute, walk
from fusion.ir.ops import conjuncts
from fusion.ir.spec import Normalizer

from .. import marks, nodes
from ..building import derived
from ..pullback.indexing import KeySet
from ..recognize.find import Site, pending
from .masks import understand
from .specify import AttentionCall, GatheredKeys

COUNT = "Nset"
"""The size that is the number of keys of a set."""


WhyDense = Callable[[AttentionCall, AttentionCall, Mapping[str, int]], str | None]
"""(over sets, with a mask of all keys, example sizes) -> why the mask is to be kept, or None."""


def read_sets(sites: Iterable[Site], why_dense: WhyDense, examples: Mapping[str, int]) -> None:
    """Let attentions read only the keys of their sets, where it is possible and pays; else `dense_reason` says why."""
    for site in pending(sites):
        for place, call in enumerate(site.calls):
            if (chosen := _membership(call)) is None:
                continue
            if (reason := _obstacle(call)) is None:
                gathered = _with_table(call, *chosen)
                reason = why_dense(gathered, call, examples)
                call = call if reason else gathered
            site.calls[place] = replace(call, dense_reason=reason or "")


def with_merged_heads(graph: Graph, root: Node, call: Node, spec: AttentionSpec) -> Node:
    """Result with the dimensions of `root`: in that of the call, heads that share keys have a separate dimension."""
    if spec.n_k_total is None:
        return call
    place = spec.output.dims.index("i")
    return derived(graph, root, torch.ops.aten.flatten.using_ints, (call, place - 1, place))


def _obstacle(call: AttentionCall) -> str | None:
    """Reason why an attention with sets of keys needs a mask of all keys; None where it does not."""
    spec = call.spec
    assert spec.mask is not None
    if call.differentiable:
        return "gradients are asked for"
    if spec.aux_outputs:
        return "the weights of all keys are asked for"
    if spec.normalizer is not Normalizer.NONE and spec.mask.fill != float("-inf"):
        return f"keys that are not selected are filled with {spec.mask.fill:g}, and count in rows without a live key"
    if any(marks.dtensor(node) for node in call.operands):
        return "operands are DTensors"
    return None


def _membership(call: AttentionCall) -> tuple[Expr, KeySet] | None:
    """Load of a mask that is true of every live key exactly in a set, and the set."""
    extent = dict(zip(call.spec.sizes, call.sizes, strict=True)).get("Nk")
    known = {number: keys for number, keys in call.key_sets if keys.extent is extent}
    for part in conjuncts(call.spec.mask.live) if call.spec.mask is not None else ():
        for member in loads(part):
            if (keys := known.get(member.operand)) is None or member.args[-1] is not J:
                continue
            free = all("j" not in coordinates(entry) for entry in member.args[:-1])
            if free and substitute(part, {member: keys.outside}) is FALSE:
                return member, keys
    return None


def _with_table(call: AttentionCall, member: Expr, keys: KeySet) -> AttentionCall:
    """Attention that reads K and V at the positions of the set."""
    spec, number, axes = call.spec, len(call.spec.operands), len(call.spec.batch)
    grouped = "i" in coordinates(member)
    query = {I: coord(f"b{axes}")} if grouped else {}
    position = substitute(load(number, (*member.args[:-1], J), Kind.INT), query)
    values = {member: keys.inside, J: position, **query}
    table = Operand(
        dtype=str(nodes.dtype(keys.positions)).removeprefix("torch."), rank=len(position.args), name="table"
    )
    described = {"operands": (*spec.operands, table), "sizes": (*spec.sizes, COUNT), "n_k": size(COUNT)}
    sizes = (*call.sizes, keys.count)
    if grouped:
        batch = (*spec.batch, spec.n_q)
        described |= {"batch": batch, "n_q": integers.integer(1), "output": _output(spec), "n_k_total": spec.n_k}
    inside = spec.mapped(lambda expr: substitute(expr, values), mask=None, **described)
    if grouped and (heads := _last_extent(call)) and (group := inside.heads_per_key(heads, axes - 1)) > 1:
        inside = _heads_as_rows(inside, axes - 1, group, heads)
    inside = replace(inside, mask=understand(inside.score, inside.normalizer))
    gathered = GatheredKeys(table=number, dense=call)
    operands = (*call.operands, keys.positions)
    return _without_unused(replace(call, spec=inside, operands=operands, sizes=sizes, key_sets=(), gathered=gathered))


def _output(spec: AttentionSpec) -> Output:
    """Output with queries as the last batch coordinate, and rows beside the coordinate that was the last before."""
    axes = len(spec.batch)
    query, last = f"b{axes}", f"b{axes - 1}"
    names = {"i": (query,), last: (last, "i")} if axes else {"i": (query, "i")}

    def renamed(dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for old in dims for name in names.get(old, (old,)))

    return Output(dims=renamed(spec.output.dims), order=renamed(spec.output.order))


def _last_extent(call: AttentionCall) -> int:
    """Size of the last batch coordinate; 0 where it is not known at compile time."""
    values = dict(zip(call.spec.sizes, call.sizes, strict=True))
    last = call.spec.batch[-1] if call.spec.batch else None
    extent = None if last is None or last.op != "size" else values.get(last.name)
    return extent.integer if extent is not None and extent.is_const else 0


def _heads_as_rows(spec: AttentionSpec, axis: int, group: int, heads: int) -> AttentionSpec:
    """The spec whose rows are the `group` heads, values of batch coordinate `axis`, that read the same keys."""
    last = coord(f"b{axis}")
    first = {last: integers.mul(last, group)}
    per_row = {last: integers.add(first[last], I)}
    batch = tuple(integers.integer(heads // group) if k == axis else extent for k, extent in enumerate(spec.batch))
    fields = {"batch": batch, "n_q": integers.integer(group), "mask": None}
    return spec.mapped(lambda expr: substitute(expr, per_row), lambda expr: substitute(expr, first), **fields)


def _without_unused(call: AttentionCall) -> AttentionCall:
    """Spec without operands that are no longer read, the mask above all, and without their sizes."""
    spec, gathered = call.spec, call.gathered
    assert gathered is not None
    every = spec.expressions()
    read = {part.operand for part in loads(*every)} | {0, 1, 2}
    number = {old: new for new, old in enumerate(sorted(read))}
    changed = spec.mapped(
        lambda expr: renumbered(expr, number.__getitem__),
        operands=tuple(spec.operands[old] for old in sorted(read)),
        sizes=tuple(name for name in spec.sizes if size(name) in set(walk(*every))),
    )
    values = dict(zip(spec.sizes, call.sizes, strict=True))
    return replace(
        call,
        spec=changed,
        operands=tuple(call.operands[old] for old in sorted(read)),
        sizes=tuple(values[name] for name in changed.sizes),
        tables=tuple((number[old], known) for old, known in call.tables if old in number),
        gathered=replace(gathered, table=number[gathered.table]),
    )
