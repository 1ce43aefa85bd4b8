"""From MLIR text to the address of machine code, in this process.

Where objects can be loaded (`fusion.machine.object_file`), what LLVM makes of a text is kept on disk: later processes
load it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import logging
from dataclasses import dataclass
from typing import Any

from fusion import caching
from fusion.errors import KernelCompilationError
from fusion.machine import Machine, cpu, object_file, openmp
from fusion.machine.object_file import ObjectFileError
from fusion.torch_private.dynamo import counters

from ..mlir import arm
from ..mlir.vectormath import rounding_function

log = logging.getLogger(__name__)

PIPELINE = (
    "builtin.module(canonicalize,cse,convert-scf-to-cf,convert-math-to-llvm,convert-vector-to-llvm,"
    "convert-func-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,convert-ub-to-llvm,reconcile-unrealized-casts)"
)
OPTIMIZATION = {False: 2, True: 3}
"""LLVM's level, by whether a module has tile instructions: those were measured with 3 alone. The others run as fast
with 2, which takes a third of the time where 3 unrolls the loops over 32 coordinates."""
FORMAT = 2
"""Version of objects on disk; to be raised when the same text comes to mean another object, or is called in another
way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """An entry point; `owner` has the memory it lies in and must outlive every call."""

    owner: Any
    address: int


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        import torch_mlir.execution_engine
        import torch_mlir.ir  # noqa: F401
    except ImportError as error:
        return f"torch-mlir cannot be imported ({error}); install torch-mlir to have CPU kernels"
    if openmp.parallel() is None:
        return "no OpenMP runtime (GOMP_parallel) was found in this process; CPU kernels run on the threads of torch's"
    return None


def compile_text(source: str, entry: str) -> MachineCode:
    """The machine code of a module's function: from disk, or parsed, lowered and compiled now. Raises
    KernelCompilationError."""
    name = _object_name(source)
    if name is not None and (content := caching.stored(name)) is not None:
        try:
            code = _from_object(content, entry, name)
            counters["fusion"]["kernel_cache_hit"] += 1
            return code
        except ObjectFileError as problem:
            log.debug("%s is compiled anew: %s", name, problem)
    counters["fusion"]["kernel_cache_miss"] += 1
    try:
        engine = _engine(source)
        if name is not None and (code := _keep(name, engine, entry)) is not None:
            return code
        address = engine.raw_lookup(entry)
    except Exception as error:
        place = _numbered(source, str(error))
        raise KernelCompilationError(f"the generated kernel does not compile: {error}\n{place}") from error
    if not address:
        raise KernelCompilationError(
            f"the generated kernel has no function {entry!r}, or calls one that does not exist"
        )
    return MachineCode(owner=engine, address=address)


def _engine(source: str) -> Any:
    from torch_mlir import ir
    from torch_mlir.execution_engine import ExecutionEngine

    with ir.Context():
        module = ir.Module.parse(complete(source))
        if features := arm.FEATURES if arm.BFDOT in source else cpu.left_out():
            limited = ir.ArrayAttr.get([ir.StringAttr.get(text) for text in ("target-features", features)])
            for operation in module.body:
                if operation.operation.name == "func.func":
                    operation.attributes["llvm.passthrough"] = ir.ArrayAttr.get([limited])
        lower(module)
        return ExecutionEngine(module, opt_level=_level(source))


def lower(module: Any) -> None:
    """Lower a module to LLVM's dialect, in place. It was verified when it was parsed; to do so again after every pass
    takes as long as all passes."""
    from torch_mlir.passmanager import PassManager

    passes = PassManager.parse(PIPELINE)
    passes.enable_verifier(False)
    passes.run(module.operation)


def complete(source: str) -> str:
    """A module's text with what LLVM may call and this process need not have: the function that rounds to bfloat16.
    That happens even where a text only copies elements: LLVM may join them by way of float32."""
    if "bf16" not in source or ("avx512_bf16" in Machine.detect().isa and not cpu.left_out()):
        return source
    return source.rstrip().removesuffix("}") + rounding_function("__truncsfbf2") + "}\n"


def _level(source: str) -> int:
    return OPTIMIZATION["llvm.x86.tdp" in source]


def _keep(name: str, engine: Any, entry: str) -> MachineCode | None:
    """The code of an engine by way of an object, which is kept on disk; None where that does not go."""
    try:
        content = _object(engine)
        code = _from_object(content, entry, name)
    except (ObjectFileError, OSError) as problem:
        log.debug("%s is not kept: %s", name, problem)
        return None
    caching.store(name, content)
    return code


def _object(engine: Any) -> bytes:
    """The object file of an engine, written to memory: LLVM ends the process where it cannot write. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)  # Python may have been built without os.memfd_create
    handle = library.memfd_create(b"kernel", 1) if hasattr(library, "memfd_create") else -1
    if handle < 0:
        raise OSError(ctypes.get_errno(), "no file in memory")
    with open(handle, "rb") as file:
        engine.dump_to_object_file(f"/proc/self/fd/{handle}")
        return file.read()


def _from_object(content: bytes, entry: str, name: str) -> MachineCode:
    """name: of its file."""
    loaded = object_file.load(content, _function)
    packed = f"_mlir_{entry}"  # the form that takes an array of pointers to arguments
    if packed not in loaded.addresses:
        raise ObjectFileError(f"an object without the function {packed}")
    if log.isEnabledFor(logging.INFO):
        try:
            loaded.write_perf_map(name.removesuffix(".o"))
        except OSError as problem:
            log.info("perf will not know the kernel %s: %s", name, problem)
    return MachineCode(owner=loaded, address=loaded.addresses[packed])


def _function(name: str) -> int:
    """The address of a function of the C library."""
    for library in (None, "libm.so.6"):
        if (result := getattr(ctypes.CDLL(library), name, None)) is not None:
            return ctypes.cast(result, ctypes.c_void_p).value or 0
    raise ObjectFileError(f"an object that calls {name}, which is in no library")


def _object_name(source: str) -> str | None:
    """The file of a text's object; None where objects are not kept: they differ between processors, versions of LLVM
    and ways to compile."""
    if not caching.enabled() or not object_file.loadable():
        return None
    parts = [FORMAT, PIPELINE, _level(source), _compiler(), cpu.identity(), caching.tag(), cpu.left_out(), source]
    return f"kernel_{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.o" if all(parts[:5]) else None


@functools.cache
def _compiler() -> list[str]:
    """The libraries of torch-mlir by their checksums; empty where the installation does not say."""
    try:
        record = importlib.metadata.distribution("torch-mlir").read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        return []
    return [line for line in record.splitlines() if ".so," in line]


def _numbered(source: str, message: str) -> str:
    """The lines around those that the message names."""
    lines = source.splitlines()
    numbers = [int(part) for part in message.replace('"', ":").split(":") if part.isdigit()]
    centre = next((number for number in numbers if 0 < number <= len(lines)), 1)
    low, high = max(0, centre - 6), min(len(lines), centre + 5)
    return "\n".join(f"{number + 1:5d}  {lines[number]}" for number in range(low, high))
