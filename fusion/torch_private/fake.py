"""Fake tensors, and the mode that they belong to: the values of the analysis of a graph. Symbolic sizes,
their known properties, and the functions in their expressions."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import active_fake_mode, detect_fake_mode
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._sympy import functions

try:
    from torch.fx.experimental.symbolic_shapes import optimization_hint
except ImportError:  # before torch 2.12
    from torch.fx.experimental.symbolic_shapes import size_hint as optimization_hint

__all__ = [
    "FakeTensor", "FakeTensorMode", "constant_of", "detect_fake_mode", "enable_python_dispatcher", "fast_detach",
    "free_unbacked_symbols", "functions", "has_symbols", "is_view", "mode_of", "optimization_hint", "real_object",
    "remember_item", "shape_environment", "statically_known_true", "unset_fake_temporarily", "without_guards",
]  # fmt: skip


def mode_of(tensor: Any) -> FakeTensorMode | None:
    """Mode of a fake tensor; None for any other value."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def shape_environment(value: Any) -> Any:
    """ShapeEnv (symbols and guards) of a fake tensor, or of a symbolic number; None for any other value."""
    if isinstance(value, FakeTensor):
        return value.fake_mode.shape_env
    return getattr(getattr(value, "node", None), "shape_env", None)


def without_guards() -> contextlib.AbstractContextManager[None]:
    """Context in which questions about symbolic sizes add no guards."""
    mode = active_fake_mode()
    return contextlib.nullcontext() if mode is None or mode.shape_env is None else mode.shape_env.suppress_guards()


def is_view(fake: FakeTensor) -> bool:
    """Whether a tensor is a view, for autograd."""
    return fake._is_view()


def has_symbols(fake: FakeTensor) -> bool:
    """Whether sizes or strides are symbols."""
    return fake._has_symbolic_sizes_strides


def constant_of(fake: FakeTensor) -> torch.Tensor | None:
    """Values of a fake tensor that torch knows, which may decide the operations of a call; else None."""
    return fake.constant


def remember_item(fake: FakeTensor, item: Any) -> None:
    """Let `fake.item()` be this symbol. Without it, each trace would make a new one without known properties."""
    fake.item_memo = item


def real_object(value: Any) -> Any:
    """Device mesh behind Dynamo's stand-in for it; any other value unchanged."""
    from torch._library.fake_class_registry import FakeScriptObject

    return value.real_obj if isinstance(value, FakeScriptObject) else value
