"""The derived tile: its formulas, and how near it comes to exhaustive search after snapping."""

import itertools

import numpy as np
import pytest
import sympy

from examples.io_model import SCHEDULES, counts, schedule
from examples.io_model.schedule import (
    TILES,
    M,
    N,
    N_k,
    N_q,
    SmallMemoryError,
    UnknownScheduleError,
    d,
    d_v,
    phase_counts,
    sizes_of,
)
from examples.io_model.tiles import groups, least_io, optimum, snapped_tile
from fusion.planning.problem import Problem
from tests.numerics import assert_same_in_float64

DERIVED = [name for name, item in SCHEDULES.items() if item.closed_form]


def test_flash_saturates_the_rows_and_moves_four_times_the_bound():
    found = optimum("flash")
    tile = dict(found.tile)
    assert (tile["B_c"], tile["stages"]) == (1, 1)
    assert sympy.simplify(tile["B_r"] - (M - d - d_v) / (d + d_v + 3)) == 0
    assert sympy.simplify(found.leading - 4 * N**2 * d**2 / M) == 0


def test_leading_orders_are_those_of_the_papers():
    assert sympy.simplify(optimum("key_stationary").leading * M / (N**2 * d**2)).is_number
    small = optimum("small_cache").leading
    assert sympy.simplify(small - N**2 * (1 + 4 * d / sympy.sqrt(M))) == 0  # N^2 d / sqrt(M), and the spilled scores
    partial_outputs = optimum("rabe_staats").leading
    assert sympy.simplify(partial_outputs - 4 * N**2 * d * (2 * d + sympy.sqrt(M + 4 * d**2)) / M) == 0
    assert sympy.count_ops(partial_outputs) < 20  # as a person would write it
    assert sympy.simplify(optimum("backward_fused").leading * M / (N**2 * d**2)).is_number


@pytest.mark.parametrize("name", DERIVED)
def test_the_continuous_optimum_fills_the_memory(name):
    found = optimum(name)
    at = {TILES[key]: value for key, value in found.tile}
    values = {N_q: 4096, N_k: 4096, d: 64, d_v: 64, M: 6000}
    for group in groups(schedule(name)):
        phase = max(group, key=lambda part: len(set(part.tile)))
        if phase.tile:
            assert_same_in_float64(float(phase.footprint.subs(at).subs(values)), 6000)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize(("n", "width"), [(256, 16), (1000, 64), (1024, 96), (4096, 256)])
@pytest.mark.parametrize("share", [1 / 32, 1 / 8, 0.4, 0.9, 2, 7, 30])
def test_snapped_tile_is_within_three_percent_of_the_balanced_search(name, n, width, share):
    problem, capacity = Problem(n_q=n, n_k=n, d=width, d_v=width), int(width * width * share)
    sizes = sizes_of(problem, capacity)
    try:
        best = least_io(schedule(name), problem, capacity)
    except SmallMemoryError:
        with pytest.raises(SmallMemoryError):
            snapped_tile(name, problem, capacity)
        return
    snapped = snapped_tile(name, problem, capacity)
    found = counts(name, sizes, snapped)
    assert found.footprint <= capacity
    assert found.io <= 1.03 * counts(name, sizes, best).io


def exhaustive(name, problem, capacity):
    """Least I/O over every tile whatever, not only balanced ones."""
    sizes, names = sizes_of(problem, capacity), schedule(name).tile
    limit = {
        "B_r": problem.n_q,
        "B_c": problem.n_k,
        "B_o": max(problem.n_q, problem.n_k),
        "B_e": max(problem.d, problem.d_v),
    }
    ranges = [range(1, limit[key] + 1) if key in limit else [1] for key in names]
    if len(names) > 3:  # two independent groups of two: search them apart
        pairs = [("B_r", "B_c"), ("B_o", "B_e" if "B_e" in names else "B_p")]
        return sum(_least(name, sizes, capacity, dict(zip(names, ranges, strict=True)), pair) for pair in pairs)
    tiles = np.array(list(itertools.product(*ranges))).T
    result = counts(name, sizes, dict(zip(names, tiles, strict=True)))
    return np.where(result.footprint <= capacity, result.io, np.inf).min()


def _least(name, sizes, capacity, ranges, pair):
    grid = np.array(list(itertools.product(*(ranges[key] for key in pair)))).T
    tile = {key: grid[pair.index(key)] if key in pair else np.int64(1) for key in ranges}
    parts = [phase_counts(phase, sizes, tile) for phase in schedule(name).phases if set(pair) & set(phase.tile)]
    footprint = np.maximum.reduce([part.footprint for part in parts])
    return np.where(footprint <= capacity, sum(part.io for part in parts), np.inf).min()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["flash", "key_stationary", "rabe_staats", "small_cache"])
@pytest.mark.parametrize(
    ("n_q", "n_k", "width", "capacity"), [(100, 75, 16, 130), (97, 128, 12, 700), (64, 200, 24, 2000)]
)
def test_both_searches_against_every_tile(name, n_q, n_k, width, capacity):
    problem = Problem(n_q=n_q, n_k=n_k, d=width, d_v=width)
    best = exhaustive(name, problem, capacity)
    if not np.isfinite(best):
        with pytest.raises(SmallMemoryError):
            least_io(schedule(name), problem, capacity)
        return
    sizes = sizes_of(problem, capacity)
    searched = counts(name, sizes, least_io(schedule(name), problem, capacity)).io
    snapped = counts(name, sizes, snapped_tile(name, problem, capacity)).io
    assert searched == best and snapped <= 1.03 * best


def test_schedules_without_a_stationary_tile_say_so():
    with pytest.raises(UnknownScheduleError, match="least_io"):
        optimum("materialized")
