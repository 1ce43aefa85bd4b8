"""Division of a backward among the cores of a CPU: which kernels run, and into how many parts the work of a batch
element is cut.

    two kernels   scores and dP for dQ, with queries in lanes; scores and dP for dK and dV, with keys in lanes: seven
                  products, two exponentials of each score; nothing is summed up across blocks of lanes
    one kernel    scores and dP once, with keys in lanes: five products, one exponential; dQ is summed up in memory

A part of an element's blocks is a piece of work, which a thread takes when it is free. Each packs the rows that its
blocks meet. In the one kernel it also leaves a dQ of all queries, and the last piece of an element adds up those of all
(split-K). Parts follow from sizes and the machine's cores, not from the number of threads, since sums depend on them.

Cycles of products, exponentials and packing are those of the forward (`cpu.COSTS`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning.choice import Choice, Tile
from fusion.planning.cpu import COSTS, MERGED, MOST_PACKED, PLANE_PRODUCTS
from fusion.planning.problem import Problem
from fusion.planning.register_tiles import PLANES, Target, Tiling, backward_tiling, target_for, tilings_for

PART_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of parts that are weighed."""
MOST_PIECES = 6
"""Pieces of work per core at most, where elements are cut for the sake of idle cores."""
MOST_ELEMENTS = 1024
"""Batch elements of a call that can be cut: each has a counter of parts that are done."""
LEAST_ROOM = 256 << 20
"""Bytes that the dQ of parts may take; or as much as the threads' packed rows, if more, up to `cpu.MOST_PACKED`."""


class Form(NamedTuple):
    """A kernel: whether its lanes are keys; how many products, and how many packed copies of rows, are of width d and
    of d_v; whether dQ is summed up in memory."""

    by_keys: bool
    products: tuple[int, int]
    copies: tuple[int, int]
    sums: bool = False


QUERIES, KEYS = Form(False, (2, 1), (2, 1)), Form(True, (2, 2), (2, 2))
FUSED = Form(True, (3, 2), (2, 2), sums=True)


class Division(NamedTuple):
    """Parts of each element, the last of which may be shorter than `blocks` blocks; predicted seconds; bytes of what
    threads leave for each other."""

    parts: int
    blocks: int
    seconds: float
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A backward of a problem on a machine. outer: batch elements that threads take; inner: those that a thread takes
    in turn for each, as dense gradients are summed over them. block: lane rows of a block; tile: rows of a tile;
    planes: of products on AMX tiles (`amx`), 1 for pairs of bfloat16, 0 for float32 multiply-adds."""

    problem: Problem
    machine: Machine
    outer: int
    inner: int
    block: int
    tile: int
    planes: int
    amx: bool

    def division(self, form: Form) -> Division:
        """Division of least predicted time."""
        return min((self._divided(form, parts) for parts in self._counts(form)), key=lambda each: each.seconds)

    @property
    def fuses(self) -> bool:
        """Whether one kernel is predicted to take less time than two, and dQ of all threads leaves room for more."""
        if self.machine.cores * self._dq_bytes > MOST_PACKED:
            return False
        return self.division(FUSED).seconds <= self.division(QUERIES).seconds + self.division(KEYS).seconds

    def _counts(self, form: Form) -> Sequence[int]:
        """The numbers of parts that are weighed."""
        blocks, most = self._blocks(form), MOST_PIECES * self.machine.cores // self.outer
        if self.machine.cores == 1:
            return [1]
        if form.sums:
            elements, room = self.outer * self.inner, self.machine.cores * self.workspace(form)
            room = min(max(LEAST_ROOM, room), MOST_PACKED)
            most = min(most, room // (elements * self._dq_bytes)) if elements <= MOST_ELEMENTS else 1
        sizes = dict.fromkeys(-(-blocks // count) for count in PART_COUNTS if count <= max(1, min(most, blocks)))
        return [-(-blocks // size) for size in sizes]

    def _blocks(self, form: Form) -> int:
        return -(-max(1, self.problem.n_k if form.by_keys else self.problem.n_q) // self.block)

    def _divided(self, form: Form, parts: int) -> Division:
        problem, (packing, of_block) = self.problem, self.block_seconds(form)
        size = -(-len(of_block) // parts)
        pieces = packing + np.add.reduceat(of_block, np.arange(0, len(of_block), size))[:: 1 if form.by_keys else -1]
        shared = 0
        if form.sums and parts > 1:
            # Cleared, added to, added up: each a vector in and out.
            moved = 3 * problem.n_q * problem.d / self.machine.lanes()
            pieces = pieces + moved * MERGED / self._clock
            shared = self.outer * self.inner * parts * self._dq_bytes
        return Division(parts, size, last_end(self.inner * pieces, self.outer, self.machine.cores), shared)

    @property
    def _dq_bytes(self) -> int:
        return 4 * max(1, self.problem.n_q) * max(1, self.problem.d)

    @property
    def _clock(self) -> float:
        return self.machine.clock or 2.5e9

    def packed(self, form: Form) -> int:
        """Bytes of all rows, packed."""
        problem, element = self.problem, 2 * self.planes or 4
        rows = problem.n_q if form.by_keys else problem.n_k
        return rows * (form.copies[0] * problem.d + form.copies[1] * problem.d_v) * element

    def workspace(self, form: Form) -> int:
        """Bytes of a thread's packed rows, of a window of them where those of all threads are too many, and dQ."""
        return min(self.packed(form), MOST_PACKED // self.machine.cores) + self._dq_bytes * form.sums

    def block_seconds(self, form: Form) -> tuple[float, np.ndarray]:
        """Seconds of packing all rows, and of each block of lanes, which packs those that it visits where they are
        packed window by window."""
        problem, machine = self.problem, self.machine
        costs = COSTS[self.planes if self.amx or not self.planes else "pairs"]
        visited = self._visited(form)
        lanes, rate = machine.lanes(), machine.flops("bfloat16" if self.planes else "float32") / machine.cores
        widths = np.array([problem.d, problem.d_v])
        flops = 2 * self.block * visited * float(widths @ np.array(form.products)) * PLANE_PRODUCTS[self.planes]
        vectors = visited * self.block / lanes
        elements = vectors * (costs.softmax + (problem.score_flops + problem.dense) * costs.operation)
        copied = float(widths @ np.array(form.copies)) / lanes * costs.packed
        rows = problem.n_q if form.by_keys else problem.n_k
        beside = self.block * float(widths.sum()) / lanes * costs.packed
        computed = flops / rate * costs.product + (elements + beside) / self._clock
        read = self._row_bytes(form) * visited / self._bandwidth(self.workspace(form))
        packing, blocks = copied / self._clock, np.maximum(computed, read)
        if self.packed(form) > MOST_PACKED // self.machine.cores:
            return 0.0, blocks + visited * packing
        return rows * packing, blocks

    def _row_bytes(self, form: Form) -> float:
        """Bytes of a row that a block reads, and of dQ that it adds to."""
        problem, element = self.problem, 2 * self.planes or 4
        copies = form.copies[0] * problem.d + form.copies[1] * problem.d_v
        return copies * element + 8 * problem.d * form.sums

    def _bandwidth(self, size: int) -> float:
        """Bytes per second and core of the cache that has a thread's `size` bytes."""
        cores = self.machine.cores
        for level in self.machine.levels[1:]:
            if size <= level.capacity // (cores if level.shared else 1):
                return level.bandwidth / cores
        return self.machine.main.bandwidth / cores

    def _visited(self, form: Form) -> np.ndarray:
        """Rows that each block of lanes meets, in whole tiles."""
        problem = self.problem
        n_q, n_k = max(1, problem.n_q), max(1, problem.n_k)
        if form.by_keys:
            start, end = problem.key_ranges(self.tile)
            first = np.arange(0, n_k, self.block)[:, None]
            crossed = (start < np.minimum(first + self.block, n_k)) & (end > first) & (start < end)
            rows = np.minimum(self.tile, n_q - np.arange(0, n_q, self.tile))
            return (crossed * rows).sum(1) * problem.density
        start, end = problem.key_ranges(self.block)
        return (end - start) * problem.density


def backward_of(problem: Problem, machine: Machine, target: Target, tiling: Tiling, inner: int = 1) -> Backward:
    """The backward in a tiling."""
    # Beside products in float16 those of dS are in planes; all are counted so.
    planes = PLANES["float16"] if tiling.planes and problem.dtype == "float16" else tiling.planes
    return Backward(
        problem=problem, machine=machine, outer=problem.problems // inner, inner=inner, planes=planes,
        block=tiling.groups * target.lanes, tile=tiling.keys, amx=target.amx,
    )  # fmt: skip


def planned(spec: AttentionSpec, problem: Problem, machine: Machine) -> Backward:
    """The backward that gives the gradients of Q, K and V, and no other."""
    target = target_for(spec, machine)
    tiling = tilings_for(spec, target)[-1 if spec.aux_outputs and target.amx else 0]
    return backward_of(problem, machine, target, backward_tiling(tiling, target))


def backward_choice(spec: AttentionSpec, problem: Problem, machine: Machine) -> Choice:
    """The choice for a backward."""
    work = planned(spec, problem, machine)
    fused = work.fuses and not spec.reproducible
    form, schedule = (FUSED, "backward_fused") if fused else (KEYS, "backward_split")
    tile, beside = Tile(rows=work.tile, keys=work.block), ("dQ", Tile(rows=work.block, keys=work.tile))
    parts, others = work.division(form).parts, () if fused else (beside,)
    return Choice(schedule=schedule, tile=tile, keys=problem.n_k, splits=parts, beside=others)


def backward_seconds(spec: AttentionSpec, problem: Problem, machine: Machine, choice: Choice) -> dict[str, float]:
    """Seconds of each kernel of a backward."""
    work = planned(spec, problem, machine)
    forms = {"dK and dV": KEYS, "dQ": QUERIES} if choice.beside else {"dQ, dK and dV": FUSED}
    return {kernel: work.division(form).seconds for kernel, form in forms.items()}


def last_end(pieces: np.ndarray, elements: int, cores: int) -> float:
    """Seconds until all pieces of so many equal elements are done, where cores take the next when they are free: the
    first piece of every element, the second of every one, ..."""
    if np.ptp(pieces) <= 1e-9 * pieces.max():
        return float(pieces[0]) * -(-elements * len(pieces) // cores)
    ends = [0.0] * min(cores, elements * len(pieces))
    for seconds in np.repeat(pieces, elements).tolist():
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)
