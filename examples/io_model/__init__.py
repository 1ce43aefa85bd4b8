"""The I/O theory of attention: schedules as formulas, their best tiles, and lower bounds on the two-level model.

    python -m examples.io_model --N 4096 --d 64 --M 2000

The two-level model has a fast memory of M elements and a slow one that holds everything; I/O counts the elements that
move between them. The compiler's own schedules are here, and those that no kernel has.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .backward import BACKWARD
from .forward import FORWARD
from .schedule import Counts, Schedule, UnknownScheduleError, counts_of

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in (*FORWARD, *BACKWARD)}


def schedule(name: str) -> Schedule:
    """The schedule of that name. Raises UnknownScheduleError, which lists the valid names."""
    if name not in SCHEDULES:
        raise UnknownScheduleError(f"schedule {name!r} is not known; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def counts(name: str, sizes: Mapping[str, float], tile: Mapping[str, int | np.ndarray]) -> Counts:
    """The counts of the schedule of that name for a tile or arrays of tiles; sizes: see `schedule.sizes_of`."""
    return counts_of(schedule(name), sizes, tile)
