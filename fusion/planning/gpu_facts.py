"""Facts of compiled GPU kernels, read from `gpu_facts.json`, which `benchmarks/tile_facts.py` writes.

FACTS: (architecture, kernel, kind of program, d, d_v) -> (rows, keys, warps, stages, order) -> (bytes of shared
memory, registers of a thread, instructions of the main loop, those of them that spill, serialised products); 16-bit
products, d and d_v as they are computed. `fusion.planning.gpu_feasible` reads them. TRITON: its version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

Cell = tuple[str, str, str, int, int]
Place = tuple[int, int, int, int, str]
Facts = dict[Place, tuple[int, int, int, int, bool]]

FILE = Path(__file__).with_suffix(".json")


def to_json(triton: str, facts: Mapping[Cell, Facts]) -> str:
    """The file's text: a cell's names and widths in a row, then a row a tile, of its sizes and its facts."""
    rows = [[*cell, [[*tile, *fact] for tile, fact in sorted(found.items())]] for cell, found in sorted(facts.items())]
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"triton": "{triton}", "facts": [\n{lines}\n]}}\n'


def from_json(text: str) -> tuple[str, dict[Cell, Facts]]:
    """(version of Triton, facts) of a text that `to_json` wrote."""
    held = json.loads(text)
    facts = {tuple(cell): {tuple(row[:5]): tuple(row[5:]) for row in rows} for *cell, rows in held["facts"]}
    return held["triton"], facts


TRITON, FACTS = from_json(FILE.read_text())
