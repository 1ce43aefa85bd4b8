"""DTensors in a graph: their conversions stay single calls, and the analysis sees the global tensors.

A DTensor behaves as the global tensor, whatever its placements, and `fusion::attention` has a rule for it
(`fusion.runtime.dtensor`). So the analysis needs no notion of placements: shapes and indices are those of the global
tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import GraphModule

from fusion.refusals import Reason
from fusion.torch_private import tracing
from fusion.torch_private.tensors import is_dtensor, mode_of, real_object, tree_map

from .. import marks, nodes
from ..nodes import Unsupported
from ..trace.retrace import Retrace


def redistribute(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`DTensor.redistribute`, as a function that a graph can call."""
    return tensor.redistribute(*args, **kwargs)


def to_local(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`DTensor.to_local`, as a function that a graph can call."""
    return tensor.to_local(*args, **kwargs)


def full_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`DTensor.full_tensor`, as a function that a graph can call."""
    return tensor.full_tensor(*args, **kwargs)


_METHODS = {"redistribute": redistribute, "to_local": to_local, "full_tensor": full_tensor}


def conversion(target: Any, args: tuple[Any, ...]) -> Any:
    """Function that replaces a call between local tensors and DTensors, or None for any other call."""
    loaded = sys.modules.get("torch.distributed.tensor")
    if loaded is None:
        return None
    if target is loaded.DTensor.from_local:
        return target
    return _METHODS.get(target) if isinstance(target, str) and is_dtensor(args[0]) else None


def convert(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a conversion as one call, without its collectives."""
    tracer = tracing.current_tracer()
    if tracer is None:
        raise Unsupported(Reason.DEFECT, "a conversion of a DTensor outside of a trace")
    with tracing.disable_proxy_modes_tracing():
        result = function(*tree_map(real_object, args), **tree_map(real_object, kwargs))
    return tracing.track(result, tracing.written(tracer, "call_function", function, args, kwargs), tracer)


def keep_conversions(base: type[Retrace]) -> type[Retrace]:
    """Interpreter that records conversions."""

    class Keeping(base):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            function = conversion(target, args)
            return super().call_function(target, args, kwargs) if function is None else convert(function, args, kwargs)

        def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            function = conversion(target, args)
            return super().call_method(target, args, kwargs) if function is None else convert(function, args, kwargs)

    return Keeping


def refuse_absent(module: GraphModule) -> None:
    """Raise `Unsupported` where this process holds no part of a DTensor."""
    for node in module.graph.find_nodes(op="placeholder"):
        fake = nodes.fake(node)
        if is_dtensor(fake) and real_object(fake.device_mesh).get_coordinate() is None:
            raise Unsupported(Reason.OTHER_PROCESSES, f"{node.name} is a DTensor of other processes than this one")


def mark(graph: torch.fx.Graph) -> None:
    """Replace meta["val"] of each DTensor by its global tensor, and set `marks.dtensor`."""
    for node in graph.nodes:
        fake = nodes.fake(node)
        if is_dtensor(fake):
            mode = mode_of(fake.to_local())
            assert mode is not None, "tensors of a graph have no data"
            with mode:
                node.meta["val"] = nodes.empty_like(fake)
            marks.dtensor.set(node, True)
