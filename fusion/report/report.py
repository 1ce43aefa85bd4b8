"""What happened to every attention of a compiled model, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._dynamo.utils import counters
from torch.fx import GraphModule

from fusion.ir import AttentionSpec
from fusion.passes.region import Region
from fusion.planning.plan import Plan

if TYPE_CHECKING:
    from fusion.api.compare import Comparison

NO_ATTENTION = "this graph holds no attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """plan: of a spec's kernel; runs: tile, warps, stages and order of one for GPUs, in words."""

    plan: Plan
    runs: str = ""


@dataclass(slots=True, kw_only=True)
class SiteReport:
    """One attention of the model.

    fused: whether it runs as a fused kernel; reason: why not. location: the user's source line of the product with V.
    stopped_by, stopped_at: the operation that stood in the way and the user's line of it, where one can be named.
    module: path of the nn.Module. specs: what was recognised (several where the weights are a sum of attentions).
    sizes, shapes: values of each spec's sizes, and shapes of its operands, in the example. planned: what tells how each
    spec runs; `plans` and `runs` ask it. sources: generated kernel of each spec.
    before, after: the graph around it, for drawing.
    approximations: what the option `approximate` does with each spec; None without it.
    """

    fused: bool
    reason: str | None
    location: str | None
    module: str | None
    stopped_by: str | None = None
    stopped_at: str | None = None
    before: Region | None = None
    after: Region | None = None
    specs: tuple[AttentionSpec, ...] = ()
    sizes: tuple[Mapping[str, int], ...] = ()
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    planned: tuple[Callable[[], Planned], ...] = ()
    sources: tuple[str, ...] = ()
    approximations: tuple[str | None, ...] = ()

    @property
    def advice(self) -> str | None:
        """What would make an unfused site fusable; None for a fused one."""
        from fusion.report.advice import advice

        return None if self.reason is None else advice(self.reason)

    def mlir(self, which: int = 0) -> str:
        """An MLIR module of one of the site's attentions, at the sizes of the example: its public function `attention`
        takes and returns packed tensors. Raises MlirExportError where the site was not fused."""
        from fusion.codegen.mlir.export import attention_module
        from fusion.errors import MlirExportError

        if which >= len(self.specs):
            raise MlirExportError(
                f"attention {which} of a site with {len(self.specs)} was asked for"
                + (f": {self.reason}" * (not self.fused))
            )
        return attention_module(self.specs[which], self.shapes[which], list(self.sizes[which].values()))

    @property
    def spec(self) -> AttentionSpec | None:
        """The spec of a site with one."""
        return self.specs[0] if self.specs else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The schedule of each spec, as far as it is known by now: tiles are measured at a kernel's first call."""
        return tuple(planned().plan for planned in self.planned)

    @property
    def runs(self) -> tuple[str, ...]:
        """In what each spec runs, likewise; "" where the plan's tile says all."""
        return tuple(planned().runs for planned in self.planned)

    @property
    def plan(self) -> Plan | None:
        return self.planned[0]().plan if self.planned else None

    @property
    def source(self) -> str | None:
        """The generated kernel; None where the reference interpreter runs."""
        return self.sources[0] or None if self.sources else None


@dataclass(slots=True, kw_only=True)
class Report:
    """The report of one compiled graph, or of all `graphs` of a model.

    notes: what concerns a whole graph. graph_before, graph_after: Dynamo's graph and the one handed to the inner
    compiler, where an attention was found. function: what was explained. comparison: what `compare` measured last.
    """

    graphs: int = 1
    sites: list[SiteReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graph_before: GraphModule | None = None
    graph_after: GraphModule | None = None
    function: Callable[..., Any] | None = field(default=None, repr=False)
    comparison: Comparison | None = None

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    def __str__(self) -> str:
        from fusion.report.text import to_text

        return to_text(self)

    def compare(self, *args: Any, seconds: float = 2.0, **kwargs: Any) -> Comparison:
        """Run what was explained on these inputs as eager, Inductor and fusion do, and add what was measured.

        seconds: for which each of the three is timed, at most. Raises ComparisonError where there is nothing to run.
        """
        from fusion.api.compare import compare
        from fusion.errors import ComparisonError

        if self.function is None:
            raise ComparisonError(
                "compare was asked of a report that was collected while a model compiled, which does not know the "
                "model; take the report of fusion.explain(model, *inputs), or call fusion.compare(model, *inputs)"
            )
        self.comparison = compare(self.function, *args, seconds=seconds, **kwargs)
        return self.comparison

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained page, which needs no network and no script; returns the path."""
        from fusion.report.page import to_html

        target = Path(path)
        target.write_text(to_html(self), encoding="utf-8")
        return target


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
    """Hand a finished report to everybody who collects, and count its sites."""
    counters["fusion"]["sites"] += len(report.sites)
    counters["fusion"]["fused"] += report.fused
    counters["fusion"]["unfused"] += len(report.sites) - report.fused
    for reports in _collectors:
        reports.append(report)
