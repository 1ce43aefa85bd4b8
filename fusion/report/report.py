"""Reports: every attention of a compiled model, fused or not, and why."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node

from fusion.ir import AttentionSpec
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning.plan import Plan, plan
from fusion.refusals import Refusal
from fusion.report.data import report_data, report_text
from fusion.torch_private.dynamo import counters
from fusion.torch_private.tracing import short_path

if TYPE_CHECKING:
    from fusion.api.compare import Comparison
    from fusion.report.drawings import Excerpt

NO_ATTENTION = "this graph holds no attention"
RECORDED = (
    "this call records gradients, as parameters or inputs require them: attention is planned for training; for "
    "inference call fusion.explain and the model under torch.no_grad()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReport:
    """One attention of a site.

    spec: what was recognised.
    names: of the spec's operands by number, the user's own where there are any.
    operands: a line about each tensor that the program or the mask reads.
    nodes: the operands in the graph.
    values: of operands that the mask reads, by number, where `explain` ran the graph.
    sizes: values of the spec's sizes in the example.
    shapes: of its operands in the example.
    planned: says how it runs, as far as is known when it is asked: tiles are measured at a kernel's first call.
    backward: the plan of its gradients, likewise; or why kernels do not compute these, "" where none are asked for.
    source: the generated kernel; "" where the reference interpreter runs.
    approximation: the use of the option `approximate`; None without that option.
    keys: how the top-k keys of an indexer are read; "" where it has none.
    gradients: which gradients kernels do not have, and why; "" where they have all, or none is asked for.
    reproducible: the cost of the option `reproducible`; "" without that option.
    """

    spec: AttentionSpec
    names: Mapping[int, str]
    operands: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: dict[int, Tensor] = field(default_factory=dict)
    sizes: Mapping[str, int]
    shapes: tuple[tuple[int, ...], ...]
    planned: Callable[[], Plan]
    backward: Callable[[], Plan] | str = ""
    source: str
    approximation: str | None = None
    keys: str = ""
    gradients: str = ""
    reproducible: str = ""


def aliases(spec: AttentionSpec, names: Mapping[int, str]) -> str:
    """Line of a Triton module, which layers share, about the tensors that this attention has other names for."""
    other = [f"{o.name} is {names[n]}" for n, o in enumerate(spec.operands) if o.name != names[n]]
    return f"# {', '.join(other)}\n" if other else ""


class OnMachine(NamedTuple):
    """Plan of an attention on a GPU, and the text of its Triton module; printed in one screen."""

    plan: Plan
    text: str

    def __repr__(self) -> str:
        lines, shown = self.text.splitlines(), 12
        rest = [f"... ({len(lines)} lines in all: print(this.text))"] if len(lines) > shown else []
        return "\n".join([self.plan.explain(), "", *lines[:shown], *rest])


@dataclass(slots=True, kw_only=True)
class SiteReport:
    """One product with V of the model.

    fused: whether it runs as fused kernels.
    refusal: why not.
    location: the user's source line of the product.
    calling: the line of a module's `forward` that called the function of another file with that product; None if none.
    module: path of the nn.Module.
    stopped_by, stopped_at: the operation that stood in the way and the user's line of it, where one can be named.
    before, after: the graph around it, for drawing.
    attentions: what was recognised; several where the weights are a sum of attentions.
    validated: what was compared with the graph's own operations, or why nothing was; None where it was not asked for.
    trained: whether gradients are recorded through it.
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
    trained: bool = False
    calling: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the site is not fused, in words; None for a fused one."""
        return None if self.refusal is None else self.refusal.message

    @property
    def advice(self) -> str | None:
        """Advice that would make an unfused site fusable; None for a fused one."""
        return None if self.refusal is None else self.refusal.advice

    def mlir(self, which: int = 0) -> str:
        """An MLIR module of one of the site's attentions, at the sizes of the example: its public function `attention`
        takes and returns packed tensors. Raises MlirExportError where the site was not fused."""
        from fusion.codegen.cpu.export import attention_module
        from fusion.errors import MlirExportError

        if which >= len(self.attentions):
            count = len(self.attentions)
            why = "" if self.fused else f": {self.reason}"
            raise MlirExportError(f"attention {which} of a site with {count} was asked for{why}")
        attention = self.attentions[which]
        return attention_module(attention.spec, attention.shapes, list(attention.sizes.values()))

    def on(self, machine: str | Machine, which: int = 0) -> OnMachine:
        """Plan of one of the site's attentions on a GPU at the sizes of the example, and the text of its Triton module;
        no GPU is needed. The text begins with the kernels' registers, as the assemblers that Triton brings state them.
        Raises UnknownMachineError, and ValueError where there is no kernel."""
        from fusion.codegen import triton
        from fusion.errors import UnknownMachineError
        from fusion.planning.gpu import GpuPlanner

        spec, sizes, gpu = self.specs[which], self.attentions[which].sizes, find_machine(machine)
        if gpu.kind != "gpu":
            raise UnknownMachineError(f"machine {machine!r} is no GPU; name one (h200): the report has the CPU's plan")
        kernel = triton.compile(spec, plan=lambda _: GpuPlanner(spec, gpu))
        extents = tuple(sizes.values())
        text = kernel.source(extents)
        if text:
            try:
                compiled = kernel.resources(extents, gpu.architecture)
            except RuntimeError as refused:
                compiled = [f"not compiled for {gpu.architecture}: {refused}".splitlines()[0]]
            text = "".join(f"# {each}\n" for each in compiled) + aliases(spec, self.attentions[which].names) + text
        return OnMachine(plan(spec, gpu, sizes=sizes), text)

    # By attention; `plans` and `runs` (in words) as far as they are known by now.
    specs = property(lambda self: tuple(attention.spec for attention in self.attentions))
    sizes = property(lambda self: tuple(attention.sizes for attention in self.attentions))
    sources = property(lambda self: tuple(attention.source for attention in self.attentions))
    plans = property(lambda self: tuple(attention.planned() for attention in self.attentions))
    runs = property(lambda self: tuple(plan.runs for plan in self.plans))

    # Of the first attention, None without one; no source where the reference interpreter runs.
    spec = property(lambda self: next(iter(self.specs), None))
    plan = property(lambda self: next(iter(self.plans), None))
    source = property(lambda self: next(iter(self.sources), None) or None)


@dataclass(slots=True, kw_only=True, repr=False)
class Report:
    """The report of one compiled graph, or of all `graphs` of a model.

    sites: every attention, fused or not.
    notes: what concerns a whole graph.
    graph_breaks: where Dynamo cut the model into graphs, and why; an attention that a break divides is not seen.
    graph_before, graph_after: Dynamo's graph and the one handed to the inner compiler, where an attention was found.
    function: what was explained, with which backend options, and the command that asked for it.
    comparison: what `compare` measured last.
    """

    graphs: int = 1
    sites: list[SiteReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    graph_before: GraphModule | None = None
    graph_after: GraphModule | None = None
    function: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    comparison: Comparison | None = None

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    @property
    def remarks(self) -> list[str]:
        """The notes, after one where gradients were recorded."""
        return [RECORDED, *self.notes] if any(site.trained for site in self.sites) else [*self.notes]

    @property
    def data(self) -> dict[str, Any]:
        """The report as dicts, lists, numbers and strings: what `fusion explain --json` prints."""
        return report_data(self)

    def __str__(self) -> str:
        return report_text(self)

    def __repr__(self) -> str:
        count = len(self.remarks)
        notes = f", {count} note{'s' * (count != 1)}" if count else ""
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
        measured = compare(self.function, *args, seconds=seconds, options=self.options, **kwargs)
        self.comparison = replace(measured, plans=tuple(plan for site in self.sites for plan in site.plans))
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


def graph_break(module: GraphModule) -> str | None:
    """The graph break that ends this graph of Dynamo's, if one does: the user's line, and Dynamo's reason."""
    ending: Any = getattr(module, "compile_subgraph_reason", None)
    if ending is None or not ending.graph_break:
        return None
    title, *rest = str(ending.reason).strip().splitlines()
    explanation = next((line.strip() for line in rest if line.strip().startswith("Explanation: ")), "")
    reason = ": ".join(part for part in (title, explanation.removeprefix("Explanation: ")) if part)
    if not ending.user_stack:
        return reason
    frame = ending.user_stack[-1]
    code = linecache.getline(frame.filename, frame.lineno).strip()
    return f"{short_path(frame.filename)}:{frame.lineno} in {frame.name}: {code}\n{reason}"
