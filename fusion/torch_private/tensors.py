"""Tensors: memory, versions, the components of wrappers and nested tensors, and containers of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "empty_strided_cpu", "is_out_of_memory", "is_traceable_wrapper_subclass", "nested_like", "nested_parts",
    "nested_size", "public_empty_strided", "ragged_dim", "shares_storage", "tree_flatten",
    "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten", "version",
]  # fmt: skip


def public_empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A stand-in for `empty_strided_cpu` where torch has none."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


empty_strided_cpu = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", public_empty_strided)
"""(sizes, strides, dtype) -> tensor. Inductor's code makes tensors with it, in half the time of torch's own."""


def version(tensor: torch.Tensor) -> int:
    """Number of in-place changes of a tensor. Without it, a tensor that was changed would pass for unchanged."""
    return tensor._version


def shares_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same memory, also fake ones. (Their addresses are 0.)"""
    return torch._C._is_alias_of(tensor, other)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, of a device or of the host. For the host's, torch raises a general
    type of
    error: it is recognised by the allocator's name in the text."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


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
