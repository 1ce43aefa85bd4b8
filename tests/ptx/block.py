"""A block of threads that executes a program, all of them at once: registers, shared memory, divergence."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.ptx.memory import UNWRITTEN, Fault, Memory, Shared
from tests.ptx.program import Program

Mask = np.ndarray | None
"""Threads that take part in an instruction; None: all."""
Grid = tuple[int, int, int]
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WIDE_REGISTERS = ("%rd", "%SP")
_OF_REGISTERS: dict[str, Any] = dict.fromkeys(_WIDE_REGISTERS, np.uint64) | {"%rs": np.uint16, "%p": np.bool_}


class Block:
    """One block. Copies of cp.async arrive when they are waited for, and are NaN before; products of wgmma are computed
    at once, and again when they are waited for: `hazards` has those whose factors have changed in between."""

    def __init__(
        self, program: Program, place: Grid, grid: Grid, threads: int, shared: int, memory: Memory,
        parameters: Mapping[str, bytes], maps: Mapping[int, Any],
    ):  # fmt: skip
        self.program, self.threads, self.memory, self.parameters = program, threads, memory, parameters
        self.shared = Shared(shared)
        self.local = np.full((threads, program.local_size), UNWRITTEN, np.uint8)
        self.registers: dict[str, np.ndarray] = {}
        thread = np.arange(threads, dtype=np.uint32)
        self.lane = (thread % 32).astype(np.int64)
        self.special: dict[str, Any] = {
            "%tid.x": thread, "%tid.y": 0, "%tid.z": 0, "%ntid.x": threads, "%laneid": thread % 32,
            "%warpid": thread // 32,
        }  # fmt: skip
        for axis, number, size in zip("xyz", place, grid, strict=True):
            self.special |= {f"%ctaid.{axis}": number, f"%nctaid.{axis}": size}
        self.copies: list[Any] = []
        self.copy_groups: deque[list[Any]] = deque()
        self.products: list[Any] = []
        self.product_groups: deque[list[Any]] = deque()
        self.hazards: list[str] = []
        self.maps, self.barriers = maps, dict[int, Any]()

    def get(self, operand: str, dtype: Any) -> np.ndarray:
        """Values of an operand in all threads."""
        size = np.dtype(dtype).itemsize
        if operand.startswith("%"):
            values = self.registers.get(operand)
            if values is None:
                if operand not in self.special:
                    raise Fault(f"register {operand} is read before it is written")
                values = np.broadcast_to(np.asarray(self.special[operand], np.uint32), (self.threads,))
            if dtype is np.bool_:
                return values
            return values.view(dtype) if values.dtype.itemsize == size else values.astype(UNSIGNED[size]).view(dtype)
        if operand in self.program.variables:
            return np.full(self.threads, self.program.variables[operand], dtype)
        if operand[:2] in ("0f", "0d"):
            bits = np.array(int(operand[2:], 16), np.uint32 if operand[1] == "f" else np.uint64)
            return np.full(self.threads, bits.view(dtype))
        value = int(operand.rstrip("U"), 0)
        if dtype is np.bool_ or np.dtype(dtype).kind == "f":
            return np.full(self.threads, value, dtype)
        return np.full(self.threads, np.array(value & ((1 << 8 * size) - 1), UNSIGNED[size]).view(dtype))

    def put(self, register: str, value: Any, mask: Mask) -> None:
        """Write a register in the threads of the mask."""
        if register == "_":
            return
        dtype = next((d for name, d in _OF_REGISTERS.items() if register.startswith(name)), np.uint32)
        value = np.asarray(value)
        if value.dtype != dtype:
            if dtype is np.bool_:
                value = value.astype(bool)
            elif value.dtype.itemsize == np.dtype(dtype).itemsize:
                value = value.view(dtype)
            else:
                bits = value.view(UNSIGNED[value.dtype.itemsize]) if value.dtype.kind == "f" else value
                value = bits.astype(dtype)
        if value.shape != (self.threads,):
            value = np.broadcast_to(value, (self.threads,)).copy()
        if mask is not None:
            before = self.registers.get(register)
            value = np.where(mask, value, np.zeros(self.threads, dtype) if before is None else before)
        self.registers[register] = value

    def address(self, operand: str) -> np.ndarray:
        """Addresses of `[%rd1 + 16]` in all threads; shared memory and each thread's local memory begin at 0."""
        total = np.zeros(self.threads, np.int64)
        for part in re.split(r"\s*\+\s*", operand.strip("[] ")):
            if part.startswith(_WIDE_REGISTERS) or part in self.program.variables:
                total = total + self.get(part, np.int64)
            elif part.startswith("%"):
                total = total + self.get(part, np.uint32).astype(np.int64)
            else:
                total = total + int(part.rstrip("U"), 0)
        return total

    def run(self) -> None:
        """Execute the program. Where threads are at different instructions, those that are furthest behind go first,
        but for those that wait for the others, at a barrier or a product."""
        code, end = self.program.code, len(self.program.code)
        at, each = 0, None  # one counter for all threads, or one for each
        while True:
            if each is not None:
                going = each[~self.program.waits[each]]
                at = int((going if len(going) else each).min())
            if at >= end:
                return
            here = None if each is None or (each == at).all() else each == at
            each = None if here is None else each
            instruction = code[at]
            active = here
            if instruction.predicate is not None:
                active = self.registers[instruction.predicate] ^ instruction.negated
                active = active if here is None else active & here
            if instruction.run is None:
                at, each = self._branch(at, each, here, active, instruction.target)
                continue
            if active is None or active.any():
                instruction.run(self, None if active is None or active.all() else active)
            at, each = (at + 1, each) if each is None else (at, np.where(here, at + 1, each))

    def _branch(
        self, at: int, each: np.ndarray | None, here: np.ndarray | None, taken: np.ndarray | None, target: int
    ) -> tuple[int, np.ndarray | None]:
        """Counters after a branch, which the threads `taken` take; None: all that are here."""
        if each is None and (taken is None or taken.all()):
            return target, None
        if each is None and taken is not None and not taken.any():
            return at + 1, None
        counters = np.full(self.threads, at) if each is None else each
        there = np.ones(self.threads, bool) if here is None else here
        return at, np.where(there, np.where(there if taken is None else taken, target, at + 1), counters)
