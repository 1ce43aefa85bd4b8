"""Division of a backward among cores: parts of each head, one kernel or two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusion.machine import Machine
from fusion.machine.processors import of_such_cores
from fusion.planning import cpu_backward
from fusion.planning.cpu_backward import FUSED, KEYS, LEAST_ROOM, MOST_PIECES, QUERIES, Backward, last_end
from fusion.planning.problem import Problem


def backward(cores: int, heads: int = 12, inner: int = 1, **sizes) -> Backward:
    problem = Problem(**{"n_q": 1024, "n_k": 1024, "d": 64, "d_v": 64, "heads": heads, "heads_kv": heads, **sizes})
    machine = of_such_cores(Machine.detect(), cores)
    levels = tuple(replace(level, bandwidth=cores * 1e11) for level in machine.levels)
    return Backward(
        problem=problem, machine=replace(machine, levels=levels), outer=heads // inner, inner=inner, block=96, tile=128,
        planes=0, amx=False,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cores", [2, 16, 32, 64, 128])
def test_one_kernel_is_chosen_on_any_number_of_cores(cores: int, causal: bool) -> None:
    for heads in (1, 12, 40):
        work = backward(cores, heads, causal=causal)
        one, whole = work.division(FUSED), work._divided(FUSED, 1)
        assert work.fuses and one.seconds <= whole.seconds
        assert one.parts * one.blocks >= 11 > (one.parts - 1) * one.blocks
        assert one.parts == 1 or one.parts * heads <= MOST_PIECES * cores
        assert work.division(QUERIES).seconds + work.division(KEYS).seconds > 1.2 * one.seconds


def test_heads_are_cut_where_they_do_not_fill_the_cores() -> None:
    assert backward(1).division(FUSED).parts == backward(12).division(FUSED).parts == 1
    assert backward(2, 512).division(FUSED).parts == 1
    assert backward(32).division(FUSED).parts > 1 and backward(32).division(KEYS).parts > 1
    assert backward(16, causal=True).division(FUSED).parts > 1


def test_memory_of_parts_is_bounded() -> None:
    """By a constant, or what threads have in packed rows; where heads are added up, dQ of each is kept."""
    for cores in (16, 128):
        for n in (128, 4096, 1 << 17):
            for heads, inner in ((3, 1), (12, 4), (96, 32)):
                work = backward(cores, heads, inner, n_q=n, n_k=n)
                one = work.division(FUSED)
                assert one.shared == (one.parts > 1) * 4 * heads * one.parts * n * 64
                assert one.shared <= max(LEAST_ROOM, cores * work.workspace(FUSED))


def test_rows_are_packed_window_by_window_where_those_of_all_threads_are_too_many(monkeypatch) -> None:
    work = backward(64, n_q=1 << 15, n_k=1 << 15, d=128, d_v=128)
    packing, blocks = work.block_seconds(KEYS)
    assert 64 * work.workspace(KEYS) <= cpu_backward.MOST_PACKED < 64 * work.packed(KEYS)
    monkeypatch.setattr(cpu_backward, "MOST_PACKED", 1 << 40)
    whole, unpacked = work.block_seconds(KEYS)
    assert packing == 0 < whole and work.workspace(KEYS) == work.packed(KEYS)
    assert (blocks > unpacked).all() and (blocks < unpacked + 1.5 * whole).all()


def test_two_kernels_where_one_could_not_be_cut() -> None:
    """A gradient that is summed over the batch keeps a dQ for each element, and there is no room for all parts."""
    work = backward(128, 2048, 1024, n_q=4096, n_k=4096)
    assert work.division(FUSED).parts == 1 and work.division(KEYS).parts > 1 and not work.fuses


def test_pieces_are_taken_in_turns() -> None:
    """The first of every element, then the second of every one."""
    assert last_end(np.array([3.0, 1.0]), 2, 2) == 4.0
    assert last_end(np.array([3.0, 1.0]), 3, 4) == 3.0
    assert last_end(np.array([2.0, 2.0]), 3, 4) == 4.0
    assert last_end(np.array([3.0, 1.0]), 1, 8) == 3.0
