"""Activation checkpointing inside a compiled function: each checkpointed part is a separate graph.

Dynamo writes `torch.utils.checkpoint` as a call of a subgraph. Attentions in that graph are fused like any others. The
call around them stays, so that the inner compiler recomputes the same values as without fusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion.refusals import Reason
from fusion.torch_private import tracing
from fusion.torch_private.tensors import is_dtensor, shares_storage

from .. import marks, nodes
from ..trace import autocast
from ..trace.retrace import Retrace, RetraceInterpreter

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A checkpointed graph. values: the arguments of its calls. around: the regions of autocast around its calls; None
    where they differ between calls."""

    graph: GraphModule
    values: list[Any]
    around: autocast.Regions | None


def bodies(module: GraphModule) -> dict[str, Body]:
    """Checkpointed graphs of a graph, by the name of the attribute."""
    bodies_by_name: dict[str, Body] = {}
    for node, around in autocast.regions(module.graph):
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


class Checkpoints:
    """Runs the calls of one graph's checkpointed graphs while it is traced again: each stays one call."""

    def __init__(self, module: GraphModule, fused: Mapping[str, GraphModule]):
        self.fused = {id(module.get_submodule(name)): body for name, body in fused.items()}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call without tracing into it."""
        body, *inputs = args
        body: GraphModule = self.fused.get(id(body), body)
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
    checkpoints = Checkpoints(module, fused)

    class Keeping(base):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (checkpoints.call if target is _CHECKPOINT else partial(super().call_function, target))(args, kwargs)

    return Keeping
