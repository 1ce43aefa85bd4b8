"""Choices of CPU kernels by measurement, on a clock of the test's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

import fusion.codegen.cpu as cpu
from fusion.machine import Machine
from fusion.machine.processors import of_such_cores
from fusion.planning import cpu_measured
from fusion.planning.choice import Choice, Tile
from fusion.planning.cpu_measured import Tuner
from fusion.planning.cpu_planner import CpuPlanner
from tests.codegen.mlir.cases import assert_as_exact_as_eager, case, draw
from tests.numerics import assert_runs_as_exact_as_eager

EXTENTS = 2, 3, 200, 300, 64, 64
MACHINE = Machine.detect()
SPEC = case("plain").spec


def choice(rows: int, splits: int = 1) -> Choice:
    return Choice(
        schedule="split_k" if splits > 1 else "flash", tile=Tile(rows=rows, keys=128), keys=300, splits=splits
    )


class Clock:
    """A clock that only launches move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(cpu_measured.time, "perf_counter", lambda: self.now)

    def launch(self, seconds: float, taken: bool = True) -> Callable[[], bool]:
        def run() -> bool:
            self.now += seconds
            return taken

        return run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fusion"


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [((3e-3, 2e-3, 1e-3), 2), ((1e-3, 2e-3, 3e-3), 0), ((1e-3, 0.99e-3, 2e-3), 0), ((2.0, 1.0, 3.0), 1)],
    ids=["the last", "the planned one", "hardly faster", "long calls"],
)
def test_the_fastest_is_taken_and_remembered(monkeypatch, seconds: tuple[float, ...], fastest: int) -> None:
    clock, choices = Clock(monkeypatch), [choice(96), choice(64), choice(48, splits=2)]
    tuner = Tuner(SPEC, MACHINE)
    assert tuner.choice(EXTENTS, choices[0]) is None
    tuner.measure(EXTENTS, dict(zip(choices, map(clock.launch, seconds), strict=True)))
    for each in (tuner, Tuner(SPEC, MACHINE)):  # in this process, and in a later one
        result = each.choice(EXTENTS, choices[0])
        assert result is not None and result.measured
        assert (result.tile, result.splits) == (choices[fastest].tile, choices[fastest].splits)
    larger, smaller = (2, 3, 300, 300, 64, 64), (2, 3, 130, 257, 64, 64)
    assert Tuner(SPEC, MACHINE).choice(larger, choices[0]) is None
    assert Tuner(SPEC, MACHINE).choice(smaller, choices[0]) is not None


def test_nothing_is_measured_where_products_do_not_take_the_operands(monkeypatch, folder: Path) -> None:
    clock, tuner = Clock(monkeypatch), Tuner(SPEC, MACHINE)
    tuner.measure(EXTENTS, {choice(96): clock.launch(1.0), choice(64): clock.launch(1.0, taken=False)})
    assert tuner.choice(EXTENTS, choice(96)) is None and not list(folder.glob("cpu_tiles_*"))


def test_measurements_are_of_one_spec_machine_and_number_of_threads(monkeypatch, folder: Path) -> None:
    clock = Clock(monkeypatch)
    Tuner(SPEC, MACHINE).measure(EXTENTS, {choice(96): clock.launch(2.0), choice(64): clock.launch(1.0)})
    others = (case("causal").spec, MACHINE), (SPEC, of_such_cores(MACHINE, MACHINE.cores + 1))
    for spec, machine in others:
        assert Tuner(spec, machine).choice(EXTENTS, choice(96)) is None
    (path,) = folder.glob("cpu_tiles_*")
    good, before = json.loads(path.read_text()), torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert Tuner(SPEC, MACHINE).choice(EXTENTS, choice(96)) is None
    finally:
        torch.set_num_threads(before)
    for damaged in ("", "[]", "{}", path.read_text()[:-9], json.dumps(good | {"torch": "0"})):
        path.write_text(damaged)
        assert Tuner(SPEC, MACHINE).choice(EXTENTS, choice(96)) is None
    for numbers in ([64], [64, 128, 0], [64.0, 128, 1], [64, 1 << 40, 1]):
        (situation,) = good["choices"]
        path.write_text(json.dumps(good | {"choices": {situation: {"choice": numbers, "measured": []}}}))
        assert Tuner(SPEC, MACHINE).choice(EXTENTS, choice(96)) is None


def test_results_must_not_depend_on_a_clock_where_torch_is_to_be_deterministic(monkeypatch) -> None:
    clock, tuner = Clock(monkeypatch), Tuner(SPEC, MACHINE)
    tuner.measure(EXTENTS, {choice(96): clock.launch(2.0), choice(64): clock.launch(1.0)})
    torch.use_deterministic_algorithms(True)
    try:
        assert tuner.choice(EXTENTS, choice(96)) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert tuner.choice(EXTENTS, choice(96)) is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_measures_its_first_call_and_runs_the_fastest(monkeypatch, dtype: str) -> None:
    c = case("plain", dtype)
    plan = lambda machine: CpuPlanner(c.spec, machine)
    kernel = cpu.compile(c.spec, plan=plan, measure=True)
    assert kernel is not cpu.compile(c.spec, plan=plan)
    launched = list[list[Choice]]()

    def measure(extents, launches) -> None:  # the last is the fastest
        assert all(launch() for launch in launches.values())
        launched.append(list(launches))
        kernel.tuner._remember(cpu_measured._situation(extents), launched[-1][-1], dict.fromkeys(launches, 1.0))

    monkeypatch.setattr(kernel.tuner, "measure", measure)
    for n_k in (290, 300):
        operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 200, "Nk": n_k})
        for _ in range(2):
            assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
        assert kernel.choice(sizes).measured and "measured" in kernel.source(sizes).splitlines()[0]
        assert kernel.choice(sizes).tile == launched[0][-1].tile
    assert len(launched) == 1 and len(launched[0]) == cpu_measured.MEASURED
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 1, "Nk": 300})
    assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert len(launched) == 1, "few queries have one choice"


def test_the_option_reaches_the_kernels(folder: Path) -> None:
    def attention(q, k, v):
        return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v

    run = torch.compile(attention, backend="fusion", options={"autotune": True, "inner": "eager", "strict": True})
    q, k, v = torch.randn(3, 1, 4, 512, 64).unbind()
    assert_runs_as_exact_as_eager(run, attention, q, k, v)
    (path,) = folder.glob("cpu_tiles_*.json")
    (known,) = json.loads(path.read_text())["choices"].values()
    assert len(known["measured"]) == cpu_measured.MEASURED and known["choice"] in [
        each[:3] for each in known["measured"]
    ]
