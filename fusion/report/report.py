"""What happened to every attention of a compiled model, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from fusion.ir import AttentionSpec
from fusion.passes.graph_excerpt import Excerpt
from fusion.planning.plan import Plan
from fusion.refusals import Refusal
from fusion.torch_private.dynamo import counters

if TYPE_CHECKING:
    from fusion.api.compare import Comparison

NO_ATTENTION = "this graph holds no attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReport:
    """One attention of a site.

    spec: what was recognised.
    sizes: values of the spec's sizes in the example.
    shapes: of its operands in the example.
    planned: says how it runs, as far as is known when it is asked: tiles are measured at a kernel's first call.
    source: the generated kernel; "" where the reference interpreter runs.
    approximation: what the option `approximate` does with it; None without that option.
    keys: what became of the sets of keys that an indexer leaves to its rows; "" where it has none.
    gradients: which gradients kernels do not have, and why; "" where they have all, or none is asked for.
    """

    spec: AttentionSpec
    sizes: Mapping[str, int]
    shapes: tuple[tuple[int, ...], ...]
    planned: Callable[[], Plan]
    source: str
    approximation: str | None = None
    keys: str = ""
    gradients: str = ""


@dataclass(slots=True, kw_only=True)
class SiteReport:
    """One product with V of the model.

    fused: whether it runs as fused kernels.
    refusal: why not.
    location: the user's source line of the product.
    module: path of the nn.Module.
    stopped_by, stopped_at: the operation that stood in the way and the user's line of it, where one can be named.
    before, after: the graph around it, for drawing.
    attentions: what was recognised; several where the weights are a sum of attentions.
    validated: what was compared with the graph's own operations, or why nothing was; None where it was not asked for.
    """

    fused: bool
    refusal: Refusal | None
    location: str | None
    module: str | None
    stopped_by: str | None = None
    stopped_at: str | None = None
    before: Excerpt | None = None
    after: Excerpt | None = None
    attentions: tuple[AttentionReport, ...] = ()
    validated: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the site is not fused, in words; None for a fused one."""
        return None if self.refusal is None else self.refusal.message

    @property
    def advice(self) -> str | None:
        """What would make an unfused site fusable; None for a fused one."""
        return None if self.refusal is None else self.refusal.advice

    def mlir(self, which: int = 0) -> str:
        """An MLIR module of one of the site's attentions, at the sizes of the example: its public function `attention`
        takes and returns packed tensors. Raises MlirExportError where the site was not fused."""
        from fusion.codegen.mlir.export import attention_module
        from fusion.errors import MlirExportError

        if which >= len(self.attentions):
            count = len(self.attentions)
            why = "" if self.fused else f": {self.reason}"
            raise MlirExportError(f"attention {which} of a site with {count} was asked for{why}")
        found = self.attentions[which]
        return attention_module(found.spec, found.shapes, list(found.sizes.values()))

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(found.spec for found in self.attentions)

    @property
    def sizes(self) -> tuple[Mapping[str, int], ...]:
        return tuple(found.sizes for found in self.attentions)

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for sites that run alike: layers with the same specs and sizes."""
        return (self.specs, *(tuple(sizes.items()) for sizes in self.sizes))

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(found.source for found in self.attentions)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The schedule of each attention, as far as it is known by now."""
        return tuple(found.planned() for found in self.attentions)

    @property
    def runs(self) -> tuple[str, ...]:
        """In what each attention runs, likewise; "" where the plan's tile says all."""
        return tuple(found.planned().runs for found in self.attentions)

    @property
    def spec(self) -> AttentionSpec | None:
        """The spec of the first attention; with it `plan` and `source`."""
        return self.attentions[0].spec if self.attentions else None

    @property
    def plan(self) -> Plan | None:
        return self.attentions[0].planned() if self.attentions else None

    @property
    def source(self) -> str | None:
        """The generated kernel; None where the reference interpreter runs."""
        return self.attentions[0].source or None if self.attentions else None


@dataclass(slots=True, kw_only=True, repr=False)
class Report:
    """The report of one compiled graph, or of all `graphs` of a model.

    sites: every attention, fused or not.
    notes: what concerns a whole graph.
    graph_breaks: where Dynamo cut the model into graphs, and why; an attention that a break divides is not seen.
    graph_before, graph_after: Dynamo's graph and the one handed to the inner compiler, where an attention was found.
    function: what was explained.
    comparison: what `compare` measured last.
    """

    graphs: int = 1
    sites: list[SiteReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    graph_before: GraphModule | None = None
    graph_after: GraphModule | None = None
    function: Callable[..., Any] | None = None
    comparison: Comparison | None = None

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    def __str__(self) -> str:
        from fusion.report.text import to_text

        return to_text(self)

    def __repr__(self) -> str:
        notes = f", {len(self.notes)} notes" if self.notes else ""
        return f"<Report: {self.fused} of {len(self.sites)} attentions fused{notes}; print it, or to_html(path)>"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, as notebooks show it."""
        from fusion.report.page import to_html

        return f'<iframe srcdoc="{escape(to_html(self))}" width="100%" height="600" style="border:0"></iframe>'

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


_collectors: ContextVar[tuple[list[Report], ...]] = ContextVar("_collectors", default=())


@contextlib.contextmanager
def collect_reports() -> Iterator[list[Report]]:
    """The reports of all graphs that this thread (or asynchronous task) compiles inside the `with`, in order, one per
    graph. One `collect_reports` inside of another leaves nothing out of the outer one."""
    reports: list[Report] = []
    _collectors.set((*_collectors.get(), reports))
    try:
        yield reports
    finally:
        _collectors.set(tuple(other for other in _collectors.get() if other is not reports))


def publish(report: Report) -> None:
    """Hand a finished report to everybody who collects, and count its sites."""
    counters["fusion"]["sites"] += len(report.sites)
    counters["fusion"]["fused"] += report.fused
    counters["fusion"]["unfused"] += len(report.sites) - report.fused
    for reports in _collectors.get():
        reports.append(report)
