"""Operators of torch's dispatcher: their types, schemas and registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = [
    "ENCODER_LAYER", "SELF_ATTENTION", "HigherOrderOperator", "OpOverload", "OpOverloadPacket", "assert_async",
    "enter_autocast", "has_kernel", "is_impure", "leave_autocast", "register_fake", "schema",
]  # fmt: skip

enter_autocast, leave_autocast = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
"""The calls that a graph has for `with torch.autocast(...)`."""
SELF_ATTENTION, ENCODER_LAYER = torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd
"""The calls that a graph has for the fused inference of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`."""


def schema(operator: OpOverload) -> torch.FunctionSchema:
    """Names, types and defaults of arguments, and which of them are written to or returned."""
    return operator._schema


is_impure = torch._library.utils.is_impure
"""Whether calls may not be removed although their results are unused. Takes the operator, since `Node.is_impure`
computes it again for each call."""


def has_kernel(operator: OpOverload, key: str) -> bool:
    """Whether an operator has a kernel of its own at a dispatch key: "AutocastCPU" of those that autocast rules."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def register_fake(library: torch.library.Library, name: str, shapes: Callable[..., Any], source: str) -> None:
    """`torch.library.register_fake` without its search for the caller, which looks at every imported file.

    name: with the namespace. source: the file that errors name.
    """
    implementation = torch._library.simple_registry.singleton.find(name).fake_impl
    library._registration_handles.append(implementation.register(shapes, source, library))


assert_async = torch._assert_async
"""Let a device raise an error where a condition does not hold, without waiting for it."""
