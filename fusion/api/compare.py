"""`report.compare(*inputs)`: the model as eager, Inductor and fusion run it, side by side in one process."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion.errors import ComparisonError
from fusion.exactness import errors, floats, reference
from fusion.machine.processors import bytes_text, seconds_text
from fusion.planning.plan import Plan, aligned, peaks_text
from fusion.report.data import finite_number
from fusion.torch_private.dynamo import original_of
from fusion.torch_private.tensors import tree_leaves

progress = logging.getLogger("fusion.progress")
FAR = 2.0
"""Times of the predicted time from which a measured one is remarked on."""
SLOWER = (
    " The call takes {:.1f} times what is predicted for attention. Check what else is in it (torch.profiler lists "
    "attention under names that begin with fusion::attention); whether the computer was busy (the times of calls then "
    "lie far apart); and the number of threads."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way to run the model.

    seconds: median of a call; half of all calls took between the two `quartiles`.
    first: of the first call, with compilation.
    peak: bytes allocated at most during a call, beyond what is held before it.
    error: largest absolute difference from float64, and `allowed`, what the numerics rule grants; None where there is
        no float64 reference.
    failure: why it did not run.
    """

    name: str
    seconds: float = float("nan")
    quartiles: tuple[float, float] | None = None
    first: float = float("nan")
    peak: int | None = None
    error: float | None = None
    allowed: float | None = None
    failure: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it failed, or is beyond what the rule allows."""
        beyond = self.error is not None and self.allowed is not None and not self.error <= self.allowed
        return bool(self.failure) or beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measurements of one call, made in turns in one process.

    note: what could not be measured, and why. plans: of the fused attentions, where a
    report knows them.
    """

    entries: tuple[Measured, ...]
    turns: int
    threads: int
    device: str
    note: str = ""
    plans: tuple[Plan, ...] = ()

    def __getitem__(self, name: str) -> Measured:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def predicted(self) -> float | None:
        """Seconds of the fused attentions, by the cost model."""
        return sum(plan.time for plan in self.plans) or None

    @property
    def conditions(self) -> str:
        """Under which the numbers hold."""
        where = f"{self.device}, {self.threads} threads" if self.device == "cpu" else self.device
        text = f"Medians of {self.turns} calls each, in turns, in one process; {where}."
        spread = [(entry.name, *map(seconds_text, entry.quartiles)) for entry in self.entries if entry.quartiles]
        if spread:
            text += " Half of them took " + ", ".join(f"{low} to {high} ({name})" for name, low, high in spread) + "."
        return f"{text} {self.note}" if self.note else text

    @property
    def optimum(self) -> str:
        """Predicted time of the fused attentions and what they reach of the machine's peaks, beside that of the
        measured call; "" without a fused attention."""
        if not self.predicted:
            return ""
        text = (
            f"Attention in fusion: {seconds_text(self.predicted)} predicted, {peaks_text(self.plans, self.predicted)}"
        )
        seconds = self["fusion"].seconds
        if not seconds > 0:
            return f"{text}."
        text += f"; by the measured call, with all else that is in it, {peaks_text(self.plans, seconds)}."
        return text + SLOWER.format(seconds / self.predicted) * (seconds > FAR * self.predicted)

    def table(self) -> list[tuple[str, ...]]:
        """Rows of (name, time, speed-up over eager, peak memory, error, allowed error)."""
        base = self.entries[0].seconds
        rows = []
        for entry in self.entries:
            if entry.failure:
                rows.append((entry.name, "failed", "", "", "", entry.failure))
                continue
            peak = "" if entry.peak is None else bytes_text(entry.peak)
            error, allowed = ("" if value is None else f"{value:.2g}" for value in (entry.error, entry.allowed))
            rows.append((entry.name, seconds_text(entry.seconds), f"{base / entry.seconds:.2f}x", peak, error, allowed))
        return rows

    @property
    def data(self) -> dict[str, Any]:
        """Measurements by name and their conditions, for JSON."""
        entries = {
            entry.name: {
                "seconds": finite_number(entry.seconds),
                "quartiles": entry.quartiles,
                "first_call_seconds": finite_number(entry.first),
                "peak_bytes": entry.peak,
                "error": entry.error,
                "allowed_error": entry.allowed,
                "failure": entry.failure or None,
            }
            for entry in self.entries
        }
        return {
            "conditions": self.conditions, "predicted_seconds": self.predicted, "optimum": self.optimum or None,
            "entries": entries,
        }  # fmt: skip

    def __str__(self) -> str:
        rows = [("measured", "time", "speed-up", "peak", "error", "allowed"), *self.table()]
        return "\n".join([*aligned(rows, 1), self.conditions, *filter(None, [self.optimum])])


def compare(
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 2.0,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Run `function(*args, **kwargs)` as eager, Inductor and fusion do, without gradients.

    seconds: for which each competitor is timed, at most.
    options: of the fusion backend.

    Raises ComparisonError where eager itself fails. A competitor that fails is reported as such.
    """
    from fusion.inductor_passes import without_ours

    original = original_of(function)
    _require_callable("compare", original)
    inductor = torch.compile(original, dynamic=False, options=without_ours() or None)
    return _compared({"eager": original, "inductor": inductor, **_ours(original, options)}, args, kwargs, seconds)


def compare_results(
    original: Callable[..., Any], args: Any, kwargs: Any, options: Mapping[str, Any] | None
) -> Comparison:
    """`compare` of fusion with eager alone, without taking times."""
    return _compared({"eager": original, **_ours(original, options)}, args, kwargs, None)


def _ours(original: Callable[..., Any], options: Mapping[str, Any] | None) -> dict[str, Callable[..., Any]]:
    return {"fusion": torch.compile(original, backend="fusion", dynamic=False, options=dict(options or {}))}


def _compared(runs: Mapping[str, Callable[..., Any]], args: Any, kwargs: Any, seconds: float | None) -> Comparison:
    """The first of `runs` is eager. seconds: for which each is timed; None for results alone."""
    times, peaks, turns = {}, {}, 0
    with torch.no_grad():
        before = _random_states()
        firsts = {"eager": _first_call("eager", runs["eager"], args, kwargs)}
        if failure := firsts["eager"][0].failure:
            message = _not_run("compare", runs["eager"], failure)
            raise ComparisonError(message)
        exact, note = None, "It draws random numbers."
        if all(torch.equal(old, new) for old, new in zip(before, _random_states(), strict=True)):
            exact, note = reference(runs["eager"], args, kwargs)
        if exact and not any(map(_is_more_exact, exact, firsts["eager"][1])):
            exact, note = None, "It computes in float64: nothing is more exact to compare it with."
        firsts |= {name: _first_call(name, run, args, kwargs) for name, run in runs.items() if name != "eager"}
        if seconds is not None:
            calls = {name: partial(runs[name], *args, **kwargs) for name in runs if not firsts[name][0].failure}
            peaks = {name: peak_memory(call) for name, call in calls.items()}
            times, turns = _in_turns(calls, seconds)
    entries = []
    for name, (entry, results) in firsts.items():
        if not entry.failure:
            error, allowed = _error(results, firsts["eager"][1], exact)
            entry = replace(entry, peak=peaks.get(name), error=error)
            if name in times:
                low, median, high = statistics.quantiles(times[name], n=4, method="inclusive")
                entry = replace(entry, seconds=median, quartiles=(low, high))
            entry = entry if name == "eager" else replace(entry, allowed=allowed)
        entries.append(entry)
    device = next((str(leaf.device.type) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), "cpu")
    return Comparison(entries=tuple(entries), turns=turns, threads=torch.get_num_threads(), device=device, note=note)


@contextlib.contextmanager
def calling(command: str, function: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Context of a command's call of the user's function. Raises ComparisonError where that cannot be called, or where
    the call fails and fails in eager mode as well, which is tried then."""
    _require_callable(command, function)
    try:
        yield
    except Exception as problem:
        with torch.no_grad():
            failure = _first_call("eager", function, args, kwargs)[0].failure
        if not failure:
            raise
        raise ComparisonError(_not_run(command, function, failure)) from problem


def _require_callable(command: str, function: Any) -> None:
    if not callable(function):
        text = f"{function!r:.60}, " if isinstance(function, str) else ""
        raise ComparisonError(
            f"{command} was given {text}an object of type {type(function).__name__}, which cannot be called; give the "
            "model itself (a torch.nn.Module) or a function first, and then its inputs"
        )


def _not_run(command: str, function: Callable[..., Any], failure: str) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return f"{command} was asked to run {name}, which fails in eager mode: {failure}; give the inputs that it takes"


def _random_states() -> list[Tensor]:
    """The states of torch's generators of random numbers."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _first_call(name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Measured, list[Tensor]]:
    """(the time of the first call or its failure, its floating-point results)."""
    progress.info("the first call of %s", name)
    started = time.perf_counter()
    try:
        results = floats(run(*args, **kwargs))
    except Exception as problem:
        return Measured(name=name, failure=f"{type(problem).__name__}: {' '.join(str(problem).split()[:30])}"), []
    return Measured(name=name, first=time.perf_counter() - started), results


def _is_more_exact(exact: Tensor, eager: Tensor) -> bool:
    """Whether the float64 run tells anything of a result: not where eager computes it in float64 itself."""
    return eager.dtype is not torch.float64 or not torch.equal(exact.nan_to_num(), eager.nan_to_num())


def _error(
    result: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor] | None
) -> tuple[float | None, float | None]:
    """(error, what the rule of `fusion.exactness` allows) of the tensor that is nearest to its bound."""
    if exact is None:
        return None, None
    triples = zip(result, eager, exact, strict=True)
    compared = [errors(a, b, c) for a, b, c in triples if _is_more_exact(c, b)]
    return max(compared, key=lambda item: item.share).figures if compared else (0.0, 0.0)


def peak_memory(call: Callable[[], Any]) -> int | None:
    """Bytes allocated at most during one call, beyond what is held before it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        if (peak := torch.cuda.max_memory_allocated() - before) > 0:
            return peak
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _quiet(), torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        call()
    current = peak = 0
    for change in _allocations(profiler):
        current += change
        peak = max(peak, current)
    return peak


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch's profiler writes to the file descriptor of standard error, past Python, off the terminal."""
    sys.stderr.flush()
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)


def _allocations(profiler: Any) -> Iterator[int]:
    """Changes of allocated bytes, in order of time; releases of what was allocated before the call do not count."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        change = max(event.nbytes(), -current)
        current += change
        yield change


def _in_turns(calls: dict[str, Callable[[], Any]], seconds: float) -> tuple[dict[str, list[float]], int]:
    """Seconds of the calls of each, called one after the other until every one had `seconds`, at least 3 times."""
    progress.info("timing %s in turns, for %g s each", ", ".join(calls), seconds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    until = time.perf_counter() + seconds * len(names)
    turns = 0
    while turns < 3 or (time.perf_counter() < until and turns < 1000):
        for name in names[turns % len(names) :] + names[: turns % len(names)]:
            times[name].append(_timed(calls[name]))
        turns += 1
    return times, turns


def _timed(call: Callable[[], Any]) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started
