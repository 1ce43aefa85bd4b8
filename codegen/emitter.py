"""Emitters: their protocol, and the emitters that serve each device.

    from . import emitter

    emitter.register("metal", ("mps",), lambda: my_package, machine=lambda device: my_machine)

A package, or any object, with the four functions of `Emitter` is one. `options={"emitter": "metal"}` selects it by
name; "auto" takes the emitter that was registered last for a device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusion.errors import EmitterError
from fusion.ir import AttentionSpec
from fusion.machine import Machine
from fusion.machine import machine as find_machine
from fusion.planning.choice import Choice, Planner
from fusion.refusals import Reason, Refusal

AUTO = "auto"

Planning = Callable[[Machine], Planner]  # machine -> the planner that makes the choices of a spec on it


class Runs(Protocol):
    """Information about a call before it; for a training kernel, about its forward."""

    def source(self, sizes: Sequence[int]) -> str:
        """Text of the code that a call with these sizes runs, headed by its choice; empty where there is none."""
        ...

    def choice(self, sizes: Sequence[int]) -> Choice | None:
        """Planned choice for a call with these sizes; None where nothing was planned."""
        ...

    def prepare(self, sizes: Sequence[int]) -> None:
        """Compile the code that a call with these sizes runs, where that can be done before it."""
        ...


class Kernel(Runs, Protocol):
    """Kernel of one spec: called with the operand tensors and the values of `spec.sizes`, it returns the output."""

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor: ...


class Backward(NamedTuple):
    """Arguments of a backward. out, statistics: results of the forward. aux_outputs: gradients of these, None
    where none arrives; empty where none arrives at any."""

    grad: Tensor  # of the output, of any strides
    out: Tensor
    statistics: Tensor
    operands: Sequence[Tensor]
    sizes: Sequence[int]
    needs: tuple[bool, ...]  # marks the operands whose gradients are wanted
    aux_outputs: Sequence[Tensor | None] = ()


class TrainingKernel(Runs, Protocol):
    """Kernels that train with one spec."""

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """[output, statistics of rows that `backward` reads (see `fusion.ir.results.statistics_shape`), *auxiliary
        outputs of an emitter that writes these]."""
        ...

    def backward(self, *given: Any) -> list[Tensor]:
        """Gradients of the operands that are wanted, of any dtype and strides. given: the fields of `Backward`."""
        ...


class Edges(NamedTuple):
    """Number of rows, and of keys, that a kernel processes at a time. rows: None where it is that of the call."""

    rows: int | None
    keys: int


class Proof(Protocol):
    """The trial of a new kernel text before its first use (`fusion.proof`). Its methods raise KernelProofError.

    A kernel with a method `proved`, which takes this and returns the kernel to be used, calls them with a kernel that
    runs calls of all sizes as the one in question does, the sizes of the call that it was built for, the edges of its
    blocks, and its text.
    """

    def results(self, kernel: Any, sizes: Sequence[int], edges: Edges, text: str) -> None: ...

    def gradients(
        self, kernel: Any, sizes: Sequence[int], edges: Edges, text: str, needs: tuple[bool, ...], places: Sequence[int]
    ) -> None:
        """Prove the gradients of the operands that `needs` marks. places: the auxiliary outputs at which gradients
        arrive."""
        ...


class Emitter(Protocol):
    """Builds the kernels of specs for one kind of machine. measure: tiles may be timed at the first call. One that is
    registered with `aux_outputs` also gets specs with auxiliary outputs: `compile_training` builds their kernel,
    whether they are trained or not; its None leaves them to the reference interpreter."""

    def supports(self, spec: AttentionSpec, machine: Machine) -> Refusal | None:
        """Reason why there is no kernel for a spec, or None."""
        ...

    def reads(self, dtype: torch.dtype, machine: Machine) -> bool:
        """Whether kernels read tensors of a float8 dtype unchanged; otherwise these are widened before."""
        ...

    def compile(self, spec: AttentionSpec, machine: Machine, plan: Planning, measure: bool) -> Kernel:
        """Kernel of a spec that is supported. It takes the choices of `plan(machine)`; it refuses one that it cannot
        run by raising `RefusedChoiceError` with a reason, at the latest in `prepare`."""
        ...

    def compile_training(
        self, spec: AttentionSpec, machine: Machine, plan: Planning, measure: bool
    ) -> TrainingKernel | None:
        """Kernels that train with a spec, or None where the gradient is left to the reference interpreter."""
        ...


def unread(spec: AttentionSpec, read: Collection[str], multiplied: Collection[str]) -> Refusal | None:
    """Refusal of a spec with an operand whose dtype kernels cannot read, or whose dtype, of Q, K or V, products cannot
    take."""
    products = [o for o, value in zip(spec.operands[:3], spec.values, strict=True) if value is None]
    for operands, what, dtypes in ((spec.operands, "kernels read", read), (products, "products take", multiplied)):
        for operand in operands:
            if operand.dtype not in dtypes:
                found = f"operand {operand.name} has dtype {operand.dtype}; {what} {', '.join(dtypes)}"
                return Refusal(Reason.DTYPE, found)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An emitter by its name. load: returns the emitter; called when a kernel is needed first, since an emitter imports
    a compiler."""

    name: str
    devices: tuple[str, ...]  # the types of devices that it serves; every type where there is none
    load: Callable[[], Emitter]
    machine: Callable[[str], Machine]  # the machine that a device is
    aux_outputs: bool = False  # whether it writes weights and statistics of them beside the output
    reproducible: bool = False  # whether it keeps the promise of `AttentionSpec.reproducible`

    def serves(self, device: str) -> bool:
        return not self.devices or device in self.devices


_registered: dict[str, Registration] = {}


def register(
    name: str,
    devices: tuple[str, ...],
    load: Callable[[], Emitter],
    machine: Callable[[str], Machine] = find_machine,
    aux_outputs: bool = False,
    reproducible: bool = False,
) -> None:
    """Add an emitter, which becomes the one that "auto" takes on its devices. A registered name is replaced."""
    _registered.pop(name, None)
    _registered[name] = Registration(
        name=name, devices=devices, load=load, machine=machine, aux_outputs=aux_outputs, reproducible=reproducible
    )


def names() -> list[str]:
    """Valid values of `options={"emitter": ...}`."""
    return [AUTO, *sorted(_registered)]


def serving(device: str) -> list[str]:
    """Names of the emitters for a type of device."""
    return [found.name for found in _registered.values() if found.serves(device)]


def find(name: str, device: str) -> Registration | None:
    """Emitter of a name for a type of device; None where "auto" finds none. Raises EmitterError where the name is not
    known or does not serve the device."""
    if name == AUTO:
        return next((found for found in reversed(_registered.values()) if device in found.devices), None)
    if name not in _registered:
        raise EmitterError(f"emitter {name!r} is not known; known: {', '.join(names())}")
    if not _registered[name].serves(device):
        raise EmitterError(
            f"emitter {name!r} does not serve device {device!r}; those that do: {', '.join([AUTO, *serving(device)])}"
        )
    return _registered[name]


@contextmanager
def registered(*given: Any, **named: Any) -> Iterator[None]:
    """Context in which an emitter is registered, with the arguments of `register`. Kernels that exist are not touched:
    see `fusion.runtime.kernels.emitting`."""
    before = dict(_registered)
    register(*given, **named)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)


for _name, _devices, _package in (
    ("reference", (), "reference"),
    ("mlir", ("cpu",), "cpu"),
    ("triton", ("cuda",), "triton"),
):
    _load: Any = functools.partial(importlib.import_module, f"fusion.codegen.{_package}")
    register(_name, _devices, _load, aux_outputs=True, reproducible=_name != "reference")
