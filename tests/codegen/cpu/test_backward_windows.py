"""Rows packed window by window in the backward, where those of all threads would take too much memory."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu import calling, launch
from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir import Normalizer
from fusion.machine import Machine
from fusion.machine.processors import of_such_cores
from fusion.planning import cpu
from fusion.planning.cpu_backward import FUSED, KEYS, Backward
from fusion.planning.problem import problem_of
from tests.codegen.mlir.cases import Case, case
from tests.codegen.mlir.test_backward_parts import assert_right_on_threads, drawn, kernel, on_threads
from tests.numerics import assert_same

EXTENTS = {"B": 2, "H": 1, "Nq": 330, "Nk": 401}


def in_windows(monkeypatch, size: int = 200 << 10) -> None:
    """Bytes for packed rows: on a few threads of some hundred."""
    monkeypatch.setattr(launch, "MOST_PACKED", size)


def trained(c: Case, target: str, fused: bool) -> TrainingKernel:
    run = kernel(c, target)
    run.fused = fused
    return run


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fused", [True, False], ids=["one kernel", "two kernels"])
@pytest.mark.parametrize(
    ("name", "fields", "target"),
    [
        ("plain", {}, "best"),
        ("causal", {"dtype": "bfloat16", "group": 3}, "best"),
        ("causal_last_key", {"dtype": "float16"}, "multiply-add"),
        ("window", {"group": 2}, "avx2"),
        ("left_padded_inf", {"normalizer": Normalizer.SAFE_SOFTMAX}, "best"),
        ("left_padded", {"sinks": True}, "best"),
        ("bias", {}, "best"),
        ("bucket_table", {"group": 2}, "best"),
        ("documents", {"dtype": "bfloat16"}, "best"),
    ],
)
def test_gradients_are_as_exact_and_the_same_on_all_threads(
    monkeypatch, fused: bool, name: str, fields: dict, target: str
) -> None:
    in_windows(monkeypatch)
    c = case(name, **fields)
    run = trained(c, target, fused)
    assert_right_on_threads(run, c, EXTENTS, counts=(1, 3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fused", [True, False], ids=["one kernel", "two kernels"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_rows_that_are_packed_whole(monkeypatch, dtype: str, fused: bool) -> None:
    """Windows end where blocks do, so that not even the order of sums is another."""
    c = case("plain", dtype)
    run = trained(c, "best", fused)
    given = drawn(c, {"B": 1, "H": 2, "Nq": 1030, "Nk": 1500}, run)
    whole = run.backward(*given)
    in_windows(monkeypatch)
    again = trained(c, "best", fused)
    for one, two in zip(whole, again.backward(*given), strict=True):
        assert_same(one, two)


def test_packed_rows_do_not_grow_with_the_keys(monkeypatch) -> None:
    in_windows(monkeypatch, 1 << 20)
    c, rooms = case("plain"), []
    run = trained(c, "best", fused=False)
    for n in (500, 5000, 20_000):
        given = drawn(c, {"B": 1, "H": 1, "Nq": 64, "Nk": n}, run)
        monkeypatch.setattr(calling.memory, "own", calling.ThreadMemory())
        on_threads(run, given, counts=(2,))
        rooms.append(calling.memory.own._room)
    assert rooms[1] == rooms[2] < 5 << 20


def backward(cores: int, n: int, d: int) -> Backward:
    c = case("plain", d=d, d_v=d)
    machine = of_such_cores(Machine.detect(), cores)
    return Backward(
        problem=problem_of(c.spec, (1, 12, n, n)), machine=machine, outer=12, inner=1, block=96, tile=128, planes=0,
        amx=False,
    )  # fmt: skip


@pytest.mark.parametrize(("cores", "n"), [(2, 4096), (64, 4096), (64, 16_384), (64, 131_072)])
def test_sums_of_all_threads_and_parts_take_at_most_a_gibibyte_each(cores: int, n: int) -> None:
    work = backward(cores, n, 128)
    assert work.division(FUSED).shared <= cpu.MOST_PACKED
    threads = cores * 4 * n * 128
    assert threads <= cpu.MOST_PACKED or not work.fuses
    assert work.division(KEYS).shared == 0


GUARDED = """
import random, torch
from fusion.codegen.cpu import launch
from tests.codegen.mlir.cases import case
from tests.codegen.cpu.test_backward_windows import drawn, trained
from tests.fuzz.guarded import Guarded, measured
from tests.fuzz.quick import unoptimised
launch.MOST_PACKED = 1 << 17
for name, dtype, target, fused in (
    ("plain", "float32", "best", True), ("causal", "bfloat16", "best", True), ("window", "float32", "avx2", False),
):
    with unoptimised():
        c = case(name, dtype, 40, 24)
        run = trained(c, target, fused)
        given = drawn(c, {"B": 1, "H": 2, "Nq": 330, "Nk": 301}, run)
        with measured():
            Guarded(run, random.Random(0)).backward(*given)
print("inside")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs pages that can be protected")
def test_no_window_touches_a_byte_beyond_its_own() -> None:
    from tests.fuzz.test_guarded import run

    done = run("-c", GUARDED)
    assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr
