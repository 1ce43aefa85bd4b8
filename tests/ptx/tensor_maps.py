"""Hopper's tensor memory accelerator: boxes of tensors that tensor maps describe, copied to shared memory, and the
barriers in memory (mbarrier) that count the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.memory import Fault, Memory
from tests.ptx.program import Run, list_of, opcode
from tests.ptx.wave import Mask, Wave

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

    def box(self, memory: Memory, first: Sequence[int], line: str, code: np.ndarray) -> np.ndarray:
        """Bytes of the box at these coordinates, as they lie in shared memory but for the swizzle."""
        index = np.indices(self.block).reshape(len(self.block), -1) + np.array(first)[:, None]
        inside = ((index >= 0) & (index < np.array(self.shape)[:, None])).all(0)
        addresses = self.address + self.size * (index * np.array(self.strides)[:, None]).sum(0)
        data = np.full((len(inside), self.size), 0xFF if self.padding else 0, np.uint8)
        data[inside] = memory.load(addresses[inside], self.size, line, np.full(inside.sum(), code))
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


def _barriers(wave: Wave, operand: str, mask: Mask, line: str) -> list[tuple[int, int]]:
    """(block, address) of the barrier that each of the threads that take part names."""
    threads = wave.active(mask)
    addresses = wave.address(operand)[threads]
    if (addresses % 8).any():
        raise Fault(f"a barrier that is not aligned: {line}")
    return list(zip((threads // wave.size).tolist(), addresses.tolist(), strict=True))


@opcode("mbarrier")
def _mbarrier(parts: list[str], args: list[str], line: str) -> Run:
    operand = next(arg for arg in args if arg.startswith("["))

    def barrier(wave: Wave, place: tuple[int, int]) -> Barrier:
        if place not in wave.barriers:
            raise Fault(f"no barrier was made here: {line}")
        return wave.barriers[place]

    def init(wave: Wave, mask: Mask) -> None:
        for place in _barriers(wave, operand, mask, line):
            if place in wave.barriers:
                raise Fault(f"there is a barrier already: {line}")
            wave.barriers[place] = Barrier(int(args[1], 0))

    def invalidate(wave: Wave, mask: Mask) -> None:
        for place in _barriers(wave, operand, mask, line):
            if barrier(wave, place).copies:
                raise Fault(f"copies are under way: {line}")
            del wave.barriers[place]

    def arrive(wave: Wave, mask: Mask) -> None:
        for place in _barriers(wave, operand, mask, line):
            at = barrier(wave, place)
            at.arrived += 1
            at.expected += int(args[2], 0) if "expect_tx" in parts else 0
            if at.arrived > at.count:
                raise Fault(f"more threads arrive than are expected, or nobody waited for the phase before: {line}")

    def wait(wave: Wave, mask: Mask) -> None:
        parities = wave.get(args[2], np.uint32)[wave.active(mask)].tolist()
        for place, parity in dict.fromkeys(zip(_barriers(wave, operand, mask, line), parities, strict=True)):
            at = barrier(wave, place)
            if at.phase == parity:
                if at.arrived != at.count or at.expected != sum(len(data) for _, data in at.copies):
                    raise Fault(f"waits for ever: {at.arrived} of {at.count} arrived: {line}")
                for places, data in at.copies:
                    wave.shared.land(places, data, place[0])
                wave.barriers[place] = Barrier(at.count, 1 - at.phase)
        wave.put(args[0], True, mask)

    runs = {"init": init, "inval": invalidate, "arrive": arrive, "try_wait": wait}
    if parts[1] not in runs or parts[1] == "try_wait" and "parity" not in parts:
        raise NotImplementedError(f"the emulator has no such barrier: {line}")
    return runs[parts[1]]


def bulk_copy(parts: list[str], args: list[str], line: str) -> Run:
    """Copy of a box to shared memory, 0xFF (NaN) until its barrier is waited for. A cluster has one block."""
    ours = parts[5:7] in (["shared::cta", "global"], ["shared::cluster", "global"])
    if parts[3] != "tensor" or not ours or len(args) != 3:
        raise NotImplementedError(f"the emulator has no such copy: {line}")
    source, coordinates = args[1].strip("[] ").split(",", 1)

    def copy(wave: Wave, mask: Mask) -> None:
        threads, barriers = wave.active(mask), _barriers(wave, args[2], mask, line)
        to, address = wave.address(args[0])[threads].tolist(), wave.get(source.strip(), np.int64)[threads].tolist()
        firsts = wave.get_active(list_of(coordinates)[::-1], np.int32, mask).tolist()
        for n, thread in enumerate(threads):
            tensor_map = wave.maps[address[n]]
            places = tensor_map.places(to[n])
            if to[n] % (128 << tensor_map.swizzle if tensor_map.swizzle else ALIGNMENT):
                raise Fault(f"shared memory that is not aligned for the swizzle: {line}")
            data = tensor_map.box(wave.memory, firsts[n], line, wave.writers(thread))
            warps = np.full(len(data), wave.warp[thread])
            wave.shared.store(places, np.full((len(data), 1), 0xFF, np.uint8), warps, line)
            if barriers[n] not in wave.barriers:
                raise Fault(f"no barrier was made for the copy: {line}")
            wave.barriers[barriers[n]].copies.append((places, data))

    return copy


@opcode("elect")
def _elect(parts: list[str], args: list[str], line: str) -> Run:
    """One thread of each warp."""
    lane, elected = args[0].split("|")

    def elect(wave: Wave, mask: Mask) -> None:
        wave.put(lane, np.uint32(0), mask)
        wave.put(elected, wave.lane == 0, mask)

    return elect


@opcode("cvta")
def _cvta(parts: list[str], args: list[str], line: str) -> Run:
    return lambda wave, mask: wave.put(args[0], wave.get(args[1], np.uint64), mask)
