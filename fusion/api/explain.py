"""`fusion.explain`: what the backend does with a model, without changing how the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion import dynamo
from fusion.backend import fuse
from fusion.options import Options
from fusion.report.report import NO_ATTENTION, Report
from fusion.torch_private.dynamo import original_of

NOTHING_TRACED = (
    "Dynamo made no graph of this call, which ran in eager mode: it is kept from being compiled "
    "(torch.compiler.disable), computes nothing with tensors, or begins with what Dynamo does not trace "
    "(TORCH_LOGS=graph_breaks says more)"
)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """The report of every attention that one call of `function` meets.

    function: a module or function, compiled or not; it is called once with the arguments. Print the report, or look at
    `report.sites`.
    """
    reports: list[Report] = []

    def backend(module: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graph, report = fuse(module, example_inputs, Options())
        reports.append(report)
        return graph.forward

    original = original_of(function)
    dynamo.register()
    torch.compile(original, backend=backend)(*args, **kwargs)
    whole = merge(reports)
    if not reports:
        whole.notes.append(NOTHING_TRACED)
    whole.function = original
    return whole


def merge(reports: list[Report]) -> Report:
    """One report of several graphs; its graphs are those of the first that holds an attention."""
    whole = Report(graphs=len(reports))
    for report in reports:
        whole.sites += report.sites
        whole.notes += [note for note in report.notes if note not in whole.notes]
        whole.graph_breaks += [found for found in report.graph_breaks if found not in whole.graph_breaks]
        if report.sites and whole.graph_before is None:
            whole.graph_before, whole.graph_after = report.graph_before, report.graph_after
    if whole.sites:
        whole.notes = [note for note in whole.notes if note != NO_ATTENTION]
    return whole
