"""Opcodes that move data: loads and stores, atomic additions, asynchronous copies, shuffles, barriers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.memory import Fault
from tests.ptx.program import Run, list_of, opcode
from tests.ptx.tensor_maps import bulk_copy
from tests.ptx.values import DTYPES
from tests.ptx.wave import WARP, Mask, Wave

_REDUCTIONS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


@opcode("ld")
def _ld(parts: list[str], args: list[str], line: str) -> Run:
    dtype, names = DTYPES[parts[-1]], list_of(args[0])
    size = np.dtype(dtype).itemsize * len(names)

    def parameter(wave: Wave, mask: Mask) -> None:
        value = np.frombuffer(wave.parameters[args[1].strip("[] ")][:size], dtype)[0]
        value = np.int64(value) if args[0].startswith("%rd") and dtype is np.int32 else value
        wave.put(args[0], np.full(wave.threads, value), mask)

    def load(wave: Wave, mask: Mask) -> None:
        threads = wave.active(mask)
        addresses = wave.address(args[1])[threads]
        if parts[1] == "local":
            read = wave.local[threads[:, None], addresses[:, None] + np.arange(size)]
        elif parts[1] == "global":
            read = wave.memory.load(addresses, size, line, wave.writers(threads))
        else:
            read = wave.shared.load(addresses, size, wave.warp[threads], line)
        wave.put_active(names, np.ascontiguousarray(read).view(dtype), mask)

    return parameter if parts[1] == "param" else load


@opcode("st")
def _st(parts: list[str], args: list[str], line: str) -> Run:
    dtype, names = DTYPES[parts[-1]], list_of(args[1])
    if parts[1] == "param":  # of a call
        return lambda wave, mask: None

    def store(wave: Wave, mask: Mask) -> None:
        threads = wave.active(mask)
        addresses = wave.address(args[0])[threads]
        values = np.ascontiguousarray(wave.get_active(names, dtype, mask)).view(np.uint8)
        if parts[1] == "local":
            wave.local[threads[:, None], addresses[:, None] + np.arange(values.shape[1])] = values
        elif parts[1] == "global":
            wave.memory.store(addresses, values, line, wave.writers(threads))
        else:
            wave.shared.store(addresses, values, wave.warp[threads], line)

    return store


@opcode("atom", "red")
def _add(parts: list[str], args: list[str], line: str) -> Run:
    """Atomic addition; `atom` returns what was there before."""
    assert "global" in parts and "add" in parts and parts[-1] == "f32", line
    before, address, values = args[:3] if parts[0] == "atom" else (None, *args[:2])

    def add(wave: Wave, mask: Mask) -> None:
        addresses = wave.address(address)[wave.active(mask)]
        old = wave.memory.add(addresses, wave.get_active(list_of(values), np.float32, mask), line)
        if before:
            wave.put_active(list_of(before), old, mask)

    return add


@opcode("cp")
def _cp(parts: list[str], args: list[str], line: str) -> Run:
    """Asynchronous copies, in groups of each thread's own; those of which it reads 0 bytes write zeros."""
    if parts[2] == "bulk":
        return bulk_copy(parts, args, line)
    if parts[2] in ("commit_group", "wait_group", "wait_all"):
        return _commit_or_wait(parts[2], int(args[0], 0) if args else 0, line)
    assert parts[1] == "async" and parts[3] == "shared", line

    def copy(wave: Wave, mask: Mask) -> None:
        threads, size = wave.active(mask), int(args[2], 0)
        to, source = wave.address(args[0])[threads], wave.address(args[1])[threads]
        read = wave.get(args[3], np.uint32)[threads] if len(args) > 3 else np.full(len(threads), size, np.uint32)
        if ((read != size) & (read != 0)).any():
            raise Fault(f"part of a copy: {line}")
        data, all_of_it = np.zeros((len(threads), size), np.uint8), read == size
        data[all_of_it] = wave.memory.load(source[all_of_it], size, line, wave.writers(threads[all_of_it]))
        wave.copies.append((threads, wave.committed["copies"][threads], to, data))
        wave.shared.store(to, np.full_like(data, 0xFF), wave.warp[threads], line)  # NaN until it is waited for

    return copy


def _commit_or_wait(how: str, pending: int, line: str) -> Run:
    """The end of a group of copies, or what lands all groups but the last `pending` ones."""

    def run(wave: Wave, mask: Mask) -> None:
        takes_part = np.ones(wave.threads, bool) if mask is None else mask
        if how != "wait_group":
            wave.committed["copies"][takes_part] += 1
        if how == "commit_group":
            return
        copies, wave.copies = wave.copies, []
        for threads, group, to, data in copies:
            lands = takes_part[threads] & (group < wave.committed["copies"][threads] - pending)
            if lands.any():
                wave.shared.store(to[lands], data[lands], wave.warp[threads[lands]], line)
            if not lands.all():
                wave.copies.append((threads[~lands], group[~lands], to[~lands], data[~lands]))

    return run


@opcode("bar")
def _bar(parts: list[str], args: list[str], line: str) -> Run:
    def barrier(wave: Wave, mask: Mask) -> None:
        if parts[1] == "sync" and args == ["0"]:
            wave.shared.barriers[wave.whole(mask, wave.size, f"barrier in divergent code: {line}")] += 1

    return barrier


@opcode("shfl")
def _shfl(parts: list[str], args: list[str], line: str) -> Run:
    """Values of other lanes of a warp, or of a segment of it; a lane whose source is outside keeps its own."""
    how, results = parts[2], args[0].split("|")

    def shuffle(wave: Wave, mask: Mask) -> None:
        lane, values = wave.lane, wave.get(args[1], np.uint32)
        by, bounds = (wave.get(arg, np.uint32).astype(np.int64) for arg in args[2:4])
        segment, clamp = bounds >> 8 & 31, bounds & 31
        last = (lane & segment) | (clamp & ~segment)
        source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": (lane & segment) | (by & ~segment)}[how]
        inside = source >= last if how == "up" else source <= last
        wave.put(results[0], values[wave.warp * WARP + np.where(inside, source, lane)], mask)
        if len(results) > 1:
            wave.put(results[1], inside, mask)

    return shuffle


@opcode("redux")
def _redux(parts: list[str], args: list[str], line: str) -> Run:
    dtype, reduction = DTYPES[parts[-1]], _REDUCTIONS[parts[2]]

    def reduce(wave: Wave, mask: Mask) -> None:
        values = wave.get(args[1], dtype).reshape(-1, 32)
        wave.put(args[0], np.repeat(reduction.reduce(values, 1, dtype=dtype), 32), mask)

    return reduce


def _matrix_rows(wave: Wave, operand: str, matrices: int, mask: Mask, line: str) -> tuple[np.ndarray, np.ndarray]:
    """(addresses, warps) of the eight rows of each matrix in each warp; lanes 8 * n and on have those of matrix n."""
    warps = wave.whole(mask, WARP, f"a matrix in divergent code: {line}")
    rows = wave.address(operand).reshape(-1, WARP)[warps, : 8 * matrices]
    return rows.reshape(-1), np.repeat(warps, 8 * matrices)


@opcode("ldmatrix")
def _ldmatrix(parts: list[str], args: list[str], line: str) -> Run:
    """Matrices [8, 8]; a lane gets two elements, side by side in a row or (transposed) in a column."""
    names, transposed = list_of(args[0]), "trans" in parts
    assert parts[-1] == "b16", line

    def load(wave: Wave, mask: Mask) -> None:
        rows, warps = _matrix_rows(wave, args[1], len(names), mask, line)
        data = wave.shared.load(rows, 16, warps, line).view(np.uint16).reshape(-1, len(names), 8, 8)
        data = np.ascontiguousarray(data.mT if transposed else data).view(np.uint32)
        wave.put_active(names, data.transpose(0, 2, 3, 1).reshape(-1, len(names)), mask)

    return load


@opcode("stmatrix")
def _stmatrix(parts: list[str], args: list[str], line: str) -> Run:
    names, transposed = list_of(args[1]), "trans" in parts
    assert parts[-1] == "b16", line

    def store(wave: Wave, mask: Mask) -> None:
        rows, warps = _matrix_rows(wave, args[0], len(names), mask, line)
        lanes = wave.get_active(names, np.uint32, mask).reshape(-1, WARP, len(names)).mT
        data = np.ascontiguousarray(lanes).view(np.uint16).reshape(-1, len(names), 8, 8)
        data = np.ascontiguousarray(data.mT if transposed else data)
        wave.shared.store(rows, data.reshape(-1, 8).view(np.uint8), warps, line)

    return store


@opcode("call", "trap")
def _trap(parts: list[str], args: list[str], line: str) -> Run:
    """The end of an assertion of the kernel's own, which fails."""
    if parts[0] == "call" and args[0] != "__assertfail":
        raise NotImplementedError(f"the emulator calls no functions: {line}")

    def fail(wave: Wave, mask: Mask) -> None:
        raise Fault(f"an assertion of the kernel fails: {line}")

    return fail


@opcode("fence", "membar", "griddepcontrol")
def _order(parts: list[str], args: list[str], line: str) -> Run:
    return lambda wave, mask: None


@opcode("createpolicy")
def _createpolicy(parts: list[str], args: list[str], line: str) -> Run:
    """How long a cache keeps what is read: no matter here."""
    return lambda wave, mask: wave.put(args[0], np.uint64(0), mask)
