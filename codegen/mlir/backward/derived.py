"""Facts that follow from the sizes and strides of a backward call, and is derived once for all that have them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fusion.ir.elements import Elements
from fusion.ir.results import packed_strides, size_value
from fusion.lowering.backward_plan import BackwardPlan, RowSum

from ..calling import Launch, empty_strided
from .tile import Kind


class Memory(NamedTuple):
    """Memory to be written; zeroed first where not all of it will be."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    covered: bool

    def make(self) -> Tensor:
        result = empty_strided(self.shape, self.strides, self.dtype)
        return result if self.covered else result.zero_()


class Sum(NamedTuple):
    """Sum that turns one element per index into an operand's gradient: heads that read the same keys are added up.
    split: the shape in which every coordinate is two, of which the second tells apart what reads the same. shape,
    strides, first: of what is left in the gradient's memory."""

    split: tuple[int, ...]
    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    def of(self, x: Tensor) -> Tensor:
        result = self.memory.make()
        view = result.as_strided(self.shape, self.strides, self.first)
        view.copy_(x.view(self.split).sum(tuple(range(1, len(self.split), 2))))
        return result


class Result(NamedTuple):
    """Memory that kernels write a gradient of Q, K or V to: that of the operand, where each of its elements is read
    once, else one element per index. first, by_name: where the first element is, and the distances of neighbouring
    ones. sum: makes the gradient of the latter; None where it is gathered."""

    memory: Memory
    first: int
    by_name: dict[str, int]
    sum: Sum | None

    def start(self, result: Tensor) -> Tensor:
        return result.as_strided((), (), self.first) if self.first else result


def result(plan: BackwardPlan, number: int, operand: Tensor, extents: Sequence[int], sizes: Sequence[int]) -> Result:
    """The place of Q, K or V (number 0, 1, 2), which has so many batch elements.., rows and columns."""
    names, spec, read = [*(f"b{n}" for n in range(len(extents) - 2)), "row", "column"], plan.spec, plan.elements[number]
    known, shape = dict(zip(spec.sizes, sizes, strict=True)), tuple(operand.shape)
    strides = packed_strides(shape, spec.operands[number].order or range(len(shape)))
    if read is not None and read.apart:
        covered = math.prod(extents) == operand.numel()
        by_coordinate, first = read.strides(strides, known)
        memory, added = Memory(shape, strides, operand.dtype, covered), None
    else:
        by_coordinate, first = packed_strides(extents), 0
        memory = Memory(tuple(extents), by_coordinate, torch.float32, covered=True)
        added = None if read is None else _sum(read, Memory(shape, strides, operand.dtype, False), extents, known)
    return Result(memory, first, dict(zip(names, by_coordinate, strict=True)), added)


def _sum(read: Elements, gradient: Memory, extents: Sequence[int], sizes: Mapping[str, int]) -> Sum | None:
    """None where groups are not whole, or elements follow one another backwards, which no view can say."""
    repeats, (strides, first) = [size_value(n, sizes) for n in read.repeats], read.strides(gradient.strides, sizes)
    pairs = [(extent // repeat, repeat) for extent, repeat in zip(extents, repeats, strict=True)]
    left = tuple(groups for groups, _ in pairs)
    if min(strides) < 0 or any(groups * n != extent for (groups, n), extent in zip(pairs, extents, strict=True)):
        return None
    whole = math.prod(left) == math.prod(gradient.shape)
    split = tuple(itertools.chain.from_iterable(pairs))
    return Sum(split, gradient._replace(covered=whole), left, strides, first)


class Step(NamedTuple):
    """A kernel, and what it adds up for each query or key."""

    kind: Kind
    sums: Sequence[RowSum]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """State that calls with the same sizes, memory and number of threads have in common. simple: whether a kernel makes
    the deltas, from nothing but dO and O. steps, launchers: by the number of the tiling, made when they are first asked
    for. right: those whose gradients have been proved."""

    extents: tuple[int, ...]
    threads: int
    results: dict[int, Result]
    simple: bool
    steps: dict[int, Sequence[Step]] = field(default_factory=dict)
    launchers: dict[tuple[Kind, int], Launch] = field(default_factory=dict)
    right: set[int] = field(default_factory=set)
