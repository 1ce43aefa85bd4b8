"""Tensors that are read at sums of multiples of coordinates: strided views of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusion.ir import integers
from fusion.ir.expr import Expr


def is_strided(index: Sequence[Expr], variables: Sequence[Expr]) -> bool:
    """Whether each part of an index is a sum of multiples of some of the variables and a constant."""
    found = [monomial for part in index for monomial in integers.terms(part)]
    return all(not monomial or len(monomial) == 1 and monomial[0] in variables for monomial in found)


def strided(tensor: Tensor, index: Sequence[Expr], variables: Sequence[Expr], extents: Sequence[int]) -> Tensor:
    """View [extents of the variables] of a tensor's elements at an index for which `is_strided` holds."""
    parts = [integers.terms(part) for part in index]

    def step(*monomial: Expr) -> int:
        return sum(part.get(monomial, 0) * stride for part, stride in zip(parts, tensor.stride(), strict=True))

    return tensor.as_strided(extents, [step(each) for each in variables], tensor.storage_offset() + step())
