"""The tiles of GPU kernels as a table by head dimension, dtype and machine.

They are those that fit without spilling, as far as ahead-of-time compilation shows.

`benchmarks/triton_versions.py` prints the facts behind these choices: shared memory, registers and spills of each
kernel and target.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fusion.ir.expr import Expr, coordinates, loads, walk
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.machine import KIB, Machine
from fusion.planning.choice import Tile
from fusion.planning.head_dims import padded, panelled, power

if TYPE_CHECKING:
    from fusion.planning.gpu import Extents

LARGE = 227 * KIB
"""Shared memory of Hopper and of Blackwell's data centre parts, bytes per program."""


class TileTable:
    """The policy that looks tiles up. A tile of the forward is the same for all n_q, and n_k, up to the same power of
    two."""

    def forward(self, spec: AttentionSpec, machine: Machine, extents: Extents) -> Tile:
        """The tile of the forward's kernel."""
        return tile_for(spec, machine, extents.d, extents.d_v, extents.n_q, extents.n_k)

    def backward(self, spec: AttentionSpec, machine: Machine, d: int, d_v: int) -> dict[str, Tile]:
        """The tile of each backward kernel by its name."""
        return backward_tiles(spec, machine, d, d_v)


def reads_tiles(*programs: Expr) -> bool:
    """Whether a tensor is read that has an element for every score (a bias matrix)."""
    return any({"i", "j"} <= coordinates(load) for program in programs for load in loads(program))


def tile_for(spec: AttentionSpec, machine: Machine, d: int, d_v: int, n_q: int, n_k: int) -> Tile:
    """The forward's tile."""
    if machine.interpreted:
        return Tile(rows=min(32, max(16, power(n_q))), keys=16, warps=4, stages=1)
    width, matrices = max(panelled(d), panelled(d_v)), reads_tiles(spec.score, spec.weight)
    if spec.dtype == "float32":
        tile = _float32(width, machine)
    elif machine.amd:
        tile = _amd(width)
    else:
        tile = _hopper(width, matrices or spec.mask is not None) if machine.shared_memory >= LARGE else _ampere(width)
    # With more than two tiles of a bias in flight ptxas has wgmma instructions wait for each other (C7515).
    simple = spec.dtype == "float32"  # whose products may be without matrix units
    if (tile.stages > 2 or tile.stages > 1 and 64 < width <= 128) and matrices and not simple:
        tile = replace(tile, stages=tile.stages - 1)
    rows = min(tile.rows, max(16, power(n_q)))
    keys = min(tile.keys, max(16, power(n_k)))
    warps = tile.warps if rows >= 64 or width > 256 or simple else 4
    # Up to 64 columns two programs share a multiprocessor, and one's products hide the other's exponentials.
    rotated = may_rotate(spec) and not (matrices or simple) and "wgmma" in machine.isa
    return Tile(
        rows=rows, keys=keys, warps=warps, stages=tile.stages, rotated=rotated and rows >= 64 and 64 < width <= 128
    )


def may_rotate(spec: AttentionSpec) -> bool:
    """Whether there is a rotated order: there are exponentials, and a tile's neighbour is known (not from a list)."""
    return spec.normalizer is not Normalizer.NONE and (spec.mask is None or spec.mask.tile_live is None)


def _hopper(width: int, more: bool) -> Tile:
    """227 KiB of shared memory. more: there are masks or biases, which take registers."""
    if width <= 128:
        return Tile(rows=128, keys=64, warps=8, stages=3)
    if width <= 256:
        return Tile(rows=128, keys=32 if more and width > 192 else 64, warps=8, stages=2)
    return Tile(rows=64, keys=32, warps=8, stages=2)


def _ampere(width: int) -> Tile:
    """99 to 163 KiB of shared memory."""
    if width <= 64:
        return Tile(rows=128, keys=64, warps=8, stages=2)
    if width <= 128:
        return Tile(rows=128, keys=32, warps=8, stages=2)
    return Tile(rows=64, keys=32 if width <= 256 else 16, warps=8, stages=1)


def _amd(width: int) -> Tile:
    """64 KiB of shared memory."""
    if width <= 128:
        return Tile(rows=128, keys=64 if width <= 64 else 32, warps=8, stages=1)
    return Tile(rows=64, keys=16, warps=8, stages=1)


def _float32(width: int, machine: Machine) -> Tile:
    """Products without matrix units take their operands from registers: small tiles, many threads, and two stages,
    which keep the next tile in shared memory."""
    if width <= 64:
        return Tile(rows=64, keys=32, warps=8, stages=2)
    if width <= 256:
        return Tile(rows=64 if width <= 128 else 32, keys=16, warps=8, stages=1 if machine.amd else 2)
    return Tile(rows=16, keys=16, warps=8, stages=1)


def queries_tile(spec: AttentionSpec, machine: Machine, d: int, d_v: int) -> Tile:
    """The tile of the kernel of dQ."""
    width = max(padded(d), padded(d_v))
    if machine.interpreted:
        return Tile(rows=32, keys=32, warps=4, stages=1)
    if spec.dtype == "float32":
        return Tile(rows=32, keys=32 if width <= 64 else 16, warps=8, stages=1)
    if machine.shared_memory >= LARGE and width <= 128:
        if reads_tiles(spec.score, spec.weight):  # an element for each score, in flight and in registers
            return Tile(rows=64 if width <= 64 else 128, keys=64 if width <= 64 else 32, warps=8, stages=2)
        return Tile(rows=128, keys=64, warps=8, stages=2)
    if machine.shared_memory >= LARGE:
        return Tile(rows=64 if width <= 256 else 32, keys=32, warps=8, stages=2)  # wgmma takes 64 rows
    return Tile(rows=64 if width <= 128 else 32, keys=32, warps=8, stages=1)


def keys_tile(spec: AttentionSpec, machine: Machine, d: int, d_v: int) -> Tile:
    """The tile of the kernel of dK and dV, which keeps two gradients and two tiles of scores."""
    width = max(padded(d), padded(d_v))
    if machine.interpreted:
        return Tile(rows=32, keys=32, warps=4, stages=1)
    if spec.dtype == "float32":
        return Tile(rows=32, keys=32 if width <= 64 else 16, warps=8, stages=1)
    if machine.shared_memory >= LARGE:
        listed, read = spec.mask is not None and spec.mask.tile_live is not None, reads_tiles(spec.score, spec.weight)
        if 64 < width <= 128 and (listed or read):
            return Tile(rows=32, keys=128, warps=8, stages=2)  # lists and biases take registers that 64 x 64 needs
        if width <= 128 and any(part.op == "hash" for part in walk(spec.weight)):
            # Beside dropout's random numbers ptxas serialises the products of two stages (C7519).
            return Tile(rows=64 if width <= 64 else 32, keys=128, warps=8, stages=1)
        keys = 128 if width <= 64 and not read else 64
        return Tile(rows=64 if width <= 128 else 32, keys=keys, warps=8, stages=2)
    return Tile(rows=32, keys=64 if width <= 128 else 32, warps=8, stages=1)


def backward_tiles(spec: AttentionSpec, machine: Machine, d: int, d_v: int) -> dict[str, Tile]:
    """The tile of each backward kernel by its name."""
    keys = keys_tile(spec, machine, d, d_v)
    return {
        "attention_backward_prepare": Tile(rows=keys.rows, keys=16, warps=4, stages=1),
        "attention_backward_queries": queries_tile(spec, machine, d, d_v),
        "attention_backward_keys": keys,
    }
