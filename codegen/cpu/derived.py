"""Facts that follow from the sizes and strides of a backward call, derived once for all calls that have them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fusion.ir.reads import Elements
from fusion.ir.results import packed_strides, size_value
from fusion.lowering.backward_plan import BackwardPlan, Form, RowSum
from fusion.planning import cpu_backward
from fusion.planning.problem import problem_of

from ..mlir.backward.kernel import SMALL_TABLE
from ..mlir.backward.lanes import FUSED, KEYS, QUERIES
from ..mlir.backward.tile import Kind
from .calling import Launch, empty_strided

if TYPE_CHECKING:
    from .backward import BackwardCall

REPRODUCIBLE_SHARES = 8  # of the work that adds to large copies, where results do not depend on the number of threads
MOST_COPIES = 1 << 26  # bytes of copies of scattered gradients, where every piece of work has its own


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
    """A kernel, and what it adds up for each query or key. parts: of each element's blocks; shares: of the work, by
    which pieces are dealt out."""

    kind: Kind
    sums: Sequence[RowSum]
    parts: int
    shares: int


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


def steps_of(call: BackwardCall) -> list[Step]:
    """The kernels that give the gradients: one for all, where there is one and it is predicted to be faster."""
    kernel, plan, needs = call.kernel, call.plan, call.needs
    problem, tiling = problem_of(call.spec, call.sizes), kernel.backward_tilings[call.choice]
    work = cpu_backward.backward_of(problem, kernel.machine, kernel.target, tiling, call.inner)
    fused = needs[0] and (needs[1] or needs[2] and tiling.planes > 0)
    if fused:
        fused = work.fuses and not call.spec.reproducible if kernel.fused is None else kernel.fused
    forms = [(FUSED, cpu_backward.FUSED)] if fused else [(QUERIES, cpu_backward.QUERIES), (KEYS, cpu_backward.KEYS)]
    return [
        step_of(call, kind, work.division(form).parts)
        for kind, form in forms
        if plan.of(kind.forms, needs) or any(needs[n] for n in kind.gradients)
    ]


def step_of(call: BackwardCall, kind: Kind, parts: int) -> Step:
    """A kernel, with each element's blocks in so many parts. Scattered gradients are added to a copy of each share: of
    each piece of work, so that they do not depend on the number of threads, if these are not too large."""
    parts = call.kernel.parts or parts
    pieces = math.prod(call.batch) // call.inner * parts
    scattered = {entry.operand for entry in call.plan.of({Form.SCATTERED} & set(kind.forms), call.needs)}
    tables = [call.operands[number] for number in scattered]
    large = 4 * pieces * sum(copies_of(table) * table.numel() for table in tables) > MOST_COPIES
    shares = min(REPRODUCIBLE_SHARES if call.spec.reproducible else call.derived.threads, pieces) if large else pieces
    return Step(kind, call.plan.sums(kind.forms, call.needs), parts, shares)


def copies_of(table: Tensor) -> int:
    """Number of copies that a share has of a scattered gradient."""
    return 2 if table.numel() <= SMALL_TABLE else 1
