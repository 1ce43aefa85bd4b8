"""The machine's multiply-add peak, measured: loops over registers only, compiled in process, one per instruction set.

What a kernel reaches is given as a share of this. The clock of a processor under vector load is not in any data sheet,
so the peak is measured on the same cores, with the same number of threads, in turns with the kernels: on a machine that
is shared it moves from minute to minute.
"""

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from fusion.codegen.cpu.machine_code import unavailable
from fusion.machine import Machine, openmp

SAMPLE = 4e-3  # s; about how long one call of a loop takes
PASSES = (
    "builtin.module(convert-vector-to-scf,convert-scf-to-cf,expand-strided-metadata,lower-affine,"
    "convert-vector-to-llvm{enable-x86=true},finalize-memref-to-llvm,convert-func-to-llvm,convert-arith-to-llvm,"
    "convert-index-to-llvm,convert-cf-to-llvm,reconcile-unrealized-casts)"
)


def _function(arguments: str, indices: Mapping[str, int], body: Sequence[str]) -> str:
    """MLIR of the function `loop`, with constants of type index by name."""
    constants = [f"  %{name} = arith.constant {value} : index" for name, value in {"c0": 0, "c1": 1, **indices}.items()]
    head = f"func.func @loop({arguments}) attributes {{llvm.emit_c_interface}} {{"
    return "\n".join([head, *constants, *body, "  return", "}"])


def _vector_loop(*, lanes: int, accumulators: int, pairs: bool) -> tuple[str, int]:
    """MLIR of a loop of independent multiply-adds (`pairs`: bf16 dot products of two), and flop per trip."""
    acc = f"vector<{lanes}xf32>"
    element, width = ("bf16", 2 * lanes) if pairs else ("f32", lanes)
    operand, memory = f"vector<{width}x{element}>", f"memref<{2 * width}x{element}>"
    out, names = f"memref<{accumulators * lanes}xf32>", [f"acc{i}" for i in range(accumulators)]
    if pairs:
        step = [f"    %next_{n} = x86.avx512.dot %{n}, %a, %b : {operand} -> {acc}" for n in names]
    else:
        step = [f"    %next_{n} = vector.fma %a, %b, %{n} : {acc}" for n in names]
    types = ", ".join([acc] * accumulators)
    body = [
        f"  %zero = arith.constant dense<0.0> : {acc}",
        f"  %a = vector.load %in[%c0] : {memory}, {operand}",
        f"  %b = vector.load %in[%width] : {memory}, {operand}",
        f"  %end:{accumulators} = scf.for %t = %c0 to %trips step %c1",
        f"      iter_args({', '.join(f'%{n} = %zero' for n in names)}) -> ({types}) {{",
        *step,
        f"    scf.yield {', '.join(f'%next_{n}' for n in names)} : {types}",
        "  }",
        *(f"  vector.store %end#{i}, %out[%at{i}] : {out}, {acc}" for i in range(accumulators)),
    ]
    indices = {"width": width} | {f"at{i}": i * lanes for i in range(accumulators)}
    return _function(f"%in: {memory}, %out: {out}, %trips: index", indices, body), accumulators * 2 * width


def _tile_loop(*, accumulators: int = 4, chain: int = 8) -> tuple[str, int]:
    """MLIR of a loop of AMX tile products (16x32 by 32x16, bf16 into float32), and flop per trip."""
    acc, operand = "!x86.amx.tile<16x16xf32>", "!x86.amx.tile<16x32xbf16>"
    sums, each = f"memref<{16 * accumulators}x16xf32>", range(accumulators)
    body = [
        f"  %sums = memref.alloca() {{alignment = 64}} : {sums}",
        "  scf.for %t = %c0 to %trips step %c1 {",
        f"    %a = x86.amx.tile_load %in[%at0, %c0] : memref<32x32xbf16> into {operand}",
        f"    %b = x86.amx.tile_load %in[%at1, %c0] : memref<32x32xbf16> into {operand}",
        *(f"    %acc{i}_0 = x86.amx.tile_zero : {acc}" for i in each),
        *(f"    %acc{i}_{step + 1} = x86.amx.tile_mulf %a, %b, %acc{i}_{step} : {operand}, {operand}, {acc}"
          for step in range(chain) for i in each),
        *(f"    x86.amx.tile_store %sums[%at{i}, %c0], %acc{i}_{chain} : {sums}, {acc}" for i in each),
        "  }",
    ]  # fmt: skip
    arguments = f"%in: memref<32x32xbf16>, %out: {sums}, %trips: index"
    return _function(arguments, {f"at{i}": 16 * i for i in each}, body), accumulators * chain * 2 * 16 * 16 * 32


def _read_loop(lanes: int, chains: int = 8) -> str:
    """MLIR of a loop in which every thread reads its part of an array of vectors, each vector once."""
    vector, array = f"vector<{lanes}xf32>", f"memref<?x{lanes}xf32>"
    names, types = [f"sum{i}" for i in range(chains)], ", ".join([vector] * chains)
    body = [
        "  %me = func.call @omp_get_thread_num() : () -> i32",
        "  %all = func.call @omp_get_num_threads() : () -> i32",
        "  %t = arith.index_cast %me : i32 to index",
        "  %threads = arith.index_cast %all : i32 to index",
        "  %share = arith.ceildivui %steps, %threads : index",
        "  %first = arith.muli %t, %share : index",
        "  %reach = arith.addi %first, %share : index",
        "  %last = arith.minui %reach, %steps : index",
        "  %low = arith.muli %first, %step : index",
        "  %high = arith.muli %last, %step : index",
        f"  %zero = arith.constant dense<0.0> : {vector}",
        f"  %end:{chains} = scf.for %r = %low to %high step %step",
        f"      iter_args({', '.join(f'%{n} = %zero' for n in names)}) -> ({types}) {{",
    ]
    for i, name in enumerate(names):
        body.append(f"    %row{i} = arith.addi %r, %at{i} : index")
        body.append(f"    %x{i} = vector.load %in[%row{i}, %c0] : {array}, {vector}")
        body.append(f"    %next_{name} = arith.addf %{name}, %x{i} : {vector}")
    body += [f"    scf.yield {', '.join(f'%next_{n}' for n in names)} : {types}", "  }"]
    total = "%end#0"
    for i in range(1, chains):
        body.append(f"  %total{i} = arith.addf {total}, %end#{i} : {vector}")
        total = f"%total{i}"
    body.append(f"  vector.store {total}, %out[%t, %c0] : {array}, {vector}")
    indices = {"step": chains} | {f"at{i}": i for i in range(chains)}
    function = _function(f"%in: {array}, %out: {array}, %steps: index", indices, body)
    openmp_functions = [f"func.func private @omp_get_{name}() -> i32" for name in ("thread_num", "num_threads")]
    return "\n".join([*openmp_functions, function])


def _compile(function: str, operands: tuple[numpy.ndarray, ...]) -> Callable[[int, int], None]:
    """`run(trips, threads)` for the function named `loop`: threads of torch's OpenMP team run it, on the same operands.

    Threads of our own would have to share the cores with that team, which keeps spinning for a while after every
    kernel: the peak would come out at half of what it is.
    """
    from torch_mlir import ir
    from torch_mlir.execution_engine import ExecutionEngine
    from torch_mlir.passmanager import PassManager
    from torch_mlir.runtime import get_ranked_memref_descriptor

    with ir.Context():
        module = ir.Module.parse("module {\n" + function + "\n}")
        PassManager.parse(PASSES).run(module.operation)
        engine = ExecutionEngine(module, opt_level=3, shared_libs=[openmp.library()])  # pyright: ignore[reportArgumentType]
    entry = ctypes.c_void_p(engine.raw_lookup("_mlir_ciface_loop"))
    launch = openmp.parallel()
    assert launch is not None, "torch has no OpenMP runtime here"

    count = ctypes.c_int64(0)
    pointers = [ctypes.pointer(ctypes.pointer(get_ranked_memref_descriptor(x))) for x in operands]
    arguments = [*pointers, ctypes.pointer(count)]
    packed = (ctypes.c_void_p * len(arguments))(*(ctypes.cast(x, ctypes.c_void_p) for x in arguments))

    def run(trips: int, threads: int, kept: object = (engine, operands, arguments)) -> None:  # alive as long as this
        count.value = trips
        launch(entry, packed, threads, 0)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Multiply-adds and nothing else: `call()` does `flop` of them, in a few milliseconds, on all threads together."""

    name: str
    call: Callable[[], object]
    flop: float

    def rate(self) -> float:
        """GFLOP/s, best of five: any disturbance only slows it."""
        return self.flop / min(_seconds(self.call) for _ in range(5)) / 1e9


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _register_loop(
    name: str, loop: tuple[str, int], shapes: tuple[tuple[int, ...], ...], dtype: type, threads: int
) -> Loop:
    function, flop = loop
    go = _compile(function, (numpy.zeros(shapes[0], dtype), numpy.zeros(shapes[1], numpy.float32)))
    trips = 1 << 12
    while min(_seconds(lambda: go(trips, 1)) for _ in range(3)) < SAMPLE:  # noqa: B023  called at once
        trips *= 2
    return Loop(name=name, call=lambda: go(trips, threads), flop=flop * trips * threads)


def _matrix_product(name: str, dtype: torch.dtype, n: int = 1024) -> Loop:
    """torch's own matrix product, in whatever way it computes it."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    torch.mm(a, b)
    return Loop(name=name, call=lambda: torch.mm(a, b), flop=2 * n**3)


def loops(threads: int) -> list[Loop]:
    """What the processor has of `fma_f32`, `dot_bf16`, `tile_bf16`; without torch-mlir, matrix products instead."""
    if unavailable() is not None:
        return [_matrix_product("matmul_f32", torch.float32), _matrix_product("matmul_bf16", torch.bfloat16)]
    flags = Machine.detect().isa
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    loop = _vector_loop(lanes=lanes, accumulators=24 if lanes == 16 else 12, pairs=False)
    found = [_register_loop("fma_f32", loop, ((2 * lanes,), (24 * lanes,)), numpy.float32, threads)]
    if "avx512_bf16" in flags:
        loop = _vector_loop(lanes=16, accumulators=24, pairs=True)
        found.append(_register_loop("dot_bf16", loop, ((64,), (24 * 16,)), numpy.int16, threads))
    if "amx_bf16" in flags:
        found.append(_register_loop("tile_bf16", _tile_loop(), ((32, 32), (64, 16)), numpy.int16, threads))
    return found


def reading(tensors: Sequence[torch.Tensor], threads: int) -> Callable[[], None]:
    """A call that reads the tensors (contiguous) once, the threads side by side, and does nothing else: what a kernel
    that is bound by memory is held against."""
    lanes, chains = 16, 8
    flat = [x.view(torch.uint8).view(-1).view(torch.float32).view(-1, lanes).numpy() for x in tensors]
    sums = numpy.zeros((threads, lanes), numpy.float32)
    runs = [_compile(_read_loop(lanes, chains), (part, sums)) for part in flat]

    def read() -> None:
        for run, part in zip(runs, flat, strict=True):
            run(len(part) // chains, threads)

    return read


def fastest(found: list[Loop], rates: dict[str, float], dtype: torch.dtype) -> Loop:
    """What a kernel with inputs of `dtype` is held against: the best multiply-add the processor has for it."""
    usable = [loop for loop in found if loop.name.endswith("_f32") or dtype == torch.bfloat16]
    return max(usable, key=lambda loop: rates[loop.name])
