"""The schedule of least I/O for one attention problem, on a fast memory of M elements."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

from fusion.errors import ProblemError
from fusion.planning.problem import Problem
from fusion.planning.schedules import lower_bound

from . import SCHEDULES, counts, schedule
from .schedule import SmallMemoryError, sizes_of
from .tiles import SEARCHED_WHOLE, Tile, least_io, snapped_tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A schedule at its best tile.

    io: elements moved for the whole problem. footprint: elements held.
    bound: a lower bound on `io`; an order with the constant 1, unless it is what every schedule must move.
    reason: why no tile fits, if so; needed: elements that the smallest takes then.
    """

    schedule: str
    bound: float
    tile: tuple[tuple[str, int], ...] = ()
    io: float = math.inf
    footprint: float = 0.0
    reason: str = ""
    needed: float = 0.0

    @property
    def ratio(self) -> float:
        return self.io / self.bound


def io_bound(problem: Problem, capacity: float, direction: str = "forward") -> float:
    """Elements that any schedule moves for all heads."""
    return lower_bound(problem, capacity, direction == "backward")


@functools.lru_cache(maxsize=1024)
def weigh(
    problem: Problem, capacity: int, direction: str = "forward", features: int | None = None
) -> tuple[Weighed, ...]:
    """Every exact schedule of that direction, and with `features` polynomial ones, the one of least I/O first."""
    if capacity < 1:
        raise ProblemError(f"a fast memory of {capacity} elements was asked for; give at least 1")
    every = [item for item in SCHEDULES.values() if item.direction == direction and not item.mixes_heads]
    names = [item.name for item in every if item.exact or (features is not None and item.takes_features)]
    names = [name for name in names if problem.masked or not SCHEDULES[name].unmasked]
    weighed = [weigh_one(problem, capacity, name, features) for name in names]
    return tuple(sorted(weighed, key=lambda item: (bool(item.reason), item.io)))


def weigh_one(problem: Problem, capacity: int, name: str, features: int | None = None) -> Weighed:
    """A schedule at its best tile, or the reason why none fits."""
    chosen = schedule(name)
    if chosen.takes_features and not features:
        raise ProblemError(f"the {name} schedule needs features=r, the number of polynomial features")
    bound = io_bound(problem, capacity, chosen.direction)
    try:
        tile = _best_tile(problem, capacity, name, features or 1)
    except SmallMemoryError as error:
        return Weighed(schedule=name, bound=bound, reason=str(error), needed=error.needed)
    share = problem.live_share(tile["B_r"], tile["B_c"]) if chosen.skips else 1.0
    found = counts(name, sizes_of(problem, capacity, share, features or 1), tile)
    return Weighed(
        schedule=name,
        bound=bound,
        tile=tuple(sorted(tile.items())),
        io=float(found.io) * problem.problems,
        footprint=float(found.footprint),
    )


def _best_tile(problem: Problem, capacity: int, name: str, features: int) -> Tile:
    chosen = schedule(name)
    if chosen.closed_form and max(problem.n_q, problem.n_k) > SEARCHED_WHOLE:
        with contextlib.suppress(SmallMemoryError):  # the derivation leaves out phases that bind only where d_v >> d
            return snapped_tile(name, problem, capacity)
    share = problem.live_share(64, 1) if chosen.skips else 1.0
    return least_io(chosen, problem, capacity, share, features)


def least(problem: Problem, capacity: int, names: Collection[str] = (), **options) -> Weighed:
    """The schedule of least I/O, of these names where some are given. Raises SmallMemoryError where none fits."""
    features = options.get("features")
    weighed = [weigh_one(problem, capacity, name, features) for name in names] or weigh(problem, capacity, **options)
    usable = [item for item in weighed if not item.reason]
    if usable:
        return min(usable, key=lambda item: item.io)
    if len(weighed) == 1:
        raise SmallMemoryError(weighed[0].reason, weighed[0].needed)
    needed = ", ".join(f"{item.schedule} {item.needed:.0f}" for item in sorted(weighed, key=lambda item: item.needed))
    raise SmallMemoryError(
        f"no schedule for {problem} fits a fast memory of M={capacity} elements; the smallest tiles need: {needed}; "
        "give a larger M"
    )
