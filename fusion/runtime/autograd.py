"""Formulas of gradients for operators whose arguments include lists of tensors, also under torch.func.

Functions of `torch.library.register_autograd` refuse to run inside of torch.func.grad and similar transforms. The
formulas of this module record themselves on the level at which they are called, as operators written in C++ do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.runtime.derivatives import Function, tangents
from fusion.torch_private import autograd
from fusion.torch_private.operators import schema

Setup = Callable[[Any, Sequence[Any], Any], None]
"""(ctx, the operator's arguments, its result) -> None; saves what the backward needs."""

Backward = Callable[..., Sequence[Tensor | None]]
"""(ctx, *gradients of the results) -> the gradient of each tensor among the arguments, lists laid end to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call of an operator without its tensors. `counts`: the number of tensors in each argument, None for other
    arguments; `modes`: whether gradients are recorded, and whether tangents are propagated."""

    keys: Any
    modes: tuple[bool, bool]
    arguments: tuple[Any, ...]
    counts: tuple[int | None, ...]

    def arguments_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        left = iter(tensors)
        return [
            given if count is None else [next(left) for _ in range(count)] if isinstance(given, list) else next(left)
            for given, count in zip(self.arguments, self.counts, strict=True)
        ]

    @contextlib.contextmanager
    def in_modes(self) -> Iterator[None]:
        """Restore the modes of the call, which `apply` has ended, for the levels of torch.func below its own as
        well."""
        recording, moving = self.modes
        with torch.set_grad_enabled(recording), autograd.carrying_tangents(moving):
            yield


def _count(argument: Any) -> int | None:
    if isinstance(argument, Tensor):
        return 1
    is_list = isinstance(argument, (list, tuple)) and len(argument) > 0 and isinstance(argument[0], Tensor)
    return len(argument) if is_list else None


def flat(arguments: Sequence[Any]) -> list[Tensor]:
    listed = [a if isinstance(a, (list, tuple)) else [a] for a in arguments if _count(a) is not None]
    return [tensor for part in listed for tensor in part]


Derivative = Callable[[Sequence[Any]], Function]
"""Choice of the derivative of an attention that a call with these arguments is."""


def register(
    library: torch.library.Library, name: str, backward: Backward, setup: Setup, derivative: Derivative | None = None
) -> None:
    """Register the gradient of the operator `name` of `library`; with `derivative` its tangents, too."""
    op = getattr(torch.ops.fusion, name).default
    recorded = _recorded(op, name, backward, setup, derivative)

    def kernel(keys: Any, *arguments: Any) -> Any:
        tensors = flat(arguments)
        recording = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not recording and (derivative is None or not any(map(_moves, tensors))):
            return autograd.below(op, keys, arguments)
        counts = tuple(_count(a) for a in arguments)
        described = zip(arguments, counts, strict=True)
        structure = (a if n is None else [] if isinstance(a, (list, tuple)) else None for a, n in described)
        modes = torch.is_grad_enabled(), autograd.carries_tangents()
        call = _Call(keys=keys, modes=modes, arguments=tuple(structure), counts=counts)
        result = autograd.recorded_here(recorded, call, *tensors)
        return list(result) if isinstance(schema(op).returns[0].type, torch.ListType) else result

    library.impl(name, kernel, "Autograd", with_keyset=True)


def _recorded(op: Any, name: str, backward: Backward, setup: Setup, derivative: Derivative | None) -> Any:
    """Autograd node of an operator: a function on one level of torch.func, as torch itself creates one for each level
    of a `torch.autograd.Function`, which refuses to run there for want of a `setup_context`."""

    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        arguments = call.arguments_with(tensors)
        with call.in_modes():
            result = autograd.below(op, call.keys, arguments)
        setup(ctx, arguments, result)
        ctx.call, ctx.results = call, None if isinstance(result, Tensor) else len(result)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(result) if isinstance(result, list) else result

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *backward(ctx, *gradients)

    def move(ctx: Any, _: None, *moving: Tensor | None) -> Any:
        assert derivative is not None
        with ctx.call.in_modes():
            tensors = [autograd.unpack_dual(x)[0] for x in ctx.saved_tensors]
            tangent_of = tangents(derivative(ctx.call.arguments_with(tensors)), tensors, moving)
        return tangent_of[0] if ctx.results is None else tuple(map(tangent_of.get, range(ctx.results)))

    parts = {"forward": forward, "backward": differentiate} | ({"jvp": move} if derivative else {})
    own = {key: staticmethod(part) for key, part in parts.items()}
    return type(f"{name}_gradient", (autograd.SingleLevelFunction,), own)


def _moves(tensor: Tensor) -> bool:
    """Whether a tensor has a tangent, on the level at which an operator is called."""
    return autograd.carries_tangents() and autograd.unpack_dual(tensor)[1] is not None
