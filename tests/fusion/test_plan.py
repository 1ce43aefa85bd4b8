"""The planner: what it picks, what it refuses, what it says."""

import time
from pathlib import Path

import pytest
import torch

import fusion
import fusion.planning.plan as planner
from fusion.errors import FusionError, NoFittingTileError, ProblemError, UnknownMachineError, UnknownScheduleError
from fusion.machine import Machine
from fusion.planning.from_spec import problem_of
from fusion.planning.plan import Problem, compare, plan
from fusion.planning.tiles import row_tiles
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
    shared = 2 * (chosen.B_r * width + chosen.stages * chosen.B_c * 2 * width)
    assert shared <= chosen.machine.shared_memory
    assert 1 <= chosen.ratio and chosen.time > 0 and chosen.limited_by


def test_decoding_splits_the_keys_and_prefill_does_not():
    assert plan(problem(n_q=1, n_k=32768, dtype="bf16"), "h200").schedule == "split_k"
    assert plan(problem(n_q=1, n_k=32768, dtype="bf16"), "h200").splits > 4
    assert plan(problem(n_q=4096, n_k=4096, heads=32, heads_kv=8, dtype="bf16"), "h200").schedule == "flash"


def test_a_cache_in_float8_takes_half_the_time():
    """Decoding waits for the keys and values, whatever they are widened to."""
    sizes = {"n_q": 1, "n_k": 131072, "heads": 32, "heads_kv": 8, "dtype": "bf16"}
    wide, stored = plan(problem(**sizes), "h200"), plan(problem(**sizes, stored_bytes=1), "h200")
    memory = [dict(chosen.resources)["HBM"] for chosen in (wide, stored)]
    assert 0.495 < memory[1] / memory[0] < 0.505 and stored.time < wide.time
    spec = case("plain", "bfloat16", group=4).spec
    found = [problem_of(s, (1, 8, 1, 1000)) for s in (spec, float8(spec, torch.float8_e5m2))]
    assert [p.key_bytes for p in found] == [2, 1] and found[0].dtype == found[1].dtype


def test_masked_problems_skip_tiles():
    full, causal = plan(problem()), plan(problem(causal=True))
    assert (full.schedule, causal.schedule) == ("flash", "block_sparse")
    assert (
        causal.share < 1 and causal.time < full.time
    )  # by how much depends on the rows of a block, that is the machine
    assert plan(problem(causal=True), Machine.two_level(10000)).io < 0.7 * plan(problem(), Machine.two_level(10000)).io
    window = plan(problem(causal=True, window=64))
    assert window.io < causal.io and window.time < causal.time


@pytest.mark.parametrize("n", [0, 1, 5, 33, 128, 777, 4096])
@pytest.mark.parametrize(("rows", "cols"), [(32, 8), (16, 4), (32, 32), (4, 2)])
def test_cpu_tiles_are_legal_and_no_larger_than_the_problem(n, rows, cols):
    chosen = planner._plan(problem(n_q=n, n_k=n), CPU, ("flash",), (rows, cols), 1)
    assert chosen.B_r % rows == 0 and chosen.B_c % cols == 0
    assert chosen.B_r < n + rows or chosen.B_r == rows
    assert chosen.B_c < n + cols or chosen.B_c == cols


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_small_problems_still_spread_over_the_cores(heads):
    for n in (64, 128, 256):
        small = problem(n_q=n, n_k=n, heads=heads, heads_kv=heads)
        blocks = heads * -(-n // planner._plan(small, CPU, ("flash",), (32, 8), 1).B_r)
        rounds = -(-blocks // CPU.cores)
        assert blocks >= min(CPU.cores, heads * n // 32)
        assert rounds * CPU.cores <= 1.5 * blocks or blocks <= CPU.cores


def test_two_level_takes_the_least_io():
    for capacity in (500, 3000, 20000):
        chosen = plan(problem(), Machine.two_level(capacity))
        others = compare(problem(), Machine.two_level(capacity))
        assert chosen.io == min(item.io for item in others)
        assert chosen.footprint <= capacity


def test_backward_plans():
    small = plan(problem(), Machine.two_level(1000), direction="backward")
    large = plan(problem(), Machine.two_level(10**5), direction="backward")
    assert small.schedule == "backward_small_cache" and large.schedule in ("backward_split", "backward_fused")
    assert small.ratio > 1 and large.ratio > 1
    assert plan(problem(), "h200", direction="backward").schedule.startswith("backward")


@pytest.mark.parametrize("width", [64, 128, 256])
def test_gpu_backward_plans_have_tiles_of_kernels(width):
    sizes = problem(n_q=4096, n_k=4096, d=width, d_v=width, dtype="bf16")
    for name in ("backward_split", "backward_fused", "backward_apart"):
        chosen = plan(sizes, "h200", name, direction="backward")
        assert chosen.B_r >= 16 and all(size >= 16 and size & (size - 1) == 0 for _, size in chosen.tile), chosen
        assert str(chosen).count(">=") == 1  # a limit of the time, said to be one


def test_polynomial_only_when_asked_and_cheaper_for_long_keys():
    machine = Machine.two_level(20000)
    assert "polynomial" not in [item.schedule for item in compare(problem(), machine)]
    long = problem(n_q=2**17, n_k=2**17, d=8, d_v=8)
    assert plan(long, Machine.two_level(400), features=45).schedule == "polynomial"
    assert plan(problem(n_q=64, n_k=64), machine, features=50000).schedule != "polynomial"
    with pytest.raises(ProblemError, match="features=r"):
        plan(problem(), machine, "polynomial")


def test_lower_bound_counts_shared_keys_once():
    grouped = plan(problem(n_q=1, heads_kv=2), "h200")
    single = plan(problem(n_q=1), "h200")
    assert grouped.bound < single.bound / 4


def test_text_has_the_numbers_in():
    chosen = plan(problem(), Machine.two_level(10000))
    assert str(chosen).count("\n") == 0 and "flash" in str(chosen) and "x bound" in str(chosen)
    text = chosen.explain()
    expected = 1024 * 128 * -(-1024 // chosen.B_r) + 1024 * 64 + 1024 * 64 + 1024
    assert f"= {expected} per head" in text and f"1024*(64 + 64)*ceil(1024/{chosen.B_r})" in text
    assert "N_k*(d + d_v)*ceil(N_q/B_r)" in text
    assert f"ratio {chosen.ratio:.2f}" in text and "small_cache" in text
    assert "predicted, limited by" in plan(problem()).explain()


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
        (lambda: plan(problem(), "h200", "flush"), UnknownScheduleError, "known: flash"),
        (lambda: plan(problem(), direction="sideways"), UnknownScheduleError, "forward, backward"),
        (
            lambda: plan(problem(), Machine.two_level(3)),
            NoFittingTileError,
            "smallest tiles need: small_cache 4",
        ),
        (lambda: plan(problem(), Machine.two_level(200), "flash"), NoFittingTileError, "small_cache"),
        (lambda: plan(problem(d=8192, d_v=8192), "h200"), NoFittingTileError, "shared memory"),
        (lambda: plan("attention"), ProblemError, "give a Problem"),
        (
            lambda: row_tiles(problem(n_q=1, training=True), Machine.two_level(200)),
            NoFittingTileError,
            "CPU kernels cut keys into parts without training",
        ),
        (
            lambda: row_tiles(problem(n_q=1, n_k=3), Machine.two_level(200)),
            NoFittingTileError,
            "3 keys are too few to",
        ),
    ],
)
def test_impossible_requests_are_clear_errors(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, FusionError) and "\\n" not in str(caught.value)


def test_importing_the_planner_is_light():
    import subprocess
    import sys

    code = (
        "import sys, types; package = types.ModuleType('fusion'); package.__path__ = ['fusion']\n"
        "sys.modules['fusion'] = package\n"  # the package itself may register the backend with torch
        "import fusion.planning.plan; print([name for name in ('sympy', 'numpy', 'torch') if name in sys.modules])"
    )
    root = Path(planner.__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout.strip() == "[]"
