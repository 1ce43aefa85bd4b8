"""Backend of `torch.compile`: `_fuse_graph` and `_decide` normalize a graph, find attention, specify it, validate the
specs, choose forms, refuse what does not pay, and replace the rest; Inductor compiles the result."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fusion import decide, linear, process
from fusion.errors import EmitterError, StrictError
from fusion.inner_compiler import with_certificates, with_tangents
from fusion.integrations import nested_tensors
from fusion.options import Options
from fusion.passes import nodes
from fusion.passes.prepare.distances import read_by_distance
from fusion.passes.prepare.late_division import move_divisions
from fusion.passes.prepare.unread_rows import skip_unread_rows
from fusion.passes.recognize.ancestors import escaping_weights
from fusion.passes.recognize.find import Site, find_sites, pending, unlisted
from fusion.passes.replace import replace_sites
from fusion.passes.specify.aux_outputs import split_extrema
from fusion.passes.specify.calls import refuse, resolve_escaping, specify_sites
from fusion.passes.specify.gathered_keys import read_sets
from fusion.passes.specify.tile_maps import map_tiles
from fusion.passes.subgraphs import Asked
from fusion.passes.trace.autocast import cast_before_expansions
from fusion.passes.trace.normalize import may_hold_attention, normalize
from fusion.passes.trace.outline import sealed_softmaxes, without_regions
from fusion.report import drawings
from fusion.report.dump import Dump
from fusion.report.report import NO_ATTENTION, Report, graph_break, publish
from fusion.report.sites import report_of
from fusion.runtime import kernels, op  # noqa: F401  (op registers torch.ops.fusion.attention)
from fusion.subgraphs import fuse_checkpointed, fuse_transformed
from fusion.torch_private.dynamo import RestartAnalysis
from fusion.torch_private.tracing import without_function_modes

log = logging.getLogger(__name__)
process.configure_log()


def __getattr__(name: str) -> Any:
    """`fusion`, the backend. An access means that a model is about to be traced, which precedes the backend's call: the
    extension of Dynamo is registered then, and not when this module is merely imported."""
    if name != "fusion":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    nested_tensors.register()
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
        before = linear.counted()
        compiled = compile_rest(fused, example_inputs, chosen, mode)
        report.notes += linear.notes(before)
    except RestartAnalysis:
        raise  # Dynamo traces the same code again, with a float as a number: that graph has the report
    except Exception:
        publish(report)
        raise
    publish(report)
    compiled = with_tangents(compiled, fused) if report.fused else compiled
    return compiled if chosen.approximate is None or not report.fused else with_certificates(compiled)


_fusion.__name__ = _fusion.__qualname__ = "fusion"


def fuse(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> tuple[GraphModule, Report]:
    """The graph with its attentions fused, and the report. The argument is not changed."""
    process.warn_of_torch(torch.__version__)
    with process.without_autograd_settings():
        process.initialize_mkl()
        process.retain_freed_memory()
        graph, report = _fuse(module, example_inputs, options)
    report.graph_breaks = [broken] if (broken := graph_break(module)) else []
    if options.strict and (refused := [site for site in report.sites if not site.fused]):
        raise StrictError("\n".join(f"not fused: {s.location or s.module}: {s.reason}" for s in refused))
    return graph, report


def _fuse(
    module: GraphModule, example_inputs: Sequence[Any], options: Options, asked: Asked | None = None
) -> tuple[GraphModule, Report]:
    """The graph with its attentions fused, and the report, also where the analysis fails. asked: see
    `decide.kernel_refusal`."""
    if not may_hold_attention(module):
        return module, Report(notes=_opaque_softmaxes(module) or [NO_ATTENTION])
    if any(isinstance(nodes.fake(node), list) for node in module.graph.find_nodes(op="placeholder")):
        return module, Report(notes=["a backward of compiled autograd: its attention was fused in the forward"])
    if "torch.distributed.tensor" in sys.modules:
        from fusion.runtime import dtensor  # noqa: F401  (registers what the ops do with DTensors)
    started, dump = time.perf_counter(), Dump()
    try:
        graph, report = _fuse_graph(module, example_inputs, options, asked, dump)
    except Exception as problem:
        if options.strict or isinstance(problem, EmitterError):
            raise
        return module, Report(notes=[_failure(problem, dump)])
    log.info("fused %d of %d attentions in %.3f s", report.fused, len(report.sites), time.perf_counter() - started)
    dump.finish(report)
    report.graph_before, report.graph_after = module, graph
    return (graph if report.fused else module), report


def _fuse_graph(
    module: GraphModule, example_inputs: Sequence[Any], options: Options, asked: Asked | None, dump: Dump
) -> tuple[GraphModule, Report]:
    """The stages of one graph."""
    dump.stage("dynamo", origin := module)
    module, bodies, inside = without_regions(module), dict[str, GraphModule](), Report()  # graphs inside of the graph
    inner = lambda body, inputs, asked: _fuse(body, inputs, options, asked)
    module = fuse_transformed(module, options, inner, inside)
    bodies = fuse_checkpointed(module, inner, inside)

    graph = normalize(module, example_inputs, bodies)  # 1. one form: pre-dispatch ATen
    cast_before_expansions(graph.graph)
    notes: list[str] = []
    notes += skip_unread_rows(graph.graph)
    read_by_distance(graph.graph)
    dump.stage("normalized", graph)

    with without_function_modes():  # the graph is traced again under a default device; ours must not be
        examples = nodes.example_sizes(graph.graph)
        graph, sites = _decide(graph, options, examples, asked, dump)  # 2. to 6.
        pictures = drawings.before(sites)
        replace_sites(graph, sites, str(options.request), examples)  # 7. the calls in the place of attentions
    dump.stage("rewritten", graph)

    report = report_of(sites, examples, options)
    drawings.add(report, pictures)
    notes = [*(notes if report.fused else ()), *_unseen(origin, graph, report)]
    report.sites = [*inside.sites, *report.sites]
    report.notes = [*notes, *inside.notes]
    return graph, report


def _decide(
    normalized: GraphModule, options: Options, examples: Mapping[str, int], asked: Asked | None, dump: Dump
) -> tuple[GraphModule, list[Site]]:
    """The sites of a graph, each with the calls that take its place or the reason why it stays.

    The graph may be a changed copy of the one given. Where a change did not bring what it promised, because a site was
    refused later, the search starts again without it."""
    reads = functools.partial(kernels.reads, request=options.request)
    excluded = set[str]()
    while True:
        graph, sites, promised = normalized, find_sites(normalized.graph, reads), {}  # 2. pull-back
        graph, sites, promised = move_divisions(graph, sites, reads, excluded)  # on a copy, where that helps
        dump.sites(sites)
        split_extrema(graph.graph, sites)
        specify_sites(graph.graph, sites)  # 3. a spec for each attention
        resolve_escaping(graph.graph, sites)  # scores used elsewhere: auxiliary outputs, or a refusal

        if options.verify:
            wrong = lambda site: decide.validation_refusal(site, examples)  # 4. the spec against the graph's operations
            refuse(sites, wrong, "validating")

        dense = functools.partial(decide.keeps_dense_mask, options)
        read_sets(sites, dense, examples)  # 5. the cheapest form of a call
        map_tiles(graph.graph, sites, decide.tile_map_pays(options), examples)
        decide.ask_reproducible(pending(sites), options)
        slower = lambda site: decide.kernel_refusal(site, options, examples, asked)  # 6. no kernel, or it does not pay
        refuse(sites, slower, "compiling the kernel of")
        resolve_escaping(graph.graph, sites, respecifies=False)  # sites that were refused need their scores

        fused = {site.anchor.name: site for site in pending(sites)}
        broken = {name for name, holds in promised.items() if not holds(fused)}
        if not broken:
            return graph, sites
        excluded |= broken


def _failure(problem: Exception, dump: Dump) -> str:
    """Note for a graph that could not be analysed; the log and the dump have the traceback."""
    dump.failure(problem)
    first, *_ = str(problem).strip().splitlines() or [""]
    intended = isinstance(problem, nodes.Unsupported)
    note = f"left to the inner compiler: {first if intended else f'{type(problem).__name__}: {first}'}"
    log.warning("%s%s", note, "" if intended else f"; {dump.where}")
    return note


def _unseen(module: GraphModule, graph: GraphModule, report: Report) -> list[str]:
    """Attention weights that belong to no site, and the reason."""
    notes = _opaque_softmaxes(module)
    if report.sites:
        return notes
    end = "a graph break follows" if graph_break(module) else "they are returned"
    places = dict.fromkeys(nodes.source_line(node) or node.name for node in escaping_weights(graph.graph))
    notes += [f"attention weights leave this graph before a product with V ({place}): {end}" for place in places]
    return notes or _no_attention(graph)


def _no_attention(graph: GraphModule) -> list[str]:
    """The reason why a graph has no site: for each product of a product that is none with V, and in general."""
    notes = []
    for site in unlisted(graph.graph):
        by = site.blame and nodes.producer(site.blame)
        at = f"the product at {nodes.source_line(site.anchor) or site.anchor.name}"
        if by is not None and by is not site.anchor:
            at = f"stopped by {by.target} at {nodes.source_line(by) or by.name}, before {at}"
        notes.append(f"{NO_ATTENTION}: {site.refusal} ({at})")
    return list(dict.fromkeys(notes)) or [NO_ATTENTION]


def _opaque_softmaxes(module: GraphModule) -> list[str]:
    """Softmaxes in parts of the graph that cannot be traced, and the reason."""
    softmaxes = sealed_softmaxes(module)
    return list(dict.fromkeys(f"{reason} ({nodes.source_line(node) or node.name})" for node, reason in softmaxes))
