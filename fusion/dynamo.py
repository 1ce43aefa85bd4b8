"""Dynamo: attention of jagged nested tensors on CPUs does not break a graph that this package compiles.

Torch 2.13 computes it there by `_scaled_dot_product_attention_math` of strided nested tensors, which it makes of the
sequences one by one (`jagged_scaled_dot_product_attention`, in torch/nested/_internal/sdpa.py): sizes that depend on
data, and an operator (`aten::_nested_tensor_from_tensor_list`) that does not run on tensors without data. So Dynamo
cuts the graph. For our backend it calls `fusion.passes.nested.attention` instead; eager mode and other backends are as
they were.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Put the call in Dynamo's table of functions that it treats in a way of their own. A version of torch with another
    table, or with such a way for attention, stays as it is."""
    try:
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        handlers = TorchInGraphFunctionVariable._get_handlers()
    except (ImportError, AttributeError):
        log.info("attention of nested tensors stays torch's: Dynamo's table of functions is not where it was")
        return
    handlers.setdefault(torch._C._nn.scaled_dot_product_attention, _attention)


def _attention(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """What Dynamo has of the call's result; None where it is to treat the call as any other."""
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables.builder import wrap_fx_proxy

    if not _is_ours(tx.output.compiler_fn):
        return None
    from fusion.passes import nested, nodes  # not where this package is only imported

    given, named = [_known(x) for x in args], {name: _known(x) for name, x in kwargs.items()}
    if not any(map(nodes.is_nested, (*given, *named.values()))):
        return None
    try:
        reason = nested.reason_against(*given, **named)
    except (AttributeError, TypeError):  # another version of torch; arguments that attention does not have
        return None
    if reason is not None:
        log.info("attention of nested tensors stays torch's: %s", reason)
        return None
    call = tx.output.create_proxy("call_function", nested.attention, *proxy_args_kwargs(args, kwargs))
    return wrap_fx_proxy(tx, call)


def _is_ours(backend: Any) -> bool:
    """Whether a backend, as Dynamo holds it, is one of this package."""
    from torch._dynamo.eval_frame import innermost_backend

    found = innermost_backend(backend) if callable(backend) else None
    found = getattr(found, "compiler_fn", found)  # what torch.compile wraps it in
    return str(getattr(found, "__module__", "")).partition(".")[0] == "fusion"


def _known(variable: Any) -> Any:
    """A tensor without data, or a constant, in the place of what Dynamo has of it; else that itself."""
    variable = variable.realize()
    if variable.is_tensor():
        return variable.as_proxy().node.meta.get("example_value")
    return variable.as_python_constant() if variable.is_python_constant() else variable
