"""Where benchmarks/gpu runs: a GPU, or in a rehearsal this computer's CPU with Triton's interpreter."""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fusion.codegen import triton
from fusion.codegen.triton.launch import machine_of
from fusion.errors import UnknownMachineError
from fusion.machine import INTERPRETER, Machine, machine
from fusion.runtime import kernels
from fusion.runtime.guards import failures_raised

CLOCK = 1.9e9  # Hz, about: of the device while it waits
QUEUED, MODEL_QUEUED = 1e-3, 3e-2  # s in which the host has queued one attention, or a step of a model
FLUSH = 256 << 20  # bytes, several times a second-level cache


class Gpu:
    """The current CUDA or ROCm device."""

    kind, rehearsal = "cuda", False
    absent: frozenset[str] = frozenset()  # competitors that cannot run here

    def __init__(self, autotune: bool = False) -> None:
        """machine: None where it is not known; planned_for: the machine that tiles are chosen for."""
        self.options: dict[str, Any] = {"strict": True, "autotune": autotune}
        self.name = torch.cuda.get_device_name()
        self.machine: Machine | None = None
        with contextlib.suppress(UnknownMachineError):
            self.machine = machine("cuda")
        self.planned_for = machine_of(torch.device("cuda", torch.cuda.current_device()))
        self._flushed = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def limit(self, share: float) -> None:
        """This process may take so much of the device's memory, and is told that there is no more."""
        torch.cuda.set_per_process_memory_fraction(share)

    def compiled(self, call: Callable[..., Any], backend: str, **given: Any) -> Callable[..., Any]:
        """`torch.compile` with static shapes; fusion must fuse every attention (torch takes options or a mode)."""
        if backend == "fusion" and "mode" not in given:
            given["options"] = self.options | given.get("options", {})
        return torch.compile(call, backend=backend, dynamic=False, **given)

    def seconds(self, call: Callable[[], object], queued: float = QUEUED) -> tuple[float, float]:
        """(on the device, on the host) of one call. The cache is emptied before, and the device kept waiting `queued`
        seconds, in which the host queues everything, so that its time has no gaps in it."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(CLOCK * queued))
        self._flushed.zero_()
        begun = time.perf_counter()
        start.record()
        call()
        stop.record()
        host = time.perf_counter() - begun
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3, host

    def free(self) -> None:
        """Give unused memory back, so that one cell's does not count against the next."""
        gc.collect()
        torch.cuda.empty_cache()

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Bytes that a call holds at most beyond those that were held before."""
        self.free()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def launched(self, call: Callable[[], object]) -> list[tuple[str, float]]:
        """(name, device seconds) of every kernel that a call runs, the longest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            call()
            torch.cuda.synchronize()
        return _longest_first((event.key, event.self_device_time_total) for event in profile.key_averages())

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Rehearsal:
    """CPU tensors and tiny sizes: every line of the benchmark runs, and no figure means anything.

    fusion goes through `torch.compile` as on a GPU, its Triton kernels run in Triton's interpreter (see
    `interpreted`), and everything else stays eager: Inductor and FlexAttention are called uncompiled.
    """

    kind, rehearsal = "cpu", True
    absent = frozenset({"sdpa cudnn", "sdpa efficient"})
    name = "rehearsal"
    machine: Machine | None = machine("h200")
    planned_for = INTERPRETER

    def nothing(self, *_: object) -> None:
        """No device has limits, memory or a queue."""

    limit = free = synchronize = nothing

    def compiled(self, call: Callable[..., Any], backend: str, **given: Any) -> Callable[..., Any]:
        if backend != "fusion":
            return call
        options = {"strict": True} | given.get("options", {}) | {"inner": "eager"}
        return torch.compile(call, backend=backend, dynamic=False, options=options)

    def seconds(self, call: Callable[[], object], queued: float = QUEUED) -> tuple[float, float]:
        begun = time.perf_counter()
        call()
        took = time.perf_counter() - begun
        return took, took

    def peak_bytes(self, call: Callable[[], object]) -> int:
        call()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def launched(self, call: Callable[[], object]) -> list[tuple[str, float]]:
        """Of operators: there are no kernels."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            call()
        return _longest_first((event.key, event.self_cpu_time_total) for event in profile.key_averages())


Device = Gpu | Rehearsal


def _longest_first(microseconds: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(((name, time / 1e6) for name, time in microseconds if time), key=lambda pair: -pair[1])


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """While this lasts, attention on CPU tensors runs in Triton kernels, by Triton's interpreter."""
    emitter: Any = triton
    with kernels.emitting("interpreted", ("cpu",), lambda: emitter, lambda device: INTERPRETER):
        yield


@contextlib.contextmanager
def running(device: Device) -> Iterator[None]:
    """What runs on a device, inside: kernels that fail raise."""
    with failures_raised(), interpreted() if device.rehearsal else contextlib.nullcontext():
        yield
