"""The planner: what it picks, what it refuses, what it says."""

import time

import pytest
import torch

import fusion
from fusion.errors import FusionError, NoFittingTileError, ProblemError, UnknownMachineError
from fusion.machine import Machine
from fusion.planning.cpu_planner import CpuPlanner, legal_tiles
from fusion.planning.plan import plan
from fusion.planning.problem import Problem, attention_of, problem_of
from tests.codegen.mlir.cases import case
from tests.float8 import stored as float8

CPU = Machine.detect()


def problem(**sizes):
    return Problem(**{"n_q": 1024, "n_k": 1024, "d": 64, "d_v": 64, "heads": 12, "heads_kv": 12, **sizes})


def test_exported_by_the_package():
    assert fusion.plan(problem(), machine="h200") == plan(problem(), "h200")


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
def test_gpu_plans_fit_without_the_hardware(name, width):
    chosen = plan(problem(d=width, d_v=width, dtype="bfloat16", causal=True), machine=name)
    assert chosen.B_r & (chosen.B_r - 1) == 0 and chosen.B_c & (chosen.B_c - 1) == 0 and chosen.B_r >= 16
    shared = 2 * (chosen.B_r * width + chosen.choice.tile.stages * chosen.B_c * 2 * width)
    assert shared <= chosen.machine.shared_memory
    assert 1 <= chosen.ratio and chosen.time > 0 and chosen.limited_by


def test_decoding_splits_the_keys_and_prefill_does_not():
    assert plan(problem(n_q=1, n_k=32768, dtype="bf16"), "h200").schedule == "split_k"
    assert plan(problem(n_q=1, n_k=32768, dtype="bf16"), "h200").choice.splits > 4
    assert plan(problem(n_q=4096, n_k=4096, heads=32, heads_kv=8, dtype="bf16"), "h200").schedule == "flash"


def test_a_cache_in_float8_is_read_in_half_the_time():
    """Keys and values are moved as they are stored, whatever they are widened to."""
    sizes = {"n_q": 1, "n_k": 131072, "heads": 32, "heads_kv": 8, "dtype": "bf16"}
    wide, stored = plan(problem(**sizes), "h200"), plan(problem(**sizes, stored_bytes=1), "h200")
    memory = [dict(chosen.resources)["HBM"] for chosen in (wide, stored)]
    assert 0.495 < memory[1] / memory[0] < 0.505 and stored.time <= wide.time
    spec = case("plain", "bfloat16", group=4).spec
    found = [problem_of(s, (1, 8, 1, 1000)) for s in (spec, float8(spec, torch.float8_e5m2))]
    assert [p.key_bytes for p in found] == [2, 1] and found[0].dtype == found[1].dtype


def test_masked_problems_skip_tiles():
    full, causal = plan(problem()), plan(problem(causal=True))
    assert (full.schedule, causal.schedule) == ("flash", "block_sparse")
    assert (
        causal.sizes["live"] < 1 and causal.time < full.time
    )  # by how much depends on the rows of a block, that is the machine
    window = plan(problem(causal=True, window=64))
    assert window.io < causal.io and window.time < causal.time


@pytest.mark.parametrize("n", [0, 1, 5, 33, 128, 777, 4096])
@pytest.mark.parametrize(("rows", "cols"), [(32, 8), (16, 4), (32, 32), (4, 2)])
def test_cpu_tiles_are_legal_and_no_larger_than_the_problem(n, rows, cols):
    legal = legal_tiles(problem(n_q=n, n_k=n), CPU, (rows, cols))
    assert legal
    for tile in legal:
        assert tile[0] % rows == tile[1] % cols == 0
        assert max(tile[0] - rows, tile[1] - cols) < max(1, n)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_small_problems_still_spread_over_the_cores(heads):
    for n in (64, 128, 256):
        small = problem(n_q=n, n_k=n, heads=heads, heads_kv=heads)
        tile = CpuPlanner(attention_of(small), CPU, register_tile=(32, 8)).choose(()).tile
        blocks = heads * -(-n // tile.rows)
        rounds = -(-blocks // CPU.cores)
        assert blocks >= min(CPU.cores, heads * n // 32)
        assert rounds * CPU.cores <= 1.5 * blocks or blocks <= CPU.cores


def test_lower_bound_counts_shared_keys_once():
    grouped = plan(problem(n_q=1, heads_kv=2), "h200")
    single = plan(problem(n_q=1), "h200")
    assert grouped.bound < single.bound / 4


def test_text_has_the_numbers_in():
    chosen = plan(problem())
    assert str(chosen).count("\n") == 0 and "flash" in str(chosen) and "x bound" in str(chosen)
    text = chosen.explain()
    expected = 1024 * 128 * -(-1024 // chosen.B_r) + 1024 * 64 + 1024 * 64 + 1024
    assert f"= {expected} per head" in text and f"1024*(64 + 64)*ceil(1024/{chosen.B_r})" in text
    assert "N_k*(d + d_v)*ceil(N_q/B_r)" in text
    assert f"ratio {chosen.ratio:.2f}" in text and "predicted, limited by" in text


def test_a_share_of_live_tiles_counts():
    full, sparse = plan(problem()), plan(problem(density=0.2))
    assert sparse.schedule == "block_sparse" and sparse.sizes["live"] == 0.2 and sparse.time < full.time


def test_planning_is_cached():
    plan(problem(n_q=100), "cpu")
    start = time.perf_counter()
    shapes = [problem(n_q=200 + 7 * step, n_k=300 + 5 * step, causal=step % 2 == 0) for step in range(20)]
    first = [plan(shape) for shape in shapes]
    each = (time.perf_counter() - start) / len(shapes)
    assert all(plan(shape) is found for shape, found in zip(shapes, first, strict=True))
    print(f"planning one site: {each * 1e3:.1f} ms")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: problem(n_q=-1), ProblemError, "n_q=-1: sizes are non-negative"),
        (lambda: problem(d=2.5), ProblemError, "d=2.5"),
        (lambda: problem(heads=12, heads_kv=5), ProblemError, "12 query heads do not divide over 5"),
        (lambda: problem(density=1.5), ProblemError, "density=1.5"),
        (lambda: problem(window=0), ProblemError, "window=0"),
        (lambda: problem(dtype="int8"), ProblemError, "int8"),
        (lambda: plan(problem(), "gtx"), UnknownMachineError, "known: cpu"),
        (lambda: plan(problem(d=8192, d_v=8192), "h200"), NoFittingTileError, "shared memory"),
        (lambda: plan("attention"), ProblemError, "give a Problem"),
    ],
)
def test_impossible_requests_are_clear_errors(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, FusionError) and "\\n" not in str(caught.value)
