"""From MLIR text to the address of machine code, in this process."""

from __future__ import annotations

import functools
import glob
import os
from dataclasses import dataclass
from typing import Any

from fusion.errors import KernelCompilationError

PIPELINE = (
    "builtin.module(canonicalize,cse,convert-scf-to-cf,convert-math-to-llvm,convert-vector-to-llvm,"
    "convert-func-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,convert-ub-to-llvm,reconcile-unrealized-casts)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """An entry point; `engine` owns the memory it lies in and must outlive every call."""

    engine: Any
    address: int


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        import torch_mlir.execution_engine
        import torch_mlir.ir  # noqa: F401
    except ImportError as error:
        return f"torch-mlir cannot be imported ({error}); install torch-mlir to have CPU kernels"
    if openmp_library() is None:
        return "torch's OpenMP library (libgomp) was not found next to torch; CPU kernels run on its threads"
    return None


@functools.cache
def openmp_library() -> str | None:
    """The path of the libgomp that torch has loaded into this process."""
    import torch

    try:
        with open("/proc/self/maps") as maps:
            loaded = sorted({line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line})
    except OSError:
        loaded = []
    ours = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*"))
    return next((path for path in loaded if "torch" in path), None) or next(iter(loaded or ours), None)


def compile_text(source: str, entry: str) -> MachineCode:
    """Parse, lower and compile a module. Raises KernelCompilationError."""
    from torch_mlir import ir
    from torch_mlir.execution_engine import ExecutionEngine
    from torch_mlir.passmanager import PassManager

    try:
        with ir.Context():
            module = ir.Module.parse(source)
            PassManager.parse(PIPELINE).run(module.operation)
            engine = ExecutionEngine(module, opt_level=3, shared_libs=[openmp_library()])
            address = engine.raw_lookup(entry)
    except Exception as error:
        place = _numbered(source, str(error))
        raise KernelCompilationError(f"the generated kernel does not compile: {error}\n{place}") from error
    return MachineCode(engine=engine, address=address)


def _numbered(source: str, message: str) -> str:
    """The lines around those that the message names."""
    lines = source.splitlines()
    numbers = [int(part) for part in message.replace('"', ":").split(":") if part.isdigit()]
    centre = next((number for number in numbers if 0 < number <= len(lines)), 1)
    low, high = max(0, centre - 6), min(len(lines), centre + 5)
    return "\n".join(f"{number + 1:5d}  {lines[number]}" for number in range(low, high))
