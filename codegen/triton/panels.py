"""Head dimensions in panels: tiles of Triton are powers of two wide, so that a head of 80, 96, 192 or 576 columns is
read and multiplied as two of them (64 + 16, 64 + 32, 128 + 64, 512 + 64) instead of one that is mostly zeros."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.planning.head_dims import panel_widths


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


def panels(extent: int) -> tuple[Panel, ...]:
    first, *rest = panel_widths(extent)
    return (
        Panel(start=0, width=first, extent=extent, suffix=""),
        *(Panel(start=first, width=width, extent=extent, suffix="_1") for width in rest),
    )
