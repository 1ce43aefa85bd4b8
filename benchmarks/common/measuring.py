"""Side-by-side timing in one process, and the rule that decides whether a result may be timed at all."""

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

SAMPLE = 2e-3  # s; shorter calls are repeated within one sample, so that the clock's own cost disappears
SETTLE = 2  # samples of each competitor that are thrown away


@dataclass(slots=True, kw_only=True)
class Entry:
    """One competitor: what it does, what came of it. `note` says why there is no time, or what is odd about it.

    setup: runs untimed before every call, and its result is the call's argument."""

    name: str
    call: Callable[..., object] | None = None
    setup: Callable[[], object] | None = None
    error: float | None = None  # max|result - float64 reference|
    allowed: float | None = None  # what the numerics rule allows
    first_call: float | None = None  # s, compilation included
    times: list[float] = field(default_factory=list)  # s per call, one per sample
    note: str = ""

    @property
    def median(self) -> float | None:
        """Median seconds per call; None if it never ran."""
        return statistics.median(self.times) if self.times else None

    @property
    def wrong(self) -> bool:
        """Whether the result is farther from float64 than the numerics rule allows."""
        return self.error is not None and self.allowed is not None and not self.error <= self.allowed

    def summary(self) -> dict:
        """What goes into the result file. Times in seconds."""
        quartiles = statistics.quantiles(self.times, n=4) if len(self.times) > 3 else None
        return {
            "median": self.median,
            "least": min(self.times, default=None),
            "quartiles": [quartiles[0], quartiles[2]] if quartiles else None,
            "samples": len(self.times),
            "first_call": self.first_call,
            "error": self.error,
            "allowed": self.allowed,
            "note": self.note,
        }


def largest_error(result: Tensor, reference: Tensor) -> float:
    """max|result - reference|, infinite where one is NaN and the other is not."""
    if result.shape != reference.shape:
        return float("inf")
    difference = (result.double() - reference).abs()
    agreed = result.isnan() & reference.isnan()
    return difference.masked_fill(agreed, 0.0).nan_to_num(nan=float("inf")).max().item()


def allowed_error(eager: Tensor, reference: Tensor) -> float:
    """Twice (eager's own error + eps * max|reference|), eps of eager's dtype: the rule that the tests hold us to."""
    scale = reference.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
    return 2 * (largest_error(eager, reference) + torch.finfo(eager.dtype).eps * scale)


def prepare(entry: Entry, make: Callable[[], Callable[[], Tensor] | None], reference: Tensor, allowed: float) -> None:
    """Build and run a competitor once; record its error, or the reason why it cannot run, in the entry."""
    try:
        start = time.perf_counter()
        call = make()
        if call is None:
            entry.note = "cannot express it"
            return
        result = call()
        entry.first_call = time.perf_counter() - start
        entry.error, entry.allowed = largest_error(result, reference), allowed
        entry.call = call
        if entry.wrong:
            entry.note = f"wrong: error {entry.error:.1e}, allowed {allowed:.1e}"
    except Exception as failure:  # a peer's failure is a result of this benchmark
        text = str(failure).strip().splitlines() or [""]
        entry.note = f"fails: {type(failure).__name__}: {text[0][:160]}"


def _sample(entry: Entry, times: int, clock: Callable[[], float]) -> float:
    """Seconds of one call."""
    call = entry.call
    assert call is not None
    if entry.setup is not None:
        argument = entry.setup()
        start = clock()
        call(argument)
        return clock() - start
    start = clock()
    for _ in range(times):
        call()
    return (clock() - start) / times


def interleave(
    entries: list[Entry],
    *,
    seconds: float,
    rounds: int = 5,
    settle: float = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Time all entries that can run, in turns, for about `seconds` in all and at least `rounds` turns. settle: seconds
    for which each runs untimed before every sample, where threads of another OpenMP pool would still be spinning.
    clock: of the times that are taken; `time.process_time` of one thread barely depends on what else a machine does."""
    running = [entry for entry in entries if entry.call is not None]
    repeats = {}
    for entry in running:
        once = [_sample(entry, 1, time.perf_counter) for _ in range(SETTLE)][-1]
        repeats[entry.name] = max(1, round(SAMPLE / once)) if entry.setup is None else 1
    gc.collect()
    gc.disable()
    try:
        stop, turn = time.perf_counter() + seconds, 0
        while turn < rounds or time.perf_counter() < stop:
            for entry in running[turn % len(running) :] + running[: turn % len(running)]:
                times = repeats[entry.name]
                ready = time.perf_counter() + settle
                while settle and time.perf_counter() < ready:
                    _sample(entry, 1, clock)
                if times == 1:  # not timed: threads of the one before may still be spinning, its data fill the caches
                    _sample(entry, 1, clock)
                entry.times.append(_sample(entry, times, clock))
            turn += 1
    finally:
        gc.enable()


def load_example(name: str) -> ModuleType:
    """The module of an example, examples/<name>.py."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
