"""Formulas of gradients for operators whose arguments include lists of tensors, also under torch.func.

`torch.library.register_autograd` makes functions that refuse to run inside of torch.func.grad and its kin. What is
registered here records itself on the level at which it is called, as operators written in C++ do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._functorch.utils import unwrap_dead_wrappers

Setup = Callable[[Any, Sequence[Any], Any], None]
"""(ctx, the operator's arguments, its result) -> None; saves what the backward needs."""

Backward = Callable[..., Sequence[Tensor | None]]
"""(ctx, *gradients of the results) -> the gradient of each tensor among the arguments, lists laid end to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call of an operator without its tensors: `counts` has how many each argument holds, None where it is none."""

    keys: Any
    arguments: tuple[Any, ...]
    counts: tuple[int | None, ...]

    def arguments_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        left = iter(tensors)
        return [
            given if count is None else [next(left) for _ in range(count)] if isinstance(given, list) else next(left)
            for given, count in zip(self.arguments, self.counts, strict=True)
        ]


def _count(argument: Any) -> int | None:
    if isinstance(argument, Tensor):
        return 1
    is_list = isinstance(argument, (list, tuple)) and len(argument) > 0 and isinstance(argument[0], Tensor)
    return len(argument) if is_list else None


def _flat(arguments: Sequence[Any]) -> list[Tensor]:
    listed = [a if isinstance(a, (list, tuple)) else [a] for a in arguments if _count(a) is not None]
    return [tensor for part in listed for tensor in part]


def register(library: torch.library.Library, name: str, backward: Backward, setup: Setup) -> None:
    """Register the gradient of the operator `name` of `library`."""
    op = getattr(torch.ops.fusion, name).default

    def below(keys: Any, arguments: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        arguments = call.arguments_with(tensors)
        result = below(call.keys, arguments)
        setup(ctx, arguments, result)
        return tuple(result) if isinstance(result, list) else result

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *backward(ctx, *gradients)

    parts = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    recorded = type(f"{name}_gradient", (torch.autograd.Function,), parts)
    returns_list = isinstance(op._schema.returns[0].type, torch.ListType)

    def kernel(keys: Any, *arguments: Any) -> Any:
        tensors = _flat(arguments)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return below(keys, arguments)
        counts = tuple(_count(a) for a in arguments)
        described = zip(arguments, counts, strict=True)
        kept = (a if n is None else [] if isinstance(a, (list, tuple)) else None for a, n in described)
        call = _Call(keys=keys, arguments=tuple(kept), counts=counts)
        # The `apply` of Function's own base: its own refuses to run under torch.func for want of a `setup_context`.
        apply = super(torch.autograd.Function, recorded).apply
        with enable_single_level_autograd_function():
            result = apply(call, *unwrap_dead_wrappers(tuple(tensors)))
        return list(result) if returns_list else result

    library.impl(name, kernel, "Autograd", with_keyset=True)
