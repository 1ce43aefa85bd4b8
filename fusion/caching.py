"""Caches of this process, in bounded memory, for any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class BoundedCache(dict):
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

    def store(self, key: Hashable, value: T) -> T:
        self[key] = value
        return value


class OncePerKey(BoundedCache):
    """Objects that are created once, at their first use, whichever threads ask for them."""

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        if (result := self.get(key)) is None:
            with self._lock:
                if (result := self.get(key)) is None:
                    result = self.store(key, make())
        return result
