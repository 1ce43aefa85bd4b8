"""Forward-mode derivatives around a compiled function: calls whose inputs have tangents.

The code of an inner compiler computes no tangents, without any error. The graph itself does: torch's operations have
theirs, and so have the fused attentions (`fusion.runtime.derivatives`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import GraphModule

from fusion.torch_private.autograd import is_within_dual_level


def with_tangents(compiled: Callable[..., Any], graph: GraphModule) -> Callable[..., Any]:
    """Compiled graph that runs the original graph, operation by operation, where an argument has a tangent."""

    def run(*arguments: Any) -> Any:
        if is_within_dual_level() and any(map(_moves, arguments)):
            return graph(*arguments)
        return compiled(*arguments)

    for name in ("named_parameters", "named_buffers", "zero_grad"):  # torch's minifier asks for them
        setattr(run, name, getattr(graph, name))
    return run


def _moves(argument: Any) -> bool:
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None
