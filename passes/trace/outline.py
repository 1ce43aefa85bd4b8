"""Calls of subgraphs in Dynamo's graph, inlined, and parts that cannot be traced again, which become calls.

Regions that are compiled once for all their calls (`torch.compiler.nested_compile_region`) are inlined, as if the user
had marked nothing. Equal calls are copied when the graph is traced again (`passes.trace.repeats`). Inductor compiles
the layers one by one then; a region that it compiles once has, in torch 2.13, wrong gradients of all calls but the
first.

Parts that cannot be traced again become one call of a separate graph each, and stay unchanged: function transforms of
`torch.func` (`grad`, `jvp`), whose levels live outside of the graph, calls of `torch.autograd.Function`, which bring a
backward of their own, and operations on tensors that wrap others (quantised weights). The attentions around them are
fused as usual.

A `vmap` is traced through where it contains none of these. The batching rules of torch.func replace each operation by
one on tensors with one more dimension, below the level at which the rest is traced, so composite operations arrive in
pieces (a `matmul` as views and a `bmm`). Masks written as nested `vmap`s over positions are read this way. Dynamo has
run the same rules on the same shapes before, so a failure of them is not expected.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion.refusals import Reason
from fusion.torch_private import functorch, tracing
from fusion.torch_private.operators import HigherOrderOperator
from fusion.torch_private.tensors import is_dtensor, is_traceable_wrapper_subclass, tree_leaves, tree_map_only

from .. import nodes
from ..nodes import Unsupported


class Untraceable(Exception):
    """An operation inside a `vmap` cannot be traced. The traced part of the `vmap` is still in the graph."""


def trace_through_vmap(body: Interpreter, args: tuple[Any, ...]) -> Any:
    """Run a part of Dynamo's graph that enters and leaves levels of `vmap`, and trace the resulting operations."""
    tracer = tracing.current_tracer()
    assert tracer is not None
    try:
        # SDPA's own kernels have no batching rule on CPUs: each would be a loop over the batch.
        with (
            functorch.closed_on_error(), tracing.disable_proxy_modes_tracing(), tracing.with_tracer(tracer),
            sdpa_kernel(SDPBackend.MATH),
        ):  # fmt: skip
            return body.run(*args)
    except (RuntimeError, NotImplementedError) as error:
        raise Untraceable from error


_PREFIX = "outlined_"
_OPEN = (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.invoke_subgraph)
"""Calls of graphs that are looked into."""
_OWN_GRADIENT = "a softmax in a torch.autograd.Function keeps the backward that is its own"
_AUGMENTED = ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
              "ilshift", "irshift", "imatmul")  # fmt: skip


def outline(module: GraphModule) -> GraphModule:
    """Graph with one call for each such part, equal parts by one name; the module itself where there is none."""
    outlined = separate_parts(module.graph)
    if not outlined:
        return module
    last = {part[-1]: part for part in outlined}
    inside = {node for part in outlined for node in part}
    graph, made, bodies, names = Graph(), dict[Node, Node](), dict[str, GraphModule](), dict[str, str]()
    for node in module.graph.nodes:
        if node not in inside:
            made[node] = graph.node_copy(node, made.__getitem__)
        elif node in last:
            body, inputs, outputs = _body(module, last[node])
            name = names.setdefault(_text(body.graph), f"{_PREFIX}{len(bodies)}")
            bodies.setdefault(name, body)
            call = graph.call_module(name, tuple(made[source] for source in inputs))
            provenance = {key: last[node][0].meta.get(key) for key in ("nn_module_stack", "stack_trace")}
            call.meta = provenance | {"val": tuple(map(nodes.fake, outputs))}
            made |= {out: graph.call_function(operator.getitem, (call, k)) for k, out in enumerate(outputs)}
    return tracing.lazy_module(attributes(graph, bodies, module), graph)


def attributes(graph: Graph, bodies: dict[str, GraphModule], module: GraphModule) -> dict[str, Any]:
    """Attributes that a graph needs: the graphs of its parts, and those taken over from a module."""
    named = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")} - bodies.keys()
    return bodies | {name: operator.attrgetter(name)(module) for name in named}


def separate_parts(graph: Graph) -> list[list[Node]]:
    """The nodes of each outermost function transform, and of each call of a `torch.autograd.Function`, in order."""
    ranges = _by_levels(graph)
    for node in graph.nodes:
        if node.target in functorch.ASK_AUTOGRAD:  # what `torch.func.vjp` returns may be called behind its levels
            inputs = set(node.all_input_nodes)
            for part in [p for p in ranges if p[-1] < node and not inputs.isdisjoint(p)][:1]:
                last = next((p[-1] for p in ranges if node in p), node)
                merged = [n for n in graph.nodes if part[0] <= n <= last]
                ranges = [p for p in ranges if p[0] < part[0]] + [merged] + [p for p in ranges if p[0] > last]
    return ranges


def sealed_softmaxes(module: GraphModule) -> list[tuple[Node, str]]:
    """Opaque calls that contain a softmax, with the note for the report: a `torch.autograd.Function` where gradients
    are recorded, and `torch.cond` and similar operators."""
    sealed = []
    for node in module.graph.nodes:
        own_gradient = node.target is functorch.AUTOGRAD_FUNCTION
        if node.target in _OPEN or not isinstance(node.target, HigherOrderOperator):
            continue
        if own_gradient and not torch.is_grad_enabled():
            continue
        bodies = (operator.attrgetter(str(n.target))(module) for n in node.all_input_nodes if n.op == "get_attr")
        inside = [str(n.target) for body in bodies if isinstance(body, GraphModule) for n in body.graph.nodes]
        if any("softmax" in name or "scaled_dot_product" in name for name in inside):
            sealed.append(
                (node, _OWN_GRADIENT if own_gradient else f"a softmax inside of {node.target} stays as it is")
            )
    return sealed


def _by_levels(graph: Graph) -> list[list[Node]]:
    ranges: list[list[Node]] = []
    depth, hooks = 0, True  # whether hooks are allowed: inner levels forbid them again, the outermost allows them
    for node in graph.nodes:
        target = node.target
        entering = _enters(target)
        own_gradient = target is functorch.AUTOGRAD_FUNCTION and torch.is_grad_enabled()
        outside = depth == 0 and hooks
        if outside and (entering or own_gradient):
            ranges.append([])
        if not outside or entering or own_gradient:
            ranges[-1].append(node)
        elif _unwraps(node):
            ranges.append([node])
        depth += functorch.enters(target) - functorch.leaves(target)
        hooks = target not in functorch.FORBID_HOOKS and (hooks or target in functorch.ALLOW_HOOKS)
    return ranges


def _enters(target: Any) -> bool:
    """Whether a call begins a transform: it opens a level, or forbids hooks around one."""
    return functorch.enters(target) or target in functorch.FORBID_HOOKS


def transforms(part: list[Node]) -> bool:
    """Whether a part consists of transforms of torch.func other than a lone `vmap`."""
    return any(functorch.enters(node.target, "grad", "jvp") for node in part)


def _unwraps(node: Node) -> bool:
    """Whether a node unwraps a tensor that wraps others, as quantised weights do, unknown to the trace."""
    if node.op in ("placeholder", "get_attr", "output") or not any(map(_wraps, map(nodes.fake, node.all_input_nodes))):
        return False
    return not any(map(_wraps, tree_leaves(nodes.fake(node))))


def _wraps(value: Any) -> bool:
    return is_traceable_wrapper_subclass(value) and not (is_dtensor(value) or nodes.is_nested(value))


def _body(module: GraphModule, part: list[Node]) -> tuple[GraphModule, list[Node], list[Node]]:
    """(a part as a separate graph, the nodes that it reads, its nodes that are read after it)."""
    inside, body, copies = set(part), Graph(), dict[Node, Node]()
    inputs, outputs = inputs_and_outputs(part)
    for source in inputs:
        is_attribute = source.op == "get_attr"
        copies[source] = body.node_copy(source) if is_attribute else body.placeholder(source.name)
    for node in part:
        if writes_outside(node, inside):
            raise Unsupported(Reason.TRANSFORM, "a function transform of torch.func changes a tensor in place")
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in outputs))
    return tracing.lazy_module(module, body), [source for source in inputs if source.op != "get_attr"], outputs


def inputs_and_outputs(part: list[Node]) -> tuple[list[Node], list[Node]]:
    """(the nodes that a part reads, its nodes that are read after it)."""
    inside = set(part)
    inputs = list(dict.fromkeys(source for node in part for source in node.all_input_nodes if source not in inside))
    return inputs, [node for node in part if not inside.issuperset(node.users)]


def _text(body: Graph) -> str:
    """Text of a part's operations and their source lines, without names: equal layers have equal parts."""
    order = {node: number for number, node in enumerate(body.nodes)}
    lines = []
    for node in body.nodes:
        arguments = map_arg((node.args, node.kwargs), lambda other: {order[other]})  # no argument is a set
        target = "" if node.op == "placeholder" else node.target
        lines.append(f"{node.op} {target!r} {arguments!r} {node.meta.get('stack_trace')}")
    return "\n".join(lines)


def writes_outside(node: Node, inside: set[Node]) -> bool:
    """Whether a node writes to a tensor that was created before its part."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    changing = name in _AUGMENTED or (name.endswith("_") and not name.endswith("__")) or _asks_for_it(node)
    return changing and any(source not in inside and nodes.is_tensor(source) for source in node.all_input_nodes[:1])


def _asks_for_it(node: Node) -> bool:
    """Whether a call has an argument `inplace` that is true."""
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a method, or a function without a signature
        return False
    return bound.arguments.get("inplace") is True


def traces_through(body: Graph) -> bool:
    """Whether an outlined part is a `vmap` that contains none of the other kinds."""
    calls = (node for node in body.nodes if node.op.startswith("call"))
    if not functorch.enters(next(calls).target, "vmap"):
        return False
    kinds = "grad", "jvp", "dual"
    others = (functorch.enters(n.target, *kinds) or n.target in functorch.FORBID_HOOKS for n in body.nodes)
    return not any(others) and not any(n.target is functorch.AUTOGRAD_FUNCTION or _unwraps(n) for n in body.nodes)


def is_outlined(target: Any) -> bool:
    """Whether a module is one that `outline` created."""
    return isinstance(target, str) and target.startswith(_PREFIX)


class _Sealed(torch.nn.Module):
    """An outlined part that no pass over graph modules finds: elimination of dead code would remove its levels."""

    def __init__(self, body: GraphModule):
        super().__init__()
        self.bodies = (body,)  # in a tuple, it is no submodule

    def forward(self, *args: Any) -> Any:
        with functorch.closed_on_error():
            return self.bodies[0](*args)


def description_of(node: Node) -> str | None:
    """Description of the outlined part that a node of the traced graph calls; None for other nodes."""
    callee = node.args[0] if node.target is torch.ops.higher_order.wrap else None
    sealed = getattr(node.graph.owning_module, str(callee.target), None) if isinstance(callee, Node) else None
    if not isinstance(sealed, _Sealed):
        return None
    first = next(inner.target for inner in sealed.bodies[0].graph.nodes if inner.op.startswith("call"))
    if first is functorch.AUTOGRAD_FUNCTION:
        return "torch.autograd.Function"
    return "a transform of torch.func" if _enters(first) else "a tensor that holds others"


def record(body: GraphModule, args: tuple[Any, ...]) -> Any:
    """Record the call of an outlined part in the traced graph; its results are the fake values that Dynamo recorded."""
    tracer = tracing.current_tracer()
    if tracer is None:
        raise Unsupported(Reason.DEFECT, "an outlined part outside of a trace")
    (outputs,) = body.graph.output_node().args
    with tracing.disable_proxy_modes_tracing():
        results = tree_map_only(torch.Tensor, nodes.empty_like, tuple(map(nodes.fake, outputs)))
    sealed = _Sealed(body)
    tracer.root.register_module(tracer.get_fresh_qualname("outlined"), sealed)
    call = tracing.written(tracer, "call_function", torch.ops.higher_order.wrap, (sealed, *args), {})
    return tracing.track(results, call, tracer)


def without_regions(module: GraphModule) -> GraphModule:
    """Graph with all calls of regions inlined; the module itself where there are none."""
    if not any(_region(module, node) for node in module.graph.nodes):
        return module
    graph, copies = Graph(), dict[Node, Any]()
    attribute_values: dict[str, Any] = {}
    for node in module.graph.nodes:
        if (body := _region(module, node)) is not None:
            body = without_regions(body)
            inputs = body.graph.find_nodes(op="placeholder")
            inside = dict(zip(inputs, (copies.get(argument, argument) for argument in node.args[2:]), strict=True))
            copies[node] = _copied(body, graph, inside, attribute_values)
        elif node.target is operator.getitem and isinstance(items := map_arg(node.args[0], copies.get), tuple):
            copies[node] = items[node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    result = GraphModule(attributes(graph, attribute_values, module), graph)
    result.meta |= module.meta
    return result


def inner_graphs(module: GraphModule) -> list[GraphModule]:
    """The graphs of regions and checkpointed functions that a graph calls."""
    calls = (node for node in module.graph.nodes if node.op == "call_function" and node.target in _OPEN)
    return [operator.attrgetter(str(node.args[0].target))(module) for node in calls]  # type: ignore[union-attr]


def _region(module: GraphModule, node: Node) -> GraphModule | None:
    """The graph that a node calls, if it is a region's."""
    if node.op != "call_function" or node.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    return operator.attrgetter(str(node.args[0].target))(module)  # type: ignore[union-attr]


def _copied(body: GraphModule, graph: Graph, copies: dict[Node, Any], attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Results of a graph whose operations are appended to `graph`. copies: new nodes, its inputs included. attributes:
    those of such graphs, to which new ones are added."""
    for node in body.graph.nodes:
        if node.op == "output":
            return tuple(copies.get(result, result) for result in node.args[0])
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op in ("get_attr", "call_module"):
            copies[node].target = f"region_{len(attributes)}"
            attributes[copies[node].target] = operator.attrgetter(str(node.target))(body)
    raise AssertionError("a graph ends with its results")
