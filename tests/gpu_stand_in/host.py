"""A GPU on the host, by the runtime that stands in for CUDA's (runtime.cpp): PyTorch's operators on device tensors are
computed by its CPU kernels on the same memory, kernels of Triton are executed as PTX (tests/ptx), and a captured graph
is a list of both, which runs when the graph is replayed."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from tests.ptx.emulated import byte_size, program_of, run_blocks
from tests.ptx.memory import Memory

_KEPT = {"aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::_local_scalar_dense",
         "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::set_"}  # fmt: skip
"""Operators that launch nothing: they allocate, or copy by the runtime."""
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_uint,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_FILL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_REPLAY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
MOST_BLOCKS = 1 << 16


class _Handlers(ctypes.Structure):
    _fields_ = [("launch", _LAUNCH), ("copy", _COPY), ("fill", _FILL), ("replay", _REPLAY)]


class Device:
    """The device's work. launched: names of Triton's kernels, one for each launch. replays: of graphs. faults:
    exceptions in kernels."""

    def __init__(self) -> None:
        self.replays = 0
        self.launched: list[str] = []
        self.faults: list[Exception] = []
        self.kernels: dict[int, Any] = {}  # Triton's, by the driver's function
        self.graphs: dict[int, list[Callable[[], Any]]] = {}
        self.runtime = ctypes.CDLL(None)
        self.runtime.stand_in_capture.restype = ctypes.c_void_p
        self.handlers = _Handlers(
            _LAUNCH(self._guarded(self._launch)),
            _COPY(self._guarded(lambda *a: self.do(functools.partial(ctypes.memmove, *a)))),
            _FILL(self._guarded(lambda *a: self.do(functools.partial(ctypes.memset, *a)))),
            _REPLAY(self._guarded(self._replay)),
        )
        self.runtime.stand_in_handle(self.handlers)

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., int]:
        def run(*arguments: Any) -> int:
            try:
                function(*arguments)
            except Exception as fault:
                self.faults.append(fault)
                return 1
            return 0

        return run

    def do(self, work: Callable[[], Any]) -> None:
        """Do work, or record it where a graph is captured."""
        if graph := self.runtime.stand_in_capture():
            self.graphs.setdefault(graph, []).append(work)
        else:
            work()

    def _replay(self, graph: int) -> None:
        self.replays += 1
        for work in self.graphs.get(graph, ()):
            work()

    def _blocks(self, replayed: bool) -> list[tuple[int, int]]:
        """(first address, bytes) of each tensor's memory; of torch's larger blocks where a graph is replayed, whose
        tensors are gone."""
        if not replayed:
            every = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
            return [(b["address"], b["requested_size"]) for b in every if b["state"] == "active_allocated"]
        firsts, sizes = (ctypes.c_void_p * MOST_BLOCKS)(), (ctypes.c_size_t * MOST_BLOCKS)()
        count = self.runtime.stand_in_blocks(firsts, sizes, MOST_BLOCKS)
        assert count <= MOST_BLOCKS
        return [(firsts[n] or 0, sizes[n]) for n in range(count)]

    def _launch(self, function: int, grid: Any, threads: int, shared: int, parameters: Any) -> None:
        kernel, size = self.kernels[function], (grid[0], grid[1], grid[2])
        program = program_of(kernel.asm["ptx"])
        values = {
            name: ctypes.string_at(parameters[n], byte_size(kind)) for n, (kind, name) in enumerate(program.params)
        }

        recorded = bool(self.runtime.stand_in_capture())

        def run() -> None:
            self.launched.append(kernel.metadata.name)
            memory = Memory.of_blocks(self._blocks(recorded), program.constants.values())
            run_blocks(program, size, threads, shared, memory, values)

        self.do(run)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    data = torch.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(data.untyped_storage(), *place)


def _on_host(device: Device, operator: Any) -> Callable[..., Any]:
    """The operator by the CPU's kernel."""
    waits = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(operator.tags)
    changes = any(argument.alias_info is not None for argument in operator._schema.arguments)

    def run(*arguments: Any, **named: Any) -> Any:
        aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        place = torch.device("cuda", torch.cuda.current_device())

        def moved(value: Any) -> Any:
            nonlocal place
            if isinstance(value, torch.Tensor) and value.is_cuda:
                place, alias = value.device, _alias(value)
                aliases[id(alias)] = value, alias
                return alias
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return None if isinstance(value, torch.Generator) else value

        if waits or operator is torch.ops.aten.copy_.default and not arguments[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        arguments, named = tree_map(moved, (arguments, named))
        recording = bool(device.runtime.stand_in_capture())
        if any(not alias.numel() for alias in named.values() if isinstance(alias, torch.Tensor)):
            operator(*arguments, **named)  # results that are made as large as they have to be
            named = {name: _resized(aliases, value) for name, value in named.items()}
        if changes and recording:
            device.do(lambda: operator(*arguments, **named))
            outputs = _written(operator, arguments, named)
        else:
            outputs = operator(*arguments, **named)

        def returned(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in aliases:
                return aliases[id(value)][0]
            result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)
            _alias(result).copy_(value)
            return result

        results = tree_map(returned, outputs)
        if recording and not changes:
            tensors = [_alias(x) for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]

            def again() -> None:
                found = torch.utils._pytree.tree_leaves(operator(*arguments, **named))
                for to, value in zip(tensors, (x for x in found if isinstance(x, torch.Tensor)), strict=True):
                    to.copy_(value)

            device.do(again)
        return results

    return run


def _resized(aliases: dict[int, tuple[torch.Tensor, torch.Tensor]], value: Any) -> Any:
    """The alias of a device tensor, which gets the alias's size first."""
    if id(value) not in aliases or value.shape == aliases[id(value)][0].shape:
        return value
    tensor = aliases[id(value)][0].resize_(value.shape)
    alias = _alias(tensor)
    aliases[id(alias)] = tensor, alias
    return alias


def _written(operator: Any, arguments: Any, named: Any) -> Any:
    """What an operator returns that changes its arguments: those, in order."""
    values = dict(zip((a.name for a in operator._schema.arguments), arguments, strict=False)) | named
    written = [values[a.name] for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    returns = len(operator._schema.returns)
    return None if not returns else written[0] if returns == 1 else tuple(written)


def _operators() -> Iterator[tuple[str, Any]]:
    """PyTorch's operators with kernels for CUDA that compute something."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is None or any(name.partition(".")[0] == kept or name == kept for kept in _KEPT):
            continue
        if any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns):
            continue  # a view
        yield name, operator
    yield "aten::copy_", torch.ops.aten.copy_.default


def install() -> tuple[Device, torch.library.Library]:
    """The device of this process, and what keeps its operators."""
    from triton.compiler.compiler import CompiledKernel

    device, library = Device(), torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, operator in _operators():
            library.impl(name.removeprefix("aten::"), _on_host(device, operator), "CUDA")
    init = CompiledKernel._init_handles

    def init_handles(kernel: Any) -> None:
        init(kernel)
        device.kernels[kernel.function] = kernel

    mock.patch.object(CompiledKernel, "_init_handles", init_handles).start()
    torch.backends.cudnn.enabled = False
    for enable in ("flash", "mem_efficient", "cudnn"):  # operators that the CPU has no kernels for
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(False)
    return device, library
