"""What follows from the sizes and strides of a backward call, and is derived once for all that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fusion.codegen.mlir.backward.kernel import BackwardKernel
from fusion.codegen.mlir.backward.plan import BackwardPlan, RowSum
from fusion.codegen.mlir.calling import Launch, empty_strided
from fusion.ir.results import packed_strides
from fusion.ir.spec import AttentionSpec


class Sum(NamedTuple):
    """How one element per index becomes an operand's gradient: heads that read the same keys are added up. split: the
    shape in which every coordinate is two, of which the second tells apart what reads the same."""

    split: tuple[int, ...]
    over: tuple[int, ...]  # dimensions of that to add up
    order: tuple[int, ...]  # of those that are left, in the operand

    def of(self, x: Tensor, like: Tensor) -> Tensor:
        return x.view(self.split).sum(self.over).permute(self.order).reshape(like.shape).to(like.dtype)


def summing(spec: AttentionSpec, number: int, shape: Sequence[int], extents: Sequence[int]) -> Sum | None:
    """For Q, K or V of this shape, which has so many batch elements.., rows and columns; None where it is indexed by
    anything but a coordinate, one divided by a constant, or 0."""
    index, *own = spec.access(number)
    names = [*spec.axes, *own]
    kept, repeats = [], [1] * len(names)
    for expr, size in zip(index, shape, strict=True):
        if expr.is_const and size == 1:
            continue
        divided = expr.op == "floordiv" and expr.args[1].is_const
        name, repeat = (expr.args[0], expr.args[1].integer) if divided else (expr, 1)
        if name not in names or names.index(name) in kept or extents[names.index(name)] != size * repeat:
            return None
        kept.append(names.index(name))
        repeats[kept[-1]] = repeat
    split = tuple(n for extent, repeat in zip(extents, repeats, strict=True) for n in (extent // repeat, repeat))
    over = tuple(dim for dim in range(len(split)) if dim % 2 or dim // 2 not in kept)
    return Sum(split, over, tuple(sorted(kept).index(axis) for axis in kept))


class Result(NamedTuple):
    """Memory for the gradient of Q, K or V: the operand's gradient itself, or one element per index; see `result`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    by_name: dict[str, int]
    covered: bool
    sum: Sum | None

    def make(self) -> Tensor:
        made = empty_strided(self.shape, self.strides, self.dtype)
        return made if self.covered else made.zero_()


def result(plan: BackwardPlan, number: int, operand: Tensor, extents: Sequence[int]) -> Result:
    """Of Q, K or V (number 0, 1, 2), which has so many batch elements.., rows and columns.

    Its strides are by the names of these; where kernels do not write all of it, it is zeroed."""
    names, places, spec = [*(f"b{n}" for n in range(len(extents) - 2)), "row", "column"], plan.places[number], plan.spec
    if places is None:
        shape, dtype, places = tuple(extents), torch.float32, range(len(extents))
        strides = packed_strides(shape, places)
    else:
        shape, dtype = tuple(operand.shape), operand.dtype
        strides = packed_strides(shape, spec.operands[number].order or range(len(shape)))
    covered = all(extent == shape[dim] for dim, extent in zip(places, extents, strict=True))
    by_name = dict(zip(names, (strides[dim] for dim in places), strict=True))
    return Result(shape, strides, dtype, by_name, covered, summing(spec, number, operand.shape, extents))


class Step(NamedTuple):
    """A kernel, and what it adds up for each query or key."""

    kind: type[BackwardKernel]
    sums: Sequence[RowSum]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What calls with the same sizes, memory and number of threads have in common. simple: whether a kernel makes the
    deltas, from nothing but dO and O. steps, launchers: by the number of the tiling, made when they are first asked
    for."""

    extents: tuple[int, ...]
    threads: int
    results: dict[int, Result]
    simple: bool
    steps: dict[int, Sequence[Step]] = field(default_factory=dict)
    launchers: dict[tuple[type[BackwardKernel], int], Launch] = field(default_factory=dict)
