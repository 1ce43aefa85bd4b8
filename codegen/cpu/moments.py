"""Call of the kernel that bounds the scores of heads (`mlir.approximate.moments`).

It runs in front of attention, after other work has filled the caches, and takes some 20 us, of which as much again is
easily spent on a single operation of torch: what does not change between calls is put together once, and a call that
wants figures alone makes no tensor.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mlir.approximate.moments import BLOCK, GIVEN, Moments
from ..mlir.scope import MEMORY_TYPE
from ..mlir.values import round_up
from ..mlir.x86 import LANES
from .calling import CompiledKernel, Launch, float_bits

MAX_WIDTH = 256  # columns of Q and K up to which this kernel is made


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of heads in memory; the elements of a row lie side by side."""

    offsets: Tensor  # int64 [heads], elements from the operand's address to the first row of each head
    stride: int  # elements from one row to the next
    count: int  # rows of a head

    def every(self, step: int) -> Rows:
        return Rows(offsets=self.offsets, stride=self.stride * step, count=-(-self.count // step))


class MomentsCall:
    """The kernel, bound to where rows of one kind lie. segment: keys that become visible together, a multiple of BLOCK,
    where attention is causal; else 0. limit: that of the module `mlir.approximate.moments`."""

    def __init__(self, d: int, dtype: torch.dtype, q: Rows, k: Rows, segment: int, limit: float):
        self.kernel, self.places, self.heads = compiled(d, dtype), (q, k), len(q.offsets)
        self.d, self.n_q, self.width = d, q.count, round_up(d, LANES)
        self.rows = round_up(max(q.count, 1), BLOCK) if segment else 0
        self.values = self.kernel.by_name({
            "items": self.heads, "q_offsets": q.offsets.data_ptr(), "k_offsets": k.offsets.data_ptr(),
            "q_stride": q.stride, "k_stride": k.stride, "n_q": q.count, "n_k": k.count, "q_rows": self.rows,
            "lag": int(not segment), "segments": -(-q.count // segment) if segment else 2,
            "q_segment": segment or q.count, "k_segment": segment or k.count, "limit": float_bits(limit),
        })  # fmt: skip
        self.launchers = dict[int, Launch]()

    def figures(self, q: int, k: int, threads: int, wanted: Sequence[Tensor] = ()) -> list[float]:
        """`found` of all heads, one head after the other. q, k: addresses; wanted: tensors for what else the kernel
        writes: means, squares and slants."""
        found, threads = (ctypes.c_float * (4 * self.heads))(), max(1, min(threads, self.heads))
        if (launch := self.launchers.get(threads)) is None:
            launch = self.launchers[threads] = self.kernel.launcher(self.values, GIVEN, threads)
        keep = (1 + bool(self.rows)) * bool(wanted)
        launch((q, k, ctypes.addressof(found), *([x.data_ptr() for x in wanted] or (0, 0, 0)), keep))
        return list(found)

    def whole(self, q: int, k: int, threads: int) -> tuple[list[float], Tensor, Tensor, Tensor]:
        """(figures, four for each head; the means of the keys, [heads, d]; squares and slants, [heads, rows], where
        attention is causal)."""
        means = torch.empty(self.heads, self.width, dtype=torch.float32)
        squares, slants = torch.empty(2, self.heads, self.rows, dtype=torch.float32) if self.rows else (means, means)
        figures = self.figures(q, k, threads, (means, squares, slants))
        return figures, means[:, : self.d], squares[:, : self.n_q], slants[:, : self.n_q]


@functools.lru_cache(maxsize=128)
def compiled(d: int, dtype: torch.dtype) -> CompiledKernel:
    """The kernel for rows of d elements of one type, compiled once. Raises KernelCompilationError."""
    return CompiledKernel(Moments(d, MEMORY_TYPE[str(dtype)[6:]]).text())
