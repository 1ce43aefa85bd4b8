"""Facts of compiled GPU kernels, for each version of Triton that they were made with, which
`benchmarks/offline/tile_facts.py` writes. `fusion.planning.gpu_feasible` reads them."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

Cell = tuple[str, str, str, int, int]
"""Architecture, kernel, kind of program, d and d_v as they are computed; products are of 16 bits."""

Place = tuple[int, int, int, int, str]
"""Rows, keys, warps, stages and order of a tile."""

SPILLED = 10
"""Instructions that a move of a register to or from memory costs as much as, since it is waited for. An assumption."""

MOST_SPILLED = 0.05
"""Share of a loop's instructions above which such moves make a tile useless; around a loop they cost nothing."""

FEW_SPILLED = 0.01
"""Share up to which a loop counts as one that does not spill."""

DOUBTED = 1.3
"""By how much less time a tile whose loop spills has to be predicted to take than one whose loop does not, to be
chosen: nothing has been timed, and what spills cost is an assumption."""


class Fact(NamedTuple):
    """A compiled kernel."""

    shared: int  # bytes
    registers: int  # of a thread
    instructions: int  # of a trip of its main loop
    spills: int  # those among them that move registers to and from memory
    serialised: bool  # whether matrix products wait for each other

    @property
    def spilled(self) -> float:
        """Share of the main loop's instructions that move registers to and from memory."""
        return self.spills / max(1, self.instructions)

    @property
    def slowed(self) -> float:
        """By what factor spills make the kernel slower; infinite where the tile is useless."""
        if self.serialised or self.spilled > MOST_SPILLED:
            return math.inf
        return (1 + SPILLED * self.spilled) * (1.0 if self.spilled <= FEW_SPILLED else DOUBTED)


Facts = dict[Place, Fact]

SAME_CODE = {
    **dict.fromkeys(("sm_86", "sm_87", "sm_89", "sm_120", "sm_121"), "sm_80"),
    **dict.fromkeys(("sm_103", "sm_110"), "sm_100"),
}
"""Architectures whose kernels are made of the same instructions as another's: facts of that one count, where they have
none of their own, up to their own shared memory. Tests compile what is chosen so."""

NEWEST = "3.7.1"


def file_of(version: str) -> Path:
    """File of the facts of a version of Triton, if there are any."""
    return Path(__file__).with_name(f"gpu_facts-{version}.json")


def read(version: str) -> dict[Cell, Facts]:
    """The facts of a version of Triton's own kernels."""
    if not (file := file_of(version)).exists():
        return {}
    cells = json.loads(file.read_text())
    return {tuple(cell): {tuple(row[:5]): Fact(*row[5:]) for row in rows} for *cell, rows in cells}


def counting_for(version: str) -> dict[Cell, Facts]:
    """The facts that count for a version of Triton: its own, and the nearest version's of kernels that it has none of.

    Versions compile much alike: of 157 kernels for sm_90, 3.7.1's facts give 133 the tile that 3.9.0's own give, and
    three one that is useless there. By the estimate alone it is 58.
    """
    result: dict[Cell, Facts] = {}
    for other in reversed(nearest(version)):
        result |= read(other)
    return result


def nearest(version: str) -> list[str]:
    """Versions of Triton with facts, the nearest one first."""

    def number(text: str) -> int:
        major, minor, patch = map(int, [*re.findall(r"\d+", text), 0, 0, 0][:3])
        return 10_000 * major + 100 * minor + patch

    every = file_of("*")
    versions = [file.stem.removeprefix("gpu_facts-") for file in every.parent.glob(every.name)]
    return sorted(versions, key=lambda other: (abs(number(other) - number(version)), number(other)))


def source(version: str, architecture: str | None) -> str | None:
    """Version of Triton by whose facts tiles are chosen for an architecture (None: any), where kernels are compiled by
    a version; None where there are no facts."""
    targets = {architecture, SAME_CODE.get(architecture or "")}
    for other in nearest(version):
        if any(architecture is None or cell[0] in targets for cell in read(other)):
            return other
    return None


def to_json(facts: Mapping[Cell, Facts]) -> str:
    """A file's text: a cell's names and widths in a row, then a row a tile, of its sizes and its facts."""
    rows = [[*cell, [[*tile, *fact] for tile, fact in sorted(cells.items())]] for cell, cells in sorted(facts.items())]
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f"[\n{lines}\n]\n"


def _installed() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return NEWEST


TRITON = _installed()
"""The version here, the newest one where there is none."""

FACTS = counting_for(TRITON)
