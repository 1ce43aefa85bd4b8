"""Levels of memory, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """One level of memory. `capacity` in bytes, per core (SM, CU) unless `shared`; `bandwidth` in bytes/s, all cores
    together."""

    name: str
    capacity: int
    bandwidth: float
    shared: bool = False

    def __str__(self) -> str:
        return (
            f"{self.name} {_size(self.capacity)}{'' if self.shared else ' per core'} at {self.bandwidth / 1e9:.0f} GB/s"
        )


def _size(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"
