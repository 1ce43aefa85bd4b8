"""What happened to every attention of a compiled model, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import GraphModule

from fusion.ir import AttentionSpec
from fusion.plan import Plan

NO_ATTENTION = "this graph holds no attention"


@dataclass(slots=True, kw_only=True)
class SiteReport:
    """One attention of the model.

    fused: whether it runs as a fused kernel; reason: why not. location: the user's source line of the product with V.
    module: path of the nn.Module. specs: what was recognised (several where the weights are a sum of attentions).
    plans, sources: schedule and generated kernel of each spec.
    """

    fused: bool
    reason: str | None
    location: str | None
    module: str | None
    specs: tuple[AttentionSpec, ...] = ()
    plans: tuple[Plan, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def spec(self) -> AttentionSpec | None:
        """The spec of a site with one."""
        return self.specs[0] if self.specs else None

    @property
    def plan(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    @property
    def source(self) -> str | None:
        """The generated kernel; None where the reference interpreter runs."""
        return self.sources[0] or None if self.sources else None


@dataclass(slots=True, kw_only=True)
class Report:
    """The report of one compiled graph, or of all `graphs` of a model.

    notes: what concerns a whole graph. graph_before, graph_after: Dynamo's graph and the one handed to the inner
    compiler, where an attention was found.
    """

    graphs: int = 1
    sites: list[SiteReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graph_before: GraphModule | None = None
    graph_after: GraphModule | None = None

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    def __str__(self) -> str:
        from fusion.report_text import to_text

        return to_text(self)


_collectors: list[list[Report]] = []


@contextlib.contextmanager
def collect_reports() -> Iterator[list[Report]]:
    """The reports of all graphs compiled inside the `with`, in order, one per graph."""
    reports: list[Report] = []
    _collectors.append(reports)
    try:
        yield reports
    finally:
        _collectors.remove(reports)


def publish(report: Report) -> None:
    """Hand a finished report to everybody who collects."""
    for reports in _collectors:
        reports.append(report)
