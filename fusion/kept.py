"""Bounded memory of what was derived for calls."""

from __future__ import annotations

from collections.abc import Hashable
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
