"""Launches of GPU kernels on CPU tensors: Triton compiles them for a GPU, and their PTX is executed by `Block`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.offline.absent import check_resources, driver_of
from fusion.codegen.triton import launch, module
from fusion.machine import Machine, of_target
from tests.ptx import arithmetic, conversions, matrices, movement  # noqa: F401  (they register opcodes)
from tests.ptx.block import Block
from tests.ptx.memory import Fault, Memory
from tests.ptx.program import Program

_SIZES = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "u16": 2, "u8": 1, "b8": 1}
program_of = functools.lru_cache(maxsize=256)(Program)


def _bits(value: Any) -> int:
    """An argument as an integer: the address of a tensor, the bits of a float32."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value)


def execute(
    ptx: str, grid: int, threads: int, shared: int, arguments: Sequence[int], tensors: Sequence[torch.Tensor]
) -> None:
    """Run a kernel. arguments: addresses, integers and bits of float32, in the order of its parameters; those that
    Triton adds are 0. Raises Fault."""
    program = program_of(ptx)
    memory = Memory(list(tensors), program.constants.values())
    values = [*arguments, *[0] * (len(program.params) - len(arguments))]
    parameters = {
        name: (value & ((1 << 8 * _SIZES[kind]) - 1)).to_bytes(_SIZES[kind], "little")
        for (kind, name), value in zip(program.params, values, strict=True)
    }
    with np.errstate(all="ignore"):
        for number in range(grid):
            block = Block(program, number, grid, threads, shared, memory, parameters)
            block.run()
            if block.hazards or block.products or any(block.product_groups):
                raise Fault(next(iter(block.hazards), "products are in flight at the end"))


@dataclass(slots=True)
class Emulation:
    """Names of the kernels that ran, one for each launch, and Triton's compiled kernels."""

    names: list[str] = field(default_factory=list)
    kernels: list[Any] = field(default_factory=list)


@contextlib.contextmanager
def emulated(target: str) -> Iterator[Emulation]:
    """Kernels on CPU tensors are compiled for a target ("sm_80") and their PTX is executed while this lasts."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver

    machine: Machine = of_target(target)
    emulation, load, before = Emulation(), module.load, driver._active

    def init_handles(kernel: Any) -> None:
        if kernel.module is None:
            check_resources(kernel, machine.shared_memory)
            kernel.module = kernel.function = 1
            emulation.kernels.append(kernel)
            kernel._run = functools.partial(run, kernel)

    def run(kernel: Any, grid: int, *others: Any) -> None:
        values, parameters = others[-len(kernel.src.signature) :], kernel.src.signature.items()
        if any(kind.startswith("tensordesc") for kind in kernel.src.signature.values()):
            pytest.skip("the emulator has no tensor memory accelerator")
        passed = [value for (_, kind), value in zip(parameters, values, strict=True) if kind != "constexpr"]
        tensors = [value for value in passed if isinstance(value, torch.Tensor)]
        arguments = list(map(_bits, passed))
        emulation.names.append(kernel.metadata.name)
        threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
        execute(kernel.asm["ptx"], grid, threads, shared, arguments, tensors)

    def start(kernel: Any, programs: int, device: Any, arguments: Any, constants: Any, options: Any) -> None:
        kernel[(programs,)](*arguments, **constants, **module.EXACT, **options)

    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (launch, "machine_of", lambda device: machine),
            (CompiledKernel, "_init_handles", init_handles),
            (module, "run", start),
            (module, "load", lambda text, interpreted=False: load(text)),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        driver.set_active(driver_of(machine))
        try:
            yield emulation
        finally:
            driver._active = before
