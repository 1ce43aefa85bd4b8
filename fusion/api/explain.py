"""`fusion.explain`: what the backend does with a model, without changing how the model runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from fusion.api.compare import calling
from fusion.backend import fuse
from fusion.exactness import copied
from fusion.integrations import nested_tensors
from fusion.options import Options
from fusion.planning.counted import mask_operands
from fusion.report.report import NO_ATTENTION, AttentionReport, Report
from fusion.torch_private.dynamo import original_of

NOTHING_TRACED = (
    "Dynamo made no graph of this call, which ran in eager mode: it is kept from being compiled "
    "(torch.compiler.disable), computes nothing with tensors, or begins with what Dynamo does not trace "
    "(TORCH_LOGS=graph_breaks says more)"
)


def explain(
    function: Callable[..., Any], /, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Report:
    """The report of every attention that one call of `function` meets.

    function: a module or function, compiled or not; it is called once with the arguments. Print the report, or look at
    `report.sites`. For inference call it under `torch.no_grad()`: it is planned for training where gradients are
    recorded.
    options: of the backend. Raises OptionError, and ComparisonError where the call fails in eager mode as well.
    """
    reports: list[Report] = []
    chosen, original = Options.parse(options), original_of(function)

    def backend(module: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graph, report = fuse(module, example_inputs, chosen)
        reports.append(report)
        recorder = _RecordingInterpreter(graph, report)
        return recorder.run if recorder.wanted else graph.forward

    nested_tensors.register()
    with calling("explain", original, args, kwargs):
        torch.compile(original, backend=backend)(*args, **kwargs)
    whole = merge(reports)
    if not reports:
        whole.notes.append(NOTHING_TRACED)
    whole.function, whole.options = original, dict(options or {})
    return whole


class _RecordingInterpreter(Interpreter):
    """Runs a graph, and keeps the tensors that masks read for the report, which draws them."""

    def __init__(self, graph: GraphModule, report: Report):
        super().__init__(graph)
        self.wanted = defaultdict[Node, list[tuple[int, AttentionReport]]](list)
        for attention in (entry for site in report.sites for entry in site.attentions):
            mask = attention.spec.mask
            for number in mask_operands(mask) if mask is not None else ():
                self.wanted[attention.nodes[number]].append((number, attention))

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.wanted:
            value = copied(result)
            for number, attention in self.wanted[n]:
                attention.values[number] = value
        return result


def merge(reports: list[Report]) -> Report:
    """One report of several graphs; its graphs are those of the first that holds an attention."""
    whole = Report(graphs=len(reports))
    for report in reports:
        whole.sites += report.sites
        whole.notes += [note for note in report.notes if note not in whole.notes]
        whole.graph_breaks += [broken for broken in report.graph_breaks if broken not in whole.graph_breaks]
        if report.sites and whole.graph_before is None:
            whole.graph_before, whole.graph_after = report.graph_before, report.graph_after
    if whole.sites or len(whole.notes) > 1:
        whole.notes = [note for note in whole.notes if note != NO_ATTENTION]
    return whole
