"""The command of the I/O model, and the schedules of least I/O on the two-level model."""

from dataclasses import replace

import pytest

from examples.io_model.__main__ import main
from examples.io_model.schedule import SmallMemoryError, UnknownScheduleError
from examples.io_model.two_level import least, weigh, weigh_one
from fusion.errors import ProblemError
from fusion.planning.problem import Problem

PROBLEM = Problem(n_q=1024, n_k=1024, d=64, d_v=64, heads=12, heads_kv=12)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--N 1024 --M 1000", ["*  small_cache", "key_stationary", "rabe_staats", "split_k", "materialized"]),
        ("--N 1K --M 1K", ["*  small_cache", "M = 1024 "]),
        ("--N 512 --M 20000 --backward", ["backward_small_cache", "backward_fused"]),
        ("--N 131072 --d 8 --M 400 --features 45", ["*  polynomial"]),
        ("--symbolic", ["flash:", "split_k:", "polynomial:", "2402.07443"]),
        ("--symbolic --schedule flash", ["B_r* = (M - d - d_v)/(d + d_v + 3)", "4*N**2*d**2/M"]),
    ],
)
def test_what_is_printed(capsys, words, said):
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("words", "said"),
    [("--M 0", "0 elements"), ("--symbolic --schedule flush", "'flush' is not known; known: flash")],
)
def test_impossible_requests(capsys, words, said):
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("capacity", [500, 3000, 20000])
def test_the_schedule_of_least_io_fits(capacity):
    chosen = least(PROBLEM, capacity)
    assert chosen.io == min(item.io for item in weigh(PROBLEM, capacity)) and chosen.footprint <= capacity


def test_dead_tiles_are_not_moved():
    masked = replace(PROBLEM, causal=True)
    assert least(masked, 10000).io < 0.7 * least(PROBLEM, 10000).io


def test_backward():
    small, large = (least(PROBLEM, capacity, direction="backward") for capacity in (1000, 10**5))
    assert small.schedule == "backward_small_cache" and large.schedule in ("backward_split", "backward_fused")
    assert small.ratio > 1 and large.ratio > 1


def test_polynomials_are_weighed_where_features_are_given():
    assert "polynomial" not in [item.schedule for item in weigh(PROBLEM, 20000)]
    short = Problem(n_q=64, n_k=64, d=64, d_v=64)
    assert least(short, 20000, features=50000).schedule != "polynomial"
    with pytest.raises(ProblemError, match="features=r"):
        weigh_one(PROBLEM, 20000, "polynomial")


def test_what_does_not_fit():
    with pytest.raises(SmallMemoryError, match="no schedule for .* M=3 elements; .* small_cache 4"):
        least(PROBLEM, 3)
    with pytest.raises(SmallMemoryError, match="its smallest tile needs 259"):
        least(PROBLEM, 200, ("flash",))
    with pytest.raises(UnknownScheduleError, match="known: flash"):
        weigh_one(PROBLEM, 200, "flush")
