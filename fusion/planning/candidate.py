"""A schedule that was weighed, with its tile and what it is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion.planning.texts import seconds_text, tile_text

if TYPE_CHECKING:
    from fusion.planning.schedule import Schedule

Given = tuple[tuple[str, int], ...]
"""(name, size) of the tile variables that are settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule that was weighed.

    io: elements moved for the whole problem.
    time: predicted s.
    ideal: there is no model of a kernel's time, which is then that of the busiest resource, never idle.
    reason: why it cannot be used, if so.
    needed: what its smallest tile needs then, elements.
    share: s, the live share that io is counted with.
    resources: seconds that each is busy.
    """

    schedule: str
    tile: tuple[tuple[str, int], ...] = ()
    io: float = float("inf")
    time: float = float("inf")
    footprint: float = 0.0
    reason: str = ""
    ideal: bool = False
    share: float = 1.0
    needed: float = 0.0
    resources: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        if self.reason:
            return f"{self.schedule}: {self.reason}"
        return f"{self.schedule} {tile_text(self.tile)}: I/O {self.io:.4g}, {self.time_text}, {self.kernels_text}"

    @property
    def kernels_text(self) -> str:
        """The kinds of machine that have a kernel of it, in words."""
        return find_schedule(self.schedule).kernels_text

    @property
    def time_text(self) -> str:
        """The predicted time, with a sign where it is a lower limit."""
        return ">=" * self.ideal + seconds_text(self.time)


def find_schedule(name: str) -> Schedule:
    """The schedule of that name. Raises UnknownScheduleError."""
    from fusion.planning.schedules import schedule  # with sympy: not where a plan is only read

    return schedule(name)
