"""Head dimensions in panels: tiles of Triton are powers of two wide, so that a head of 80, 96, 192 or 576 columns is
read and multiplied as two of them (64 + 16, 64 + 32, 128 + 64, 512 + 64) instead of one that is mostly zeros."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.planning.gpu_layout import panel_widths


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Columns start .. start + width - 1 of a head dimension, of which those below `extent` exist. suffix: of its
    names, empty for the first panel. column: the name of its column numbers."""

    start: int
    width: int
    extent: int
    suffix: str
    column: str

    @property
    def numbers(self) -> str:
        """Statement of the panel's column numbers."""
        numbers = f"tl.arange(0, {self.width})"
        numbers = f"({self.start} + {numbers})" if self.start else numbers
        return f"{self.column} = {numbers}[None, :]"

    @property
    def inside(self) -> str:
        """The predicate that says which columns exist; empty where all do."""
        return f"{self.column} < {self.extent}" if self.start + self.width > self.extent else ""


def panels(extent: int, column: str) -> tuple[Panel, ...]:
    """Panels of a head dimension. column: the name of the coordinate along them."""
    found, start = [], 0
    for width, suffix in zip(panel_widths(extent), ("", "_1"), strict=False):
        found.append(Panel(start=start, width=width, extent=extent, suffix=suffix, column=f"{column}{suffix}"))
        start += width
    return tuple(found)
