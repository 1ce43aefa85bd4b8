"""Comparison of a kernel's results with those of the reference interpreter, by the rule for numbers
(`fusion.exactness`).

"Eager" is the interpreter in the dtype of the kernel's products, the reference that in float64. Elements count where
the two are finite, or are the same infinity or NaN: eager may leave the range of its dtype where a kernel does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.exactness import errors, special

LIMIT = 4.0
"""By how much results may be beyond the rule. Few elements have errors by luck: of right kernels one trial in a hundred
is beyond it; a fault is so by orders of magnitude."""
VANISHING = 16
"""Roundings of the largest result below which a gradient is one that cancels to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Results by name, each computed in three ways."""

    ours: Mapping[str, Tensor]
    eager: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]

    def problem(self, dtype: torch.dtype) -> str | None:
        """Text of the kernel's fault; None where there is none. dtype: of the products."""
        largest = max((_size(x) for x in self.exact.values()), default=0.0)
        for name, ours in self.ours.items():
            if (found := _problem(name, ours, self.eager[name], self.exact[name], dtype, largest)) is not None:
                return found
        return None

    @property
    def finite(self) -> float:
        """Share of the elements that are finite."""
        counts = [(int(x.isfinite().sum()), x.numel()) for x in self.exact.values()]
        return sum(n for n, _ in counts) / max(1, sum(n for _, n in counts))


def _problem(name: str, ours: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype, largest: float) -> str | None:
    if ours.shape != eager.shape:
        return f"{name} has the shape {list(ours.shape)} where it should be {list(eager.shape)}"
    dtype = max(dtype, eager.dtype, key=lambda d: torch.finfo(d).eps)
    eps = torch.finfo(dtype).eps
    ours, eager, exact = (x.detach().double() for x in (ours, eager, exact))
    compared = special(eager) == special(exact)
    ours, eager, exact = (torch.where(compared, x, 0.0) for x in (ours, eager, exact))
    if name.startswith("the gradient") and _size(exact) <= VANISHING * eps * largest / 1e3:
        compared = ours.isfinite() & (ours.abs() <= VANISHING * eps * largest)
        ours = torch.where(compared, exact, ours)
    found = errors(ours, eager, exact, dtype)
    if found.share <= LIMIT:
        return None
    if found.misplaced:
        return (
            f"{name} has NaN or infinities at {found.misplaced} of {ours.numel()} elements where it should not, or not"
        )
    return f"{name} is off by {found.max_error:.2g} where {found.max_bound:.2g} is allowed"


def _size(x: Tensor) -> float:
    return float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0
