"""Launches of GPU kernels on CPU tensors: Triton compiles them for a GPU, and their PTX is executed by `Wave`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.offline.absent import check_resources, driver_of
from fusion.codegen.triton import launch, module
from fusion.machine import Machine, of_target
from tests.emitters import unwritten_is_nan
from tests.ptx import arithmetic, conversions, matrices, movement  # noqa: F401  (they register opcodes)
from tests.ptx.memory import Fault, Memory
from tests.ptx.program import Program
from tests.ptx.tensor_maps import TensorMap
from tests.ptx.wave import Grid, Wave

_BYTES = {8: ("u64", "s64", "b64"), 4: ("u32", "s32", "b32", "f32"), 2: ("u16", "s16", "b16"), 1: ("u8", "s8", "b8")}
_SIZES = {kind: size for size, kinds in _BYTES.items() for kind in kinds} | {"align": 128}
byte_size = _SIZES.__getitem__
"""Of a parameter's type; tensor maps are the only ones that ask for an alignment."""
MOST_THREADS = 4096
"""Threads of the blocks that run in step: an instruction takes numpy little longer than for one block."""
program_of = functools.lru_cache(maxsize=256)(Program)


def _bits(value: Any) -> Any:
    """An argument as an integer: the address of a tensor, the bits of a float32. Tensor maps stay."""
    if isinstance(value, TensorMap):
        return value
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value)


def execute(
    ptx: str, grid: int, threads: int, shared: int, arguments: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> None:
    """Run a kernel. arguments: addresses, integers, bits of float32 and tensor maps, in the order of its parameters;
    those that Triton adds are 0. Raises Fault."""
    program = program_of(ptx)
    values = [*arguments, *[0] * (len(program.params) - len(arguments))]
    given = {name: (kind, value) for (kind, name), value in zip(program.params, values, strict=True)}
    parameters = {
        name: (value & ((1 << 8 * byte_size(kind)) - 1)).to_bytes(byte_size(kind), "little")
        for name, (kind, value) in given.items()
        if name not in program.maps
    }
    maps = {address: given[name][1] for name, address in program.maps.items()}
    memory = Memory(list(tensors), program.constants.values())
    run_blocks(program, (grid, 1, 1), threads, shared, memory, parameters, maps)


def run_blocks(
    program: Program,
    grid: Grid,
    threads: int,
    shared: int,
    memory: Memory,
    parameters: Mapping[str, bytes],
    maps: Mapping[int, TensorMap] = MappingProxyType({}),
) -> None:
    """Run the blocks of a kernel, in any order, some of them in step. maps: by the addresses of `Program.maps`. Raises
    Fault."""
    order = np.random.default_rng(0).permutation(math.prod(grid)).tolist()
    each = max(1, MOST_THREADS // threads)
    for start in range(0, len(order), each):
        numbers = order[start : start + each]
        places = [(n % grid[0], n // grid[0] % grid[1], n // (grid[0] * grid[1])) for n in numbers]
        wave = Wave(program, places, grid, threads, shared, memory, parameters, maps)
        with np.errstate(all="ignore"):
            wave.run()
        if wave.hazards or wave.products:
            raise Fault(next(iter(wave.hazards), "products are in flight at the end"))
        if any(barrier.copies for barrier in wave.barriers.values()):
            raise Fault("copies of boxes are under way at the end")


@dataclass(slots=True)
class Emulation:
    """Names of the kernels that ran, one for each launch, and Triton's compiled kernels."""

    names: list[str] = field(default_factory=list)
    kernels: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def emulated(target: str) -> Iterator[Emulation]:
    """While this lasts, kernels on CPU tensors are compiled for a target ("sm_80") as far as PTX, which is executed."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import make_tensordesc_arg
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    machine: Machine = of_target(target)
    emulation, load, launched, before = Emulation(), module.load, module.run, driver._active

    def init_handles(kernel: Any) -> None:
        if kernel.module is None:
            check_resources(kernel, machine.shared_memory)
            kernel.module = kernel.function = 1
            emulation.kernels.append(kernel)
            kernel._run = functools.partial(run, kernel)

    def run(kernel: Any, grid: int, *others: Any) -> None:
        values, kinds = others[-len(kernel.src.signature) :], kernel.src.signature.values()
        passed = [value for kind, value in zip(kinds, values, strict=True) if kind != "constexpr"]
        bases = [getattr(value, "base", value) for value in passed]  # of tensor descriptors
        tensors = [value for value in bases if isinstance(value, torch.Tensor)]
        maps = iter(kernel.metadata.tensordesc_meta or [None] * len(passed))
        parts = [make_tensordesc_arg(v, next(maps)) if isinstance(v, TensorDescriptor) else [v] for v in passed]
        arguments = [_bits(value) for part in parts for value in part]
        emulation.names.append(kernel.metadata.name)
        threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
        execute(kernel.asm["ptx"], grid, threads, shared, arguments, tensors)

    def start(kernel: Any, programs: int, device: Any, arguments: Any, constants: Any, options: Any) -> None:
        if driver._active is not active:  # kernels are compiled for a device of a test's own, and not run
            return launched(kernel, programs, device, arguments, constants, options)
        with mock.patch.object(CUDABackend, "make_cubin", lambda *_: b""), knobs.cache.scope():
            knobs.cache.dir = str(Path(knobs.cache.dir) / "without_machine_code")  # which takes as long as all the rest
            kernel[(programs,)](*arguments, **constants, **module.EXACT, **options)

    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (launch, "machine_of", lambda device: machine),
            (CompiledKernel, "_init_handles", init_handles),
            (module, "run", start),
            (module, "load", lambda text, interpreted=False: load(text)),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(unwritten_is_nan())
        active = driver_of(machine)
        active.utils = SimpleNamespace(fill_tma_descriptor=TensorMap, fill_tma_descriptor_tiled=TensorMap)
        driver.set_active(active)
        try:
            yield emulation
        finally:
            driver._active = before
