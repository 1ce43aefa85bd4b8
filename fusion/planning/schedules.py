"""The schedules by name."""

from __future__ import annotations

from fusion.errors import UnknownScheduleError
from fusion.planning.backward import BACKWARD
from fusion.planning.forward import FORWARD
from fusion.planning.schedule import Schedule

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in (*FORWARD, *BACKWARD)}

_ALIASES = {
    "query_stationary": "flash",
    "standard": "materialized",
    "materialised": "materialized",
    "flash1": "key_stationary",
    "split-k": "split_k",
}


def schedule(name: str) -> Schedule:
    """The schedule of that name. Raises UnknownScheduleError, which lists the valid names."""
    key = _ALIASES.get(name, name)
    if key not in SCHEDULES:
        raise UnknownScheduleError(f"schedule {name!r} is not known; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[key]
