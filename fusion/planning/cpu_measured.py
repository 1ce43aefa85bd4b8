"""Choices by measurement, where the option `autotune` asks for it: the best few by the cost model are timed at the
first call in a situation (threads, and sizes up to the next power of two), and the fastest is remembered, by later
processes as well."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusion import caching
from fusion.ir.records import to_json
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine, cpu
from fusion.planning.choice import Choice, Tile

log = logging.getLogger(__name__)

MEASURED = 3  # choices that are timed at most
MARGIN = 0.02
"""A choice must be faster than the planned one by this share to take its place: less is within what two runs differ."""
ROUNDS, SECONDS = 7, 0.5
"""Times that each choice runs, in turns, and when no other round begins."""
FORMAT = 1  # of the files; to be raised when a choice or a situation comes to mean something else

_measuring = threading.RLock()  # other work of this process falsifies measurements


class Tuner:
    """Measures the choices of one spec on a machine, and remembers the fastest."""

    def __init__(self, spec: AttentionSpec, machine: Machine):
        facts = [*cpu.identity(), *sorted(machine.isa), str(machine.cores), caching.tag()]
        header = {"format": FORMAT, "torch": torch.__version__, "machine": facts, "spec": to_json(spec)}
        self._records, self._choices = caching.Records("cpu_tiles", header), dict[str, Any]()

    def choice(self, extents: Sequence[int], planned: Choice) -> Choice | None:
        """The choice that was measured to be the fastest in a situation, by this process or another."""
        if torch.are_deterministic_algorithms_enabled():
            return None
        situation = _situation(extents)
        known = self._choices.get(situation) or self._stored().get(situation)
        if known is None:
            return None
        self._choices[situation] = known
        rows, keys, splits = known["choice"]
        schedule = "split_k" if splits > 1 else planned.schedule
        tile = Tile(rows=rows, keys=keys)
        return replace(planned, schedule=schedule, tile=tile, splits=splits, measured=True)

    def measure(self, extents: Sequence[int], launches: Mapping[Choice, Callable[[], bool]]) -> None:
        """Time the choices, the planned one first, and remember the fastest; nothing if one refuses the operands."""
        with _measuring:
            seconds = dict.fromkeys(launches, float("inf"))
            if not all(launch() for launch in launches.values()):  # which is the first run of each
                return
            start = time.perf_counter()
            for number in range(ROUNDS):
                if number > 0 and time.perf_counter() - start > SECONDS:
                    break
                for choice, launch in launches.items():
                    before = time.perf_counter()
                    launch()
                    seconds[choice] = min(seconds[choice], time.perf_counter() - before)
        planned, best = next(iter(launches)), min(seconds, key=seconds.__getitem__)
        if seconds[best] > (1 - MARGIN) * seconds[planned]:
            best = planned
        log.info("%s: %s", best, {str(choice): f"{1e3 * each:.3f} ms" for choice, each in seconds.items()})
        self._remember(_situation(extents), best, seconds)

    def _remember(self, situation: str, best: Choice, seconds: Mapping[Choice, float]) -> None:
        self._choices[situation] = {
            "choice": _numbers(best),
            "measured": [[*_numbers(choice), each] for choice, each in seconds.items()],
        }
        self._records.write(self._stored() | self._choices)

    def _stored(self) -> dict[str, Any]:
        """The choices on disk, by situation."""
        return self._records.read(_sound) if caching.enabled() else {}


def _situation(extents: Sequence[int]) -> str:
    sizes = (str(1 << max(0, n - 1).bit_length()) for n in extents)
    return f"{torch.get_num_threads()} threads, sizes up to {' x '.join(sizes)}"


def _numbers(choice: Choice) -> list[int]:
    return [choice.tile.rows, choice.tile.keys, choice.splits]


def _sound(known: Any) -> bool:
    """Whether this is a valid record of a choice in a file."""
    numbers = known["choice"]
    return len(numbers) == 3 and all(type(n) is int and 1 <= n <= 1 << 20 for n in numbers)
