"""Tensors: memory, versions, the components of wrappers and nested tensors, and containers of tensors. Fake tensors,
and the mode that they belong to: the values of the analysis of a graph; symbolic sizes, their known properties, and
the functions in their expressions."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import active_fake_mode, detect_fake_mode
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils._sympy import functions

try:
    from torch.fx.experimental.symbolic_shapes import optimization_hint
except ImportError:  # before torch 2.12
    from torch.fx.experimental.symbolic_shapes import size_hint as optimization_hint

__all__ = [
    "FAKE_TENSOR_LOG", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "constant_of", "detect_fake_mode",
    "empty_strided_cpu", "enable_python_dispatcher", "fast_detach", "free_unbacked_symbols", "functions", "has_symbols",
    "is_dtensor", "is_out_of_memory", "is_traceable_wrapper_subclass", "is_view", "mode_of", "nested_like",
    "nested_parts", "nested_size", "optimization_hint", "public_empty_strided", "ragged_dim", "real_object",
    "remember_item", "shape_environment", "shares_storage", "statically_known_true", "tree_flatten", "tree_leaves",
    "tree_map", "tree_map_only", "tree_unflatten", "unset_fake_temporarily", "version", "without_guards",
]  # fmt: skip


FAKE_TENSOR_LOG = logging.getLogger(FakeTensor.__module__)
"""Log to which torch writes its stack when an operation on fake tensors fails, before it raises the error."""


def public_empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A stand-in for `empty_strided_cpu` where torch has none."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


empty_strided_cpu = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", public_empty_strided)
"""(sizes, strides, dtype) -> tensor. Inductor's code makes tensors with it, in half the time of torch's own."""


def version(tensor: torch.Tensor) -> int:
    """Number of in-place changes of a tensor. Without it, a tensor that was changed would pass for unchanged."""
    return tensor._version


shares_storage = torch._C._is_alias_of
"""Whether two tensors have the same memory, also fake ones. (Their addresses are 0.)"""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, of a device or of the host. For the host's, torch raises a general
    type of error: it is recognised by the allocator's name in the text."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, found out without importing `torch.distributed.tensor`."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def nested_parts(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, offsets) of a jagged nested tensor, which its methods return with a gradient, as calls of a graph."""
    return nested._values, nested._offsets


def nested_size(nested: Any) -> tuple[Any, ...]:
    """Sizes of a jagged nested tensor, without a guard of Dynamo."""
    return nested._size


def ragged_dim(nested: Any) -> int:
    """Dimension of a jagged nested tensor whose length differs."""
    return nested._ragged_idx


def nested_like(values: torch.Tensor, other: Any) -> Any:
    """Values as a nested tensor of the sequences of another. `torch.nested.nested_tensor_from_jagged` would look for
    the longest sequence again, and would not take the length of one tensor for that of the other."""
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets

    extremes = {"min_seqlen": other._maybe_min_seqlen, "max_seqlen": other._maybe_max_seqlen}
    return nested_view_from_values_offsets(values, other.offsets(), **extremes)


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


is_view = FakeTensor._is_view
"""Whether a tensor is a view, for autograd."""


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
