"""Blocks of threads that execute a program in step, all threads at once: registers, shared memory, divergence."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.ptx.memory import UNWRITTEN, Fault, Memory, Shared, writers
from tests.ptx.program import Program

Mask = np.ndarray | None
"""Threads that take part in an instruction; None: all."""
Grid = tuple[int, int, int]
WARP, GROUP = 32, 128
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WIDE_REGISTERS = ("%rd", "%SP")
_OF_REGISTERS: dict[str, Any] = dict.fromkeys(_WIDE_REGISTERS, np.uint64) | {"%rs": np.uint16, "%p": np.bool_}


@functools.cache
def _dtype(register: str) -> Any:
    return next((dtype for name, dtype in _OF_REGISTERS.items() if register.startswith(name)), np.uint32)


@functools.cache
def _terms(address: str) -> tuple[list[str], int]:
    """(registers and variables, number) that the address `[%rd1 + 16]` is the sum of."""
    parts = re.split(r"\s*\+\s*", address.strip("[] "))
    names = [part for part in parts if not re.match(r"-?\d", part)]
    return names, sum(int(part.rstrip("U"), 0) for part in parts if part not in names)


class Wave:
    """Blocks at these places of a grid. A register is an array of one value per thread, those of block 0 first, and is
    never changed in place. Copies of cp.async arrive when they are waited for, and are NaN before; products of wgmma
    are computed at once, and again when they are waited for: `hazards` has those whose factors changed in between."""

    def __init__(
        self, program: Program, places: Sequence[Grid], grid: Grid, size: int, shared: int, memory: Memory,
        parameters: Mapping[str, bytes], maps: Mapping[int, Any],
    ):  # fmt: skip
        self.program, self.size, self.threads, self.memory = program, size, size * len(places), memory
        self.parameters, self.maps = parameters, maps
        self.shared = Shared(shared, len(places), size // WARP)
        self.local = np.full((self.threads, program.local_size), UNWRITTEN, np.uint8)
        self.numbers = np.arange(self.threads)
        self.warp, self.lane = self.numbers // WARP, self.numbers % WARP
        thread = (self.numbers % size).astype(np.uint32)
        self.places = np.array([x + grid[0] * (y + grid[1] * z) for x, y, z in places])
        special: dict[str, Any] = {
            "%tid.x": thread, "%tid.y": 0, "%tid.z": 0, "%ntid.x": size, "%laneid": thread % WARP,
            "%warpid": thread // WARP,
        }  # fmt: skip
        for n, axis in enumerate("xyz"):
            special[f"%ctaid.{axis}"] = np.repeat([place[n] for place in places], size)
            special[f"%nctaid.{axis}"] = grid[n]
        every = np.zeros(self.threads, np.uint32)
        self.registers = {name: every + np.asarray(value, np.uint32) for name, value in special.items()}
        self.constants: dict[tuple[str, Any], np.ndarray] = {}
        self.copies: list[Any] = []
        self.products: list[Any] = []
        self.committed = {"copies": np.zeros(self.threads, int), "products": np.zeros(self.threads // GROUP, int)}
        self.hazards: list[str] = []
        self.barriers: dict[tuple[int, int], Any] = {}

    def writers(self, threads: np.ndarray) -> np.ndarray:
        """Codes of threads that access global memory."""
        warps = np.arange(self.threads // WARP)
        blocks = warps // (self.size // WARP)
        return writers(self.places[blocks], self.shared.barriers[blocks], warps % (self.size // WARP))[
            self.warp[threads]
        ]

    def active(self, mask: Mask) -> np.ndarray:
        """Numbers of the threads that take part."""
        return self.numbers if mask is None else np.flatnonzero(mask)

    def whole(self, mask: Mask, size: int, problem: str) -> np.ndarray:
        """Numbers of the groups of `size` threads that take part; a fault where a part of one does."""
        if mask is None:
            return np.arange(self.threads // size)
        parts = mask.reshape(-1, size)
        if (parts.any(1) != parts.all(1)).any():
            raise Fault(problem)
        return np.flatnonzero(parts[:, 0])

    def get(self, operand: str, dtype: Any) -> np.ndarray:
        """Values of an operand in all threads."""
        values = self.registers.get(operand)
        if values is None:
            return self._constant(operand, dtype)
        if values.dtype.type is dtype:
            return values
        if dtype is np.bool_:
            return values != 0
        size = np.dtype(dtype).itemsize
        return values.view(dtype) if values.itemsize == size else values.astype(UNSIGNED[size]).view(dtype)

    def _constant(self, operand: str, dtype: Any) -> np.ndarray:
        if (operand, dtype) not in self.constants:
            self.constants[operand, dtype] = np.full(self.threads, self._number(operand, dtype))
        return self.constants[operand, dtype]

    def _number(self, operand: str, dtype: Any) -> Any:
        if operand.startswith("%"):
            raise Fault(f"register {operand} is read before it is written")
        if operand in self.program.variables:
            return np.array(self.program.variables[operand], dtype)
        if operand[:2] in ("0f", "0d"):
            return np.array(int(operand[2:], 16), np.uint32 if operand[1] == "f" else np.uint64).view(dtype)
        value, size = int(operand.rstrip("U"), 0), np.dtype(dtype).itemsize
        if dtype is np.bool_ or np.dtype(dtype).kind == "f":
            return np.array(value, dtype)
        return np.array(value & ((1 << 8 * size) - 1), UNSIGNED[size]).view(dtype)

    def put(self, register: str, value: Any, mask: Mask) -> None:
        """Write a register in the threads of the mask; where nothing was written before, others have bits of 1."""
        if register == "_":
            return
        dtype = _dtype(register)
        value = np.asarray(value)
        if value.dtype.type is not dtype:
            if dtype is np.bool_:
                value = value.astype(bool)
            elif value.itemsize == np.dtype(dtype).itemsize:
                value = value.view(dtype)
            else:
                bits = value.view(UNSIGNED[value.itemsize]) if value.dtype.kind == "f" else value
                value = bits.astype(dtype)
        if value.shape != (self.threads,):
            value = np.broadcast_to(value, (self.threads,)).copy()
        if mask is not None:
            before = self.registers.get(register)
            value = np.where(mask, value, np.invert(dtype(0)) if before is None else before)
        self.registers[register] = value

    def get_active(self, names: Sequence[str], dtype: Any, mask: Mask) -> np.ndarray:
        """Values [active threads, registers] of registers."""
        values = np.stack([self.get(name, dtype) for name in names], 1)
        return values if mask is None else values[mask]

    def put_active(self, names: Sequence[str], values: np.ndarray, mask: Mask) -> None:
        """Write the columns of values [active threads, registers] to registers."""
        for column, name in enumerate(names):
            value = values[:, column]
            if mask is not None:
                value = np.zeros(self.threads, values.dtype)
                value[mask] = values[:, column]
            self.put(name, value, mask)

    def address(self, operand: str) -> np.ndarray:
        """Addresses in all threads; shared memory of each block and local memory of each thread begin at 0."""
        names, total = _terms(operand)
        wide = [name.startswith(_WIDE_REGISTERS) or name in self.program.variables for name in names]
        for name, is_wide in zip(names, wide, strict=True):
            total = total + (self.get(name, np.int64) if is_wide else self.get(name, np.uint32).astype(np.int64))
        if names and not any(wide):  # 32-bit addresses wrap around
            total = total & 0xFFFFFFFF
        return np.broadcast_to(total, (self.threads,))

    def run(self) -> None:
        """Execute the program. Threads at different instructions are groups, of which those that are furthest behind
        go first, but for those that wait for others of their block: at a barrier or a product."""
        code, groups = self.program.code, dict[int, Mask]({0: None})

        def join(at: int, threads: Mask) -> None:
            joined = groups[at] | threads if at in groups and threads is not None else threads  # type: ignore
            groups[at] = None if joined is None or joined.all() else joined

        while groups:
            at = self._next(groups)
            here = groups.pop(at)
            while at < len(code):
                instruction, active = code[at], here
                if instruction.predicate is not None:
                    active = self.get(instruction.predicate, np.bool_) ^ instruction.negated
                    active = active if here is None else active & here
                if instruction.run is None:
                    taken = np.ones(self.threads, bool) if active is None else active
                    if taken.any():
                        join(instruction.target, taken)
                    left = ~taken if here is None else here & ~taken
                    if left.any():
                        join(at + 1, left)
                    break
                if active is None or active.any():
                    instruction.run(self, None if active is None or active.all() else active)
                at += 1
                if groups and (at in groups or self.program.waits[at]):
                    join(at, here)
                    break

    def _next(self, groups: Mapping[int, Mask]) -> int:
        for at in sorted(groups):
            threads = groups[at]
            if not self.program.waits[at] or threads is None:
                return at
            blocks = threads.reshape(-1, self.size)
            if (blocks.any(1) == blocks.all(1)).all():
                return at
        return min(groups)
