"""Parts of the keys of a head in the backward: all gradients in one kernel, for any number of threads."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu.training import TrainingKernel
from fusion.codegen.mlir.backward import fused
from fusion.codegen.mlir.backward.delta import DELTAS
from fusion.codegen.mlir.backward.lanes import FUSED, KEYS
from fusion.ir import Normalizer
from fusion.machine import Machine
from fusion.machine.processors import of_such_cores
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import TARGETS, Case, assert_gradients_as_exact_as_eager, beside_eager, case, draw
from tests.numerics import assert_as_exact_over_draws, assert_same

THREADS = (1, 2, 3, 8, 31, 64)


def kernel(c: Case, target: str = "best", cores: int = 64, parts: int | None = None) -> TrainingKernel:
    """One for all gradients."""
    machine = of_such_cores(Machine.detect(), cores)
    result = TrainingKernel(c.spec, tilings_for(c.spec, TARGETS[target]), TARGETS[target], machine)
    result.fused, result.parts = True, parts
    return result


def drawn(c: Case, extents: dict[str, int], run: TrainingKernel) -> list:
    """Arguments of `backward`: with dropout where the case has weights."""
    operands, sizes = draw(c, extents, "heads_inside")
    if c.weight:
        operands[-1] = 2 * operands[-1].round()
    out, statistics = run.outputs(operands, sizes)
    needs = tuple(x.is_floating_point() for x in operands)
    return [torch.randn_like(out), out, statistics, operands, sizes, needs]


def on_threads(run: TrainingKernel, given: list, counts: Sequence[int] = THREADS) -> list[list[torch.Tensor]]:
    before, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(run.backward(*given))
    finally:
        torch.set_num_threads(before)
    return results


def assert_right_on_threads(
    run: TrainingKernel, c: Case, extents: dict[str, int], counts: Sequence[int] = THREADS
) -> None:
    """Gradients as exact as eager's, and the same numbers on all of these threads."""

    def draw_and_run():
        given = drawn(c, extents, run)
        first, *others = on_threads(run, given, counts)
        for other in others:
            for one, two in zip(first, other, strict=True):
                assert_same(one, two)
        grad, _, _, operands, _, needs = given
        return beside_eager(first, c, operands, grad, needs)

    assert_as_exact_over_draws(draw_and_run, getattr(torch, c.spec.dtype), name="gradient", check_dtype=False)


@pytest.mark.parametrize(
    ("name", "fields", "target"),
    [
        ("plain", {}, "best"),
        ("plain", {"dtype": "bfloat16", "d": 40, "d_v": 24}, "avx2"),
        ("causal", {"group": 3}, "best"),
        ("causal", {"dtype": "bfloat16"}, "best"),
        ("causal_last_key", {"dtype": "float16", "group": 2}, "multiply-add"),
        ("window", {"dtype": "bfloat16", "group": 2}, "best"),
        ("left_padded_inf", {"normalizer": Normalizer.SAFE_SOFTMAX}, "best"),
        ("left_padded", {"sinks": True}, "avx2"),
        ("bias", {}, "best"),
        ("brain_bias", {"dtype": "bfloat16"}, "best"),
        ("bucket_table", {"group": 2}, "best"),
        ("plain", {"weight": True}, "best"),
        ("causal", {"weight": True, "dtype": "bfloat16"}, "best"),
        ("causal", {"off_by_one": True}, "generic"),
        ("soft_cap", {"normalizer": Normalizer.NONE}, "best"),
        ("documents", {}, "avx2"),
    ],
)
def test_gradients_are_the_same_for_any_number_of_threads(name: str, fields: dict, target: str) -> None:
    c = case(name, **fields)
    for parts, n_q, n_k in ((None, 333, 517), (2, 77, 300), (5, 130, 97)):
        run = kernel(c, target, parts=parts)
        extents = {"B": 2 if "bias" in name else 1, "H": 2, "Nq": n_q, "Nk": n_k}
        assert_right_on_threads(run, c, extents, THREADS if parts is None else (1, 5))
        steps = {(step.kind, step.parts) for derived in run.derived.values() for step in derived.steps[0]}
        ((kind, cut),) = steps
        assert kind is FUSED and cut == (parts or cut) > 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_long_heads_begin_anew_within_parts(monkeypatch, dtype: str, parts: int) -> None:
    monkeypatch.setattr(fused, "QUERY_GRADIENT_SPAN", 200)
    monkeypatch.setattr("fusion.codegen.cpu.backward.QUERY_GRADIENT_SPAN", 200)
    c = case("causal_last_key", dtype)
    run = kernel(c, parts=parts)
    assert_right_on_threads(run, c, {"B": 1, "H": 3, "Nq": 61, "Nk": 1300}, (1, 2, 5))


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_special_values_stay_in_their_rows(value: float) -> None:
    """Those of one part reach the same gradients as in a head that is not cut."""
    c = case("plain")
    whole, cut = kernel(c, parts=1), kernel(c, parts=3)
    given = drawn(c, {"B": 1, "H": 2, "Nq": 50, "Nk": 400}, whole)
    given[3][1][0, 0, -1, 3] = value
    given[1], given[2] = whole.outputs(given[3], given[4])
    for one, two in zip(whole.backward(*given), cut.backward(*given), strict=True):
        assert torch.equal(one.isnan(), two.isnan()) and torch.equal(one[1:], two[1:])


def test_a_large_table_has_a_copy_for_each_thread(monkeypatch) -> None:
    """Its sums depend on the number of threads, by the order of sums alone."""
    monkeypatch.setattr("fusion.codegen.cpu.derived.MOST_COPIES", 1000)
    c = case("bucket_table")
    run = kernel(c, parts=4)
    given = drawn(c, {"B": 1, "H": 3, "Nq": 200, "Nk": 300}, run)
    for found in on_threads(run, given, (1, 3, 9)):
        assert_gradients_as_exact_as_eager(found, c, given[3], given[0], given[5])
    assert sorted(derived.steps[0][0].shares for derived in run.derived.values()) == [1, 3, 9]


def test_two_kernels_cut_blocks_as_well() -> None:
    c = case("causal", group=2)
    run = kernel(c)
    run.fused = False
    assert_right_on_threads(run, c, {"B": 1, "H": 1, "Nq": 500, "Nk": 600}, (1, 4, 20))
    steps = [step for derived in run.derived.values() for step in derived.steps[0]]
    assert {step.kind.name for step in steps} == {"queries", "keys"} and all(step.parts > 1 for step in steps)
    assert all((DELTAS, 0) in derived.launchers and (KEYS, 0) in derived.launchers for derived in run.derived.values())


GUARDED = """
import random, torch
from tests.codegen.mlir.cases import case
from tests.codegen.mlir.test_backward_parts import drawn, kernel, on_threads
from tests.fuzz.guarded import Guarded, measured
torch.manual_seed(0)
for name, dtype, group, n_q, n_k in (
    ("plain", "float32", 1, 33, 401), ("causal", "bfloat16", 3, 130, 97), ("bias", "float32", 1, 50, 300),
    ("bucket_table", "bfloat16", 1, 70, 209), ("window", "float32", 2, 1, 3000),
):
    c = case(name, dtype, 40, 24, group=group)
    run = kernel(c)
    given = drawn(c, {"B": 2, "H": 1, "Nq": n_q, "Nk": n_k}, run)
    for run.parts in (1, 2, 7):
        run.derived.clear()
        with measured():
            on_threads(Guarded(run, random.Random(0)), given, (1, 3))
print("inside")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs pages that can be protected")
def test_no_part_touches_a_byte_beyond_its_own() -> None:
    from tests.fuzz.test_guarded import run

    done = run("-c", GUARDED)
    assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr
