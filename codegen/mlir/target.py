"""What a kernel is generated for: vector width and the instructions that it may use."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fusion.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The instruction set of a kernel.

    lanes: float32 elements in a vector, a multiple of tile_rows
    avx512: `vreduceps` and `vscalefps` exist, and 512-bit word shuffles
    amx: bf16 tile products (`tdpbf16ps`)
    tile_rows: keys (or value columns) in the register tile of the multiply-add product
    tile_groups: lane vectors (groups of queries) in it
    near_bytes: capacity of the first-level cache, in which a tile of scores lives
    """

    lanes: int
    avx512: bool = False
    amx: bool = False
    tile_rows: int = 4
    tile_groups: int = 2
    near_bytes: int = 32 * 1024

    def __str__(self) -> str:
        return f"{self.lanes} lanes{', AVX-512' if self.avx512 else ''}{', AMX' if self.amx else ''}"


_AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl"}


def target_of(machine: Machine) -> Target:
    """The best target for a machine. AMX counts only where this process may use it (the kernel must grant the tile
    state)."""
    near = machine.levels[0].capacity
    if _AVX512 <= machine.isa:
        amx = {"amx_tile", "amx_bf16"} <= machine.isa and "avx512_bf16" in machine.isa and amx_enabled()
        return Target(lanes=16, avx512=True, amx=amx, tile_rows=8, tile_groups=3, near_bytes=near)
    if "avx2" in machine.isa:
        return Target(lanes=8, tile_rows=4, tile_groups=3, near_bytes=near)
    lanes = max(4, machine.vector_bytes // 4 if machine.vector_bytes <= 64 else 4)
    return Target(lanes=lanes, near_bytes=near)


@functools.cache
def amx_enabled() -> bool:
    """Ask the operating system for the tile registers, once per process; False where it refuses."""
    import torch

    try:
        return bool(torch.cpu._init_amx())
    except (AttributeError, RuntimeError):
        return False
