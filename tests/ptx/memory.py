"""Global memory of an emulated GPU: the storages of CPU tensors, by address."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import numpy as np
import torch

UNWRITTEN = 0xCD
Storage = tuple[int, int, np.ndarray]  # first address, end, bytes


class Fault(Exception):
    """An access or a state that a device would trap on, or whose result it does not define."""


NEVER, NOBODY, SEVERAL = -1, -1, -2


class Shared:
    """Shared memory of a block. Between two barriers no warp may read what another one writes, nor two write different
    bytes to a place: which of them comes first, nothing says."""

    def __init__(self, size: int):
        self.data = np.full(size, UNWRITTEN, np.uint8)
        self.barriers = 0
        self._writer, self._reader = np.full((2, size), NOBODY, np.int16)
        self._written, self._read = np.full((2, size), NEVER, np.int32)  # after how many barriers

    def _bytes(self, places: np.ndarray, size: int, line: str) -> np.ndarray:
        if (places % size).any():
            raise Fault(f"an access of {size} bytes of shared memory that is not aligned: {line}")
        if len(places) and (places.min() < 0 or places.max() + size > len(self.data)):
            raise Fault(f"outside of shared memory ({places.max()} + {size} of {len(self.data)} bytes): {line}")
        return places[:, None] + np.arange(size)

    def load(self, places: np.ndarray, size: int, warps: np.ndarray, line: str) -> np.ndarray:
        """Bytes [n, size]. warps: that read them, or SEVERAL."""
        at, warps = self._bytes(places, size, line), warps.astype(np.int16)[:, None]
        if ((self._written[at] == self.barriers) & (self._writer[at] != warps)).any():
            raise Fault(f"a race: no barrier after what another warp wrote: {line}")
        again = (self._read[at] == self.barriers) & (self._reader[at] != warps)
        self._reader[at] = np.where(again, SEVERAL, warps)
        self._reader[at] = np.where(self._reader[at] == warps, warps, SEVERAL)  # several by this very instruction
        self._read[at] = self.barriers
        return self.data[at]

    def store(self, places: np.ndarray, values: np.ndarray, warps: np.ndarray, line: str) -> None:
        """Write bytes [n, size]. Bytes that stay as they are race with nobody."""
        at, warps = self._bytes(places, values.shape[1], line), warps.astype(np.int16)[:, None]
        changed = self.data[at] != values
        for when, who, how in ((self._written, self._writer, "wrote"), (self._read, self._reader, "reads")):
            if (changed & (when[at] == self.barriers) & (who[at] != warps)).any():
                raise Fault(f"a race: no barrier before a write to what another warp {how}: {line}")
        self.data[at] = values
        self._writer[at], self._written[at] = warps, self.barriers
        if (changed & (self._writer[at] != warps) & (self.data[at] != values)).any():
            raise Fault(f"a race: two warps write to a place: {line}")

    def land(self, places: np.ndarray, data: np.ndarray) -> None:
        """Bytes of a copy that threads have waited for, by a barrier in memory: they race with nobody."""
        self.data[places] = data
        self._written[places] = NEVER


class Memory:
    """The storages of a launch's tensors. An access outside of them, or one that is not aligned, is a fault."""

    def __init__(self, tensors: list[torch.Tensor], constants: Iterable[np.ndarray] = ()):
        self.storages: list[Storage] = [(a.ctypes.data, a.ctypes.data + a.nbytes, a) for a in constants]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if size and not any(first <= start and start + size <= end for first, end, _ in self.storages):
                data = np.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=np.uint8)
                self.storages.append((start, start + size, data))

    @classmethod
    def of_blocks(cls, blocks: Iterable[tuple[int, int]], constants: Iterable[np.ndarray]) -> Memory:
        """Memory of these (first address, bytes)."""
        memory = cls([], constants)
        for start, size in blocks:
            data = np.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=np.uint8)
            memory.storages.append((start, start + size, data))
        return memory

    def _storage_at(self, address: int, size: int, line: str) -> Storage:
        for start, end, data in self.storages:
            if start <= address and address + size <= end:
                return start, end, data
        nearest = min(self.storages, key=lambda s: min(abs(address - s[0]), abs(address - s[1])), default=None)
        where = "" if nearest is None else f", {address - nearest[0]} from the first of {nearest[1] - nearest[0]} bytes"
        raise Fault(f"an access of {size} bytes outside of all tensors{where}: {line}")

    def _by_storage(
        self, addresses: np.ndarray, size: int, line: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(positions among the addresses, their offsets, the storage's bytes) for each storage."""
        if (addresses % size).any():
            raise Fault(f"an access of {size} bytes that is not aligned: {line}")
        left = np.arange(len(addresses))
        while len(left):
            start, end, data = self._storage_at(int(addresses[left[0]]), size, line)
            inside = (addresses[left] >= start) & (addresses[left] + size <= end)
            yield left[inside], (addresses[left[inside]] - start).astype(np.int64), data
            left = left[~inside]

    def load(self, addresses: np.ndarray, size: int, line: str) -> np.ndarray:
        """Bytes [n, size] at n addresses."""
        out = np.zeros((len(addresses), size), np.uint8)
        for which, offsets, data in self._by_storage(addresses, size, line):
            out[which] = data[offsets[:, None] + np.arange(size)]
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, line: str) -> None:
        """Write bytes [n, size] to n addresses."""
        size = values.shape[1]
        for which, offsets, data in self._by_storage(addresses, size, line):
            data[offsets[:, None] + np.arange(size)] = values[which]

    def add(self, addresses: np.ndarray, values: np.ndarray, line: str) -> np.ndarray:
        """Add float32 [n, k] one by one; returns what was there before."""
        size = values.shape[1] * 4
        before = self.load(addresses, size, line).view(np.float32).copy()
        for which, offsets, data in self._by_storage(addresses, size, line):
            for k in range(values.shape[1]):
                places = offsets + 4 * k
                cells = np.unique(places)
                sums = data[cells[:, None] + np.arange(4)].view(np.float32)[:, 0].copy()
                np.add.at(sums, np.searchsorted(cells, places), values[which, k])
                data[cells[:, None] + np.arange(4)] = sums[:, None].view(np.uint8).reshape(-1, 4)
        return before
