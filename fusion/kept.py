"""Caches of this process, in bounded memory, for any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Kept(dict):
    """Cache with at most `most` results; a new one replaces the oldest."""

    def __init__(self, most: int = 4096):
        super().__init__()
        self.most = most
        self._lock = threading.RLock()

    def __setitem__(self, key: Hashable, value: Any) -> None:
        with self._lock:
            if len(self) >= self.most and key not in self:
                del self[next(iter(self))]
            super().__setitem__(key, value)

    def keep(self, key: Hashable, value: T) -> T:
        self[key] = value
        return value


class Made(Kept):
    """Objects that are created once, at their first use, whichever threads ask for them."""

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        if (found := self.get(key)) is None:
            with self._lock:
                if (found := self.get(key)) is None:
                    found = self.keep(key, make())
        return found
