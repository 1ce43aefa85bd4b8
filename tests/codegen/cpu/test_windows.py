"""Keys and values packed window by window, where those of all threads would take too much memory."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu import calling, launch
from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir import Normalizer
from fusion.planning.register_tiles import tilings_for
from tests import emulation
from tests.codegen.mlir.cases import (
    TARGETS,
    Case,
    assert_as_exact_as_eager,
    assert_trains_as_exact_as_eager,
    case,
    draw,
    on_threads,
)
from tests.codegen.mlir.test_parts import kernel as in_parts
from tests.numerics import assert_same


def kernel(c: Case, target: str = "best") -> Kernel:
    return Kernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target])


def in_windows(monkeypatch, size: int = 300 << 10) -> None:
    """Bytes for packed keys and values: of some hundred keys."""
    monkeypatch.setattr(launch, "MOST_PACKED", size)


@pytest.mark.parametrize(
    ("name", "fields", "target"),
    [
        ("plain", {}, "best"),
        ("plain", {"dtype": "bfloat16", "normalizer": Normalizer.NONE}, "best"),
        ("causal_last_key", {"group": 3, "dtype": "bfloat16"}, "best"),
        ("window", {"group": 2}, "avx2"),
        ("left_padded", {"sinks": True}, "best"),
        ("left_padded_inf", {"dtype": "float16", "normalizer": Normalizer.SAFE_SOFTMAX}, "generic"),
        ("bias", {"weight": True}, "best"),
        ("bucket_table", {}, "multiply-add"),
        ("documents", {"off_by_one": True}, "best"),
    ],
)
def test_results_are_as_exact_and_the_same_on_all_threads(monkeypatch, name: str, fields: dict, target: str) -> None:
    in_windows(monkeypatch)
    c = case(name, **fields)
    for n_q, n_k in ((130, 1700), (300, 701), (33, 64)):
        run = kernel(c, target)
        operands, sizes = draw(c, {"B": 2, "H": 1, "Nq": n_q, "Nk": n_k}, "heads_inside")
        first, *others = on_threads(run, operands, sizes)
        assert_as_exact_as_eager(first, c, operands)
        for other in others:
            assert_as_exact_as_eager(other, c, operands)


@pytest.mark.parametrize(("dtype", "target"), [("float32", "multiply-add"), ("bfloat16", "best")])
def test_results_are_those_of_keys_that_are_packed_whole(monkeypatch, dtype: str, target: str) -> None:
    """Windows end where blocks do, so that not even the order of sums is another. (Float32 over
    planes of AMX is as exact, but has not the same bits.)"""
    c = case("plain", dtype)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 200, "Nk": 5000})
    whole = kernel(c, target)(operands, sizes)
    in_windows(monkeypatch)
    assert_same(kernel(c, target)(operands, sizes), whole)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["plain", "causal", "left_padded_inf"])
def test_windows_of_scores_that_are_bounded_or_not(monkeypatch, name: str, trained: bool) -> None:
    """Where a later window's scores are not, the item begins anew."""
    in_windows(monkeypatch, 1 << 15)
    c, target = case(name, "bfloat16", 40, 24), emulation.AMX
    tilings = [replace(tiling, keys=64) for tiling in tilings_for(c.spec, target)]
    with emulation.compiling(target):
        run = (TrainingKernel if trained else Kernel)(c.spec, tilings, target)
        for factor in (1, 1000):
            operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 40, "Nk": 300})
            operands[1][..., 200:, :] *= factor
            out = run.outputs(operands, sizes)[0] if isinstance(run, TrainingKernel) else run(operands, sizes)
            assert_as_exact_as_eager(out, c, operands)
        text = run.variant(40, 24, tilings[0]).text
    assert "query_norms" in text.source and launch.window_of(text, 300, 1) == 128


def test_windows_of_parts_and_in_training(monkeypatch) -> None:
    in_windows(monkeypatch)
    c = case("left_padded_inf", group=2)
    operands, sizes = draw(c, {"B": 2, "H": 1, "Nq": 100, "Nk": 3000})
    assert_as_exact_as_eager(in_parts(c, 3, tiled=True)(operands, sizes), c, operands)
    c = case("causal", group=2)
    run = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS["best"]), TARGETS["best"])
    assert_trains_as_exact_as_eager(run, c, {"B": 1, "H": 2, "Nq": 100, "Nk": 900})


def test_memory_does_not_grow_with_the_keys(monkeypatch) -> None:
    in_windows(monkeypatch, 1 << 20)
    monkeypatch.setattr(calling.memory, "own", calling.ThreadMemory())
    c, rooms = case("plain"), []
    run = kernel(c)
    for n_k in (500, 5000, 40_000):
        operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 100, "Nk": n_k})
        run(operands, sizes)
        rooms.append(calling.memory.own._room)
    assert rooms[1] == rooms[2] < 5 << 20
    threads = min(2, torch.get_num_threads())
    text = run.variant(64, 64, run.tilings[0]).text
    assert launch.window_of(text, 40_000, threads) * threads * text.step_bytes // text.key_step <= 1 << 20


GUARDED = """
import random, torch
from fusion.codegen.cpu import launch
from tests.codegen.mlir.cases import case, draw
from tests.codegen.cpu.test_windows import kernel
from tests.fuzz.guarded import Guarded, measured
launch.MOST_PACKED = 1 << 17
for name, dtype, target in (
    ("plain", "float32", "best"), ("causal", "bfloat16", "best"), ("window", "float32", "avx2"),
):
    c = case(name, dtype, 40, 24)
    run = kernel(c, target)
    with measured():
        for n_q, n_k in ((50, 701), (130, 64)):
            Guarded(run, random.Random(0))(*draw(c, {"B": 1, "H": 3, "Nq": n_q, "Nk": n_k}))
print("inside")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs pages that can be protected")
def test_no_window_touches_a_byte_beyond_its_own() -> None:
    from tests.fuzz.test_guarded import run

    done = run("-c", GUARDED)
    assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr
