"""A two-level memory that counts: a slow one that holds everything, a fast one of M elements that holds named blocks.

Programs move blocks with `load` and `store`, each element counted, and compute only on blocks that are in the fast
memory. It refuses to exceed M, to read a block that is not loaded, and to change a block's shape. A freed block is
filled with NaN, so that a program that keeps using it cannot come out right. Temporaries within one arithmetic
statement are not counted, as in the red-blue pebble game, where a computation happens in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Index = Any  # whatever indexes a numpy array


class FastMemoryError(RuntimeError):
    """A program exceeded the capacity or touched what is not loaded."""


class TwoLevelMemory:
    """Fast memory of `capacity` elements over the arrays given by name. Use `memory["s"]` to read a block and
    `memory["s"] = value` to make or overwrite one.

    loads, stores: elements moved so far.
    peak: most elements held at once.
    """

    def __init__(self, capacity: int, **arrays: np.ndarray) -> None:
        self.capacity = capacity
        self.loads = self.stores = self.used = self.peak = 0
        self._slow = dict(arrays)
        self._fast: dict[str, np.ndarray] = {}

    @property
    def io(self) -> int:
        """Elements moved in either direction."""
        return self.loads + self.stores

    def reserve(self, name: str, shape: tuple[int, ...]) -> None:
        """An array in slow memory to be written; NaN until it is."""
        self._slow[name] = np.full(shape, np.nan)

    def load(self, name: str, source: str, index: Index = ...) -> np.ndarray:
        """Brings `source[index]` into the fast block `name`."""
        block = np.array(self._array(source)[index], dtype=float, ndmin=1)
        self.loads += block.size
        return self._place(name, block)

    def store(self, name: str, target: str, index: Index = ...) -> None:
        """Writes the fast block `name` to `target[index]`; the block stays."""
        block = self[name]
        self._array(target)[index] = block
        self.stores += block.size

    def full(self, name: str, shape: tuple[int, ...], value: float = 0.0) -> np.ndarray:
        """A new fast block filled with `value`."""
        return self._place(name, np.full(shape, value))

    def free(self, *names: str) -> None:
        """Drops fast blocks."""
        for name in names:
            block = self[name]
            self.used -= block.size
            block.fill(np.nan)
            del self._fast[name]

    def result(self, name: str) -> np.ndarray:
        """What slow memory holds under that name, for checking; not counted."""
        return self._array(name)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._fast:
            raise FastMemoryError(
                f"block {name!r} was used but is not in fast memory; there are {sorted(self._fast)}; load it first"
            )
        return self._fast[name]

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        if name not in self._fast:
            self._place(name, np.array(value, dtype=float))
            return
        if self._fast[name].shape != value.shape:
            raise FastMemoryError(
                f"block {name!r} of shape {self._fast[name].shape} was given a value of shape {value.shape}; "
                f"free it first"
            )
        self._fast[name][...] = value

    def _place(self, name: str, block: np.ndarray) -> np.ndarray:
        if name in self._fast:
            raise FastMemoryError(f"block {name!r} is already in fast memory; free it before loading another")
        if self.used + block.size > self.capacity:
            raise FastMemoryError(
                f"block {name!r} of {block.size} elements does not fit: {self.used} of M={self.capacity} are in use; "
                f"use a smaller tile or free a block"
            )
        self.used += block.size
        self.peak = max(self.peak, self.used)
        self._fast[name] = block
        return block

    def _array(self, name: str) -> np.ndarray:
        if name not in self._slow:
            raise FastMemoryError(f"slow memory holds no {name!r}; it holds {sorted(self._slow)}")
        return self._slow[name]
