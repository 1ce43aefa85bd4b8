"""Emitters for tests, made and registered as any package outside of this one would do it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fusion.codegen import triton
from fusion.codegen.triton import differentiable, launch
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
    with unwritten_is_nan(), kernels.emitting("interpreted", ("cpu",), lambda: emitter, lambda _: INTERPRETER, **keeps):
        yield


class _FilledTorch:
    """torch, whose empty tensors have bits of 1: NaN, or -1."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *given: Any, **named: Any) -> torch.Tensor:
        made = torch.empty(*given, **named)
        if made.numel():
            made.view(torch.uint8).fill_(0xFF)
        return made


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """While this lasts, what GPU kernels should write, and do not, is NaN."""
    with contextlib.ExitStack() as stack:
        for module in (launch, differentiable):
            stack.enter_context(mock.patch.object(module, "torch", _FilledTorch()))
        yield
