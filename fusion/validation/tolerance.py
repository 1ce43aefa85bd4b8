"""Rule by which a sample of values counts as equal to eager's.

Per sample (one row of the output), elements are compared with a float64 run of the same operations:

    |ours - float64| <= 4 * (eager + condition * eps * size)

eager is eager's largest error in this sample, or its median over samples if that is larger; size likewise the largest
magnitude, of all gradients where it is one (a gradient may cancel to nothing). eps is float32's; `condition` allows for
the growth of last bits in exponentials and cancellation, for which half precision's eps stands where tensors have it.
The house rule's 2 is a 4 here: eager's error in few elements is left to chance.

Where eager is further than APART * the largest size from its float64 run, that run is another function (-1e9 + s is s
up to a shift in float64, and -1e9 in float32). Ours must then be near one of the two, within a quarter of their
distance; for half precision also near a float32 run, as kernels compute.

NaN and infinities must stand where eager has them. Where its float64 run disagrees, eager overflowed: it is still the
law in samples of ordinary values and masks (for half precision either will do), and special values are left out there.
Where exponentials without a maximum overflow in eager alone, nothing is compared.

Eager's error in a few elements is luck. So a violation of the rule is compared once more, with additional runs of eager
whose Q, K and V differ in their last digits: their spread is rounding, too. A sample with a spread of more than APART
in float32 says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import exactness
from fusion.exactness import APART
from fusion.validation.samples import EAGER_OVERFLOW, SPECIAL

_KINDS = ("ordinary values", "masks and fills", "values that tie", "special values", "overflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """One quantity computed in three ways: by eager, by the same operations in float64, and by the spec. Flat, of one
    length.

    samples: the number of each element's sample.
    kinds: of each sample.
    single: eager's values in float32, if they count, too.
    nudged: eager's values where its inputs differ in their last digits.
    strict: whether eager's overflows count.
    floor: of `size`, per sample.
    coarse: the eps of half precision.
    """

    name: str
    eager: Tensor
    exact: Tensor
    ours: Tensor
    samples: Tensor
    kinds: Tensor
    single: Tensor | None = None
    nudged: Sequence[Tensor] = ()
    strict: bool = True
    condition: float = 16
    floor: Tensor | None = None
    coarse: float = 0.0


def difference(values: Values) -> str | None:
    """Text of the first disagreement; None where there is none."""
    eager, exact, ours = (t.detach().double() for t in (values.eager, values.exact, values.ours))
    kinds = values.kinds[values.samples]
    theirs, true, own = (exactness.special(t) for t in (eager, exact, ours))
    free = ((theirs != true) & (kinds == SPECIAL)) | ((theirs != 0) & (kinds == EAGER_OVERFLOW))
    allowed = (own == theirs) | free | ((own == true) & (not values.strict))
    if bool((wrong := ~allowed).any()):
        return _message(values, int(wrong.nonzero()[0]), "")
    finite = (theirs == 0) & (true == 0) & (own == 0)
    count = len(values.kinds)
    single = eager if values.single is None else values.single.detach().double()
    far = torch.minimum((ours - eager).abs(), (ours - single).abs())
    error, eager_error, apart = (
        _largest(value, finite, values.samples, count) for value in ((ours - exact).abs(), (eager - exact).abs(), far)
    )
    size = _largest(exact.abs(), finite, values.samples, count)
    size = _at_least_median(size if values.floor is None else torch.maximum(size, values.floor))
    precision = max(values.condition * torch.finfo(torch.float32).eps, values.coarse)
    bound = exactness.bound(_at_least_median(eager_error), precision, size, slack=4)
    elsewhere = eager_error > APART * size.max()
    error = torch.where(elsewhere, torch.minimum(error, apart), error)
    bound = torch.where(elsewhere, eager_error / 4, bound)
    for nudged in values.nudged:
        moved = (nudged.detach().double() - eager).abs().nan_to_num(0.0, 0.0, 0.0)
        moved = _largest(moved, finite, values.samples, count)
        chaotic = (moved > APART * size) & (values.coarse == 0)
        bound = torch.maximum(bound, torch.where(chaotic, math.inf, 4 * moved))
    if not bool((error > bound).any()):
        return None
    sample = int((error / bound.clamp(min=1e-300)).argmax())
    own_error = (ours - exact).abs()
    own_error = torch.where(elsewhere[values.samples], torch.minimum(own_error, far), own_error)
    worst = int(torch.where(finite & (values.samples == sample), own_error, -1.0).argmax())
    return _message(values, worst, f", allowed {bound[sample]:.1e}")


def _largest(value: Tensor, where: Tensor, samples: Tensor, count: int) -> Tensor:
    masked = torch.where(where, value, 0.0)
    return torch.zeros(count, dtype=torch.float64).scatter_reduce(0, samples, masked, "amax")


def _at_least_median(value: Tensor) -> Tensor:
    return value.clamp(min=float(value.median()) if value.numel() else 0.0)


def _message(values: Values, at: int, allowed: str) -> str:
    kind = _KINDS[int(values.kinds[values.samples[at]])]
    eager, exact, ours = (float(t[at].detach()) for t in (values.eager, values.exact, values.ours))
    return f"{values.name} is {ours:.6g} where eager has {eager:.6g} (float64 {exact:.6g}{allowed}; {kind})"
