"""Graphs inside of the graph, each of which is fused separately: checkpointed functions, and functions inside of
`torch.func.grad`, `jvp` and the other transforms.

Checkpointing. Dynamo writes `torch.utils.checkpoint` as a call of a subgraph. Attentions in that graph are fused like
any others. The call around them stays, so that the inner compiler recomputes the same values as without fusion.

Transforms. Dynamo's graph has the operations of such a transform on the levels of `torch.func` (tensors are wrapped and
unwrapped, duals are made, autograd is called) between the operations of the function, which are those of any other
graph. A run of the latter is extracted as a separate graph, fused like one, and called in their place. So a transform
reaches `fusion::attention`, which has tangents, gradients and batching rules like any operation.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion.refusals import Reason
from fusion.torch_private import functorch, tracing
from fusion.torch_private.autograd import SET_GRAD_ENABLED
from fusion.torch_private.tensors import detect_fake_mode, is_dtensor, is_traceable_wrapper_subclass, shares_storage

from . import marks, nodes
from .trace import retrace
from .trace.outline import attributes, inputs_and_outputs, separate_parts, transforms, writes_outside
from .trace.retrace import Retrace, RetraceInterpreter

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A checkpointed graph. values: the arguments of its calls. around: the regions of autocast around its calls; None
    where they differ between calls."""

    graph: GraphModule
    values: list[Any]
    around: retrace.Regions | None


def bodies(module: GraphModule) -> dict[str, Body]:
    """Checkpointed graphs of a graph, by the name of the attribute."""
    bodies_by_name: dict[str, Body] = {}
    for node, around in retrace.regions(module.graph):
        if node.op == "call_function" and node.target is _CHECKPOINT:
            name = str(node.args[0].target)  # type: ignore[union-attr]
            values = list(map(nodes.fake, node.args[1:]))
            known = bodies_by_name.setdefault(
                name, Body(graph=module.get_submodule(name), values=values, around=around)
            )  # type: ignore[arg-type]
            if known.around != around:
                bodies_by_name[name] = replace(known, around=None)
    return bodies_by_name


def lift_seeds(body: GraphModule) -> None:
    """Make the seeds of dropout inputs of the graph, after all others: a recomputation then draws the same mask."""
    last = body.graph.find_nodes(op="placeholder")[-1:]
    for node in list(body.graph.nodes):
        if marks.is_seed(node):
            with body.graph.inserting_after(*last):
                last = [body.graph.placeholder(f"seed_{node.name}")]
            last[0].meta |= node.meta
            node.replace_all_uses_with(last[0])
            body.graph.erase_node(node)
    body.recompile()


def _is_shared(value: Any, results: Sequence[Any]) -> bool:
    """Whether one of the results is this tensor, or a view of its memory."""
    return isinstance(value, torch.Tensor) and any(
        isinstance(result, torch.Tensor) and shares_storage(value, result) for result in results
    )


def _record_checkpointed(body: GraphModule, inputs: list[Any], kwargs: dict[str, Any]) -> Any:
    """Record the call of a checkpointed graph without tracing into it."""
    tracer = tracing.current_tracer()
    if tracer is None:
        raise nodes.Unsupported(Reason.DEFECT, "a checkpointed part outside of a trace")
    seeds = [p.meta["val"] for p in filter(marks.is_seed, body.graph.find_nodes(op="placeholder"))]
    inputs += [torch.randint(0, 2**31 - 1, (1,), device=seed.device) for seed in seeds]
    with tracing.disable_proxy_modes_tracing():
        result = RetraceInterpreter(body).run(*inputs)
    tracer.root.register_module(tracer.get_fresh_qualname("checkpointed"), body)
    call = tracing.written(tracer, "call_function", _CHECKPOINT, (body, *inputs), kwargs)
    read = zip(inputs, call.node.args[1:], strict=True)
    shared = [node for value, node in read if isinstance(node, Node) and _is_shared(value, result)]
    marks.aliases.set(call.node, tuple(shared))
    if not any(map(is_dtensor, result)):
        return tracing.track(result, call, tracer)
    # One by one: of DTensors that are not tracked yet, torch cannot note a copy.
    results_as_nodes = [
        tracing.track(value, call[k], tracer)  # pyright: ignore[reportIndexIssue]
        for k, value in enumerate(result)
    ]
    return type(result)(results_as_nodes)


def keep_calls(base: type[Retrace], module: GraphModule, fused: Mapping[str, GraphModule]) -> type[Retrace]:
    """Interpreter that records the calls of checkpointed graphs. fused: the graphs that replace these, by name."""
    replacements = {id(module.get_submodule(name)): body for name, body in fused.items()}

    class Keeping(base):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if target is not _CHECKPOINT:
                return super().call_function(target, args, kwargs)
            body, *inputs = args
            body: GraphModule = replacements.get(id(body), body)
            return _record_checkpointed(body, inputs, kwargs)

    return Keeping


_PREFIX = "transformed_"
_VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class Asked(enum.Enum):
    """Derivatives of a function that a transform needs."""

    GRADIENTS = "a first gradient at most"
    TANGENTS = "tangents through which no gradient flows, too"
    MORE = "tangents that are differentiated, or derivatives of gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Operations of a function inside of a transform.

    inputs, outputs: the nodes that they read, and those of them that are read after the run.
    body: the run as a graph.
    values: the arguments of its call.
    around: the regions of autocast around it.
    """

    members: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    body: GraphModule
    values: tuple[Any, ...]
    around: retrace.Regions
    asked: Asked
    refusal: str | None

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Grad and autocast modes of the run. A tangent is propagated whether or not gradients are recorded."""
        with retrace.in_regions(self.around), torch.enable_grad():
            yield


def runs(module: GraphModule) -> list[Run]:
    """Runs of all transforms of a graph, except for a lone `vmap`, which is traced through."""
    inside = {node for part in separate_parts(module.graph) if transforms(part) for node in part}
    all_runs: list[Run] = []
    members: list[Node] = []
    inputs = map(nodes.fake, module.graph.find_nodes(op="placeholder"))
    outside = torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in inputs)
    levels = {"jvp": 0, "grad": int(outside), "trained": int(outside and _trains_tangents(module.graph))}
    around: retrace.Regions = ()
    for node, regions in retrace.regions(module.graph):
        ends = functorch.is_of_levels(node.target) or node.target is functorch.AUTOGRAD_FUNCTION
        if node in inside and not ends:
            around = around if members else regions
            members.append(node)
        elif members:
            if not any(writes_outside(member, inside) for member in members):
                all_runs += _taken(module, members, around, levels)
            members = []
        for kind in ("jvp", "grad"):
            levels[kind] += functorch.enters(node.target, kind) - functorch.leaves(node.target, kind)
    return all_runs


def _trains_tangents(graph: Graph) -> bool:
    """Whether a gradient of what the graph returns may flow through the tangents in it."""
    reached, recording = set[Node](), True
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            recording = node.args[0]
        elif node.target is operator.getitem and node.args[1] == 1 and node.args[0].target in functorch.UNPACK_DUAL:
            reached.add(node)
        elif node.op == "output" or recording and "detach" not in (node.target, getattr(node.target, "__name__", "")):
            reached.update([node] if not reached.isdisjoint(node.all_input_nodes) else [])
    return any(node.op == "output" for node in reached)


def _asked(levels: Mapping[str, int]) -> Asked:
    """Derivatives that nested transforms need. levels: the number of transforms of each kind."""
    if levels["jvp"] > 1 or levels["grad"] > 1 or levels["jvp"] and levels["trained"]:
        return Asked.MORE
    return Asked.TANGENTS if levels["jvp"] else Asked.GRADIENTS


def _taken(module: GraphModule, members: list[Node], around: retrace.Regions, levels: Mapping[str, int]) -> list[Run]:
    """Run of these nodes; none if it is no graph of tensors and numbers. levels: transforms of each kind."""
    graph, copies = Graph(), dict[Node, Node]()
    inputs, outputs = inputs_and_outputs(members)
    mode = detect_fake_mode([*map(nodes.fake, module.graph.find_nodes(op="placeholder"))])
    values = list[Any]()
    for source in inputs:
        if source.op == "get_attr" and not nodes.is_tensor(source):
            copies[source] = graph.node_copy(source)
            continue
        value = nodes.fake(source)
        if mode is None or not isinstance(value, _VALUES) or is_traceable_wrapper_subclass(value):
            return []
        with mode:
            values.append(_alike(value))
        copies[source] = graph.placeholder(source.name)
        copies[source].meta["example_value"] = values[-1]
    for node in members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.pop("example_value", None)  # of levels that are gone
    graph.output(tuple(copies[node] for node in outputs))
    read = tuple(source for source in inputs if copies[source].op == "placeholder")
    return [
        Run(
            members=tuple(members), inputs=read, outputs=tuple(outputs), body=GraphModule(module, graph),
            values=tuple(values), around=around, refusal=_refusal(members, levels["jvp"] > 0),
            asked=_asked(levels),
        )
    ]  # fmt: skip


def _alike(value: Any) -> Any:
    """Tensor of the same shape and dtype that belongs to no level, and may have a gradient; numbers unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return nodes.empty_like(value).requires_grad_(value.is_floating_point())


def _refusal(members: Sequence[Node], tangents: bool) -> str | None:
    switches = [node for node in members if node.target is SET_GRAD_ENABLED]
    if switches and tangents:
        return "its function uses torch.no_grad inside, which forward-mode AD ignores"
    if switches and not switches[-1].args[0]:
        return "torch.no_grad is entered in the function and left after it"
    depth = 0
    for node in members:
        depth += (node.target is retrace.enter_autocast) - (node.target is retrace.leave_autocast)
        if depth < 0:
            break
    return "a region of autocast is entered in the function and left after it" if depth else None


def with_fused(module: GraphModule, fused: Sequence[tuple[Run, GraphModule]]) -> GraphModule:
    """Copy of the graph in which calls of these modules replace the runs."""
    if not fused:
        return module
    graph, copies = Graph(), dict[Node, Node]()
    last = {run.members[-1]: (number, run) for number, (run, _) in enumerate(fused)}
    inside = {node for run, _ in fused for node in run.members}
    for node in module.graph.nodes:
        if node not in inside:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif node in last:
            number, run = last[node]
            call = graph.call_module(f"{_PREFIX}{number}", tuple(copies[source] for source in run.inputs))
            for k, out in enumerate(run.outputs):
                copies[out] = graph.call_function(operator.getitem, (call, k))
                copies[out].meta |= out.meta
    bodies = {f"{_PREFIX}{number}": body for number, (_, body) in enumerate(fused)}
    result = GraphModule(attributes(graph, bodies, module), graph)
    result.meta |= module.meta
    return result
