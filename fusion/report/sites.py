"""Report of the attentions of a graph."""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusion.approximate import dispatch
from fusion.codegen.emitter import Kernel, TrainingKernel
from fusion.errors import UnknownMachineError
from fusion.ir.reads import dense_loads, is_shift_free
from fusion.ir.results import size_value
from fusion.lowering import aux_gradients
from fusion.machine.processors import bytes_text, seconds_text
from fusion.options import Options
from fusion.passes import marks, nodes
from fusion.passes.recognize.find import Site
from fusion.passes.specify.specify import AttentionCall
from fusion.passes.trace.outline import description_of
from fusion.planning.plan import Plan, plan
from fusion.report.report import AttentionReport, Report, SiteReport, aliases
from fusion.runtime import kernels
from fusion.torch_private.tracing import stack_frames, user_name, user_path


def report_of(sites: Sequence[Site], examples: Mapping[str, int], options: Options) -> Report:
    """Report of a graph's sites."""
    report = Report()
    for site in sites:
        blame = None if site.refusal is None else site.blame
        by = None if blame is None else nodes.producer(blame)
        report.sites.append(
            SiteReport(
                fused=site.refusal is None,
                refusal=site.refusal,
                stopped_by=None if by is None else description_of(by) or str(by.target),
                stopped_at=None if by is None else nodes.source_line(by),
                location=nodes.source_line(site.anchor),
                calling=_calling_line(site.anchor),
                module=nodes.module_path(site.anchor),
                attentions=tuple(_attention(call, examples, options) for call in site.calls),
                validated=site.validated,
                trained=options.training != "never" and marks.requires_grad(site.root),
            )
        )
    return report


def _calling_line(node: Node) -> str | None:
    """Location in the `forward` that called a function of another file, in which the node is computed: libraries of
    models have one function for the attention of all."""
    frames = stack_frames(node)
    calls = [frame for frame in frames if frame.function == "forward"]
    return calls[-1].place if calls and calls[-1].file != frames[-1].file else None


def _attention(call: AttentionCall, examples: Mapping[str, int], options: Options) -> AttentionReport:
    sizes, names = call.example_sizes(examples), _names(call)
    values: dict[int, Tensor] = {}
    planned = partial(_plan, call, sizes, options, values)
    shapes = tuple(tuple(size_value(n, examples) for n in nodes.shape(operand)) for operand in call.operands)
    operands = tuple(_operand(call, number, names[number], shapes[number]) for number in range(3, len(names)))
    source = _kernel(call, options).source(tuple(sizes.values()))
    if source.startswith("//"):  # MLIR; Triton's module begins with its formula
        said = textwrap.wrap(f"out = {call.spec.formula(names)} @ v", 112)
        said += [line for operand in operands for line in operand.splitlines()]
        source = "".join(f"// {line}\n" for line in said) + source
    else:
        source = aliases(call.spec, names) * bool(source) + source
    return AttentionReport(
        spec=call.spec,
        names=names,
        operands=operands,
        nodes=call.operands,
        sizes=sizes,
        keys=_keys(call, sizes, names),
        shapes=shapes,
        values=values,
        planned=planned,
        backward=_backward(call, sizes, options, values),
        source=source,
        approximation=_approximation(call, options, planned),
        reproducible=_reproducible(call, sizes, options) if options.reproducible else "",
        gradients="\n".join(
            f"through {call.spec.describe_aux(aux, names)}: the reference interpreter, as {why}"
            for aux, why in (aux_gradients.left_out(call.spec) if call.differentiable else ())
        ),
    )


def name_in_code(node: Node) -> str:
    """Path of a tensor in the user's code (`self.bias`), else the operation that makes it."""
    if (path := user_path(node)) or node.op != "call_function":
        return path or node.name
    return str(getattr(nodes.packet(nodes.producer(node)), "__name__", node.name)).strip("_")


_RESERVED = re.compile(r"[a-zA-Z]\d*|Nq|Nk")
"""Letters of the printed form: coordinates, sizes, scores, weights."""


def _names(call: AttentionCall) -> dict[int, str]:
    """Names of the operands: the user's, or that of the operation that makes one; no letter that formulas use."""
    names = call.spec.names
    for number in range(3, len(names)):
        node, count = call.operands[number], 1
        if node.target is torch.ops.fusion.tile_map.default:
            continue
        name = user_name(node) or name_in_code(node)
        if _RESERVED.fullmatch(name):
            name = user_path(node)
        if not all(map(str.isidentifier, name.split("."))) or _RESERVED.fullmatch(name):
            continue
        others = {names[other] for other in names if other != number}
        while (numbered := f"{name}{count}" if count > 1 else name) in others:
            count += 1
        names[number] = numbered
    return names


OF_PAIRS = """
  It has a number for each query and key, so it grows with the square of the length. Kernels compute instead what is a
  pointwise function of i - j, or of vectors over rows and keys, with at most two exponentials; of longer functions of
  i - j make a vector over all distances, and index it: table[i - j + n]. I/O counts it as an
  input, and so does the bound where no scores share an element; a program that makes it inside would not move it."""


def _operand(call: AttentionCall, number: int, name: str, shape: tuple[int, ...]) -> str:
    """Text for a tensor that the program or the mask reads."""
    operand, node = call.spec.operands[number], call.operands[number]
    text, path = f"{operand.dtype}{list(shape)}", user_path(node)
    if path or node.op != "call_function":
        return f"{name}: {text}" + f", {path}" * (path not in ("", name))
    size = bytes_text(math.prod(shape) * operand.torch_dtype.itemsize)
    if node.target is torch.ops.fusion.tile_map.default:
        return f"{name}: {text}, {size}, the map of tiles that every call makes of the mask"
    line, spec = nodes.source_line(node), call.spec
    programs = (spec.score, spec.weight, spec.mask and spec.mask.live)
    pairs = any(part.operand == number and not is_shift_free(part) for part in dense_loads(*programs))
    return f"{name}: {text}, {size} that the graph makes" + (f" at {line}" if line else "") + OF_PAIRS * pairs


def _keys(call: AttentionCall, sizes: Mapping[str, int], names: Mapping[int, str]) -> str:
    """Text that tells how the top-k keys of an attention are read; "" where it has none."""
    if call.dense_reason:
        return f"top-k keys of each row are known, but all keys are read under a mask: {call.dense_reason}"
    if call.gathered is None:
        return ""
    count, table = size_value(call.spec.n_k, sizes), names[call.gathered.table]
    if call.spec.n_k_total is None:
        return f"{count} of them, read through {table}"
    every, heads = size_value(call.spec.n_k_total, sizes), size_value(call.spec.n_q, sizes)
    return f"{count} of {every} for each query, read through {table}" + f", once for {heads} heads" * (heads > 1)


def _approximation(call: AttentionCall, options: Options, planned: Callable[[], Plan]) -> str | None:
    """Text for the use of the option `approximate` at a site."""
    if (allowed := options.request.approximation) is None:
        return None
    if (reason := dispatch.refusal(call.spec, call.device)) is not None:
        return f"{allowed.method}: exact, because {reason}"
    expected = planned()
    return dispatch.describe(allowed, expected.problem, expected.machine)


def _reproducible(call: AttentionCall, sizes: Mapping[str, int], options: Options) -> str:
    """Text for the cost of the option `reproducible` at a site."""
    other = replace(call, spec=replace(call.spec, reproducible=False))
    own, plain = (_plan(each, sizes, options, {}).time for each in (call, other))
    return f"reproducible: {seconds_text(own)} predicted in place of {seconds_text(plain)}" + (
        ", and gradients take seven products where others take five" if call.differentiable else ""
    )


def _backward(
    call: AttentionCall, sizes: Mapping[str, int], options: Options, values: Mapping[int, Tensor]
) -> Callable[[], Plan] | str:
    """Function that returns the plan of a call's gradients, or why there is none."""
    if not call.differentiable:
        return ""
    exact, needs = str(replace(options.request, approximation=None)), tuple(map(marks.requires_grad, call.operands))
    kernel: Any = kernels.differentiable(call.spec.to_json(), call.device, exact).kernel
    try:
        if (reason := kernel.without_kernels(needs)) is not None:
            return f"by the reference interpreter: {reason}"
        machine = kernels.machine_of(call.device, options.request)
    except (AttributeError, UnknownMachineError):  # an emitter of somebody else's
        return ""
    return partial(plan, call.spec, machine, sizes=sizes, values=values, backward=True)


def _plan(call: AttentionCall, sizes: Mapping[str, int], options: Options, values: Mapping[int, Tensor]) -> Plan:
    """The plan of a call as far as it is known by now: tiles are measured at the first call, and `values` of what the
    mask reads are there when the graph has run."""
    choice, machine = _kernel(call, options).choice(tuple(sizes.values())), None
    with contextlib.suppress(UnknownMachineError):
        machine = kernels.machine_of(call.device, options.request)
    return plan(call.spec, machine, sizes=sizes, choice=choice, values=values)


def _kernel(call: AttentionCall, options: Options) -> Kernel | TrainingKernel:
    return kernels.kernel_of(call.spec, call.device, options.request, call.differentiable)
