"""Call of any kernel: a workspace, a block of parameters, and a region on torch's OpenMP threads."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fusion.errors import UnsupportedSizeError
from fusion.ir.ranges import LARGEST_SIZE
from fusion.ir.spec import AttentionSpec
from fusion.machine import openmp
from fusion.torch_private.tensors import empty_strided_cpu

from ..mlir.thread_function import KernelText
from ..mlir.values import round_up
from .machine_code import MachineCode, compile_text

PARAMETER_SLOTS = 256
FALSE_SHARING = 128  # bytes: two cache lines, which processors fetch together

COUNTERS = memoryview(array("q", [0, 0]))
"""Counters of portions taken and threads begun, at the start of a call: see `ThreadFunction`."""
LARGE, PATIENCE = 64 << 20, 64
"""Bytes of a workspace from which on it is given back, after so many calls in a row that need less than a quarter."""
MOST_CUT = 1024  # work items of a call whose keys can be cut into parts
HUGE_PAGE = 2 << 20  # bytes
MADV_HUGEPAGE = 14

address, empty_strided = torch.Tensor.data_ptr, empty_strided_cpu


def in_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the operating system to back a fresh tensor of many MiB by huge pages: the first write to each page of 4 KiB
    takes longer than computing what is written. Where it does not know them, nothing happens."""
    size = tensor.numel() * tensor.element_size()
    if size < 4 * HUGE_PAGE or not sys.platform.startswith("linux"):
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + size
    first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_HUGEPAGE)


class ThreadMemory:
    """Workspace and parameter block of one calling thread; kept between calls, grown when needed, and given back where
    calls no longer need it."""

    __slots__ = (
        "_address", "_argument", "_arguments", "_room", "_small_calls", "arrivals", "arrivals_address",
        "counter_address", "counters", "flag", "flag_address", "packed", "params", "slots", "workspace",
    )  # fmt: skip

    def __init__(self) -> None:
        self.workspace = torch.empty(0, dtype=torch.uint8)
        self._room = self._address = self._small_calls = 0
        self.params = ctypes.create_string_buffer(8 * PARAMETER_SLOTS)
        self.slots = memoryview(self.params).cast("B").cast("q")
        # The engine's entry points take an array of pointers to arguments; the one argument is the address of the
        # slots.
        self._argument = ctypes.c_void_p(ctypes.addressof(self.params))
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._argument))
        self.packed = ctypes.addressof(self._arguments)
        # What threads write lies apart from all else: a line that one of them writes is taken from all that read it.
        shared = ctypes.create_string_buffer(3 * FALSE_SHARING)
        start = -ctypes.addressof(shared) % FALSE_SHARING
        self.flag = ctypes.c_int64.from_buffer(shared, start)
        self.flag_address = ctypes.addressof(self.flag)
        self.counter_address = self.flag_address + FALSE_SHARING
        self.counters = memoryview(shared)[start + FALSE_SHARING :][: COUNTERS.nbytes].cast("B").cast("q")
        # Parts of every item that are done: 0 between calls, since the last of an item puts it back.
        self.arrivals = (ctypes.c_int64 * MOST_CUT)()
        self.arrivals_address = ctypes.addressof(self.arrivals)

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes, on a cache line."""
        if self._room < size or self._room >= LARGE and self._is_too_large_for(size):
            # There is none until the new one has been allocated: that may raise.
            self._room, self._small_calls, self.workspace = 0, 0, torch.empty(0, dtype=torch.uint8)
            room = size + size // 4
            self.workspace = torch.empty(room + 64, dtype=torch.uint8)
            self._room, self._address = room, round_up(self.workspace.data_ptr(), 64)
        return self._address

    def _is_too_large_for(self, size: int) -> bool:
        self._small_calls = self._small_calls + 1 if 4 * size < self._room else 0
        return self._small_calls >= PATIENCE

    def flagged(self) -> bool:
        """Whether a kernel met values that its products cannot take; the flag is lowered."""
        raised = self.flag.value != 0
        self.flag.value = 0
        return raised


class _Memories(threading.local):
    def __init__(self) -> None:
        self.own = ThreadMemory()


memory = _Memories()
"""`memory.own` is that of the calling thread. Looking it up is slow; a call does so once."""


class Function:
    """Machine code that takes `count` parameter slots."""

    def __init__(self, code: MachineCode, count: int):
        if count > PARAMETER_SLOTS:
            raise UnsupportedSizeError(f"a kernel with {count} parameters; there is room for {PARAMETER_SLOTS}")
        self.code = code
        self._serial = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)

    def on(self, threads: int) -> Callable[[int], object]:
        """Function that runs it on so many threads; it takes a `ThreadMemory.packed` whose slots hold the
        parameters."""
        if threads == 1:
            return self._serial
        parallel, address = openmp.parallel(), self.code.address
        assert parallel is not None  # see `machine_code.unavailable`
        return lambda packed: parallel(address, packed, threads, 0)


def bytes_per_thread(text: KernelText, steps: int) -> int:
    """A thread's part of the workspace of a kernel that packs `steps` key steps."""
    return thread_stride(text.fixed_bytes + steps * text.step_bytes)


def thread_stride(size: int) -> int:
    """Bytes from one thread's part of `size` bytes to the next's: on pages of their own, and not all parts at the same
    place of a page."""
    return round_up(size, 4096) + 128


Launch = Callable[[Sequence[int]], bool]
"""Runs a kernel, given the parameters that differ from call to call; False where it met values that its products cannot
take."""

OWN = tuple(("ptr", name) for name in ("workspace", "partials", "counter", "flag", "arrivals"))
"""Parameters that every call has from the memory of its thread."""


class CompiledKernel:
    """A kernel whose parameters are given by name. Raises KernelCompilationError where its text is refused."""

    def __init__(self, text: KernelText):
        self.text = text
        self.function = Function(compile_text(text.source, text.entry), len(text.slots))

    def by_name(self, values: Mapping[str, int]) -> dict[tuple, int]:
        """Values by the last word of their parameters."""
        return {slot: values[slot[-1]] for slot in self.text.slots if slot[-1] in values}

    def launcher(
        self, values: Mapping[tuple, int], given: Sequence[tuple], threads: int, rows: int = 0, shared: int = 0
    ) -> Launch:
        """Function that runs it on so many threads, each of which packs `rows` rows. values: parameters that are the
        same in all calls. given: those that a call is given, in this order. shared: bytes that threads leave for each
        other. Between two calls a model reads megabytes of weights, so that whatever a call touches has left the
        caches: each object and frame more costs microseconds, not what a loop of calls shows. What can be looked up is,
        here."""
        text, run, steps = self.text, self.function.on(threads), -(-rows // self.text.key_step)
        per_thread = bytes_per_thread(text, steps)
        values = {("workspace_bytes",): per_thread, ("threads",): threads, ("key_steps",): steps, **values}
        order = (*given, *OWN)
        varying = [(n, order.index(slot)) for n, slot in enumerate(text.slots) if slot in order]
        fixed = memoryview(array("q", [0 if slot in order else values[slot] for slot in text.slots]))
        count, may_flag, own = len(fixed), text.may_flag, threads * per_thread
        room = own + shared

        def launch(numbers: Sequence[int]) -> bool:
            mine = memory.own
            workspace, slots = mine.reserve(room), mine.slots
            mine.counters[:] = COUNTERS
            slots[:count] = fixed
            mine_too = workspace, workspace + own, mine.counter_address, mine.flag_address, mine.arrivals_address
            numbers = (*numbers, *mine_too)
            for n, place in varying:
                slots[n] = numbers[place]
            run(mine.packed)
            return not (may_flag and mine.flagged())

        return launch


def float_bits(x: float) -> int:
    """x in float32 as a parameter."""
    return struct.unpack("<i", struct.pack("<f", min(x, 3e38) if x < math.inf else x))[0]


def operand_values(spec: AttentionSpec, strides: Iterable[Sequence[int]], sizes: Sequence[int]) -> dict[tuple, int]:
    """Parameters that say how tensors lie in memory, and the sizes."""
    values = {("stride", number, dim): n for number, own in enumerate(strides) for dim, n in enumerate(own)}
    return values | {("size", name): value for name, value in zip(spec.sizes, sizes, strict=True)}


def check_sizes(*sizes: int) -> None:
    """Raises UnsupportedSizeError where one is too large for the kernels."""
    if (largest := max(sizes)) >= LARGEST_SIZE:
        raise UnsupportedSizeError(f"a size of {largest} was met; CPU kernels take sizes below {LARGEST_SIZE}")
