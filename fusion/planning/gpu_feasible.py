"""Whether a GPU kernel can be had in a tile: what compiling has shown, and an estimate where nothing was compiled.

`fusion.planning.gpu_facts` has the facts of compiled kernels, written by `benchmarks.offline.tile_facts`, of this
version of Triton or the nearest. The estimate has a margin: what it takes for feasible is, wherever it is known (a test
compares).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from fusion import process
from fusion.planning import gpu_facts
from fusion.planning.gpu_clocks import (
    ADDRESSES,
    BACKWARD,
    BY_KEYS,
    FORWARD,
    HELD,
    JOINT,
    KEYS,
    KEYS_ALONE,
    QUERIES,
    Work,
    redundancy,
    registers,
    shared_bytes,
)
from fusion.planning.gpu_facts import Fact

if TYPE_CHECKING:
    from fusion.machine import Machine
    from fusion.planning.choice import Tile

MARGIN = 0.84
"""Share of a thread's registers that an estimate may reach."""

LOADED_MARGIN = {32: 1.0, 64: 0.95}
"""Share of a thread's registers, by lanes of a wave, where tiles that a trip loads are counted (`loaded_registers`).
CDNA has two files of registers and moves between them. Read off compiled kernels of gfx950 and gfx1100."""

TWICE = {QUERIES: (2, 1), KEYS: (2, 2), KEYS_ALONE: (2, 1), JOINT: (2, 2)}
"""Numbers of products of a trip that read the tile of d columns and that of d_v; else one each."""

ROTATED_COLUMNS = 128
"""Columns up to which the rotated order is trusted without being compiled: with more, ptxas serialises its products."""

MATRIX_STAGES = 2
"""Stages up to which loops over a matrix of scores are not serialised (C7515); one less for more columns of V."""
MATRIX_COLUMNS = 128

WIDE = 256
"""Columns of V from which on addresses take twice the registers: columns are read in panels, and no loop is simple."""

FLOAT32_SCORES = 1 << 17
"""Scores of a tile times columns of float32 products without matrix units, above which their factors spill; in the
backward half of them, 32 x 32 at most, with one stage."""


def slowed(work: Work, tile: Tile, machine: Machine) -> float:
    """By what factor a kernel is slower in a tile than without spills; infinite where it cannot be had."""
    if (fact := fact_of(work, tile, machine)) is not None:
        return fact.slowed if fact.shared <= machine.shared_memory else math.inf
    return 1.0 if estimated(work, tile, machine) and not spills_known(work, tile, machine) else math.inf


def fact_of(work: Work, tile: Tile, machine: Machine) -> Fact | None:
    """Fact from compiling this kernel in this tile, if it was compiled."""
    if tile.described:
        return None
    return facts_of(work, machine).get(place_of(tile))


def spills_known(work: Work, tile: Tile, machine: Machine) -> bool:
    """Whether this kernel spills too much in this tile with another number of stages, which moves registers little."""
    *size, _, order = place_of(tile)
    for (*other, _, its), fact in facts_of(work, machine).items():
        if (other, its) == (size, order) and fact.spilled > gpu_facts.MOST_SPILLED:
            return True
    return False


def facts_of(work: Work, machine: Machine) -> gpu_facts.Facts:
    """Facts from compiling this kernel, by tile. Where it was not compiled without a mask, those with one count, which
    needs more."""
    process.warn_of_triton(gpu_facts.TRITON, machine.architecture)
    if work.size != 2:
        return {}
    own = gpu_facts.FACTS.get(cell_of(work, machine))
    if own is None and work.program == "plain":
        return facts_of(replace(work, program="masked"), machine)
    return own or {}


def cell_of(work: Work, machine: Machine) -> gpu_facts.Cell:
    """Key of the facts of a kernel: under its own architecture, if there are any, or under one with the same code."""
    own, *kernel = machine.architecture, work.kernel, work.program, work.d, work.d_v
    shared = gpu_facts.SAME_CODE.get(own, own)
    return (own if (own, *kernel) in gpu_facts.FACTS else shared, *kernel)


def place_of(tile: Tile) -> gpu_facts.Place:
    """Key of the facts of a tile among those of its kernel."""
    return tile.rows, tile.keys, tile.warps, tile.stages, tile.order


def estimated(work: Work, tile: Tile, machine: Machine) -> bool:
    """Whether a kernel is expected to run in a tile without spilling, with a margin."""
    serialised = tile.rotated and max(work.d, work.d_v) > ROTATED_COLUMNS
    stages = MATRIX_STAGES - (work.kernel == FORWARD and work.d_v > MATRIX_COLUMNS)
    serialised |= "wgmma" in machine.isa and work.score_bytes > 0 and tile.stages > stages
    by_keys = work.kernel in BY_KEYS and tile.stages > 1
    serialised |= "wgmma" in machine.isa and by_keys and work.program == "random"  # C7519
    if serialised or not fits(work, tile, machine):
        return False
    if work.size == 4:
        scores = tile.rows * tile.keys * max(work.d, work.d_v)
        small = max(tile.rows, tile.keys) <= 32 and tile.stages == 1 and scores <= FLOAT32_SCORES // 2
        return tile.warps == 8 and (small or work.kernel == FORWARD and scores <= FLOAT32_SCORES)
    addresses = ADDRESSES * (2 if work.d_v > WIDE else 1)
    used, most = registers(work, tile, machine) + addresses, most_registers(tile, machine)
    if machine.architecture.startswith("gfx") and work.kernel in BACKWARD:
        staged = machine.wave == 32 and tile.stages > 1  # takes more than the tiles: 40 registers, of dV at d = 128
        return not staged and used + loaded_registers(work, tile, machine) <= LOADED_MARGIN[machine.wave] * most
    return used <= MARGIN * most


def loaded_registers(work: Work, tile: Tile, machine: Machine) -> float:
    """Registers of a thread for what AMD's products read. All factors come from registers there. The tiles of a trip
    are loaded at once, for each product in its own layout; of the factor that stays nothing is read again; and tiles of
    later stages wait in registers."""
    threads, rows, inner = tile.warps * machine.wave, work.outer(tile), work.inner(tile)
    words = work.size / 4
    of_d, of_v = TWICE.get(work.kernel, (1, 1))
    read = inner * (of_d * work.d + of_v * work.d_v) * words / machine.wave
    stays = (1 - HELD) * rows * work.factors * words * redundancy(work, tile, machine) / threads
    return read + stays + (tile.stages - 1) * inner * work.loaded * words / threads


def most_registers(tile: Tile, machine: Machine) -> int:
    """Largest number of registers of a thread."""
    return min(255 if machine.wave == 32 else 512, machine.registers // (4 * tile.warps * machine.wave))


def fits(work: Work, tile: Tile, machine: Machine) -> bool:
    """Whether a program's shared memory is expected to exist."""
    return shared_bytes(work, tile) <= machine.shared_memory
