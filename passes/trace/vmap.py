"""`vmap` in Dynamo's graphs, traced through.

The batching rules of torch.func replace each operation by one on tensors with one more dimension, and these are what
the graph gets. They act below the level at which the rest is traced, so composite operations arrive in pieces (a
`matmul` as views and a `bmm`). Masks written as nested `vmap`s over positions are read this way, and attentions inside
a `vmap`. Dynamo has run the same rules on the same shapes before, so a failure of them is not expected.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Interpreter
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion.torch_private import functorch, tracing


def is_outermost(graph: Graph) -> bool:
    """Whether the first call of a graph enters a `vmap`."""
    calls = (node for node in graph.nodes if node.op.startswith("call"))
    return functorch.enters(next(calls).target, "vmap")


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
