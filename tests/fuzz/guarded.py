"""Memory of kernels between pages that nobody may touch: what is read or written beyond it ends the process.

Within `guarded` the workspace of every thread, and every tensor that is made, ends where a page begins that may be
neither read nor written; `tensor` lays an operand out like that, or so that it begins right behind one. Results are
filled with NaN before a kernel writes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.codegen.cpu import calling, derived, launch, training

PAGE = mmap.PAGESIZE
LINE = 64
"""Workspaces are aligned to it."""
aten = torch.ops.aten
NEITHER = 0
_EMPTY = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty}
_FILLED = {aten.zeros, aten.full, aten.zeros_like, aten.full_like, aten.new_zeros, aten.new_full, aten.clone}


def pages(size: int) -> int:
    """Bytes of whole pages."""
    return -(-size // PAGE) * PAGE


class Region:
    """Pages that may be read and written, filled with ones, at the given places (first byte, bytes); all others, and
    one on each side, may be neither. `address` is that of byte 0 of `size`."""

    def __init__(self, size: int, openings: Sequence[tuple[int, int]]):
        self.memory = mmap.mmap(-1, pages(size) + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer = (ctypes.c_uint8 * len(self.memory)).from_buffer(self.memory)
        base = ctypes.addressof(self.buffer)
        self.address = base + PAGE
        self._protect(base, len(self.memory), NEITHER)
        for start, count in openings:
            self._protect(self.address + start, pages(count), mmap.PROT_READ | mmap.PROT_WRITE)
            ctypes.memset(self.address + start, 0xFF, pages(count))

    @staticmethod
    def _protect(address: int, size: int, mode: int) -> None:
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mode):
            raise OSError("mprotect")


def tensor(x: torch.Tensor, at_start: bool = False, copied: bool = True) -> torch.Tensor:
    """A copy, laid out alike, whose last element ends where a page begins that nobody may touch; at_start: whose first
    one begins where such a page ends. Not copied: filled with NaN."""
    if not x.numel():
        return x
    size = x.itemsize * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)))
    region = Region(size, [(0, size)])  # kept alive by its buffer, that by the tensor
    offset = PAGE + (0 if at_start else pages(size) - size)
    memory = torch.frombuffer(region.buffer, dtype=x.dtype, count=size // x.itemsize, offset=offset)
    if copied:
        once = x[tuple(slice(0, None if stride else 1) for stride in x.stride())]
        memory.as_strided(once.shape, once.stride()).copy_(once)
    return memory.as_strided(x.shape, x.stride())


class _Making(TorchDispatchMode):
    """What torch makes for kernels is guarded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, kind = func(*args, **(kwargs or {})), func.overloadpacket
        return tensor(made, copied=kind in _FILLED) if kind in _FILLED | _EMPTY else made


class Bytes(int):
    """Bytes of a workspace, which knows how they come about: `count` parts of `exact` bytes each."""

    exact: int
    count: int

    @staticmethod
    def of(value: int, exact: int, count: int = 1) -> Bytes:
        made = Bytes(value)
        made.exact, made.count = exact, count
        return made

    def __rmul__(self, count: int) -> Bytes:
        return Bytes.of(int(self) * count, self.exact, count)

    __mul__ = __rmul__

    def __add__(self, more: int) -> Bytes:
        return Bytes.of(int(self) + more, self.exact, self.count)


def _thread_stride(size: int) -> Bytes:
    """Each thread's part of the workspace ends at a page that nobody may touch."""
    exact = -(-size // LINE) * LINE
    return Bytes.of(pages(exact) + PAGE, exact)


class Workspace(calling.ThreadMemory):
    """Makes the workspace of every call anew. What threads leave for each other follows their parts."""

    __slots__ = ("region",)

    def reserve(self, size: int) -> int:
        assert isinstance(size, Bytes), "a workspace of unknown parts"
        each, lead = pages(size.exact) + PAGE, pages(size.exact) - size.exact  # a part ends with a page, save one
        end, shared = each * size.count, int(size) - each * size.count
        parts = [(each * number, size.exact) for number in range(size.count)]
        self.region = Region(end + lead + shared, [*parts, *([(end, lead + shared)] if shared else [])])
        return self.region.address + lead


class Guarded:
    """A kernel, or a training kernel, whose calls are guarded."""

    def __init__(self, kernel: Any, rng: random.Random):
        self.kernel, self.rng = kernel, rng

    def _given(self, values: Sequence[Any]) -> list[Any]:
        return [tensor(x, self.rng.random() < 0.5) if isinstance(x, torch.Tensor) else x for x in values]

    def __call__(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        given = self._given(operands)
        with guarded():
            return self.kernel(given, sizes)

    def outputs(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        given = self._given(operands)
        with guarded():
            return self.kernel.outputs(given, sizes)

    def backward(
        self, grad: Any, out: Any, statistics: Any, operands: Any, sizes: Any, needs: Any, aux_outputs: Any = ()
    ) -> list[torch.Tensor]:
        given = [*self._given([grad, out, statistics]), self._given(operands), sizes, needs, self._given(aux_outputs)]
        with guarded():
            return self.kernel.backward(*given)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Within it, memory that this thread makes for kernels is guarded. Kernels must be bound within `measured`."""
    before, calling.memory.own = calling.memory.own, Workspace()
    try:
        with _Making():
            yield
    finally:
        calling.memory.own = before


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Within it, kernels that are bound tell how large each thread's part of the workspace is."""
    with contextlib.ExitStack() as stack:
        for module in (launch, training, derived):
            stack.enter_context(mock.patch.object(module, "empty_strided", _empty))
        stack.enter_context(mock.patch.object(calling, "thread_stride", _thread_stride))
        yield


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)  # which `_Making` sees
