"""A GPU that is not there: launches specialise and compile kernels as they would on it, and nothing runs.

    with absent(machine("h100")) as launches:
        Kernel(spec)([meta(tensor) for tensor in operands], sizes)

Operands are tensors on torch's meta device. What is compiled is what a user's call compiles: Triton specialises on the
values of integers, on strides and on alignment, which compiling ahead of time (`facts`) has to assume.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fusion.codegen.triton import launch, variant
from fusion.codegen.triton.ahead_of_time import gpu_target
from fusion.machine import Machine

TENSOR_COLUMNS = 512
"""Of Blackwell's tensor memory, per multiprocessor."""


@dataclass(slots=True)
class Launches:
    """What was launched.

    kernels: Triton's compiled kernels, one for each variant that was specialised, in the order of their first launch.
    names: of the kernels, one for each launch.
    """

    kernels: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@contextlib.contextmanager
def absent(machine: Machine, shared: bool = False, only: Collection[str] = ()) -> Iterator[Launches]:
    """Launches on meta tensors compile for a machine's architecture while this lasts; where shared or tensor memory
    does not suffice, Triton's own error is raised. shared: V is the first columns of K, where it can be. only: the
    kernels that are compiled, if not all."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver

    found = Launches()

    def init_handles(kernel: Any) -> None:
        if kernel.module is None:
            check_resources(kernel, machine.shared_memory)
            found.kernels.append(kernel)
            kernel.module = kernel.function = 1
            kernel._run = lambda *_: found.names.append(kernel.metadata.name)

    def launch_some(chosen: variant.Variant, name: str, *arguments: Any) -> None:
        if not only or name in only:
            launch_variant(chosen, name, *arguments)

    launch_variant, before = variant.Variant.launch, driver._active
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (launch, "machine_of", lambda device: machine),
            (launch.Kernel, "_shares", lambda kernel, operands: shared and kernel._may_share),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (variant.Variant, "launch", launch_some),
            (CompiledKernel, "_init_handles", init_handles),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        driver.set_active(driver_of(machine))
        try:
            yield found
        finally:
            driver._active = before
            for kernel in found.kernels:
                kernel.module = None  # Triton 3.8 and later would unload it


def check_resources(kernel: Any, limit: int) -> None:
    """Raise Triton's own error where shared memory (of `limit` bytes) or tensor memory does not suffice."""
    from triton.runtime.errors import OutOfResources

    if kernel.metadata.shared > limit:
        raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
    if (columns := getattr(kernel.metadata, "tmem_size", None) or 0) > TENSOR_COLUMNS:
        raise OutOfResources(columns, TENSOR_COLUMNS, "tensor memory")


def driver_of(machine: Machine) -> Any:
    """Stand-in for Triton's driver: all that a launch asks it."""
    target = gpu_target(machine.architecture)
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        is_active=lambda: True,
    )


def meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
