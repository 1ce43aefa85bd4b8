"""Subgraphs that are fused separately: checkpointed functions and function transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fusion.options import Options
from fusion.passes import subgraphs
from fusion.passes.subgraphs import Asked
from fusion.passes.trace import retrace
from fusion.passes.trace.normalize import may_hold_attention
from fusion.report.report import NO_ATTENTION, Report

Fuse = Callable[[GraphModule, Sequence[Any], Asked | None], tuple[GraphModule, Report]]


def fuse_transformed(module: GraphModule, options: Options, fuse: Fuse, total: Report) -> GraphModule:
    """The graph with the attentions inside of its function transforms fused; `total` gets their reports."""
    fused: list[tuple[subgraphs.Run, GraphModule]] = []
    for run in subgraphs.runs(module) if options.transforms != "never" else ():
        if not may_hold_attention(run.body):
            continue
        if run.refusal is not None:
            total.notes.append(f"attention inside of a function transform stays as it is: {run.refusal}")
            continue
        with run.modes():
            graph, report = fuse(run.body, run.values, run.asked)
        _add(total, report)
        if report.fused:
            fused.append((run, graph))
    return subgraphs.with_fused(module, fused)


def fuse_checkpointed(module: GraphModule, fuse: Fuse, total: Report) -> dict[str, GraphModule]:
    """The checkpointed graphs in which something was fused, by name; `total` gets the reports of all of them."""
    fused: dict[str, GraphModule] = {}
    for name, body in subgraphs.bodies(module).items():
        if body.around is None:
            total.notes.append("a checkpointed function that is called in several regions of autocast stays as it is")
            continue
        with retrace.in_regions(body.around):
            graph, report = fuse(body.graph, body.values, None)
        _add(total, report)
        if report.fused:
            subgraphs.lift_seeds(graph)
            fused[name] = graph
    return fused


def _add(total: Report, report: Report) -> None:
    total.sites += report.sites
    total.notes += [note for note in report.notes if note != NO_ATTENTION]
