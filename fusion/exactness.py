"""Tolerance for all numerical results: as exact as eager.

    error(actual, reference) <= 2 * (error(eager, reference) + eps * size(reference))

`reference` is computed in float64, `eager` by plain torch in the dtype under test, eps is that dtype's. The rule holds
per tensor in two norms, because each is blind to something:

- the largest absolute error sees a single wrong element (a tail column, a dead row); size is the largest magnitude;
- the root mean square sees a small error everywhere (a scale off by 1e-3, statistics in half precision), below eager's
  largest; size is the root mean square. A mean of many roundings barely depends on luck: a factor of two is a real
  bound.

Errors are absolute within a tensor: attention averages, so elements near zero carry the rounding of large ones, and
relative errors of single elements say nothing. NaN and infinities must stand where eager has them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusion.torch_private.tensors import TorchDispatchMode, tree_leaves, tree_map

Number = TypeVar("Number", float, Tensor)


APART = 0.02
"""Share of the largest magnitude by which eager is off its float64 run where that is another function."""


def is_float(value: Any) -> bool:
    """True for a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def widened(value: Any) -> Any:
    """Tensor of floating-point numbers in float64; any other value unchanged."""
    return value.double() if is_float(value) else value


def copied(value: Any) -> Any:
    """Copy of a tensor, without its history; any other value unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def floats(result: Any) -> list[Tensor]:
    """Floating-point tensors of a result, detached; a model's output object counts as its tuple."""
    result = result.to_tuple() if hasattr(result, "to_tuple") else result
    return [leaf.detach().clone() for leaf in filter(is_float, tree_leaves(result))]


class InFloat64(TorchDispatchMode):
    """Float64 wherever a computation says float32: a cast that is written into a model, a tensor that it makes, or one
    that it captured. Tensors that are changed in place stay what they are."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        changes = function._schema.is_mutable

        def wide(value: Any) -> Any:
            if value is torch.float32:
                return torch.float64
            return value.double() if isinstance(value, Tensor) and value.dtype is torch.float32 else value

        def dtype(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        positional, named = tree_map(dtype if changes else wide, (tuple(args), dict(kwargs or {})))
        result = function(*positional, **named)
        return result if changes else tree_map(wide, result)


def in_float64(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """`floats` of a call in float64, with copies of the arguments, and of a function that is a module."""
    run = copy.deepcopy(function).double() if isinstance(function, torch.nn.Module) else function
    args, kwargs = tree_map(lambda leaf: widened(copied(leaf)), (tuple(args), dict(kwargs)))
    with InFloat64():
        return floats(run(*args, **kwargs))


def reference(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor] | None, str]:
    """(the results of a call in float64, ""), or (None, the reason) where it asks for another dtype."""
    try:
        return in_float64(function, args, kwargs), ""
    except Exception as problem:
        first, *_ = str(problem).splitlines() or [""]
        return None, f"There is no float64 reference ({type(problem).__name__}: {first})."


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Comparison of a tensor with eager's: errors and bounds in both norms, over elements that are finite in eager and
    in the reference. misplaced: number of elements where NaN and infinities differ from eager's. eager_share: eager's
    largest error / the largest magnitude. apart: whether that is more than rounding, so that the float64 run is another
    function (a comparison that falls the other way) and the bound says nothing."""

    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float
    misplaced: int
    eager_share: float
    apart: bool

    @property
    def share(self) -> float:
        """The larger error / bound; at most 1 where the rule holds."""
        pairs = [(self.max_error, self.max_bound), (self.rms_error, self.rms_bound)]
        shares = [0.0 if error == 0 else error / bound if bound else float("inf") for error, bound in pairs]
        return float("inf") if self.misplaced or any(share != share for share in shares) else max(shares)

    @property
    def figures(self) -> tuple[float, float]:
        """(error, bound) in one norm: the largest error, unless only the root mean square breaks the rule."""
        if self.misplaced:
            return float("inf"), self.max_bound
        only_rms = self.share > 1 and self.max_error <= self.max_bound
        return (self.rms_error, self.rms_bound) if only_rms else (self.max_error, self.max_bound)

    def __str__(self) -> str:
        if self.misplaced:
            return f"NaN or infinities stand elsewhere at {self.misplaced} elements"
        text = f"error {self.max_error:.3g}, allowed {self.max_bound:.3g}"
        if self.figures != (self.max_error, self.max_bound):
            text += f"; root mean square {self.rms_error:.3g}, allowed {self.rms_bound:.3g}"
        if self.apart:
            text += f"; cannot be judged: eager itself is {100 * self.eager_share:.2g} % off its float64 run"
        return text


def bound(eager_error: Number, eps: float, size: Number, slack: float = 2) -> Number:
    """Error that is allowed."""
    return slack * (eager_error + eps * size)


def special(value: Tensor) -> Tensor:
    """0 for finite elements, 1 for NaN, 2 and 3 for the infinities (of complex numbers 2)."""
    if value.is_complex():
        return value.isnan() * 1 + (value.isinf() & ~value.isnan()) * 2
    return value.isnan() * 1 + value.isposinf() * 2 + value.isneginf() * 3


def norms(value: Tensor) -> tuple[float, float]:
    """(largest, root mean square) of the magnitudes; 0 of an empty tensor."""
    return (float(value.abs().max()), float(value.abs().square().mean().sqrt())) if value.numel() else (0.0, 0.0)


def errors(actual: Tensor, eager: Tensor, reference: Tensor, dtype: torch.dtype | None = None) -> Errors:
    """Comparison of one floating-point tensor with eager's; of nested tensors the values are compared. dtype: that of
    the computation, where that is coarser than the tensor's."""
    actual, eager, reference = (t.values() if t.is_nested else t for t in (actual, eager, reference))
    wide = torch.complex128 if eager.is_complex() else torch.float64
    finite = eager.isfinite() & reference.isfinite()
    eps = max(torch.finfo(t).eps for t in (eager.dtype, dtype or eager.dtype))
    misplaced = int((special(actual) != special(eager)).sum())
    own, theirs, true = (t.detach().to(wide)[finite] for t in (actual, eager, reference))
    (max_error, rms_error), (max_eager, rms_eager), (max_size, rms_size) = map(norms, (own - true, theirs - true, true))
    eager_share = max_eager / max_size if max_size else 0.0
    return Errors(
        max_error=max_error,
        max_bound=bound(max_eager, eps, max_size),
        rms_error=rms_error,
        rms_bound=bound(rms_eager, eps, rms_size),
        misplaced=misplaced,
        eager_share=eager_share,
        apart=eager_share > max(APART, 8 * eps),
    )
