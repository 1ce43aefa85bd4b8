"""Dynamo's graph run again, call by call, under a trace that records pre-dispatch ATen.

Inputs of the trace are placeholders of its graph, whose values are created when a traced call needs them: a model has
hundreds of parameters, and copied calls (`repeats`) need none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from fusion.refusals import Reason
from fusion.torch_private import autograd, tensors, tracing
from fusion.torch_private.dynamo import ConstantSource
from fusion.torch_private.functorch import of_vmap
from fusion.torch_private.operators import HigherOrderOperator, enter_autocast, leave_autocast

from .. import nodes
from .decompositions import EINSUMS, ENCODER, VARLEN
from .outline import is_outlined, record, trace_through_vmap, traces_through

_DECOMPOSITIONS = ENCODER | EINSUMS | VARLEN
_DECOMPOSITIONS[autograd.GET_DATA] = torch.Tensor.detach  # `x.data`, which no trace follows

Regions = tuple[tuple[Any, ...], ...]
"""The arguments of regions of autocast, the outermost first: (device, dtype, enabled, whether casts are kept)."""


def regions(graph: Graph) -> Iterator[tuple[Node, Regions]]:
    """Pairs of a node and the regions that it is in."""
    around: dict[Node, tuple[Any, ...]] = {}
    for node in list(graph.nodes):
        yield node, tuple(around.values())
        if node.target is enter_autocast:
            around[node] = (*node.args, *node.kwargs.values())
        elif node.target is leave_autocast:
            around.pop(node.all_input_nodes[0])


@contextlib.contextmanager
def in_regions(around: Regions) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for region in around:
            stack.enter_context(torch.amp.autocast_mode.autocast(*region))
        yield


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
            if isinstance(tensor, tensors.FakeTensor):
                tensors.remember_item(tensor, fake)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is enter_autocast:  # the class sets the state as well as recording it
            self._regions.append(torch.amp.autocast_mode.autocast(*args, **kwargs))
            self._regions[-1].__enter__()
            return self._regions[-1]
        if target is leave_autocast:
            self._regions.remove(args[0])
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)


class Retrace(RetraceInterpreter):
    """Runs Dynamo's graph, or a part of it, with torch's fused encoder modules decomposed. sealed: whether each `vmap`
    stays one call."""

    def __init__(self, module: GraphModule, sealed: bool):
        super().__init__(module)
        self.sealed = sealed

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, HigherOrderOperator) and target.name() == "register_hook":  # the trace would not keep it
            message = "a gradient hook is registered on a tensor, and such graphs are not analysed"
            raise nodes.Unsupported(Reason.HOOK, message)
        if (level := of_vmap(target)) is not None:
            return level(*args)
        decomposition = _DECOMPOSITIONS.get(target)
        result = NotImplemented if decomposition is None else decomposition(*args, **kwargs)
        return super().call_function(target, args, kwargs) if result is NotImplemented else result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_outlined(target):
            return super().call_module(target, args, kwargs)
        body = self.fetch_attr(target)
        if self.sealed or not traces_through(body.graph):
            return record(body, args)
        return trace_through_vmap(type(self)(body, self.sealed), args)

    def map_nodes_to_values(self, args: Any, n: Node) -> Any:
        for node in n.all_input_nodes:
            if isinstance(deferred := self.env.get(node), Deferred):
                self.env[node] = deferred.create()
        return super().map_nodes_to_values(args, n)


class Deferred:
    """A value of a trace that does not exist yet; `create` makes it."""

    __slots__ = ()

    def create(self) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyInput(Deferred):
    """An input whose value does not exist yet. recorded: the fake value of Dynamo."""

    node: Node
    recorded: tensors.FakeTensor
    mode: tensors.FakeTensorMode
    tracer: Any

    def create(self) -> tensors.FakeTensor:
        """The value, created in the running trace."""
        with tracing.untraced():
            value = self.mode.from_tensor(_by_itself(self.recorded), static_shapes=True)
        tracing.stand_for(value, self.node, self.tracer)
        return value


def fake_inputs(module: GraphModule, example_inputs: Sequence[Any]) -> tuple[list[Any], tensors.FakeTensorMode]:
    """Fake values of the inputs of Dynamo's graph, recorded or made from the examples, and their fake mode."""
    recorded = [nodes.fake(node) for node in module.graph.find_nodes(op="placeholder")]
    mode = tensors.detect_fake_mode([*recorded, *example_inputs]) or tensors.FakeTensorMode(allow_non_fake_inputs=True)
    fakes = []
    for recording, example in zip(recorded, example_inputs, strict=True):
        chosen = tensors.real_object(example if recording is None else recording)
        plain = isinstance(chosen, torch.Tensor) and not isinstance(chosen, tensors.FakeTensor)
        plain = plain and not (tensors.is_dtensor(chosen) or nodes.is_nested(chosen))
        fakes.append(mode.from_tensor(chosen, static_shapes=True) if plain else chosen)
    sources = (ConstantSource(f"input{number}") for number in range(len(fakes)))
    return [_of_mode(mode, fake, source) for fake, source in zip(fakes, sources, strict=True)], mode


def _of_mode(mode: tensors.FakeTensorMode, fake: Any, source: ConstantSource) -> Any:
    """Input in this fake mode; tensors of known sizes are created when a call needs them."""
    is_fresh = isinstance(fake, torch.Tensor) and not (_is_known(fake) or nodes.is_nested(fake))
    return mode.from_tensor(_by_itself(fake), source=source) if is_fresh else fake


def _by_itself(fake: torch.Tensor) -> torch.Tensor:
    """Tensor that is no view: torch would not move a view that is written to out of the mode that it was created in."""
    if type(fake) is not tensors.FakeTensor or not tensors.is_view(fake):
        return fake
    return tensors.fast_detach(tensors.mode_of(fake), fake).requires_grad_(fake.requires_grad)


def placed(fakes: Sequence[Any], mode: tensors.FakeTensorMode) -> list[Any]:
    """Placeholders in the traced graph, and the value of each; for tensors of known sizes, a `LazyInput`."""
    tracer, values = tracing.current_tracer(), list(fakes)
    proxies = [tracer.create_proxy("placeholder", f"arg{number}_1", (), {}) for number in range(len(fakes))]
    with tracing.untraced():
        for number, (fake, proxy) in enumerate(zip(fakes, proxies, strict=True)):
            if _is_known(fake):
                proxy.node.meta["val"] = tensors.fast_detach(mode, fake)
                values[number] = LazyInput(node=proxy.node, recorded=fake, mode=mode, tracer=tracer)
    with tracing.disable_proxy_modes_tracing():
        for value, proxy in zip(values, proxies, strict=True):
            if not isinstance(value, LazyInput):
                tracing.track(value, proxy, tracer)
    return values


def _is_known(fake: Any) -> bool:
    """Whether a tensor's sizes and those of its memory are numbers: in exported programs a base may have symbols."""
    known = type(fake) is tensors.FakeTensor and not tensors.has_symbols(fake)
    return known and isinstance(fake.untyped_storage().nbytes(), int)


def carry_placeholders(origin: GraphModule, traced: GraphModule) -> None:
    """Dynamo's notes on its inputs (sources, static marks), without which Inductor treats parameters as inputs."""
    for source, target in zip(*(module.graph.find_nodes(op="placeholder") for module in (origin, traced)), strict=True):
        for key, value in source.meta.items():
            target.meta.setdefault(key, value)
        tracing.carry_source(source, target)
    for key, value in origin.meta.items():
        traced.meta.setdefault(key, value)
