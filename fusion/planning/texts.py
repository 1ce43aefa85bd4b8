"""Numbers, tiles and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows of cells as lines, the first `left` columns flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([(str.ljust if k < left else str.rjust)(cell, widths[k]) for k, cell in enumerate(row)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def number_text(value: float) -> str:
    return f"{int(value)}" if float(value).is_integer() else f"{value:.4g}"


def seconds_text(value: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 1e-9:.3g} ns"


def bytes_text(value: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} B"


def tile_text(tile: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{name}={size}" for name, size in tile)
