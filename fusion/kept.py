"""What was derived for calls, in bounded memory, and what is made once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Kept(dict):
    """What was derived, by whatever it follows from; it begins anew where there are `most`."""

    def __init__(self, most: int = 4096):
        super().__init__()
        self.most = most

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)

    def keep(self, key: Hashable, value: T) -> T:
        self[key] = value
        return value


class Made(dict):
    """What is made at its first use: once, whichever threads ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        if (found := self.get(key)) is None:
            with self._lock:
                if (found := self.get(key)) is None:
                    found = self[key] = make()
        return found
