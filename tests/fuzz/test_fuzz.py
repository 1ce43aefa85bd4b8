"""Fuzzing in small: some seeds through the whole of it, and a failure made short."""

import io
import math
import os
import random
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fuzz import kernel_faults, quick, sharded_run
from tests.fuzz.campaign import Record, in_workers
from tests.fuzz.check import Sample, Verdict, _finite_where_unstable, allowing_overflow, check, verdict
from tests.fuzz.fault_examples import EXAMPLES
from tests.fuzz.faults import FAULTS, found_by
from tests.fuzz.functions import program
from tests.fuzz.reduce import reduced
from tests.fuzz.routes import compiled
from tests.fuzz.specs import drawn
from tests.fuzz.specs_run import CALLS, Way, way
from tests.fuzz.specs_run import check as check_spec

HALF, WIDE = torch.float16, torch.float64
WRONG = """B, H, N, M, D, E = 1, 2, 6, 6, 4, 4
dtype = torch.float32

def inputs():
    q = torch.randn(B, H, N, D)
    k = torch.randn(B, H, M, D)
    v = torch.randn(B, H, M, E)
    bias = torch.randn(N, M)
    return (q, k, v, bias)

def f(q, k, v, bias):
    k = k * 0.5
    s = q @ k.mT
    s = s + bias
    p = s.softmax(-1)
    return p @ v
"""


def test_random_functions_are_as_exact_as_eager():
    results = {seed: check(program(seed)) for seed in range(30)}
    bad = {s: r.message for s, r in results.items() if r.verdict in (Verdict.WRONG, Verdict.FAILED) or r.defects}
    assert not bad
    assert sum(result.verdict is Verdict.INVALID for result in results.values()) < 6
    assert sum(result.fused for result in results.values()) > 15


@pytest.mark.parametrize(
    ("ours", "eager", "exact", "expected"),
    [
        (math.inf, math.nan, 1e5, Verdict.OVERFLOW),
        (65504.0, math.inf, 65515.0, Verdict.OVERFLOW),
        (100.0, math.nan, 100.0, Verdict.OVERFLOW),
        (-math.inf, math.nan, 1e5, Verdict.OVERFLOW),
        (-math.inf, math.inf, 1e5, Verdict.WRONG),
        (math.nan, math.inf, 1e5, Verdict.WRONG),
        (-math.inf, 65504.0, 65515.0, Verdict.WRONG),
        (math.inf, 100.0, 100.0, Verdict.WRONG),
        (10.0, math.nan, 100.0, Verdict.WRONG),
    ],
)
def test_where_eager_leaves_the_range_of_its_dtype(ours, eager, exact, expected):
    found = [[{"x": torch.tensor([1.0, x], dtype=dtype)}] for x, dtype in ((ours, HALF), (eager, HALF), (exact, WIDE))]
    assert allowing_overflow(*found, HALF).verdict is expected


def test_sums_over_heads_may_overflow_otherwise_than_in_eager():
    found = [[{"x": torch.tensor([1.0, *row])}] for row in ((2.0, math.nan), (math.nan, 4.0), (3.0, 4.0))]
    assert allowing_overflow(*found, torch.float32).verdict is Verdict.WRONG
    assert allowing_overflow(*found, torch.float32, elsewhere=True).verdict is Verdict.OVERFLOW
    ours_alone = [[{"x": torch.tensor([1.0, x])}] for x in (math.nan, 4.0, 4.0)]
    assert allowing_overflow(*ours_alone, torch.float32, elsewhere=True).verdict is Verdict.WRONG


def test_exponentials_that_overflow_make_a_row_of_weights_nan():
    rows = [[math.nan, math.nan], [0.5, 0.5]], [[math.nan, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]
    found = [[{"x": torch.tensor(row)}] for row in rows]
    assert allowing_overflow(*found, torch.float32).verdict is Verdict.WRONG
    assert allowing_overflow(*found, torch.float32, unshifted=True).verdict is Verdict.OVERFLOW
    found[0][0]["x"][1] = math.nan
    assert allowing_overflow(*found, torch.float32, unshifted=True).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("ours", "stable", "expected"), [(1.0, math.nan, 1.0), (math.nan, math.nan, math.inf), (1.0, 4e22, math.inf)]
)
def test_infinities_made_of_rounding_errors_are_not_compared(ours, stable, expected):
    """Only where float64 is unstable and ours is finite."""
    sample = SimpleNamespace(eager={"x": torch.tensor(math.inf)}, exact={"x": torch.tensor(4e22, dtype=WIDE)})
    found = _finite_where_unstable(sample, {"x": torch.tensor(ours)}, {"x": torch.tensor(stable, dtype=WIDE)})
    assert found["x"] == expected


def test_float64_has_the_fills_of_float32():
    """So that it has a number where heads that are mixed overflow in eager, in an order of the library's choice."""
    text = WRONG.replace("s = s + bias", "s = s + 2 * torch.full_like(s, torch.finfo(s.dtype).min)").replace(
        "return p @ v", "return s"
    )
    sample = Sample(replace(program(0), text=text, trained=False), 0)
    assert sample.eager["output"].isneginf().all()
    assert (sample.exact["output"] < torch.finfo(torch.float32).min).all()
    assert sample.exact["output"].isfinite().all()


def test_a_program_is_the_same_wherever_it_is_drawn():
    assert [program(seed).text for seed in range(20)] == [program(seed).text for seed in range(20)]
    assert len({program(seed).text for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("scale twice", 12),
        pytest.param("mask off by one", 8, marks=pytest.mark.long),
        pytest.param("changes in place not seen", 60, marks=pytest.mark.long),
    ],
)
def test_faults_are_found_soon(name, seeds):
    seed, _ = found_by(FAULTS[name], range(seeds))
    assert seed is not None, f"{name}: right by {seeds} functions"


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_takes_effect(name):
    """A redesign may leave a fault in a function that nothing asks any more."""
    with FAULTS[name]():
        assert _of_one_draw(EXAMPLES[name]) is Verdict.WRONG
    assert _of_one_draw(EXAMPLES[name]) is Verdict.RIGHT


def _of_one_draw(program):
    sample = Sample(program, 0)
    with torch.set_grad_enabled(program.trained):
        outcome = compiled(sample.function, sample.inputs(), program.route, program.emitter, verify=False)
    return verdict([sample.run(outcome.call, sample.given)], [sample.eager], [sample.exact], program.dtype).verdict


@pytest.mark.parametrize("name", kernel_faults.FAULTS)
def test_faults_of_kernels_are_found_soon(name):
    pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")
    seed, _ = kernel_faults.found_by(kernel_faults.FAULTS[name], range(16))
    assert seed is not None, f"{name}: right by 16 specs"


def test_random_specs_run_on_cpu_kernels():
    """One as for users; the others on kernels that are made quickly, among them such that go row by row."""
    pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")
    found, rng = drawn(0), random.Random(0)
    ways = [Way(emitter="mlir", trained=False, plan=None)]
    ways += [Way(emitter="mlir", trained=False, plan=quick.plan(found.spec, rng, by_rows=n > 3)) for n in range(6)]
    for how in ways:
        results = check_spec(found, how, rng, 0)
        assert {result.verdict for result in results} <= {Verdict.RIGHT, Verdict.LUCK}
        assert len(results) == CALLS[how.kind]


def test_random_specs_run_in_simulated_rings():
    record = Record("sharded", "0:4", None)
    sharded_run.run(record, range(4), 600.0)
    assert not record.bad
    assert record.counts["right"] >= 2


def test_specs_are_tried_in_every_way():
    kinds = {(how.kind, how.trained) for how in (way(drawn(seed), random.Random(seed)) for seed in range(500))}
    assert kinds >= {("quick", False), ("quick", True), ("as for users", False), ("triton", False)}


class Dying:
    """A runner that ends its process at seed 3."""

    @staticmethod
    def run(record, seeds, seconds):
        for seed in seeds:
            if seed == 3:
                os._exit(11)
            record.count(seed, Verdict.RIGHT, pid=os.getpid())


def test_workers_end_and_what_ends_one_is_a_failure():
    out = io.StringIO()
    record = Record("functions", "0:7", out)
    in_workers(Dying, record, iter(range(7)), 0.0, None, each=2)
    assert record.counts["run"] == 7 and record.counts["right"] == 6 and record.counts["failed"] == 1
    assert record.last == 6 and record.bad == 1
    assert '"seed": 3' in out.getvalue()


class Interrupting:
    """A runner that interrupts the process that started it at seed 3, and goes on."""

    @staticmethod
    def run(record, seeds, seconds):
        for seed in seeds:
            if seed == 3:
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(600)
            record.count(seed, Verdict.RIGHT)


def test_what_was_counted_before_an_interrupt_is_kept():
    record = Record("functions", "0:7", None)
    with pytest.raises(KeyboardInterrupt):
        in_workers(Interrupting, record, iter(range(7)), 0.0, None)
    assert record.counts["right"] == 3 and record.last == 2


def test_a_failure_is_made_short():
    """As if every attention with a bias were wrong: what is left has the bias, and no scale of K."""

    def judge(candidate):
        result = check(candidate)
        wrong = result.verdict is Verdict.RIGHT and "bias" in candidate.text.split("def f")[1].split(":", 1)[1]
        return replace(result, verdict=Verdict.WRONG) if wrong else result

    start = replace(program(0), text=WRONG, route="trace", emitter="reference", trained=False)
    wanted = judge(start)
    assert wanted.verdict is Verdict.WRONG
    found, _ = reduced(start, wanted, seconds=60, judge=judge)
    assert "* 0.5" not in found.text and len(found.text) < 0.7 * len(WRONG)
