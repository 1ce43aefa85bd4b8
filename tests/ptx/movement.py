"""Opcodes that move data: loads and stores, atomic additions, asynchronous copies, shuffles, barriers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.block import Block, Mask
from tests.ptx.memory import Fault
from tests.ptx.program import Run, list_of, opcode
from tests.ptx.tensor_maps import bulk_copy
from tests.ptx.values import DTYPES

_LANES = np.arange(32)
_REDUCTIONS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


def _active(block: Block, mask: Mask) -> np.ndarray:
    """Numbers of the threads that take part."""
    return np.arange(block.threads) if mask is None else np.flatnonzero(mask)


def _put_active(block: Block, names: list[str], values: np.ndarray, mask: Mask) -> None:
    """Write the columns of values [active threads, registers] to registers."""
    for column, name in enumerate(names):
        full = np.zeros(block.threads, values.dtype)
        full[_active(block, mask)] = values[:, column]
        block.put(name, full, mask)


def _active_values(block: Block, names: list[str], dtype: Any, mask: Mask) -> np.ndarray:
    """Values [active threads, registers] of registers."""
    return np.stack([block.get(name, dtype)[_active(block, mask)] for name in names], 1)


@opcode("ld")
def _ld(parts: list[str], args: list[str], line: str) -> Run:
    dtype, names = DTYPES[parts[-1]], list_of(args[0])
    size = np.dtype(dtype).itemsize * len(names)

    def parameter(block: Block, mask: Mask) -> None:
        value = np.frombuffer(block.parameters[args[1].strip("[] ")][:size], dtype)[0]
        value = np.int64(value) if args[0].startswith("%rd") and dtype is np.int32 else value
        block.put(args[0], np.full(block.threads, value), mask)

    def load(block: Block, mask: Mask) -> None:
        threads = _active(block, mask)
        addresses = block.address(args[1])[threads]
        if parts[1] == "local":
            read = block.local[threads[:, None], addresses[:, None] + np.arange(size)]
        elif parts[1] == "global":
            read = block.memory.load(addresses, size, line)
        else:
            read = block.shared.load(addresses, size, threads // 32, line)
        _put_active(block, names, np.ascontiguousarray(read).view(dtype), mask)

    return parameter if parts[1] == "param" else load


@opcode("st")
def _st(parts: list[str], args: list[str], line: str) -> Run:
    dtype, names = DTYPES[parts[-1]], list_of(args[1])
    if parts[1] == "param":  # of a call
        return lambda block, mask: None

    def store(block: Block, mask: Mask) -> None:
        threads = _active(block, mask)
        addresses = block.address(args[0])[threads]
        values = np.ascontiguousarray(_active_values(block, names, dtype, mask)).view(np.uint8)
        if parts[1] == "local":
            block.local[threads[:, None], addresses[:, None] + np.arange(values.shape[1])] = values
        elif parts[1] == "global":
            block.memory.store(addresses, values, line)
        else:
            block.shared.store(addresses, values, threads // 32, line)

    return store


@opcode("atom", "red")
def _add(parts: list[str], args: list[str], line: str) -> Run:
    """Atomic addition; `atom` returns what was there before."""
    assert "global" in parts and "add" in parts and parts[-1] == "f32", line
    before, address, values = args[:3] if parts[0] == "atom" else (None, *args[:2])

    def add(block: Block, mask: Mask) -> None:
        addresses = block.address(address)[_active(block, mask)]
        old = block.memory.add(addresses, _active_values(block, list_of(values), np.float32, mask), line)
        if before:
            _put_active(block, list_of(before), old, mask)

    return add


@opcode("cp")
def _cp(parts: list[str], args: list[str], line: str) -> Run:
    """Asynchronous copies, in groups; those of which a thread reads 0 bytes write zeros."""
    if parts[2] == "bulk":
        return bulk_copy(parts, args, line)
    assert parts[1] == "async" and (parts[2] in ("commit_group", "wait_group", "wait_all") or parts[3] == "shared"), (
        line
    )

    def commit(block: Block, mask: Mask) -> None:
        block.copy_groups.append(block.copies)
        block.copies = []

    def wait(block: Block, mask: Mask) -> None:
        if parts[2] == "wait_all":
            commit(block, mask)
        while len(block.copy_groups) > (int(args[0], 0) if args else 0):
            for to, data, warps in block.copy_groups.popleft():
                block.shared.store(to, data, warps, line)

    def copy(block: Block, mask: Mask) -> None:
        which, size = _active(block, mask), int(args[2], 0)
        to, source = block.address(args[0])[which], block.address(args[1])[which]
        read = block.get(args[3], np.uint32)[which] if len(args) > 3 else np.full(len(which), size, np.uint32)
        if ((read != size) & (read != 0)).any():
            raise Fault(f"part of a copy: {line}")
        data = np.zeros((len(which), size), np.uint8)
        data[read == size] = block.memory.load(source[read == size], size, line)
        block.copies.append((to, data, which // 32))
        block.shared.store(to, np.full_like(data, 0xFF), which // 32, line)  # NaN until it is waited for

    return commit if parts[2] == "commit_group" else copy if parts[2] not in ("wait_group", "wait_all") else wait


@opcode("bar")
def _bar(parts: list[str], args: list[str], line: str) -> Run:
    def barrier(block: Block, mask: Mask) -> None:
        if mask is not None and parts[1] == "sync" and args == ["0"]:
            raise Fault(f"barrier in divergent code: {line}")
        block.shared.barriers += parts[1] == "sync" and args == ["0"]

    return barrier


@opcode("shfl")
def _shfl(parts: list[str], args: list[str], line: str) -> Run:
    """Values of other lanes of a warp, or of a segment of it; a lane whose source is outside keeps its own."""
    how, results = parts[2], args[0].split("|")

    def shuffle(block: Block, mask: Mask) -> None:
        lane, values = block.lane, block.get(args[1], np.uint32)
        by, bounds = (block.get(arg, np.uint32).astype(np.int64) for arg in args[2:4])
        segment, clamp = bounds >> 8 & 31, bounds & 31
        last = (lane & segment) | (clamp & ~segment)
        source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": (lane & segment) | (by & ~segment)}[how]
        inside = source >= last if how == "up" else source <= last
        block.put(results[0], values[np.arange(block.threads) // 32 * 32 + np.where(inside, source, lane)], mask)
        if len(results) > 1:
            block.put(results[1], inside, mask)

    return shuffle


@opcode("redux")
def _redux(parts: list[str], args: list[str], line: str) -> Run:
    dtype, reduction = DTYPES[parts[-1]], _REDUCTIONS[parts[2]]

    def reduce(block: Block, mask: Mask) -> None:
        values = block.get(args[1], dtype).reshape(-1, 32)
        block.put(args[0], np.repeat(reduction.reduce(values, 1, dtype=dtype), 32), mask)

    return reduce


def _matrix_rows(block: Block, operand: str, matrix: int) -> tuple[np.ndarray, np.ndarray]:
    """(addresses, warps) of the eight rows of a matrix in each warp, which lanes 8 * matrix and on have."""
    rows = block.address(operand).reshape(-1, 32)[:, 8 * matrix : 8 * matrix + 8]
    return rows.reshape(-1), np.repeat(np.arange(len(rows)), 8)


def _places(half: int, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of a matrix whose elements are one half of the lanes' registers."""
    row, column = _LANES >> 2, 2 * (_LANES & 3) + half
    return (column, row) if transposed else (row, column)


@opcode("ldmatrix")
def _ldmatrix(parts: list[str], args: list[str], line: str) -> Run:
    names, transposed = list_of(args[0]), "trans" in parts
    assert parts[-1] == "b16", line

    def load(block: Block, mask: Mask) -> None:
        assert mask is None, line
        for matrix, name in enumerate(names):
            rows, warps = _matrix_rows(block, args[1], matrix)
            data = block.shared.load(rows, 16, warps, line).view(np.uint16).reshape(-1, 8, 8)
            low, high = (data[(slice(None), *_places(half, transposed))].astype(np.uint32) for half in (0, 1))
            block.put(name, (low | high << 16).reshape(-1), mask)

    return load


@opcode("stmatrix")
def _stmatrix(parts: list[str], args: list[str], line: str) -> Run:
    names, transposed = list_of(args[1]), "trans" in parts
    assert parts[-1] == "b16", line

    def store(block: Block, mask: Mask) -> None:
        assert mask is None, line
        for matrix, name in enumerate(names):
            values = block.get(name, np.uint32).reshape(-1, 32)
            data = np.zeros((len(values), 8, 8), np.uint16)
            for half in (0, 1):
                rows, columns = _places(half, transposed)
                data[:, rows, columns] = (values >> 16 * half).astype(np.uint16)
            rows, warps = _matrix_rows(block, args[0], matrix)
            block.shared.store(rows, data.reshape(-1, 8).view(np.uint8), warps, line)

    return store


@opcode("call", "trap")
def _trap(parts: list[str], args: list[str], line: str) -> Run:
    """The end of an assertion of the kernel's own, which fails."""
    if parts[0] == "call" and args[0] != "__assertfail":
        raise NotImplementedError(f"the emulator calls no functions: {line}")

    def fail(block: Block, mask: Mask) -> None:
        raise Fault(f"an assertion of the kernel fails: {line}")

    return fail


@opcode("fence", "membar", "griddepcontrol")
def _order(parts: list[str], args: list[str], line: str) -> Run:
    return lambda block, mask: None


@opcode("createpolicy")
def _createpolicy(parts: list[str], args: list[str], line: str) -> Run:
    """How long a cache keeps what is read: no matter here."""
    return lambda block, mask: block.put(args[0], np.uint64(0), mask)
