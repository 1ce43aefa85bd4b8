"""Whether a GPU kernel can be had in a tile: what compiling has shown, and an estimate where nothing was compiled.

`fusion.planning.gpu_facts` has the facts of compiled kernels, written by `benchmarks/tile_facts.py`. They count for the
version of Triton that they were made with. The estimate has a margin: what it takes for feasible is, wherever it is
known (a test compares).
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from typing import TYPE_CHECKING, NamedTuple

from fusion.planning import gpu_facts
from fusion.planning.gpu_clocks import ADDRESSES, FORWARD, KEYS, Work, registers, shared_bytes

if TYPE_CHECKING:
    from fusion.machine import Machine
    from fusion.planning.choice import Tile

SPILLED = 10
"""Instructions that a move of a register to or from memory costs as much as, since it is waited for. An assumption."""

MOST_SPILLED = 0.05
"""Share of a loop's instructions above which such moves make a tile useless. What is spilled around a loop costs
nothing."""

MARGIN = 0.84
"""Share of a thread's registers that an estimate may reach."""

ROTATED_COLUMNS = 128
"""Columns up to which the rotated order is trusted without being compiled: with more, ptxas serialises its products."""

MATRIX_STAGES = 2
"""Stages of a loop that reads a matrix of scores with which ptxas does not yet serialise products (C7515)."""

FLOAT32_SCORES = 1 << 17
"""Of float32 products without matrix units: scores of a tile times columns, above which their factors spill; in the
backward half of them, 32 x 32 at most, with one stage."""


class Fact(NamedTuple):
    """A compiled kernel.

    shared: bytes.
    registers: of a thread.
    instructions: of a trip of its main loop.
    spills: those among them that move registers to and from memory.
    serialised: whether matrix products wait for each other.
    """

    shared: int
    registers: int
    instructions: int
    spills: int
    serialised: bool

    @property
    def slowed(self) -> float:
        """By what factor spills make the kernel slower; infinite where the tile is useless."""
        share = self.spills / max(1, self.instructions)
        return math.inf if self.serialised or share > MOST_SPILLED else 1 + SPILLED * share


def slowed(work: Work, tile: Tile, machine: Machine) -> float:
    """By what factor a kernel is slower in a tile than without spills; infinite where it cannot be had."""
    if (fact := fact_of(work, tile, machine)) is not None:
        return fact.slowed if fact.shared <= machine.shared_memory else math.inf
    return 1.0 if estimated(work, tile, machine) else math.inf


def fact_of(work: Work, tile: Tile, machine: Machine) -> Fact | None:
    """What compiling this kernel in this tile has shown, if it was compiled."""
    if tile.described or tile.persistent or tile.specialized:
        return None
    found = facts_of(work, machine).get((tile.rows, tile.keys, tile.warps, tile.stages, tile.rotated))
    return None if found is None else Fact(*found)


def facts_of(work: Work, machine: Machine) -> gpu_facts.Facts:
    """What compiling this kernel has shown, by tile."""
    if work.size != 2 or not _known_version():
        return {}
    return gpu_facts.FACTS.get((machine.architecture, work.kernel, work.program, work.d, work.d_v), {})


def estimated(work: Work, tile: Tile, machine: Machine) -> bool:
    """Whether a kernel is expected to run in a tile without spilling, with a margin."""
    serialised = tile.rotated and max(work.d, work.d_v) > ROTATED_COLUMNS
    serialised |= "wgmma" in machine.isa and work.score_bytes > 0 and tile.stages > MATRIX_STAGES
    serialised |= (
        "wgmma" in machine.isa and (work.kernel, work.program) == (KEYS, "random") and tile.stages > 1
    )  # C7519
    if serialised or not fits(work, tile, machine):
        return False
    if work.size == 4:
        scores = tile.rows * tile.keys * max(work.d, work.d_v)
        small = max(tile.rows, tile.keys) <= 32 and tile.stages == 1 and scores <= FLOAT32_SCORES // 2
        return tile.warps == 8 and (small or work.kernel == FORWARD and scores <= FLOAT32_SCORES)
    most = min(255 if machine.wave == 32 else 512, machine.registers // (4 * tile.warps * machine.wave))
    return registers(work, tile, machine) + ADDRESSES <= MARGIN * most


def fits(work: Work, tile: Tile, machine: Machine) -> bool:
    """Whether a program's shared memory is expected to exist."""
    return shared_bytes(work, tile) <= machine.shared_memory


@functools.cache
def _known_version() -> bool:
    """Whether Triton is the one that the facts were made with, or none is here."""
    try:
        return importlib.metadata.version("triton") == gpu_facts.TRITON
    except importlib.metadata.PackageNotFoundError:
        return True
