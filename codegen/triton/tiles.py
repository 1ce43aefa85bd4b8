"""Tile sizes, warps and stages of a kernel on a GPU, from what ahead-of-time compilation shows to fit without
spilling."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.ir.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """rows: query rows of a program. keys: keys of a tile. warps: warps of a program. stages: tiles of keys in
    flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def _power(extent: int) -> int:
    return 1 << max(0, (max(1, extent) - 1).bit_length())


def tile_for(spec: AttentionSpec, d: int, d_v: int, n_q: int, n_k: int, capability: int) -> Tile:
    """The tile for these sizes. capability: 10 * major + minor of the device; 0 in the interpreter."""
    if capability == 0:
        return Tile(rows=min(32, max(16, _power(n_q))), keys=16, warps=4, stages=1)
    width = max(_power(d), _power(d_v), 16)
    tile = _wide_dtype(width) if spec.dtype == "float32" else _half_dtype(width, capability)
    rows = min(tile.rows, max(16, _power(n_q)))
    keys = min(tile.keys, max(16, _power(n_k)))
    warps = tile.warps if rows >= 128 or width >= 256 else 4
    return Tile(rows=rows, keys=keys, warps=warps, stages=tile.stages)


def _half_dtype(width: int, capability: int) -> Tile:
    big = 90 <= capability < 120  # 227 KiB of shared memory; 163 or 99 KiB elsewhere
    if width <= 64:
        return Tile(rows=128, keys=64, warps=8 if big else 4, stages=3)
    if width <= 128:
        return Tile(rows=128, keys=64, warps=8, stages=3 if big else 2)
    if width <= 256:
        return Tile(rows=128 if big else 64, keys=64 if big else 32, warps=8, stages=2)
    return Tile(rows=64, keys=32 if big else 16, warps=8, stages=2 if big else 1)


def _wide_dtype(width: int) -> Tile:
    if width <= 64:
        return Tile(rows=64, keys=64, warps=4, stages=2)
    if width <= 128:
        return Tile(rows=64, keys=32, warps=4, stages=2)
    return Tile(rows=32, keys=16, warps=4, stages=1 if width > 256 else 2)


def backward_tile_for(spec: AttentionSpec, d: int, d_v: int, capability: int) -> Tile:
    """The tile of the backward kernels, which keep two gradients or one and two score tiles."""
    if capability == 0:
        return Tile(rows=32, keys=32, warps=4, stages=1)
    width = max(_power(d), _power(d_v), 16)
    big = 90 <= capability < 120
    if spec.dtype == "float32":
        return Tile(rows=32, keys=32 if width <= 128 else 16, warps=4 if width <= 128 else 8, stages=1)
    if width <= 128:
        return Tile(rows=64, keys=128 if big else 64, warps=8 if big else 4, stages=2 if big else 1)
    return Tile(rows=32, keys=64 if big else 32, warps=8, stages=2 if big and width <= 256 else 1)
