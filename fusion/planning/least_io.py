"""The tile of a schedule that moves least: a search over the blocks that matter, by the schedule's formulas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fusion.errors import NoFittingTileError
from fusion.planning.compiled import io_variables, phase_counts
from fusion.planning.problem import Problem
from fusion.planning.schedule import Phase, Schedule
from fusion.planning.symbols import CUTS
from fusion.planning.tiles import Tile, balanced, grid, pick, sizes_of


def groups(schedule: Schedule) -> list[tuple[Phase, ...]]:
    """Phases that share no tile variable can be tiled independently of each other."""
    remaining, result = list(schedule.phases), []
    while remaining:
        group, names = [remaining.pop(0)], set()
        names.update(group[0].tile)
        for phase in list(remaining):
            if names & set(phase.tile):
                remaining.remove(phase)
                group.append(phase)
                names.update(phase.tile)
        result.append(tuple(group))
    return result


def least_io(schedule: Schedule, problem: Problem, capacity: int, share: float = 1.0, features: int = 1) -> Tile:
    """The tile of least I/O whose footprint is at most `capacity` elements: the two-level model's optimum. Exhaustive
    up to the thinning of `balanced`, since only balanced blocks matter and other variables are best at their minimum.
    Raises NoFittingTileError where the smallest tile does not fit."""
    sizes = sizes_of(problem, capacity, share, features)
    used = frozenset().union(*(io_variables(phase) for phase in schedule.phases))
    choices = {
        name: sorted({block for cut in CUTS[name] for block in balanced(int(sizes[cut]))}) if name in used else [1]
        for name in schedule.tile
    }
    return least_of(schedule, problem, capacity, choices, share, features)


def least_of(
    schedule: Schedule,
    problem: Problem,
    capacity: int,
    choices: Mapping[str, Iterable[int]],
    share: float = 1.0,
    features: int = 1,
) -> Tile:
    """The combination of least I/O among `choices` that fits `capacity`. Raises NoFittingTileError where none does."""
    sizes = sizes_of(problem, capacity, share, features)
    tile: Tile = {}
    for group in groups(schedule):
        names = sorted({name for phase in group for name in phase.tile})
        if not names:
            continue
        tiles = grid({name: choices[name] for name in names})
        parts = [phase_counts(phase, sizes, tiles) for phase in group]
        footprint = np.maximum.reduce([np.broadcast_to(part.footprint, tiles[names[0]].shape) for part in parts])
        if footprint.min() > capacity:
            raise NoFittingTileError(
                f"{schedule.name} for {problem} in a fast memory of M={capacity} elements: its smallest tile needs "
                f"{footprint.min():.0f}; give a larger M, or take small_cache, which tiles the head dimension too",
                needed=float(footprint.min()),
            )
        io = sum(part.io for part in parts)
        tile |= pick(tiles, int(np.argmin(np.where(footprint <= capacity, io + footprint * 1e-9, np.inf))))
    return tile
