"""Seeds in a row: what was found is counted, written as JSON lines, and failures are reduced to short programs."""

from __future__ import annotations

import collections
import json
import platform
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from tests.fuzz.check import Verdict

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
    cpu: float = field(default_factory=time.process_time)
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

    def finish(self) -> dict[str, Any]:
        """The counts, in the record and returned."""
        summary = {
            "summary": self.kind, "seeds": self.seeds, "last seed": self.last, "commit": commit(),
            "seconds": round(time.monotonic() - self.started, 1),
            "cpu seconds": round(time.process_time() - self.cpu, 1),
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
    """The seeds of "first:end" that belong to shard "number/of"; "new:count" begins where no other commit does."""
    start, end_or_count = text.split(":")
    first = zlib.crc32(commit().encode()) * 10**6 if start == "new" else int(start)
    end = int(end_or_count) + first * (start == "new")
    number, of = (int(part) for part in shard.split("/"))
    return (seed for seed in range(first, end) if seed % of == number - 1)


def until(seeds: Iterable[int], minutes: float | None, record: Record) -> Iterator[int]:
    """Seeds until the time is over, with a line of progress every few seconds."""
    shown = time.monotonic()
    for seed in seeds:
        now = time.monotonic()
        if minutes is not None and now - record.started > 60 * minutes:
            return
        if now - shown > (1 if sys.stderr.isatty() else 30):
            record.progress()
            shown = now
        yield seed
