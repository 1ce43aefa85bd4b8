"""Inputs of a trace: placeholders of its graph, whose values are created when a traced call needs them.

A model has hundreds of parameters, and copied calls need none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion.torch_private import tracing
from fusion.torch_private.dynamo import ConstantSource
from fusion.torch_private.fake import (
    FakeTensor,
    FakeTensorMode,
    detect_fake_mode,
    fast_detach,
    has_symbols,
    is_view,
    mode_of,
    real_object,
)

from .. import nodes
from ..tensors import dtensor, nested


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyInput:
    """An input whose value does not exist yet. recorded: the fake value of Dynamo."""

    node: Node
    recorded: FakeTensor
    mode: FakeTensorMode
    tracer: Any

    def create(self) -> FakeTensor:
        """The value, created in the running trace."""
        with tracing.untraced():
            value = self.mode.from_tensor(_by_itself(self.recorded), static_shapes=True)
        tracing.stand_for(value, self.node, self.tracer)
        return value


def fake_inputs(module: GraphModule, example_inputs: Sequence[Any]) -> tuple[list[Any], FakeTensorMode]:
    """Fake values of the inputs of Dynamo's graph, recorded or made from the examples, and their fake mode."""
    recorded = [nodes.fake(node) for node in module.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode([*recorded, *example_inputs]) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = []
    for recording, example in zip(recorded, example_inputs, strict=True):
        chosen = real_object(example if recording is None else recording)
        plain = isinstance(chosen, torch.Tensor) and not isinstance(chosen, FakeTensor)
        plain = plain and not (dtensor.is_dtensor(chosen) or nodes.is_nested(chosen))
        fakes.append(mode.from_tensor(chosen, static_shapes=True) if plain else chosen)
    sources = (ConstantSource(f"input{number}") for number in range(len(fakes)))
    return [_of_mode(mode, fake, source) for fake, source in zip(fakes, sources, strict=True)], mode


def _of_mode(mode: FakeTensorMode, fake: Any, source: ConstantSource) -> Any:
    """Input in this fake mode; tensors of known sizes are created when a call needs them."""
    if nodes.is_nested(fake):
        return nested.empty_like_nested(fake, mode)
    is_fresh = isinstance(fake, torch.Tensor) and not _is_known(fake)
    return mode.from_tensor(_by_itself(fake), source=source) if is_fresh else fake


def _by_itself(fake: torch.Tensor) -> torch.Tensor:
    """Tensor that is no view: torch would not move a view that is written to out of the mode that it was created in."""
    if type(fake) is not FakeTensor or not is_view(fake):
        return fake
    return fast_detach(mode_of(fake), fake).requires_grad_(fake.requires_grad)


def placed(fakes: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Placeholders in the traced graph, and the value of each; for tensors of known sizes, a `LazyInput`."""
    tracer, values = tracing.current_tracer(), list(fakes)
    proxies = [tracer.create_proxy("placeholder", f"arg{number}_1", (), {}) for number in range(len(fakes))]
    with tracing.untraced():
        for number, (fake, proxy) in enumerate(zip(fakes, proxies, strict=True)):
            if _is_known(fake):
                proxy.node.meta["val"] = fast_detach(mode, fake)
                values[number] = LazyInput(node=proxy.node, recorded=fake, mode=mode, tracer=tracer)
    with tracing.disable_proxy_modes_tracing():
        for value, proxy in zip(values, proxies, strict=True):
            if not isinstance(value, LazyInput):
                tracing.track(value, proxy, tracer)
    return values


def _is_known(fake: Any) -> bool:
    """Whether a tensor's sizes and those of its memory are numbers: in exported programs a base may have symbols."""
    known = type(fake) is FakeTensor and not has_symbols(fake)
    return known and isinstance(fake.untyped_storage().nbytes(), int)


def carry_placeholders(origin: GraphModule, traced: GraphModule) -> None:
    """Dynamo's notes on its inputs (sources, static marks), without which Inductor treats parameters as inputs."""
    for source, target in zip(*(module.graph.find_nodes(op="placeholder") for module in (origin, traced)), strict=True):
        for key, value in source.meta.items():
            target.meta.setdefault(key, value)
        tracing.carry_source(source, target)
    for key, value in origin.meta.items():
        traced.meta.setdefault(key, value)
