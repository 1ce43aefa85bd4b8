"""Kernels beside other teams of threads: within one of the caller's, in smaller ones than they ask for, with a second
OpenMP runtime in the process, and called by many threads at once. Workspaces lie between bytes that must not change."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu import calling
from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.moments import MomentsCall, Rows
from fusion.codegen.cpu.training import TrainingKernel
from fusion.machine import openmp
from fusion.planning.register_tiles import tilings_for
from tests.codegen.mlir.cases import HERE, case, draw

ROOT = Path(__file__).parents[3]
Run = Callable[[], list[torch.Tensor]]
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Fenced(calling.ThreadMemory):
    """A workspace that is as long as is asked for, with bytes behind it that nobody may write."""

    __slots__ = ("fences",)
    BYTES, MARK = 1 << 18, 0xAB

    def __init__(self) -> None:
        super().__init__()
        self.fences: list[tuple[torch.Tensor, int]] = []  # no views: Python cannot end a thread that has some

    def reserve(self, size: int) -> int:
        memory = torch.full((64 + size + self.BYTES,), self.MARK, dtype=torch.uint8)
        start = -memory.data_ptr() % 64
        self.fences.append((memory, start + size))
        return memory.data_ptr() + start

    def check(self) -> None:
        assert self.fences, "no kernel ran"
        assert all(bool((memory[end:] == self.MARK).all()) for memory, end in self.fences)


def forward(name: str, dtype: str, queries: int) -> Run:
    c = case(name, dtype, d=16)
    kernel = Kernel(c.spec, tilings_for(c.spec, HERE), HERE)
    operands, sizes = draw(c, {"B": 2, "H": 3, "Nq": queries, "Nk": 300})
    return lambda: [kernel(operands, sizes)]


def training(name: str, dtype: str) -> Run:
    c = case(name, dtype, d=16)
    kernel = TrainingKernel(c.spec, tilings_for(c.spec, HERE), HERE)
    operands, sizes = draw(c, {"B": 2, "H": 3, "Nq": 150, "Nk": 200})
    grad = torch.randn_like(operands[0])

    def run() -> list[torch.Tensor]:
        out, statistics = kernel.outputs(operands, sizes)
        return [out, *kernel.backward(grad, out, statistics, operands, sizes, (True,) * len(operands))]

    return run


def statistics_of_rows() -> Run:
    q, k = (torch.randn(7, 256, 32) for _ in range(2))
    rows = Rows(offsets=torch.arange(7) * 256 * 32, stride=32, count=256)
    means = MomentsCall(32, torch.float32, rows, rows, segment=64, limit=math.inf)

    def run() -> list[torch.Tensor]:
        figures, *others = means.whole(q.data_ptr(), k.data_ptr(), torch.get_num_threads())
        return [torch.tensor(figures), *others]

    return run


RUNS: dict[str, Callable[[], Run]] = {
    "tiles": lambda: forward("causal", "float32", 300),
    "gradients": lambda: training("causal", "float32"),
    "few queries": lambda: forward("plain", "float32", 1),
    "statistics of rows": statistics_of_rows,
    "tiles in bfloat16": lambda: forward("plain", "bfloat16", 300),
    "gradients of a bias": lambda: training("bias", "float32"),
    "gradients of a table": lambda: training("bucket_table", "bfloat16"),
}
FEW = 2  # of them, where nothing is kept on disk or many call at once


def known_runs(count: int | None = None) -> dict[str, tuple[Run, list[torch.Tensor]]]:
    """The first so many, and their results now."""
    torch.manual_seed(0)
    made = {name: RUNS[name]() for name in list(RUNS)[:count]}
    return {name: (run, run()) for name, run in made.items()}


@pytest.fixture(scope="module")
def known() -> Iterator[dict[str, tuple[Run, list[torch.Tensor]]]]:
    """Every run, and its results in a team of two of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield known_runs()
    torch.set_num_threads(threads)


def in_team(threads: int, run: Callable[[int], None]) -> None:
    """Run it on every thread of an OpenMP team. Raises what one of them raises."""
    numbers, failures = itertools.count(), []

    def body(_: object) -> None:
        try:
            run(next(numbers))
        except BaseException as error:
            failures.append(error)

    parallel, entry = openmp.parallel(), BODY(body)
    assert parallel is not None
    parallel(ctypes.cast(entry, ctypes.c_void_p), None, threads, 0)
    if failures:
        raise failures[0]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_within_a_team_of_the_callers(known: dict, name: str) -> None:
    run, expected = known[name]

    def call(_: int) -> None:
        own = calling.memory.own = Fenced()
        torch.set_num_threads(2)
        assert_same(run(), expected)
        own.check()

    in_team(3, call)


def test_runtimes_are_told_apart() -> None:
    """One that another package brings is not torch's."""
    path = openmp.library()
    assert path is not None and openmp.parallel() is openmp.parallel()
    assert torch.get_num_threads() == ctypes.CDLL(path).omp_get_max_threads()


def other_runtime(folder: Path) -> Path:
    """A copy of the runtime under another name, which the loader takes for another library."""
    path = openmp.library()
    assert path is not None
    name = Path(path).name.encode() + b"\0"
    content = Path(path).read_bytes()
    if name not in content:
        pytest.skip("the runtime's name for the loader is not its file's")
    other = folder / "libother.so"
    other.write_bytes(content.replace(name, b"x" + name[1:]))
    shutil.copymode(path, other)
    return other


PRELOADED = """
import torch
from tests.codegen.cpu import test_teams as teams
from fusion.machine import openmp
runs = teams.known_runs(teams.FEW)
for name, (run, expected) in runs.items():
    for _ in range(10):
        teams.assert_same(run(), expected)
torch.set_num_threads(1)
run, expected = runs["tiles"]
teams.assert_same(run(), expected)
print(openmp.library())
"""


def child(script: str, **environment: str) -> str:
    """The last line that a script writes."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=own, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are preloaded on Linux")
def test_with_a_second_runtime_that_was_preloaded(tmp_path: Path) -> None:
    """torch then calls that one; nothing is kept on disk, so that the engine's own linker binds the kernels."""
    other = str(other_runtime(tmp_path))
    assert child(PRELOADED, LD_PRELOAD=other, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1") == other


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="libraries are loaded by path")
def test_with_a_second_runtime_that_another_package_loaded(tmp_path: Path) -> None:
    other = str(other_runtime(tmp_path))
    assert child(f"import ctypes; ctypes.CDLL({other!r}){PRELOADED}") == openmp.library()


@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "5"},
        pytest.param({"OMP_DYNAMIC": "true", "OMP_NUM_THREADS": "64"}, marks=pytest.mark.long),
    ],
    ids=["limit", "dynamic"],
)
def test_in_teams_that_are_smaller_than_asked(environment: dict[str, str]) -> None:
    child(PRELOADED, **environment)


NESTED = """
import torch
from fusion.codegen.cpu import calling
from tests.codegen.cpu import test_teams as teams
torch.set_num_threads(2)
runs = teams.known_runs(teams.FEW)
def call(number):
    torch.set_num_threads(2)
    for run, expected in runs.values():
        teams.assert_same(run(), expected)
teams.in_team(3, call)
print("done")
"""


@pytest.mark.parametrize("levels", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_nested_teams(levels: str) -> None:
    assert child(NESTED, OMP_MAX_ACTIVE_LEVELS=levels) == "done"


def callers(count: int, turns: int, known: dict) -> None:
    """So many threads call at once, each with a team of two of its own."""
    failures: list[BaseException] = []

    def call() -> None:
        try:
            own = calling.memory.own = Fenced()
            torch.set_num_threads(2)
            for _ in range(turns):
                for run, expected in known.values():
                    assert_same(run(), expected)
                own.check()
                own.fences.clear()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


CALLERS = """
import torch
from tests.codegen.cpu import test_teams as teams
torch.set_num_threads(2)
teams.callers(8, {turns}, teams.known_runs({count}))
print("done")
"""


@pytest.mark.parametrize(("turns", "count"), [(4, FEW), pytest.param(200, None, marks=pytest.mark.long)])
def test_eight_callers_with_teams_of_their_own(turns: int, count: int | None) -> None:
    assert child(CALLERS.format(turns=turns, count=count), OMP_WAIT_POLICY="passive") == "done"
