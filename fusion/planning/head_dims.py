"""Columns that GPU kernels compute for a head dimension: tiles are powers of two wide, so that a head of 80, 96, 192 or
576 columns is two of them (64 + 16, 64 + 32, 128 + 64, 512 + 64) instead of one that is mostly zeros."""

from __future__ import annotations

NARROWEST = 16  # products take at least so many columns


def power(extent: int) -> int:
    """The power of two that holds an extent."""
    return 1 << max(0, (max(1, extent) - 1).bit_length())


def padded(extent: int) -> int:
    """The power of two that holds a head dimension."""
    return max(NARROWEST, power(extent))


def panel_widths(extent: int) -> tuple[int, ...]:
    """Widths of the tiles that cover a head dimension: one, or two where these are narrower together."""
    whole = padded(extent)
    first = whole // 2
    rest = padded(extent - first) if extent > first else whole
    return (whole,) if first < NARROWEST or rest >= first else (first, rest)


def panelled(extent: int) -> int:
    """Columns of all tiles of a head dimension."""
    return sum(panel_widths(extent))
