"""Global memory of an emulated GPU: the storages of CPU tensors, by address."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

UNWRITTEN, ALIGNMENT = 0xCD, 16


class Fault(Exception):
    """An access or a state that a device would trap on, or whose result it does not define."""


NEVER = -1
CODES, SEVERAL = 64, 63
"""Codes of the warp that used a byte between two barriers: CODES * barriers before + its number, or SEVERAL."""


class Shared:
    """Shared memory of blocks. Between two barriers no warp may read what another one writes, nor two write different
    bytes to a place: which of them comes first, nothing says. Accesses name the warps, counted over all blocks."""

    def __init__(self, size: int, blocks: int = 1, warps: int = 2):
        self.size, self.warps = size, warps
        self.room = -(-size // ALIGNMENT) * ALIGNMENT
        self.data = np.full(blocks * self.room, UNWRITTEN, np.uint8)
        self.barriers = np.zeros(blocks, np.int32)
        self._written, self._read = np.full((2, blocks * self.room), NEVER, np.int32)

    def _rows(self, places: np.ndarray, size: int, warps: np.ndarray, line: str) -> np.ndarray:
        """Numbers of these places in the memory of all blocks, counted in accesses."""
        if (places % size).any():
            raise Fault(f"an access of {size} bytes of shared memory that is not aligned: {line}")
        if len(places) and (places.min() < 0 or places.max() + size > self.size):
            raise Fault(f"outside of shared memory ({places.max()} + {size} of {self.size} bytes): {line}")
        return (places + warps // self.warps * self.room) // size

    def _codes(self, warps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the least code since the last barrier, the warp's) for each of the warps."""
        first = self.barriers[warps // self.warps] * np.int32(CODES)
        return first[:, None], (first + warps % self.warps).astype(np.int32)[:, None]

    def load(self, places: np.ndarray, size: int, warps: np.ndarray, line: str, several: bool = False) -> np.ndarray:
        """Bytes [n, size]. several: further warps read them, too."""
        at, (first, mine) = self._rows(places, size, warps, line), self._codes(warps)
        mine = first + np.int32(SEVERAL) if several else mine
        written, reads = self._written.reshape(-1, size)[at], self._read.reshape(-1, size)
        if ((written >= first) & (written != mine)).any():
            raise Fault(f"a race: no barrier after what another warp wrote: {line}")
        before = reads[at]
        now = np.where((before >= first) & (before != mine), first + np.int32(SEVERAL), mine)
        reads[at] = now
        if (others := (reads[at] != now).any(1)).any():  # they read by this very instruction
            reads[at[others]] = (first + np.int32(SEVERAL))[others]
        return self.data.reshape(-1, size)[at]

    def store(self, places: np.ndarray, values: np.ndarray, warps: np.ndarray, line: str) -> None:
        """Write bytes [n, size]. Bytes that stay as they are race with nobody."""
        size = values.shape[1]
        at, (first, mine) = self._rows(places, size, warps, line), self._codes(warps)
        data, written = self.data.reshape(-1, size), self._written.reshape(-1, size)
        changed = data[at] != values
        for codes, how in ((written, "wrote"), (self._read.reshape(-1, size), "reads")):
            if (changed & ((now := codes[at]) >= first) & (now != mine)).any():
                raise Fault(f"a race: no barrier before a write to what another warp {how}: {line}")
        data[at], written[at] = values, mine
        if (changed & (written[at] != mine) & (data[at] != values)).any():
            raise Fault(f"a race: two warps write to a place: {line}")

    def land(self, places: np.ndarray, data: np.ndarray, block: int) -> None:
        """Bytes of a copy that threads have waited for, by a barrier in memory: they race with nobody."""
        self.data[block * self.room + places] = data
        self._written[block * self.room + places] = NEVER


NOBODY, ADDED, BLOCK = 0, -1, 32
"""Codes of the writer of a byte of global memory in a launch: `writers`, ADDED by atomic additions, or NOBODY."""


def writers(blocks: np.ndarray, barriers: np.ndarray, warps: np.ndarray) -> np.ndarray:
    """Codes of warps of these blocks (numbers in the grid), after so many barriers."""
    return (blocks + 1 << BLOCK) + barriers.astype(np.int64) * CODES + warps


@dataclass(slots=True)
class Storage:
    """Bytes at an address."""

    start: int
    data: np.ndarray
    written: np.ndarray | None = None

    def has(self, addresses: Any, size: int) -> Any:
        return (self.start <= addresses) & (addresses + size <= self.start + len(self.data))

    def rows(self, array: np.ndarray, size: int) -> np.ndarray:
        """An array of something for each byte, as rows for aligned accesses of `size` bytes."""
        first = -self.start % size
        return array[first : first + (len(array) - first) // size * size].reshape(-1, size)

    def check(self, at: np.ndarray, codes: np.ndarray, line: str, where: Any = True) -> None:
        """Raise where others than these writers wrote to these rows, unless in their own block before a barrier."""
        if self.written is None:
            return
        codes = codes[:, None]
        written = self.rows(self.written, where.shape[1])[at]
        earlier = (written >> BLOCK == codes >> BLOCK) & (written // CODES < codes // CODES)
        if (where & (written != NOBODY) & (written != codes) & ~earlier).any():
            raise Fault(f"a race in global memory with what another warp or block wrote: {line}")

    def write(self, at: np.ndarray, values: np.ndarray, codes: Any) -> None:
        if self.written is None:
            self.written = np.zeros(len(self.data), np.int64)
        size = values.shape[1]
        self.rows(self.data, size)[at] = values
        self.rows(self.written, size)[at] = codes


class Memory:
    """The storages of a launch's tensors. An access outside of them, or one that is not aligned, is a fault; so is one
    of what another block wrote in the same launch, or another warp with no barrier between. codes: `writers` of the
    threads that access it."""

    def __init__(self, tensors: Iterable[torch.Tensor], constants: Iterable[np.ndarray] = ()):
        self.storages = [Storage(a.ctypes.data, a) for a in constants]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if size and not any(other.has(start, size) for other in self.storages):
                self._add(start, size)

    @classmethod
    def of_blocks(cls, blocks: Iterable[tuple[int, int]], constants: Iterable[np.ndarray]) -> Memory:
        """Memory of these (first address, bytes)."""
        memory = cls([], constants)
        for start, size in blocks:
            memory._add(start, size)
        return memory

    def _add(self, start: int, size: int) -> None:
        data = np.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=np.uint8)
        self.storages.append(Storage(start, data))

    def _storage_at(self, address: int, size: int, line: str) -> Storage:
        for storage in self.storages:
            if storage.has(address, size):
                return storage
        distance = lambda s: min(abs(address - s.start), abs(address - s.start - len(s.data)))
        nearest = min(self.storages, key=distance, default=None)
        where = "" if nearest is None else f", {address - nearest.start} from the first of {len(nearest.data)} bytes"
        raise Fault(f"an access of {size} bytes outside of all tensors{where}: {line}")

    def _by_storage(
        self, addresses: np.ndarray, size: int, line: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray, Storage]]:
        """(positions among the addresses, the rows that these are, the storage) for each storage."""
        if (addresses % size).any():
            raise Fault(f"an access of {size} bytes that is not aligned: {line}")
        left = np.arange(len(addresses))
        while len(left):
            storage = self._storage_at(int(addresses[left[0]]), size, line)
            inside = storage.has(addresses[left], size)
            here = left[inside]
            yield here, (addresses[here] - storage.start) // size, storage
            left = left[~inside]

    def load(self, addresses: np.ndarray, size: int, line: str, codes: np.ndarray) -> np.ndarray:
        """Bytes [n, size] at n addresses."""
        out = np.zeros((len(addresses), size), np.uint8)
        for here, at, storage in self._by_storage(addresses, size, line):
            storage.check(at, codes[here], line, np.ones((1, size), bool))
            out[here] = storage.rows(storage.data, size)[at]
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, line: str, codes: np.ndarray) -> None:
        """Write bytes [n, size] to n addresses. Bytes that stay as they are race with nobody."""
        size = values.shape[1]
        for here, at, storage in self._by_storage(addresses, size, line):
            changed = storage.rows(storage.data, size)[at] != values[here]
            storage.check(at, codes[here], line, changed)
            storage.write(at, values[here], codes[here, None])
            storage.check(at, codes[here], line, changed & (storage.rows(storage.data, size)[at] != values[here]))

    def add(self, addresses: np.ndarray, values: np.ndarray, line: str) -> np.ndarray:
        """Add float32 [n, k] one by one; returns what was there before."""
        size = values.shape[1] * 4
        added = np.full(len(addresses), ADDED)
        before = self.load(addresses, size, line, added).view(np.float32)
        for here, at, storage in self._by_storage(addresses, size, line):
            rows, which = np.unique(at, return_inverse=True)
            sums = storage.rows(storage.data, size)[rows].view(np.float32)
            np.add.at(sums, which, values[here])
            storage.write(rows, sums.view(np.uint8), ADDED)
        return before
