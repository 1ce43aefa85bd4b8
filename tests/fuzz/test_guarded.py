"""Kernels in guarded memory, in processes of their own: some seeds here, a thousand in the long set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from tests.codegen.cpu.test_teams import other_runtime

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs pages that can be protected, and fork")

BEYOND = """
import ctypes, torch
from tests.fuzz.guarded import tensor
x = tensor(torch.zeros(3, 5)[:, 1:], at_start={at_start})
first, last = x.data_ptr(), x.data_ptr() + 4 * 13
ctypes.string_at(first, last - first + 4)
print("inside", flush=True)
ctypes.string_at({address}, 1)
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(("at_start", "address"), [(True, "first - 1"), (False, "last + 4")])
def test_a_byte_beyond_ends_the_process(at_start: bool, address: str) -> None:
    done = run("-c", BEYOND.format(at_start=at_start, address=address))
    assert (done.returncode, done.stdout) == (-11, "inside\n"), done.stderr


@pytest.mark.parametrize(
    "seeds",
    [
        "0:8",
        pytest.param("43:44", id="AMX, a table by distance, whose last turn has no keys"),
        pytest.param("1000:2000", marks=pytest.mark.long),
    ],
)
def test_no_kernel_touches_a_byte_beyond_its_own(seeds: str) -> None:
    done = run("-m", "tests.fuzz", "guarded", "--seeds", seeds)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are preloaded on Linux")
@pytest.mark.parametrize("seeds", ["0:3", pytest.param("3000:3200", marks=pytest.mark.long)])
def test_beside_a_second_openmp_runtime(seeds: str, tmp_path: Path) -> None:
    other = str(other_runtime(tmp_path))
    arguments = ("-m", "tests.fuzz", "guarded", "--seeds", seeds)
    done = run(*arguments, LD_PRELOAD=other, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert done.returncode == 0, done.stdout + done.stderr
