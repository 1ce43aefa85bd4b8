"""Side-by-side timing in one process."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SAMPLE = 2e-3  # s; shorter calls are repeated within one sample, so that the clock's own cost disappears
SETTLE = 2  # samples of each competitor that are thrown away
LONG = 0.5  # s; of longer calls one is thrown away


@dataclass(slots=True, kw_only=True)
class Entry:
    """One competitor, and its times. call: None where it cannot run. setup: runs untimed before every call, and its
    result is the call's argument."""

    name: str
    call: Callable[..., object] | None = None
    setup: Callable[[], object] | None = None
    times: list[float] = field(default_factory=list)  # s per call, one per sample

    @property
    def median(self) -> float | None:
        """Median seconds per call; None if it never ran."""
        return statistics.median(self.times) if self.times else None


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
        for _ in range(SETTLE):
            if (once := _sample(entry, 1, time.perf_counter)) > LONG:
                break
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
                # not timed: threads of the one before may still be spinning, its data fill the caches
                if times == 1 and len(running) > 1:
                    _sample(entry, 1, clock)
                entry.times.append(_sample(entry, times, clock))
            turn += 1
    finally:
        gc.enable()
