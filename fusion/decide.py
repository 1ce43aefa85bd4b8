"""Reasons against fusing a site, or a form of its call: a failed validation, a missing kernel, a higher cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from fusion.ir import Kind
from fusion.ir.results import size_value
from fusion.options import Options
from fusion.passes import nodes
from fusion.passes.recognize.find import Site
from fusion.passes.recognize.sdpa import is_sdpa
from fusion.passes.specify.specify import AttentionCall
from fusion.passes.specify.tile_maps import Pays
from fusion.passes.subgraphs import Asked
from fusion.planning import pays
from fusion.planning.problem import problem_of
from fusion.refusals import Reason, Refusal
from fusion.runtime import derivatives, kernels
from fusion.torch_private.dynamo import counters
from fusion.validation import mask_check, validate

log = logging.getLogger(__name__)


def validation_refusal(site: Site, examples: Mapping[str, int]) -> Refusal | None:
    """Difference between the specs of a site and the graph's own operations, or why they could not be compared."""
    verdict = validate(site, site.calls, examples)
    site.validated = str(verdict)
    if verdict.wrong is not None:
        kind, reason = "invalid", f"the fused program would differ from eager: {verdict.wrong}"
    elif verdict.skipped is not None:
        kind, reason = "skipped", f"it could not be compared with eager: {verdict.skipped}"
    else:
        return None
    counters["fusion"][kind] += 1
    place = nodes.source_line(site.anchor) or site.anchor.name
    log.error("a defect of fusion: the attention at %s was not fused: %s", place, reason)
    return Refusal(Reason.DEFECT, f"{reason} (a defect of fusion)")


def keeps_dense_mask(
    options: Options, gathered: AttentionCall, dense: AttentionCall, examples: Mapping[str, int]
) -> str | None:
    """Reason for an attention to read all keys under a mask rather than gather those of each row, or None."""
    request = options.request
    if (refusal := kernels.unsupported(gathered.spec, gathered.device, request)) is not None:
        return str(refusal)
    if options.verify and (wrong := mask_check.key_set_contradiction(gathered, examples)) is not None:
        counters["fusion"]["invalid"] += 1
        log.error("a defect of fusion: an attention with sets of keys sees a mask of all keys: %s", wrong)
        return f"it would compute something else (a defect of fusion): {wrong}"
    of_sets, masked = ((call.spec, tuple(call.example_sizes(examples).values())) for call in (gathered, dense))
    shapes = (nodes.shape(dense.operands[number]) for number, _ in dense.key_sets)
    elements = sum(math.prod(size_value(n, examples) for n in shape) for shape in shapes)
    return pays.sets_pay(of_sets, masked, elements, kernels.machine_of(gathered.device, request))


def tile_map_pays(options: Options) -> Pays:
    """Predicate for computing the map of a mask's tiles, by the option `tile_maps`."""
    if options.emitter == "reference" or options.tile_maps == "never":
        return lambda *_: False
    return pays.map_pays if options.tile_maps == "auto" else lambda *_: True


def ask_reproducible(sites: Iterable[Site], options: Options) -> None:
    """Ask for the same bits of a row in every call, by the option `reproducible`."""
    for site in sites if options.reproducible else ():
        site.calls = [replace(call, spec=replace(call.spec, reproducible=True)) for call in site.calls]


def kernel_refusal(site: Site, options: Options, examples: Mapping[str, int], asked: Asked | None) -> Refusal | None:
    """Reason why a site gets no kernels: none can compute it, or the inner compiler's code is faster (on CPUs; on GPUs
    only derivatives are weighed). Kernels of sites that get them are prepared here.

    asked: the derivatives that are needed around the graph; None outside of function transforms.
    """
    device = nodes.fake(site.root).device
    if asked is not None and options.transforms == "auto" and (refusal := _too_small(site, options, examples, asked)):
        return refusal
    written_out = not is_sdpa(site.anchor)
    each = ((call, [*call.example_sizes(examples).values()]) for call in site.calls)
    reasons = (_call_refusal(call, device, sizes, options, written_out) for call, sizes in each)
    return next(filter(None, reasons), None)


def _call_refusal(
    call: AttentionCall, device: torch.device, sizes: list[int], options: Options, written_out: bool
) -> Refusal | None:
    wanted = options.training == "always" or options.strict or options.emitter != "auto" or options.inner != "inductor"
    if device.type == "cpu" and not wanted:
        machine, fixed = kernels.machine_of(call.device, options.request), call.has_fixed_lengths()
        trained = options.training == "auto" and call.differentiable
        refusal = pays.refusal_on_cpu(call.spec, sizes, machine, trained=trained, fixed=fixed, written_out=written_out)
        if refusal is not None:
            return refusal
    return kernels.prepare(call.spec, device, sizes, call.differentiable, options.request)


def _too_small(site: Site, options: Options, examples: Mapping[str, int], asked: Asked) -> Refusal | None:
    """Refusal of tangents and second derivatives of few scores, which are left to the inner compiler."""
    if asked is Asked.GRADIENTS:
        return None
    problems = [problem_of(call.spec, [*call.example_sizes(examples).values()]) for call in site.calls]
    floats = lambda call: tuple(operand.kind is Kind.FLOAT for operand in call.spec.operands)
    by_kernels = asked is Asked.TANGENTS and all(
        derivatives.have_tangent_kernels(call.spec, floats(call), options.emitter, call.device) for call in site.calls
    )
    return pays.refusal_of_derivatives(problems, by_kernels)
