"""The backend of `torch.compile`: the way of a graph."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.fx import GraphModule

from fusion import dynamo, linear, logs, mkl, undisturbed, versions
from fusion.approximate import certificates
from fusion.dual_numbers import with_tangents
from fusion.errors import EmitterError, StrictError
from fusion.ir import Kind
from fusion.ir.sizes import size_value
from fusion.options import Options
from fusion.passes import graph_excerpt, nodes
from fusion.passes.prepare import cascades
from fusion.passes.prepare.distances import read_by_distance
from fusion.passes.prepare.unread_rows import skip_unread_rows
from fusion.passes.recognize.ancestors import escaping_weights
from fusion.passes.recognize.find import Site, may_hold_attention
from fusion.passes.replace import Pays, rewrite
from fusion.passes.specify.specify import Specified
from fusion.passes.subgraphs import checkpointing, transforms
from fusion.passes.trace import autocast
from fusion.passes.trace.normalize import normalize
from fusion.passes.trace.outline import sealed_softmaxes
from fusion.passes.trace.regions import without_regions
from fusion.planning import pays
from fusion.planning.pays import map_pays, sets_pay
from fusion.refusals import Ground, Refusal
from fusion.report.dump import Dump
from fusion.report.report import NO_ATTENTION, Report, graph_break, publish
from fusion.runtime import kernels, op, tangents  # noqa: F401  (op registers torch.ops.fusion.attention)
from fusion.site_reports import report_of
from fusion.torch_private.dynamo import RestartAnalysis, counters
from fusion.torch_private.modes import without_function_modes
from fusion.validation import Verdict, calls, key_sets, validate

log = logging.getLogger(__name__)
logs.configure()


def __getattr__(name: str) -> Any:
    """`fusion`, the backend. Whoever asks for it is about to trace a model, which comes before a backend is called:
    Dynamo hears of ours then, and not where this module is only imported."""
    if name != "fusion":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    dynamo.register()
    return _fusion


def _fusion(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: Any = None
) -> Callable[..., Any]:
    """`torch.compile(model, backend="fusion", options=...)`.

    Returns the compiled callable. Raises `OptionError` for options that do not exist; any other failure of ours leaves
    the graph to the inner compiler as it was, with a note in the report.
    """
    chosen = Options.parse(options, mode)
    fused, report = fuse(module, example_inputs, chosen)
    from fusion.inner_compiler import compile_rest

    try:
        with linear.noting(report.notes):
            compiled = compile_rest(fused, example_inputs, chosen, mode)
    except RestartAnalysis:
        raise  # Dynamo traces the same code again, with a float as a number: that graph has the report
    except Exception:
        publish(report)
        raise
    publish(report)
    compiled = with_tangents(compiled, fused) if report.fused else compiled
    if chosen.verify == "run" and report.fused and chosen.approximate is None:
        return calls.compared(compiled, module, fused)
    return compiled if chosen.approximate is None or not report.fused else _clear_certificates_before_call(compiled)


_fusion.__name__ = _fusion.__qualname__ = "fusion"


def _clear_certificates_before_call(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled graph, whose calls begin a new record of certificates."""

    def run(*arguments: Any) -> Any:
        certificates.begin()
        return compiled(*arguments)

    return run


def fuse(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> tuple[GraphModule, Report]:
    """The graph with its attentions fused, and the report. The argument is not changed."""
    versions.tell(torch.__version__)
    with undisturbed.by_autograd():
        mkl.resolve()
        graph, report = _fuse(module, example_inputs, options)
    report.graph_breaks = [found] if (found := graph_break(module)) else []
    if options.strict and (refused := [site for site in report.sites if not site.fused]):
        raise StrictError("\n".join(f"not fused: {s.location or s.module}: {s.reason}" for s in refused))
    return graph, report


def _fuse(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> tuple[GraphModule, Report]:
    if not may_hold_attention(module):
        return module, Report(notes=_sealed(module) or [NO_ATTENTION])
    if any(isinstance(nodes.value(node), list) for node in module.graph.find_nodes(op="placeholder")):
        return module, Report(notes=["a backward of compiled autograd: its attention was fused in the forward"])
    if "torch.distributed.tensor" in sys.modules:
        from fusion.runtime import dtensor  # noqa: F401  (registers what the ops do with DTensors)
    started = time.perf_counter()
    dump = Dump()
    try:
        graph, report, inside = _passes(module, example_inputs, options, dump)
    except Exception as problem:
        if options.strict or isinstance(problem, EmitterError):
            raise
        dump.failure(problem)
        first, *_ = str(problem).strip().splitlines() or [""]
        intended = isinstance(problem, nodes.Unsupported)
        note = f"left to the inner compiler: {first if intended else f'{type(problem).__name__}: {first}'}"
        log.warning("%s%s", note, "" if intended else f"; {dump.where}")
        return module, Report(notes=[note])
    report.notes += _unseen(module, graph, report)
    report.sites = inside.sites + report.sites
    report.notes += inside.notes
    log.info("fused %d of %d attentions in %.3f s", report.fused, len(report.sites), time.perf_counter() - started)
    dump.finish(report)
    report.graph_before, report.graph_after = module, graph
    return (graph if report.fused else module), report


def _passes(
    module: GraphModule, example_inputs: Sequence[Any], options: Options, dump: Dump
) -> tuple[GraphModule, Report, Report]:
    """(the rewritten graph, the report of its attentions, that of the graphs that it checkpoints)."""
    dump.stage("dynamo", module)
    module = without_regions(module)
    module, transformed = _fuse_transformed(module, options)
    bodies, inside = _fuse_checkpointed(module, options)
    inside.sites += transformed.sites
    inside.notes += transformed.notes
    but = set[str]()
    while True:
        graph, report, failed = _rewritten(module, example_inputs, bodies, options, dump, but)
        if not failed:
            return graph, report, inside
        but |= failed


def _rewritten(
    module: GraphModule,
    example_inputs: Sequence[Any],
    bodies: Mapping[str, GraphModule],
    options: Options,
    dump: Dump,
    but: Set[str],
) -> tuple[GraphModule, Report, set[str]]:
    """(the rewritten graph, the report of its attentions, the products for which it was changed in vain). but: those
    for which it is not to be changed."""
    graph, notes = _normalized(module, example_inputs, bodies, options)
    dump.stage("normalized", graph)
    with without_function_modes():  # a default device is for the graph's tensors, which is traced again under it
        return _replaced(graph, notes, options, dump, but)


def _replaced(
    graph: GraphModule, notes: list[str], options: Options, dump: Dump, but: Set[str]
) -> tuple[GraphModule, Report, set[str]]:
    """As `_rewritten`, of a normalized graph, which is changed. notes: to report if anything is fused."""
    reads = functools.partial(kernels.reads, request=options.request)
    sites, changes = cascades.find(graph.graph, reads, options.cascades, but)
    drawn, hints = [graph_excerpt.before(site) for site in sites], nodes.size_hints(graph.graph)
    dump.sites(sites)
    verdicts: dict[int, Verdict] = {}
    specified = rewrite(
        graph,
        sites,
        _supports(options),
        str(options.request),
        _pays(options),
        functools.partial(_validated, verdicts) if options.verify else None,
        functools.partial(_keeps_mask, options),
    )
    if failed := cascades.failed(graph.graph, changes):
        return graph, Report(), failed
    dump.stage("rewritten", graph)
    report = report_of(sites, specified, drawn, hints, options)
    for site, told in zip(sites, report.sites, strict=True):
        told.validated = str(verdicts[id(site)]) if id(site) in verdicts else None
    report.notes = notes if report.fused else []  # else the graph stays as it was
    return graph, report, set()


def _normalized(
    module: GraphModule, example_inputs: Sequence[Any], bodies: Mapping[str, GraphModule], options: Options
) -> tuple[GraphModule, list[str]]:
    """The graph in the form that is analysed, without what need not be computed, and what to report of that."""
    graph = normalize(module, example_inputs, bodies)
    notes = skip_unread_rows(graph.graph)
    read_by_distance(graph.graph)
    return graph, notes


def _unseen(module: GraphModule, graph: GraphModule, report: Report) -> list[str]:
    """Attention weights that are no site, and why."""
    notes = _sealed(module)
    if report.sites:
        return notes
    end = "a graph break follows" if graph_break(module) else "they are returned"
    places = dict.fromkeys(nodes.source_line(node) or node.name for node in escaping_weights(graph.graph))
    return notes + [f"attention weights leave this graph before a product with V ({place}): {end}" for place in places]


def _sealed(module: GraphModule) -> list[str]:
    """Softmaxes that nothing is known of, and why."""
    found = sealed_softmaxes(module)
    return list(dict.fromkeys(f"{told} ({nodes.source_line(node) or node.name})" for node, told in found))


def _fuse_checkpointed(module: GraphModule, options: Options) -> tuple[dict[str, GraphModule], Report]:
    """The checkpointed graphs of a graph in which something was fused, by name, and what was found in all of them."""
    fused: dict[str, GraphModule] = {}
    whole = Report()
    for name, body in checkpointing.bodies(module).items():
        if body.around is None:
            whole.notes.append("a checkpointed function that is called in several regions of autocast stays as it is")
            continue
        with autocast.inside(body.around):
            graph, report = _fuse(body.graph, body.values, options)
        whole.sites += report.sites
        whole.notes += [note for note in report.notes if note != NO_ATTENTION]
        if report.fused:
            checkpointing.lift_seeds(graph)
            fused[name] = graph
    return fused, whole


def _fuse_transformed(module: GraphModule, options: Options) -> tuple[GraphModule, Report]:
    """The graph with the attentions inside of its function transforms fused, and what was found there."""
    fused: list[tuple[transforms.Run, GraphModule]] = []
    whole = Report()
    for run in transforms.runs(module) if options.transforms != "never" else ():
        if not may_hold_attention(run.body):
            continue
        if run.refusal is not None:
            whole.notes.append(f"attention inside of a function transform stays as it is: {run.refusal}")
            continue
        with run.modes():
            graph, report = _fuse(run.body, run.values, options)
        if options.transforms == "auto" and run.asked is not transforms.Asked.GRADIENTS:
            _leave_small(report, _tangents_have_kernels(run, report, options))
        whole.sites += report.sites
        whole.notes += [note for note in report.notes if note != NO_ATTENTION]
        if report.fused:
            fused.append((run, graph))
    return transforms.with_fused(module, fused), whole


def _tangents_have_kernels(run: transforms.Run, report: Report, options: Options) -> bool:
    """Whether kernels compute all derivatives of a run that are asked for."""
    specs = [found.spec for site in report.sites for found in site.attentions]
    devices = {value.device.type for value in run.values if isinstance(value, torch.Tensor)}
    return run.asked is transforms.Asked.TANGENTS and all(
        tangents.have_kernels(spec, tuple(o.kind is Kind.FLOAT for o in spec.operands), options.emitter, device)
        for spec in specs
        for device in devices
    )


def _leave_small(report: Report, by_kernels: bool) -> None:
    """Mark what was fused as left to the inner compiler where none of it has many scores. by_kernels: whether kernels
    compute the derivatives."""
    refusal = pays.left_in_derivatives((plan.problem for site in report.sites for plan in site.plans), by_kernels)
    for site in report.sites if refusal is not None else ():
        if site.fused:
            site.fused, site.attentions, site.refusal = False, (), refusal


def _validated(
    verdicts: dict[int, Verdict], site: Site, parts: Sequence[Specified], hints: Mapping[str, int]
) -> Refusal | None:
    """Why a site must not be replaced by these specs, if so; `verdicts`, by the site's id, is added to."""
    verdict = verdicts[id(site)] = validate(site, parts, hints)
    if verdict.wrong is None and verdict.skipped is None:
        return None
    kind, reason = "skipped", f"it could not be compared with eager: {verdict.skipped}"
    if verdict.wrong is not None:
        kind, reason = "invalid", f"the fused program would differ from eager: {verdict.wrong}"
    counters["fusion"][kind] += 1
    place = nodes.source_line(site.anchor) or site.anchor.name
    log.error("a defect of fusion: the attention at %s was not fused: %s", place, reason)
    return Refusal(Ground.DEFECT, f"{reason} (a defect of fusion)")


def _keeps_mask(options: Options, found: Specified, dense: Specified, hints: Mapping[str, int]) -> str | None:
    """Why an attention is to see a mask of all keys rather than read the keys of its rows' sets; None where not."""
    request = options.request
    if (refusal := kernels.unsupported(found.spec, found.device, request)) is not None:
        return str(refusal)
    if options.verify and (wrong := key_sets.contradiction(found, hints)) is not None:
        counters["fusion"]["invalid"] += 1
        log.error("a defect of fusion: an attention with sets of keys sees a mask of all keys: %s", wrong)
        return f"it would compute something else (a defect of fusion): {wrong}"
    sets, masked = ((part.spec, tuple(part.example_sizes(hints).values())) for part in (found, dense))
    shapes = (nodes.shape(dense.operands[number]) for number, _ in dense.key_sets)
    elements = sum(math.prod(size_value(n, hints) for n in shape) for shape in shapes)
    return sets_pay(sets, masked, elements, kernels.machine_of(found.device, request))


def _supports(options: Options) -> Callable[[Specified, torch.device, Sequence[int]], Refusal | None]:
    chosen = options.training == "always" or options.strict
    may_leave = not chosen and options.emitter == "auto" and options.inner == "inductor"

    def supports(part: Specified, device: torch.device, sizes: Sequence[int]) -> Refusal | None:
        if may_leave and device.type == "cpu":
            machine, fixed = kernels.machine_of(part.device, options.request), part.has_fixed_lengths()
            trained = options.training == "auto" and part.differentiable
            refusal = pays.left_on_cpu(part.spec, sizes, machine, trained=trained, fixed=fixed)
            if refusal is not None:
                return refusal
        return kernels.prepare(part.spec, device, sizes, part.differentiable, options.request)

    return supports


def _pays(options: Options) -> Pays | None:
    """Whether a map of a mask's tiles is worth making; None where none is to be made."""
    if options.emitter == "reference" or options.tile_maps == "never":
        return None
    return map_pays if options.tile_maps == "auto" else lambda *_: True
