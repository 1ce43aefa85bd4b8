"""Which tiles are chosen for GPU kernels, over variants, widths and targets, as a Markdown table with what compiling
has shown of them; with --before beside earlier choices, with the reasons of differences.

    python -m benchmarks.offline.tile_choices [--json FILE] [--before FILE] [--out FILE.md]

Nothing is compiled, and nothing was timed: the facts are those of `fusion.planning.gpu_facts`, clocks are those of
`fusion.planning.gpu_clocks`. --json writes the choices, which another commit's run takes as --before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.rows import GPU_ROWS
from benchmarks.offline.static_cells import Cell, backward_tiles
from benchmarks.offline.triton_static import FORWARD_ONLY
from fusion.codegen.triton.forward import Forward
from fusion.machine import Machine, of_target
from fusion.planning import gpu_facts
from fusion.planning.choice import Tile
from fusion.planning.gpu_clocks import BACKWARD, Work, kernel_clocks, redundancy, work_of
from fusion.planning.gpu_facts import Fact
from fusion.planning.gpu_feasible import fact_of, slowed
from fusion.planning.gpu_model import USUAL, USUAL_HEADS, best, extent_of, may_rotate

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
WIDTHS = (64, 128, 256)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A kernel of a variant on a machine, and the tile that is chosen for it."""

    cell: Cell
    machine: Machine
    work: Work
    tile: Tile

    @property
    def name(self) -> str:
        return f"{self.machine.architecture} | {self.cell} | {self.work.kernel.removeprefix('attention_')}"

    @property
    def fact(self) -> Fact | None:
        return fact_of(self.work, self.tile, self.machine)

    def clocks(self, tile: Tile) -> float:
        """Predicted of the kernel in a tile, spills included where they are known."""
        extent = extent_of(self.cell.spec, self.work.kernel, USUAL_HEADS, USUAL, USUAL)
        fact = fact_of(self.work, tile, self.machine)
        clocks = kernel_clocks(self.work, tile, self.machine, extent, fact.instructions if fact else 0)
        return clocks * (fact.slowed if fact else 1.0)


def choices() -> Iterator[Chosen]:
    """Of all cells, for long sequences."""
    for target in TARGETS:
        machine = of_target(target)
        for name in (row for row in GPU_ROWS if "decode" not in row):
            for d in (576,) if "latent" in name else WIDTHS:
                yield from choices_of(Cell(name=name, d=d), machine)


def choices_of(cell: Cell, machine: Machine) -> Iterator[Chosen]:
    """Of a cell's kernels."""
    d, d_v = cell.spec.d.integer, cell.spec.d_v.integer
    backward = () if cell.name in FORWARD_ONLY else backward_tiles(cell, machine)
    for kernel in (Forward.name, *(name for name in backward if name in BACKWARD)):
        work = work_of(cell.spec, kernel, d, d_v)
        extent = extent_of(cell.spec, kernel, USUAL_HEADS, USUAL, USUAL)
        tile = best(work, machine, extent, may_rotate(cell.spec, kernel))
        yield Chosen(cell=cell, machine=machine, work=work, tile=tile)


def reason(chosen: Chosen, before: Tile) -> str:
    """Why an earlier tile is not chosen any more."""
    work, machine = chosen.work, chosen.machine
    reasons = []
    if (times := redundancy(work, before, machine)) > redundancy(work, chosen.tile, machine):
        reasons.append(f"computes scores {times:g} times")
    if (fact := fact_of(work, before, machine)) is None:
        reasons.append("not compiled" if slowed(work, before, machine) < 1e9 else "not expected to fit or not to spill")
    elif fact.shared > machine.shared_memory:
        reasons.append("compiled: does not fit")
    elif fact.serialised:
        reasons.append("compiled: products wait for each other")
    elif fact.spills:
        reasons.append(f"compiled: spills {fact.spills} of {fact.instructions} instructions")
    if fact is None or fact.slowed < 1e9:
        reasons.append(f"x {chosen.clocks(before) / chosen.clocks(chosen.tile):.2f} the clocks")
    return "; ".join(reasons)


def line(chosen: Chosen, before: Tile | None) -> str:
    """A row of the table."""
    fact = chosen.fact
    shown = ("estimated", "", "", "")
    if fact is not None:
        shown = (str(fact.registers), str(fact.shared), str(fact.instructions), str(fact.spills))
    changed = [str(before), reason(chosen, before)] if before not in (None, chosen.tile) else ["", ""]
    return f"| {chosen.name} | " + " | ".join([str(chosen.tile), *shown, *changed]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the choices are written")
    parser.add_argument("--before", type=Path, help="earlier choices")
    parser.add_argument("--out", type=Path, help="where the table is written; otherwise it is only printed")
    options = parser.parse_args()
    found = list(choices())
    if options.json:
        options.json.write_text(json.dumps({each.name: dataclasses.asdict(each.tile) for each in found}, indent=1))
    before = {}
    if options.before:
        before = {name: Tile(**tile) for name, tile in json.loads(options.before.read_text()).items()}
    head = ("target", "variant", "kernel", "tile", "registers", "shared B", "instructions", "spills", "before", "why")
    known = sum(each.fact is not None for each in found)
    lines = [
        f"Triton {gpu_facts.TRITON}; {known} of {len(found)} chosen tiles are compiled. Instructions and spills are of",
        "the main loop. bfloat16, 64 heads, 4096 queries and keys. Nothing was timed on a GPU.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *(line(each, before.get(each.name)) for each in found),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
