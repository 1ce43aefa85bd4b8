"""Functions that Inductor's code calls in place of `fusion::attention` and its gradient, each specialized to one spec.

A call of an operator goes through torch's dispatcher (some 5 us), through Python code that looks for gradients, and
finds its kernel by the text of the spec. Inductor's Python code creates one function per spec instead, when it is
loaded, also from a cache in another process. Its C++ code (AOTInductor) keeps the operator, and so does a call that is
profiled, or made under a `TorchFunctionMode` (a default device), which has to see one operation and none inside of it.

    attention_1f0c = specialized_attention('{"nodes": ...', 'cpu', 'auto', 'attention_forward')
    buf0 = attention_1f0c([primals_1, primals_2, primals_3], [1, 8, 16, 16])
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch

from fusion.runtime import kernels
from fusion.runtime.kernels import OF_OPERATORS
from fusion.torch_private.tracing import is_watched

SPECIALIZED = ("attention_below_autograd", "attention_forward", "attention_backward")
"""Operators that have specialized functions."""


class SpecializedOp:
    """An operator of one spec on a type of device; its kernel is looked up at the first call."""

    def __init__(self, spec: str, device: str, request: str, operator: str):
        self.described, self.operator = (spec, device, request), operator
        self._find, self._before = OF_OPERATORS[operator]
        self._run: Callable[..., Any] | None = None
        kernels.holders.add(self)

    def __call__(self, *given: Any) -> Any:
        if is_watched():
            (spec, _, request), n = self.described, self._before
            return getattr(torch.ops.fusion, self.operator)(*given[:n], spec, request, *given[n:])
        run = self._run
        if run is None:
            run = self._run = self._find(*self.described)
        return run(*given)

    def forget(self) -> None:
        """Look the kernel up again at the next call."""
        self._run = None


def specialized_attention(
    spec: str, device: str, request: str, operator: str = "attention_below_autograd"
) -> Callable[..., Any]:
    """Function of a spec (as text) on a type of device; a bound method, which is called faster than an object."""
    return SpecializedOp(spec, device, request, operator).__call__


def register_inductor_codegen() -> None:
    """Let Inductor's Python code call specialized functions; versions of torch without the hook call the operator."""
    from fusion.torch_private import inductor

    for name in SPECIALIZED:
        inductor.write_with(f"torch.ops.fusion.{name}.default", functools.partial(_call, name))


def _call(operator: str, node: Any, wrapper: Any) -> str:
    """Code for the call of an Inductor node. The called function's definition goes into the wrapper's head."""
    given, n = node.codegen_args(), OF_OPERATORS[operator][1]
    arguments = f"{given[n]}, {node.get_device().type!r}, {given[n + 1]}, {operator!r}"
    name = f"attention_{hashlib.sha256(arguments.encode()).hexdigest()[:12]}"
    wrapper.add_import_once("from fusion.runtime.specialized import specialized_attention")
    wrapper.add_import_once(f"{name} = specialized_attention({arguments})")
    rest = ", ".join([*given[:n], *given[n + 2 :]])
    return f"{name}({rest})"
