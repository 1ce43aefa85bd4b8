"""Parts of scripts that run a graph: imports, and example inputs."""

from __future__ import annotations

import json
import types
from typing import Any

import torch
from torch.fx import Node

from fusion.torch_private import tensors


def import_line(name: str, held: Any) -> str:
    if isinstance(held, types.ModuleType):
        return f"import {held.__name__} as {name}"
    if held is type(None):
        return f"{name} = type(None)"
    if isinstance(held, float):  # inf and nan
        return f'{name} = float("{held}")'
    outer, dot, rest = getattr(held, "__qualname__", name).partition(".")
    if dot:
        return f"from {held.__module__} import {outer}; {name} = {outer}.{rest}"
    return f"from {getattr(held, '__module__', 'torch')} import {outer} as {name}"


def example(node: Node) -> str:
    """An expression that makes an input like the one the graph was traced with."""
    held = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(held, (torch.SymInt, torch.SymFloat)):
        hint = held.node.hint
        return repr(hint if isinstance(hint, (int, float)) else None)  # the length of a nested tensor is no number
    if not isinstance(held, torch.Tensor):
        return repr(held)
    if held.is_nested:
        return _nested_example(held)
    return _example(held)


def _nested_example(held: Any) -> str:
    """All rows in the first sequence."""
    (values, _), dim = tensors.nested_parts(held), tensors.ragged_dim(held)
    rows, sequences = (_hint(n) for n in (values.shape[dim - 1], held.shape[0]))
    offsets = f"torch.tensor([0] + [{rows}] * {sequences})"
    return f"torch.nested.nested_tensor_from_jagged({_example(values)}, {offsets}, jagged_dim={dim})"


def _example(held: torch.Tensor) -> str:
    size, stride = (json.dumps([_hint(n) for n in ns]) for ns in (held.shape, held.stride()))
    made = f"torch.empty_strided({size}, {stride}, dtype={held.dtype}, device={str(held.device)!r})"
    if held.is_floating_point():
        return f"{made}.normal_()"
    # small indices are in range wherever there are at least two entries
    return f"{made}.random_(0, 2)" if not held.is_complex() else f"{made}.fill_(1)"


def _hint(extent: int | torch.SymInt) -> int:
    return int(extent.node.hint) if isinstance(extent, torch.SymInt) else extent
