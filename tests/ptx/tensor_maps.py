"""Hopper's tensor memory accelerator: boxes of tensors that tensor maps describe, copied to shared memory, and the
barriers in memory (mbarrier) that count the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.block import Block, Mask
from tests.ptx.memory import Fault, Memory
from tests.ptx.program import Run, list_of, opcode

ALIGNMENT, MOST_IN_BOX = 16, 256


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Description of a tensor and of the box that a copy takes, outer dimensions first, in the order in which Triton
    passes it to the driver. swizzle: 0 to 3, for rows of at most 16, 32, 64 and 128 bytes. padding: 1 where elements
    outside are NaN instead of zero."""

    address: int
    swizzle: int
    size: int
    dtype: int
    block: Sequence[int]
    shape: Sequence[int]
    strides: Sequence[int]
    padding: int = 0

    def __post_init__(self) -> None:
        outer = [stride * self.size for stride in self.strides[:-1]]
        if self.address % ALIGNMENT or any(stride % ALIGNMENT for stride in outer) or self.strides[-1] != 1:
            raise Fault(f"a tensor that cannot be described: {self}")
        row = self.block[-1] * self.size
        if max(self.block) > MOST_IN_BOX or row % ALIGNMENT or self.swizzle and row > 16 << self.swizzle:
            raise Fault(f"a box that cannot be copied: {self}")

    def box(self, memory: Memory, first: Sequence[int], line: str) -> np.ndarray:
        """Bytes of the box at these coordinates, as they lie in shared memory but for the swizzle."""
        index = np.indices(self.block).reshape(len(self.block), -1) + np.array(first)[:, None]
        inside = ((index >= 0) & (index < np.array(self.shape)[:, None])).all(0)
        addresses = self.address + self.size * (index * np.array(self.strides)[:, None]).sum(0)
        data = np.full((len(inside), self.size), 0xFF if self.padding else 0, np.uint8)
        data[inside] = memory.load(addresses[inside], self.size, line)
        return data.reshape(-1)

    def places(self, start: int) -> np.ndarray:
        """Addresses in shared memory of the box's bytes."""
        places = start + np.arange(int(np.prod(self.block)) * self.size)
        return places ^ ((places >> 7) & ((1 << self.swizzle) - 1)) << 4


@dataclass(slots=True)
class Barrier:
    """A barrier in memory in its present phase. copies: (places, data) that are under way, which arrive when the phase
    is waited for."""

    count: int
    phase: int = 0
    arrived: int = 0
    expected: int = 0
    copies: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


def _barriers(block: Block, operand: str, mask: Mask, line: str) -> list[int]:
    """The address of the barrier that each of the threads that take part names."""
    addresses = block.address(operand)[slice(None) if mask is None else mask]
    if (addresses % 8).any():
        raise Fault(f"a barrier that is not aligned: {line}")
    return [int(address) for address in addresses]


@opcode("mbarrier")
def _mbarrier(parts: list[str], args: list[str], line: str) -> Run:
    operand = next(arg for arg in args if arg.startswith("["))

    def barrier(block: Block, address: int) -> Barrier:
        if address not in block.barriers:
            raise Fault(f"no barrier was made here: {line}")
        return block.barriers[address]

    def init(block: Block, mask: Mask) -> None:
        for address in _barriers(block, operand, mask, line):
            if address in block.barriers:
                raise Fault(f"there is a barrier already: {line}")
            block.barriers[address] = Barrier(int(args[1], 0))

    def invalidate(block: Block, mask: Mask) -> None:
        for address in _barriers(block, operand, mask, line):
            if barrier(block, address).copies:
                raise Fault(f"copies are under way: {line}")
            del block.barriers[address]

    def arrive(block: Block, mask: Mask) -> None:
        for address in _barriers(block, operand, mask, line):
            at = barrier(block, address)
            at.arrived += 1
            at.expected += int(args[2], 0) if "expect_tx" in parts else 0
            if at.arrived > at.count:
                raise Fault(f"more threads arrive than are expected, or nobody waited for the phase before: {line}")

    def wait(block: Block, mask: Mask) -> None:
        parities = block.get(args[2], np.uint32)[slice(None) if mask is None else mask]
        for address, parity in dict.fromkeys(zip(_barriers(block, operand, mask, line), parities, strict=True)):
            at = barrier(block, address)
            if at.phase == parity:
                if at.arrived != at.count or at.expected != sum(len(data) for _, data in at.copies):
                    raise Fault(f"waits for ever: {at.arrived} of {at.count} arrived: {line}")
                for places, data in at.copies:
                    block.shared.land(places, data)
                block.barriers[address] = Barrier(at.count, 1 - at.phase)
        block.registers[args[0]] = np.ones(block.threads, np.bool_)

    runs = {"init": init, "inval": invalidate, "arrive": arrive, "try_wait": wait}
    if parts[1] not in runs or parts[1] == "try_wait" and "parity" not in parts:
        raise NotImplementedError(f"the emulator has no such barrier: {line}")
    return runs[parts[1]]


def bulk_copy(parts: list[str], args: list[str], line: str) -> Run:
    """Copy of a box to shared memory, 0xFF (NaN) until its barrier is waited for."""
    if parts[3] != "tensor" or parts[5:7] != ["shared::cta", "global"] or len(args) != 3:
        raise NotImplementedError(f"the emulator has no such copy: {line}")
    source, coordinates = args[1].strip("[] ").split(",", 1)

    def copy(block: Block, mask: Mask) -> None:
        threads = np.arange(block.threads) if mask is None else np.flatnonzero(mask)
        barriers = _barriers(block, args[2], mask, line)
        to, address = block.address(args[0])[threads], block.get(source.strip(), np.int64)[threads]
        firsts = [block.get(name, np.int32)[threads] for name in reversed(list_of(coordinates))]
        for n, thread in enumerate(threads):
            tensor_map = block.maps[int(address[n])]
            places = tensor_map.places(int(to[n]))
            if to[n] % (128 << tensor_map.swizzle if tensor_map.swizzle else ALIGNMENT):
                raise Fault(f"shared memory that is not aligned for the swizzle: {line}")
            data = tensor_map.box(block.memory, [int(first[n]) for first in firsts], line)
            block.shared.store(places, np.full((len(data), 1), 0xFF, np.uint8), np.full(len(data), thread // 32), line)
            if barriers[n] not in block.barriers:
                raise Fault(f"no barrier was made for the copy: {line}")
            block.barriers[barriers[n]].copies.append((places, data))

    return copy


@opcode("elect")
def _elect(parts: list[str], args: list[str], line: str) -> Run:
    """One thread of each warp."""
    lane, elected = args[0].split("|")

    def elect(block: Block, mask: Mask) -> None:
        block.put(lane, np.uint32(0), mask)
        block.put(elected, block.lane == 0, mask)

    return elect


@opcode("cvta")
def _cvta(parts: list[str], args: list[str], line: str) -> Run:
    return lambda block, mask: block.put(args[0], block.get(args[1], np.uint64), mask)
