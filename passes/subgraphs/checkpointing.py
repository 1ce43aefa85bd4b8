"""Activation checkpointing inside a compiled function: each checkpointed part is a separate graph.

Dynamo writes `torch.utils.checkpoint` as a call of a subgraph. Attentions in that graph are fused like any others. The
call around them stays, so that the inner compiler recomputes the same values as without fusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from fusion.refusals import Reason
from fusion.torch_private import tracing
from fusion.torch_private.fake import FakeTensor, remember_item
from fusion.torch_private.tensors import shares_storage

from .. import marks, nodes
from ..tensors import dtensor
from ..trace import autocast


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
        if node.op == "call_function" and node.target is torch.ops.higher_order.tag_activation_checkpoint:
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


class RetraceInterpreter(Interpreter):
    """Runs a graph on fake tensors. Dynamo's knowledge of an `item()` is copied to the new tensor. Regions of autocast
    are entered, where the graph's own calls would only be recorded, and are left at the latest with the graph."""

    def __init__(self, module: GraphModule):
        super().__init__(module)
        self._regions: list[torch.amp.autocast_mode.autocast] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run(*args, **kwargs)
        finally:
            while self._regions:
                self._regions.pop().__exit__(None, None, None)

    def run_node(self, n: Node) -> Any:
        fake = nodes.fake(n)
        is_item = n.op.startswith("call") and n.target in ("item", torch.ops.aten.item.default)
        if is_item and isinstance(fake, (torch.SymFloat, torch.SymInt)):
            (tensor,), _ = self.fetch_args_kwargs_from_env(n)
            if isinstance(tensor, FakeTensor):
                remember_item(tensor, fake)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is autocast.enter:  # the class sets the state as well as recording it
            self._regions.append(torch.amp.autocast_mode.autocast(*args, **kwargs))
            self._regions[-1].__enter__()
            return self._regions[-1]
        if target is autocast.leave:
            self._regions.remove(args[0])
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)


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
        checkpoint = torch.ops.higher_order.tag_activation_checkpoint
        call = tracing.written(tracer, "call_function", checkpoint, (body, *inputs), kwargs)
        read = zip(inputs, call.node.args[1:], strict=True)
        shared = [node for value, node in read if isinstance(node, Node) and _is_shared(value, result)]
        marks.aliases.set(call.node, tuple(shared))
        if not any(map(dtensor.is_dtensor, result)):
            return tracing.track(result, call, tracer)
        # One by one: of DTensors that are not tracked yet, torch cannot note a copy.
        results_as_nodes = [
            tracing.track(value, call[k], tracer)  # pyright: ignore[reportIndexIssue]
            for k, value in enumerate(result)
        ]
        return type(result)(results_as_nodes)
