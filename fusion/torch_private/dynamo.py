"""Dynamo: its counters, its table of functions, and its variables for values and calls. torch's structured log, without
which `tlparse` shows nothing of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import list_backends, lookup_backend, register_backend
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters

__all__ = [
    "SDPA", "ConstantSource", "RestartAnalysis", "backend_of", "call_in_graph", "counters", "is_tracing_log_on",
    "known", "list_backends", "lookup_backend", "original_of", "register_backend", "treat", "write_to_tracing_log",
]  # fmt: skip

SDPA = torch._C._nn.scaled_dot_product_attention
"""`torch.nn.functional.scaled_dot_product_attention`, in Dynamo's table."""


def treat(function: Any, handler: Callable[..., Any]) -> None:
    """Let Dynamo ask `handler(_, translator, *variables, **variables)` for the result of a call, where it has no
    handler yet.

    Raises ImportError or AttributeError where the table is not where it was.
    """
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    TorchInGraphFunctionVariable._get_handlers().setdefault(function, handler)


def call_in_graph(translator: Any, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Write a call into Dynamo's graph; returns Dynamo's variable for its result."""
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables.builder import wrap_fx_proxy

    call = translator.output.create_proxy("call_function", function, *proxy_args_kwargs(args, kwargs))
    return wrap_fx_proxy(translator, call)


def backend_of(translator: Any) -> Any:
    """Backend that Dynamo compiles for, without torch's wrappers; None where it has none."""
    from torch._dynamo.eval_frame import innermost_backend

    backend = translator.output.compiler_fn
    result = innermost_backend(backend) if callable(backend) else None
    return getattr(result, "compiler_fn", result)


def known(variable: Any) -> Any:
    """Fake tensor or constant of a Dynamo variable; for any other variable the variable itself."""
    variable = variable.realize()
    if variable.is_tensor():
        return variable.as_proxy().node.meta.get("example_value")
    return variable.as_python_constant() if variable.is_python_constant() else variable


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Function or module that was passed to `torch.compile`; any other function unchanged."""
    if isinstance(function, OptimizedModule):  # which has the mark of the function, too, on the module's `forward`
        return function._orig_mod
    return getattr(function, "_torchdynamo_orig_callable", function)


def is_tracing_log_on() -> bool:
    """Whether torch's structured log (TORCH_TRACE) is enabled."""
    return bool(torch._logging._internal.trace_log.handlers)


def write_to_tracing_log(name: str, text: str) -> None:
    """Add a text to the structured log, under a name. Does nothing where the log is not enabled."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text
    )
