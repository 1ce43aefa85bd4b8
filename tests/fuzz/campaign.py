"""Seeds in a row: what was found is counted, written as JSON lines, and failures are reduced to short programs.

Seeds run in worker processes, one after the other, of some hundred seeds each: what a compiler keeps in memory goes
with its worker, and a seed that ends the process (a kernel that writes where it must not) is a failure among others.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from tests.fuzz.check import Verdict

EACH = 1000
"""Seeds of a worker, whose memory grows by some 0.4 MB a function."""
BAD = (Verdict.WRONG, Verdict.FAILED)
NOTED = (*BAD, Verdict.OVER, Verdict.OVERFLOW, Verdict.LUCK, Verdict.UNSTABLE, Verdict.REFERENCE, Verdict.POISONED)


@dataclass
class Record:
    """What a run found. Every finding is written at once to `out`; `finish` adds the counts."""

    kind: str
    seeds: str
    out: TextIO | None = None
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    started: float = field(default_factory=time.monotonic)
    cpu: float = field(default_factory=lambda: cpu_seconds())
    last: int | None = None

    def __post_init__(self) -> None:
        self.write(
            {"kind": self.kind, "seeds": self.seeds, "commit": commit(), "torch": torch.__version__,
             "machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        )  # fmt: skip

    def write(self, line: dict[str, Any]) -> None:
        if self.out is not None:
            print(json.dumps(line), file=self.out, flush=True)

    def count(self, seed: int, verdict: Verdict, **counts: int) -> None:
        self.last = seed
        self.counts["run"] += 1
        self.counts[verdict.value] += 1
        self.counts.update(counts)

    @property
    def bad(self) -> int:
        return sum(self.counts[verdict.value] for verdict in BAD)

    def is_over(self, minutes: float | None) -> bool:
        return minutes is not None and time.monotonic() - self.started > 60 * minutes

    def finish(self) -> dict[str, Any]:
        """The counts, in the record and returned."""
        summary = {
            "summary": self.kind, "seeds": self.seeds, "last seed": self.last, "commit": commit(),
            "seconds": round(time.monotonic() - self.started, 1),
            "cpu seconds": round(cpu_seconds() - self.cpu, 1),
            "counts": dict(self.counts), "refusals": dict(self.refusals.most_common(60)),
        }  # fmt: skip
        self.write(summary)
        return summary

    def progress(self, stream: TextIO = sys.stderr) -> None:
        """One line, written over the last one on a terminal."""
        hours = (time.monotonic() - self.started) / 3600
        counts = ", ".join(f"{self.counts[v.value]} {v.value}" for v in Verdict if self.counts[v.value])
        end = "\r" if stream.isatty() else "\n"
        print(f"{self.kind}: seed {self.last}, {self.counts['run'] / hours:.0f}/h: {counts}", end=end, file=stream)


def cpu_seconds() -> float:
    """Of this process and of workers that have ended."""
    return sum(os.times()[:4])


def commit() -> str:
    """The commit of this checkout, with a mark where files differ from it."""
    here = Path(__file__).parent
    asked = (["git", "rev-parse", "--short=12", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        name, changes = (subprocess.run(a, cwd=here, capture_output=True, text=True, check=True).stdout for a in asked)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + ("+changes" if changes.strip() else "")


def seeds_of(text: str, shard: str) -> Iterator[int]:
    """The seeds of "first:end" that belong to shard "number/of"; "new:count" begins where no other commit does.

    Exits where there is no such shard.
    """
    start, end_or_count = text.split(":")
    first = zlib.crc32(commit().encode()) * 10**6 if start == "new" else int(start)
    end = int(end_or_count) + first * (start == "new")
    number, of = (int(part) for part in shard.split("/"))
    if not 1 <= number <= of:
        raise SystemExit(f"--shard {shard}: the first of {of} is 1/{of}, the last {of}/{of}")
    return (seed for seed in range(first, end) if seed % of == number - 1)


class Runner(Protocol):
    def run(self, record: Record, seeds: Iterable[int], seconds: float) -> None:
        """Check each seed. seconds: for making one that fails short."""
        ...


def in_workers(
    runner: Runner, record: Record, seeds: Iterator[int], seconds: float, minutes: float | None, each: int = EACH
) -> None:
    """Check all seeds, or those that the time suffices for, `each` of them in one process."""
    gc.freeze()  # what is imported lives on in every worker, and need not be looked through again
    while chunk := list(itertools.islice(seeds, each)):
        while chunk and not record.is_over(minutes):
            chunk = _in_worker(runner, record, chunk, seconds, minutes)
            record.progress()


def _in_worker(runner: Runner, record: Record, seeds: list[int], seconds: float, minutes: float | None) -> list[int]:
    """Check these seeds in one process; returns those behind one that ended it."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    about = (runner, record, seeds, seconds, minutes, writer)
    worker = multiprocessing.get_context("fork").Process(target=_work, args=about)
    interrupts = []
    before = signal.signal(signal.SIGINT, lambda *given: (interrupts.append(given), worker.terminate()))
    worker.start()  # after that, as it may be interrupted at once
    writer.close()
    running, counts, refusals, last = seeds[0], {}, {}, None
    with contextlib.suppress(EOFError, OSError):  # the latter in the middle of what it sends
        while True:
            running, counts, refusals, last = reader.recv()
    worker.join()
    signal.signal(signal.SIGINT, before)
    record.counts.update(counts)
    record.refusals.update(refusals)
    record.last = record.last if last is None else last
    if interrupts:
        raise KeyboardInterrupt
    if running is None:
        return []
    record.count(running, Verdict.FAILED)
    record.write({"seed": running, "verdict": Verdict.FAILED.value, "message": f"exit code {worker.exitcode}"})
    print(f"\nseed {running} ended the process with code {worker.exitcode}", flush=True)
    return seeds[seeds.index(running) + 1 :]


def _work(
    runner: Runner, record: Record, seeds: list[int], seconds: float, minutes: float | None, writer: Connection
) -> None:
    """What a worker does. Before each seed, and at the end with None, it sends what it has counted until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's interrupt ends it
    record.counts, record.refusals, record.last = collections.Counter(), collections.Counter(), None

    def told() -> Iterator[int]:
        for seed in seeds:
            if record.is_over(minutes):
                return
            writer.send((seed, record.counts, record.refusals, record.last))
            yield seed

    runner.run(record, told(), seconds)
    writer.send((None, record.counts, record.refusals, record.last))
