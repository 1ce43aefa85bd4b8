"""Head dimensions in panels: tiles of Triton are powers of two wide, so that a head of 80, 96, 192 or 576 columns is
read and multiplied as two of them (64 + 16, 64 + 32, 128 + 64, 512 + 64) instead of one that is mostly zeros."""

from __future__ import annotations

from dataclasses import dataclass

NARROWEST = 16  # products take at least so many columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Columns start .. start + width - 1 of a head dimension, of which those below `extent` exist. suffix: of the names
    of what belongs to it, empty for the first."""

    start: int
    width: int
    extent: int
    suffix: str

    def columns(self, name: str) -> str:
        """The statement that makes the panel's column numbers."""
        numbers = f"tl.arange(0, {self.width})"
        numbers = f"({self.start} + {numbers})" if self.start else numbers
        return f"{name}{self.suffix} = {numbers}[None, :]"

    def inside(self, name: str) -> str:
        """The predicate that says which columns exist; empty where all do."""
        return f"{name}{self.suffix} < {self.extent}" if self.start + self.width > self.extent else ""


def padded(extent: int) -> int:
    """The power of two that holds a head dimension."""
    return max(NARROWEST, 1 << (extent - 1).bit_length())


def panels(extent: int) -> tuple[Panel, ...]:
    """One panel, or two where these are narrower together."""
    whole = padded(extent)
    first = whole // 2
    rest = padded(extent - first) if extent > first else whole
    if first < NARROWEST or rest >= first:
        return (Panel(start=0, width=whole, extent=extent, suffix=""),)
    return (
        Panel(start=0, width=first, extent=extent, suffix=""),
        Panel(start=first, width=rest, extent=extent, suffix="_1"),
    )


def panelled(extent: int) -> int:
    """Columns of all panels of a head dimension."""
    return sum(panel.width for panel in panels(extent))
