"""Running generated modules in Triton's interpreter, on CPU tensors, without setting TRITON_INTERPRET for the whole process.

Triton decides when a function is decorated whether it will be interpreted. Modules are therefore loaded with the switch on, and while
a kernel runs, the reductions of Triton's own library (compiled functions in such a process) are replaced by interpreted ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_REDUCTIONS = ("max", "sum")


@contextlib.contextmanager
def decorating() -> Iterator[None]:
    """Functions that are decorated inside will be interpreted."""
    from triton import knobs

    before = knobs.runtime.interpret
    knobs.runtime.interpret = True
    try:
        yield
    finally:
        knobs.runtime.interpret = before


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Interpreted kernels can be called inside."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    before = {name: getattr(tl, name) for name in _REDUCTIONS}
    for name, function in before.items():
        if isinstance(function, JITFunction):
            setattr(tl, name, InterpretedFunction(function.fn))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(tl, name, function)
