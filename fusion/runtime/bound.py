"""What Inductor's code calls in the place of `fusion::attention`: a function that knows its spec.

A call of an operator goes through torch's dispatcher, which looks at every argument (some 5 us), and finds its kernel
by the text of the spec. Code that Inductor writes in Python makes one function per spec instead, when it is loaded:

    attention_1f0c = bound_attention('{"nodes": ...', 'cpu', 'auto')
    ...
    buf0 = attention_1f0c([arg0_1, arg1_1, arg2_1], [1, 8, 16, 16])

The text stands in the code, so that another process which loads the code from a cache makes the same function.
Inductor's C++ code (AOTInductor) keeps the operator, and so does a call that is profiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from fusion.runtime import kernels
from fusion.runtime.guards import Executor

OPERATOR = "torch.ops.fusion.attention_below_autograd.default"


class Bound:
    """`(operands, sizes) -> output` of one spec on a type of device; its kernel is looked up at the first call."""

    def __init__(self, spec: str, device: str, request: str):
        self.described = (spec, device, request)
        self._run: Executor | None = None
        kernels.holders.add(self)

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if profiler._is_profiler_enabled:
            spec, _, request = self.described
            return torch.ops.fusion.attention_below_autograd(operands, sizes, spec, request)
        run = self._run
        if run is None:
            run = self._run = kernels.executor(*self.described).__call__
        return run(operands, sizes)

    def forget(self) -> None:
        """Look the kernel up again at the next call."""
        self._run = None


def bound_attention(spec: str, device: str, request: str) -> Executor:
    """The function of a spec on a type of device. spec, request: as text. A method, which is called faster than an
    object."""
    return Bound(spec, device, request).__call__


def teach_inductor() -> None:
    """Let the Python code that Inductor writes call bound functions. Versions of torch that have no place for it write
    calls of the operator."""
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    except ImportError:
        return
    CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(OPERATOR, CustomCodegen(python=_write_call))


def _write_call(node: Any, writeline: Callable[[str], None]) -> None:
    """Write the call of a node of Inductor's, and the function that it calls into the head of the code."""
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    wrapper = V.graph.wrapper_code
    if V.graph.fx_wrapper:  # it makes a graph, not code
        writeline(ExternKernelAllocLine(wrapper, node))  # type: ignore[arg-type]
        return
    operands, sizes, spec, request = node.codegen_args()
    arguments = f"{spec}, {node.get_device().type!r}, {request}"
    name = f"attention_{hashlib.sha256(arguments.encode()).hexdigest()[:12]}"
    wrapper.add_import_once("from fusion.runtime.bound import bound_attention")
    wrapper.add_import_once(f"{name} = bound_attention({arguments})")
    writeline(f"{wrapper.declare}{node.get_name()} = {name}({operands}, {sizes}){wrapper.ending}")
