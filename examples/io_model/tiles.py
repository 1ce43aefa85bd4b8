"""The best tile of a schedule: the one of least I/O, searched for and in closed form.

Without ceilings the I/O of every schedule is, per group of phases that share tile variables, a constant plus a / x or
a / x + b / y, and its footprint p x + c or w x y + p x + q y + c. Variables that only enlarge the footprint are at
their minimum. With one variable the I/O falls until the footprint reaches M; with two, y is taken from footprint = M
and the derivative in x set to zero, which is a quadratic. All of it is done by sympy on the schedule's own
expressions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import sympy

from fusion.planning.problem import Problem

from . import schedule
from .schedule import (
    CUTS,
    SIZES,
    TILES,
    M,
    N,
    N_k,
    N_q,
    Phase,
    Schedule,
    SmallMemoryError,
    UnknownScheduleError,
    d,
    d_v,
    io_variables,
    phase_counts,
    sizes_of,
    smooth,
)

Tile = dict[str, int]
Tiles = dict[str, np.ndarray]

MOST_BLOCKS = 200
"""Sizes of one tile variable that a search tries at most."""
SEARCHED_WHOLE = (MOST_BLOCKS // 2) ** 2
"""Up to so many queries and keys a search tries every balanced block: a size n has at most 2 sqrt(n) of them."""


def balanced(size: int) -> list[int]:
    """The blocks worth trying for `size`: for each number of blocks the smallest block that gives it. I/O depends on a
    block only through the number of blocks, so nothing is lost; above `MOST_BLOCKS` values the list is thinned
    geometrically."""
    size = max(1, size)
    root = math.isqrt(size)
    values = sorted({-(-size // count) for count in range(1, root + 1)} | set(range(1, min(size, root + 1) + 1)))
    if len(values) <= MOST_BLOCKS:
        return values
    keep = np.unique(np.round(np.geomspace(1, len(values), MOST_BLOCKS)).astype(int) - 1)
    return [values[index] for index in keep]


def grid(values: Mapping[str, Iterable[int]]) -> Tiles:
    """All combinations, as flat arrays by name."""
    axes = np.meshgrid(*(np.array(list(column), dtype=np.int64) for column in values.values()), indexing="ij")
    return {name: axis.ravel() for name, axis in zip(values, axes, strict=True)}


def pick(tiles: Tiles, index: int) -> Tile:
    """One combination."""
    return {name: int(column[index]) for name, column in tiles.items()}


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
    Raises SmallMemoryError where the smallest tile does not fit."""
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
    """The combination of least I/O among `choices` that fits `capacity`. Raises SmallMemoryError where none does."""
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
            raise SmallMemoryError(
                f"{schedule.name} for {problem} in a fast memory of M={capacity} elements: its smallest tile needs "
                f"{footprint.min():.0f}; give a larger M, or take small_cache, which tiles the head dimension too",
                needed=float(footprint.min()),
            )
        io = sum(part.io for part in parts)
        tile |= pick(tiles, int(np.argmin(np.where(footprint <= capacity, io + footprint * 1e-9, np.inf))))
    return tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The continuous optimum of one schedule, in N_q, N_k, d, d_v and M. tile: best value of each tile variable. io:
    elements moved there, ceilings taken off."""

    schedule: str
    tile: tuple[tuple[str, sympy.Expr], ...]
    io: sympy.Expr

    @property
    def leading(self) -> sympy.Expr:
        """The I/O's leading order: the N^2 term for N_q = N_k = N, d = d_v and M in proportion to d^2, as d grows."""
        return _leading(self.io)

    def __str__(self) -> str:
        tile = ", ".join(f"{name}* = {value}" for name, value in self.tile)
        return f"{self.schedule}: {tile}; I/O ~ {self.leading}"


@functools.lru_cache(maxsize=64)
def optimum(name: str) -> Optimum:
    """Derives the optimum of the schedule of that name. Raises UnknownScheduleError where it has no closed form: the
    N^2 of materialised ones does not depend on the tile, and approximate ones have other terms than a / x + b / y."""
    chosen = schedule(name)
    if not chosen.closed_form:
        raise UnknownScheduleError(f"the I/O of {chosen.name} has no stationary tile worth deriving; use least_io")
    tile: dict[str, sympy.Expr] = {}
    for group in groups(chosen):
        tile |= _group_optimum(group)
    io = smooth(chosen.io).subs({TILES[key]: value for key, value in tile.items()})
    return Optimum(schedule=chosen.name, tile=tuple(tile.items()), io=io)


def _group_optimum(group: tuple[Phase, ...]) -> dict[str, sympy.Expr]:
    """Best values of the group's variables. The footprint of the phase that holds most of them is set equal to M."""
    used = sorted(frozenset().union(*(io_variables(phase) for phase in group)))
    fixed = {name: sympy.Integer(1) for phase in group for name in phase.tile if name not in used}
    if "B_s" in used:  # fewer splits are always less I/O: one split of all keys
        used.remove("B_s")
        fixed["B_s"] = N_k
    phase = max(group, key=lambda part: len(set(part.tile)))
    if not used:
        return fixed
    at_minimum = {TILES[name]: value for name, value in fixed.items()}
    io = sum(smooth(part.reads + part.writes) for part in group).subs(at_minimum)
    room = sympy.expand(phase.footprint.subs(at_minimum)) - M
    x = TILES[used[0]]
    if len(used) == 1:
        _check_falling(io, x)
        return fixed | {used[0]: sympy.simplify(sympy.solve(room, x)[0])}
    y = TILES[used[1]]
    _check_falling(io, y)
    y_of_x = sympy.solve(room, y)[0]
    best = _stationary(io, x, y, y_of_x)
    return fixed | {used[0]: best, used[1]: sympy.simplify(y_of_x.subs(x, best))}


def _stationary(io: sympy.Expr, x: sympy.Symbol, y: sympy.Symbol, y_of_x: sympy.Expr) -> sympy.Expr:
    """The positive x with d io / dx = 0 along footprint = M: a quadratic, both partial derivatives being monomials."""
    along = sympy.diff(io, x) + sympy.diff(io, y).subs(y, y_of_x) * sympy.diff(y_of_x, x)
    numerator = sympy.numer(sympy.cancel(sympy.together(along)))
    probe = {N_q: 1024, N_k: 1024, d: 64, d_v: 64, M: 4096}
    roots = sympy.solve(numerator, x)
    feasible = [root for root in roots if root.subs(probe) > 0 and y_of_x.subs(x, root).subs(probe) > 0]
    return sympy.simplify(feasible[0])


def _check_falling(io: sympy.Expr, variable: sympy.Symbol) -> None:
    slope = sympy.factor(sympy.diff(io, variable))
    if not slope.is_nonpositive:
        raise AssertionError(f"I/O does not fall with {variable}: slope {slope}")


@functools.lru_cache(maxsize=64)
def _leading(io: sympy.Expr) -> sympy.Expr:
    """With M = mu d^2 the limit in d, and mu put back."""
    mu = sympy.Symbol("mu", positive=True)
    per_pair = sympy.Poly(sympy.expand(io.subs({N_q: N, N_k: N, d_v: d})), N).coeff_monomial(N**2)
    limit = sympy.limit(sympy.simplify(per_pair.subs(M, mu * d**2)), d, sympy.oo)
    per_pair = limit.subs(mu, M / d**2)
    forms = (sympy.expand(per_pair), sympy.factor(sympy.radsimp(sympy.simplify(per_pair))))
    return min(forms, key=sympy.count_ops) * N**2


@functools.lru_cache(maxsize=64)
def _compiled(name: str) -> tuple[tuple[str, ...], object]:
    tile = optimum(name).tile
    return tuple(key for key, _ in tile), sympy.lambdify(SIZES, [value for _, value in tile], modules="math")


def continuous_tile(name: str, problem: Problem, capacity: int) -> dict[str, float]:
    """The optimum's tile in numbers, not yet whole, nor cut to the problem's size. Raises SmallMemoryError at a pole
    of the formula (at a capacity of few elements)."""
    names, function = _compiled(schedule(name).name)
    sizes = sizes_of(problem, capacity)
    try:
        values = function(*(sizes[str(symbol)] for symbol in SIZES))  # type: ignore[operator]
    except ZeroDivisionError as error:
        raise SmallMemoryError(f"the derived tile of {name} has a pole at M={capacity} elements") from error
    return dict(zip(names, values, strict=True))


def snapped_tile(name: str, problem: Problem, capacity: int) -> Tile:
    """The continuous optimum brought to legal sizes: whole numbers near it that fit `capacity`. Where a block can
    shrink without adding another block, the smaller one is tried too, and what that frees goes to the group's other
    variable. Raises SmallMemoryError."""
    chosen: Schedule = schedule(name)
    sizes = sizes_of(problem, capacity)
    tile = continuous_tile(chosen.name, problem, capacity)
    limits = {key: max((sizes[cut] for cut in CUTS.get(key, ())), default=math.inf) for key in tile}
    around = {key: _neighbours(min(value, limits[key]), problem) for key, value in tile.items()}
    for group in groups(chosen):
        phase = max(group, key=lambda part: len(set(part.tile)))
        held = set(map(str, phase.footprint.free_symbols))
        used = sorted(frozenset().union(*(io_variables(part) for part in group)) & held)
        if len(used) == 2:
            x, y = (np.array(sorted(around[key])) for key in used)
            around[used[1]] |= _saturating(phase, sizes, tile, {used[0]: x}, used[1])
            around[used[0]] |= _saturating(phase, sizes, tile, {used[1]: y}, used[0])
    return least_of(chosen, problem, capacity, around)


def _saturating(
    phase: Phase, sizes: Mapping[str, float], tile: Mapping[str, float], given: dict, name: str
) -> set[int]:
    """Legal sizes of `name` that just fill M next to each size in `given`; the footprint is linear in it."""
    one, two = (phase_counts(phase, sizes, {**tile, **given, name: value}).footprint for value in (1, 2))
    room = np.floor(1 + (sizes["M"] - one) / (two - one)).astype(int)
    return {int(value) for value in np.atleast_1d(room) if value >= 1}


def _neighbours(value: float, problem: Problem) -> set[int]:
    """Sizes within a few steps of `value`, and the balanced sizes next to it."""
    whole = max(1, int(value))
    sizes = {max(1, whole + offset) for offset in range(-2, 4)}
    sizes |= {round(whole * factor) for factor in (0.8, 0.9, 1.1, 1.25) if whole > 8}
    for size in {problem.n_q, problem.n_k, problem.d, problem.d_v}:
        if value > 0 and size > 0:
            blocks = max(1, math.ceil(size / max(value, 1)))
            sizes |= {-(-size // count) for count in range(max(1, blocks - 1), blocks + 3)}
    return sizes
