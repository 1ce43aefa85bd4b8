"""Machine code from texts, from disk, and from object files without a linker."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

from fusion.codegen.cpu import machine_code
from fusion.codegen.cpu.machine_code import MachineCode, compile_text
from fusion.errors import KernelCompilationError
from fusion.machine import object_file

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(not object_file.loadable(), reason="objects are loaded on x86-64 Linux alone")


def text(number: int = 1) -> str:
    """A function that writes number * sqrt(7) + 2 and the thread's number, by way of constants and other libraries."""
    return f"""module {{
llvm.func @omp_get_thread_num() -> i32
llvm.func @tanf(f32) -> f32
func.func @f(%p: !llvm.ptr) {{
  %seven = arith.constant 7.0 : f32
  %root = math.sqrt %seven : f32
  %factor = arith.constant dense<{number}.0> : vector<8xf32>
  %two = arith.constant dense<[2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5]> : vector<8xf32>
  %all = vector.broadcast %root : f32 to vector<8xf32>
  %product = arith.mulf %all, %factor : vector<8xf32>
  %sum = arith.addf %product, %two : vector<8xf32>
  llvm.store %sum, %p : vector<8xf32>, !llvm.ptr
  %thread = llvm.call @omp_get_thread_num() : () -> i32
  %float = arith.sitofp %thread : i32 to f32
  %tangent = llvm.call @tanf(%float) : (f32) -> f32
  %last = llvm.getelementptr %p[8] : (!llvm.ptr) -> !llvm.ptr, f32
  llvm.store %tangent, %last : f32, !llvm.ptr
  return
}}
}}
"""


def result(code: MachineCode) -> torch.Tensor:
    """What the function writes."""
    found = torch.full((9,), torch.nan)
    argument = ctypes.c_void_p(found.data_ptr())
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)(ctypes.addressof(packed))
    return found


def expected(number: int = 1) -> torch.Tensor:
    return torch.cat([number * torch.tensor(7.0).sqrt() + torch.arange(2, 6, 0.5), torch.zeros(1)])


def compiled(source: str) -> bool:
    """Whether LLVM is asked for a text's code; the result of which is checked."""
    before = counters["fusion"]["kernel_cache_miss"]
    assert torch.equal(result(compile_text(source, "f")), expected())
    return counters["fusion"]["kernel_cache_miss"] > before


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fusion"


def test_a_text_is_compiled_once() -> None:
    assert compiled(text())
    before = counters["fusion"]["kernel_cache_hit"]
    assert not compiled(text())
    assert counters["fusion"]["kernel_cache_hit"] == before + 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(b""),
        lambda path: machine_code.caching.store(path.name, b"no object"),
        lambda path: machine_code.caching.store(path.name, b"\x7fELF" + bytes(60)),
        lambda path: machine_code.caching.store(path.name, (path.read_bytes()[32:])[:-200]),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o666),
    ],
    ids=["cut off", "empty", "another file", "an empty object", "half an object", "gone", "written by anybody"],
)
def test_what_is_damaged_is_compiled_again(folder: Path, damage: Callable[[Path], object]) -> None:
    assert compiled(text())
    (path,) = folder.iterdir()
    damage(path)
    assert compiled(text())
    assert not compiled(text()), "and is on disk again"


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (machine_code, "FORMAT", machine_code.FORMAT + 1),
        (machine_code, "PIPELINE", machine_code.PIPELINE.replace("canonicalize,", "canonicalize,cse,")),
        (machine_code, "OPTIMIZATION", {False: 1, True: 1}),
        (machine_code, "_compiler", lambda: ["another LLVM"]),
        (machine_code.cpu, "identity", lambda: ["another processor"]),
        (machine_code.caching, "tag", lambda: "another tag"),
    ],
)
def test_objects_are_of_one_version_and_processor(monkeypatch, owner: object, name: str, value: object) -> None:
    assert compiled(text())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert compiled(text())
    assert not compiled(text())


def test_perf_knows_kernels_where_the_log_asks_for_it(monkeypatch, caplog, folder: Path, tmp_path: Path) -> None:
    map_file = tmp_path / "perf.map"
    monkeypatch.setattr(object_file, "PERF_MAP", str(map_file))
    compile_text(text(), "f")
    assert not map_file.exists()
    (object_path,) = folder.iterdir()
    with caplog.at_level("INFO", machine_code.log.name):
        codes = [compile_text(text(), "f"), compile_text(text(2), "f")]  # from disk, and from LLVM
        lines = [line.split(" ", 2) for line in map_file.read_text().splitlines()]
        names = {int(start, 16): (int(size, 16), name) for start, size, name in lines}
        for code in codes:
            size, name = names[code.address]
            assert 0 < size < 1 << 12 and name.startswith("fusion _mlir_f kernel_")
        assert names[codes[0].address][1].endswith(object_path.stem)
        map_file.unlink()
        map_file.symlink_to(object_path)
        before = object_path.read_bytes()
        compile_text(text(), "f")
    assert object_path.read_bytes() == before, "nobody's link is followed"
    assert "perf will not know the kernel" in caplog.text


@pytest.mark.parametrize("unknown", ["_compiler", "identity", "loadable"])
def test_nothing_is_kept_where_that_would_not_be_safe(monkeypatch, folder: Path, unknown: str) -> None:
    owner = {"_compiler": machine_code, "identity": machine_code.cpu, "loadable": object_file}[unknown]
    monkeypatch.setattr(owner, unknown, list)
    assert compiled(text()) and compiled(text()) and not folder.exists()


def test_a_full_disk_changes_nothing_for_the_kernel(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/full/folder")
    assert compiled(text()) and compiled(text())


VARIABLE = text().replace("module {", "module {\nllvm.mlir.global internal @count(1 : i32) : i32", 1).replace(
    "  return", "  %g = llvm.mlir.addressof @count : !llvm.ptr\n  %c = llvm.load volatile %g : !llvm.ptr -> i32\n"
    "  llvm.store volatile %c, %g : i32, !llvm.ptr\n  return", 1)  # fmt: skip


def test_an_object_that_cannot_be_loaded_runs_as_llvm_loads_it(folder: Path) -> None:
    assert compiled(VARIABLE) and compiled(VARIABLE) and not list(folder.iterdir())


def test_without_files_in_memory_nothing_is_kept(monkeypatch, folder: Path) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    with pytest.raises(OSError, match="no file in memory"):
        machine_code._object(None)
    assert compiled(text()) and compiled(text()) and not list(folder.iterdir())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (text().replace("arith.mulf", "arith.mulx"), "mulx"),
        (
            text().replace("tanf", "no_such_function"),
            "the generated kernel has no function 'f', or calls one that does not exist",
        ),
        (text().replace("@f(", "@g("), "the generated kernel has no function 'f', or calls one that does not exist"),
    ],
    ids=["not a program", "a function that does not exist", "no entry"],
)
def test_texts_that_do_not_compile(folder: Path, source: str, message: str) -> None:
    with pytest.raises(KernelCompilationError, match=message):
        compile_text(source, "f")
    assert not list(folder.iterdir())


MANY = """
import sys
from tests.codegen.cpu.test_machine_code import compile_text, expected, result, text, torch
print("started", flush=True)
for number in range(1, 13):
    assert torch.equal(result(compile_text(text(number), "f")), expected(number)), number
    print(number, flush=True)
"""


def many() -> subprocess.Popen:
    """A process that compiles many texts into the folder."""
    return subprocess.Popen([sys.executable, "-c", MANY], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_and_one_that_is_killed(folder: Path) -> None:
    first, second, killed = many(), many(), many()
    output = cast(IO[str], killed.stdout)
    while (line := output.readline()) and int(line if line.strip().isdigit() else 0) < 2:
        pass
    killed.send_signal(signal.SIGKILL)
    for process in (first, second, killed):
        process.communicate()
    assert (first.returncode, second.returncode, killed.returncode) == (0, 0, -signal.SIGKILL)
    before = counters["fusion"]["kernel_cache_miss"]
    for number in range(1, 13):
        assert torch.equal(result(compile_text(text(number), "f")), expected(number))
    assert counters["fusion"]["kernel_cache_miss"] == before, "everything was there"


@pytest.mark.parametrize("asked", [True, False])
def test_perf_finds_the_names_of_kernels_where_logs_are_asked_for(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """New kernels and those from disk: an address and a size that hold the entry, and the name of the object."""
    monkeypatch.setattr(object_file, "PERF_MAP", str(tmp_path / "perf-{}.map"))
    caplog.set_level("INFO" if asked else "WARNING", "fusion.codegen.cpu.machine_code")
    codes = [compile_text(text(41), "f") for _ in range(2)]
    files = list(tmp_path.glob("perf-*.map"))
    assert len(files) == asked
    if not asked:
        return
    (path,) = files
    assert path.name == f"perf-{os.getpid()}.map" and path.stat().st_mode & 0o777 == 0o600
    ranges = [line.split(maxsplit=2) for line in path.read_text().splitlines()]
    for code in codes:
        names = [
            name for start, size, name in ranges if int(start, 16) <= code.address < int(start, 16) + int(size, 16)
        ]
        assert len(names) == 1 and re.fullmatch(r"fusion _mlir_f kernel_\w+", names[0]), names
