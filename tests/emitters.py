"""Emitters for tests, made and registered as any package outside of this one would do it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from fusion.codegen import triton
from fusion.ir import AttentionSpec
from fusion.machine import INTERPRETER
from fusion.runtime import kernels

Make = Callable[[AttentionSpec], Any]


@contextlib.contextmanager
def interpreted(make: Make | None = None, train: Make | None = None) -> Iterator[None]:
    """While this lasts `torch.compile(..., backend="fusion")` runs GPU kernels on CPU tensors, in Triton's interpreter.
    make, train: spec -> kernel, in place of the emitter's."""
    emitter: Any = SimpleNamespace(
        supports=triton.supports,
        reads=triton.reads,
        compile=triton.compile if make is None else lambda spec, *_: make(spec),
        compile_training=triton.compile_training if train is None else lambda spec, *_: train(spec),
    )
    keeps: Any = {"aux_outputs": True, "reproducible": True}
    with kernels.emitting("interpreted", ("cpu",), lambda: emitter, lambda device: INTERPRETER, **keeps):
        yield
