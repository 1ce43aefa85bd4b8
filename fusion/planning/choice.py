"""Choice of how a kernel runs one call: what the planner chooses, an emitter takes or refuses, and reports print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fusion.ir.spec import AttentionSpec

FORM = ("rotated", "spread", "described")
"""Fields of a tile that say what form the loop over it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A kernel's tile, and the form of its loop.

    rows, keys: query rows of a program or work item (B_r), and keys of a tile (B_c).
    warps: warps of a program.
    stages: tiles in flight.
    rotated: a product runs beside exponentials: in the forward that with V of one tile beside the softmax of the next
        (software pipelining), for dK and dV that for dP, which that for dV follows.
    spread: more warps than rows need share the keys of a tile, whose weights then go through shared memory.
    described: tiles are read by tensor descriptors (TMA).
    """

    rows: int
    keys: int
    warps: int = 1
    stages: int = 1
    rotated: bool = False
    spread: bool = False
    described: bool = False

    @property
    def order(self) -> str:
        """The order of the loop's operations."""
        return "spread" if self.spread else "rotated" if self.rotated else "plain"

    def with_form_of(self, other: Tile) -> Tile:
        """This tile, with the form of another's loop."""
        return replace(self, **{name: getattr(other, name) for name in FORM})

    def constants(self) -> dict[str, int]:
        """Constants of a GPU kernel's tile at compile time, by name."""
        return {"ROWS": self.rows, "KEYS": self.keys, "ROTATED": self.rotated}

    def options(self) -> dict[str, int]:
        """Options of Triton's compilation, by name."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def __str__(self) -> str:
        switches = "".join(f", {name}" for name in FORM if getattr(self, name))
        threads = "" if self.warps == self.stages == 1 else f", {self.warps} warps, stages {self.stages}"
        return f"{self.rows} x {self.keys}{threads}{switches}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Schedule, tile and splits of a call.

    schedule: the name of its schedule (`fusion.planning.schedules.SCHEDULES`).
    tile: of the kernel that takes the time.
    keys: all keys of the call.
    splits: parts that the keys are cut into.
    packed: query heads whose rows lie side by side in a block of rows.
    measured: whether the tile was timed, not predicted.
    peer: what is called in place of the kernel, since it was measured to be faster ("sdpa cudnn").
    beside: of a backward, tiles of the kernels of dQ and of dV, by these names, where they are not in the first.
    """

    schedule: str
    tile: Tile
    keys: int
    splits: int = 1
    packed: int = 1
    measured: bool = False
    peer: str = ""
    beside: tuple[tuple[str, Tile], ...] = ()

    @property
    def tiling(self) -> dict[str, int]:
        """By the names of the cost model."""
        cut = {"B_s": -(-self.keys // self.splits)} if self.splits > 1 else {}
        names = {"dQ": ("B_o", "B_p"), "dV": ("B_u", "B_v")}
        for kernel, tile in self.beside:
            cut |= zip(names[kernel], (tile.rows, tile.keys), strict=True)
        return {"B_r": self.tile.rows, "B_c": self.tile.keys, "stages": self.tile.stages, **cut}

    def heading(self, comment: str) -> str:
        """The first line of a kernel's text: what was chosen for it."""
        return f"{comment} {self.schedule}: {self}\n"

    def __str__(self) -> str:
        parts = "" if self.splits == 1 else f"keys in {self.splits} parts, "
        own = f"{parts}tiles of {self.tile}{', measured' if self.measured else ''}"
        own += "".join(f"; {kernel} in tiles of {tile}" for kernel, tile in self.beside)
        return f"{self.peer}, measured to be faster than {own}" if self.peer else own


def query_stationary(spec: AttentionSpec) -> str:
    """The schedule in which blocks of queries stay and keys stream past: all of them, or those that a mask leaves."""
    return "block_sparse" if spec.mask is not None and spec.mask.skips else "flash"


class Planner(Protocol):
    """Makes the choices of one spec on one machine."""

    def choose(self, sizes: Sequence[int], existing: Sequence[Choice] = ()) -> Choice:
        """The choice for a call with these values of `spec.sizes`. existing: choices whose kernels exist, one of which
        is taken where another would save less than compiling it costs."""
        ...
