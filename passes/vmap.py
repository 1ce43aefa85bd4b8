"""`vmap` in Dynamo's graphs, traced through.

The batching rules of torch.func make of each operation one on tensors with one more dimension, and those are what the
graph gets. They act below the level at which the rest is traced, so composite operations arrive in pieces (a `matmul`
as views and a `bmm`). Masks written as nested `vmap`s over positions are read this way, and attentions inside a `vmap`.
Dynamo has run the same rules on the same shapes before, so that it fails here is not expected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Interpreter
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, get_proxy_mode
from torch.nn.attention import SDPBackend, sdpa_kernel

_ENTER = "_vmap_increment_nesting"
_OWN = (_ENTER, "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim")


def own(target: Any) -> Any:
    """The function behind a call that enters or leaves levels of vmap, whose wrapper would be traced; else None."""
    name = getattr(target, "__name__", "")
    return getattr(torch._C._functorch, name) if name in _OWN else None


def is_outermost(graph: Graph) -> bool:
    """Whether the first call of a graph enters a `vmap`."""
    calls = (node for node in graph.nodes if node.op.startswith("call"))
    return getattr(next(calls).target, "__name__", "") == _ENTER


class Untraceable(Exception):
    """An operation inside a `vmap` cannot be traced. What was traced of the `vmap` is still in the graph."""


def through(body: Interpreter, args: tuple[Any, ...]) -> Any:
    """Run a part of Dynamo's graph that enters and leaves levels of `vmap`, and trace what becomes of it."""
    mode, depth = get_proxy_mode(), _depth()
    assert mode is not None
    try:
        # SDPA's own kernels have no batching rule on CPUs: each would be a loop over the batch.
        with disable_proxy_modes_tracing(), ProxyTorchDispatchMode(mode.tracer, "fake"), sdpa_kernel(SDPBackend.MATH):
            return body.run(*args)
    except (RuntimeError, NotImplementedError) as error:
        while _depth() > depth:
            torch._C._functorch._vmap_decrement_nesting()
        raise Untraceable from error


def _depth() -> int:
    level = torch._C._functorch.maybe_current_level()
    return -1 if level is None else level
