"""Facts of compiled GPU kernels, for each version of Triton that they were made with, which
`benchmarks/tile_facts.py` writes. `fusion.planning.gpu_feasible` reads them."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

Cell = tuple[str, str, str, int, int]
"""Architecture, kernel, kind of program, d and d_v as they are computed; products are of 16 bits."""

Place = tuple[int, int, int, int, str]
"""Rows, keys, warps, stages and order of a tile."""

Facts = dict[Place, tuple[int, int, int, int, bool]]
"""Bytes of shared memory, registers of a thread, instructions of the loop, spills, whether products are serialised."""

SAME_CODE = {
    **dict.fromkeys(("sm_86", "sm_87", "sm_89", "sm_120", "sm_121"), "sm_80"),
    **dict.fromkeys(("sm_103", "sm_110"), "sm_100"),
}
"""Architectures whose kernels are made of the same instructions as another's: facts of that one count, where they have
none of their own, up to their own shared memory. Tests compile what is chosen so."""

NEWEST = "3.7.1"


def file_of(version: str) -> Path:
    """Where the facts of a version of Triton are, if there are any."""
    return Path(__file__).with_name(f"gpu_facts-{version}.json")


def read(version: str) -> dict[Cell, Facts]:
    """The facts of a version of Triton."""
    if not (file := file_of(version)).exists():
        return {}
    held = json.loads(file.read_text())
    return {tuple(cell): {tuple(row[:5]): tuple(row[5:]) for row in rows} for *cell, rows in held}


def to_json(facts: Mapping[Cell, Facts]) -> str:
    """A file's text: a cell's names and widths in a row, then a row a tile, of its sizes and its facts."""
    rows = [[*cell, [[*tile, *fact] for tile, fact in sorted(found.items())]] for cell, found in sorted(facts.items())]
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f"[\n{lines}\n]\n"


def _installed() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return NEWEST


TRITON = _installed()
"""The version here, the newest one where there is none."""

FACTS = read(TRITON)
