"""The tiles that are chosen for GPU kernels, over variants, widths and targets, as a Markdown table with what compiling
has shown of them.

    python -m benchmarks.offline.tile_choices > after.md        and `diff` with that of another commit

Nothing is compiled, and nothing was timed: the facts are those of `fusion.planning.gpu_facts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.common import results
from benchmarks.common.rows import GPU_ROWS
from benchmarks.offline.static_cells import FORWARD_ONLY, Cell, backward_tiles
from fusion.codegen.triton.forward import Forward
from fusion.machine import Machine, of_target
from fusion.planning import gpu_facts
from fusion.planning.choice import Tile
from fusion.planning.gpu_clocks import BACKWARD, Work, work_of
from fusion.planning.gpu_facts import Fact
from fusion.planning.gpu_feasible import fact_of
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
        return f"{self.machine.architecture}, {self.cell}, {self.work.kernel.removeprefix('attention_')}"

    @property
    def fact(self) -> Fact | None:
        return fact_of(self.work, self.tile, self.machine)


def choices() -> Iterator[Chosen]:
    """Choices for all cells, with long sequences."""
    for target in TARGETS:
        machine = of_target(target)
        for name in (row for row in GPU_ROWS if "decode" not in row):
            for d in (576,) if "latent" in name else WIDTHS:
                yield from choices_of(Cell(name=name, d=d), machine)


def choices_of(cell: Cell, machine: Machine) -> Iterator[Chosen]:
    """Choices for the kernels of a cell."""
    d, d_v = cell.spec.d.integer, cell.spec.d_v.integer
    backward = () if cell.name in FORWARD_ONLY else backward_tiles(cell, machine)
    for kernel in (Forward.name, *(name for name in backward if name in BACKWARD)):
        work = work_of(cell.spec, kernel, d, d_v)
        extent = extent_of(cell.spec, kernel, USUAL_HEADS, USUAL, USUAL)
        tile = best(work, machine, extent, may_rotate(cell.spec, kernel))
        yield Chosen(cell=cell, machine=machine, work=work, tile=tile)


def main() -> None:
    results.parser(__doc__).parse_args()
    header, lines = ["target, variant, kernel", "tile", "registers", "shared B", "instructions", "spills"], []
    for choice in choices():
        fact, shown = choice.fact, ("estimated", "", "", "")
        if fact is not None:
            shown = map(str, (fact.registers, fact.shared, fact.instructions, fact.spills))
        lines.append([choice.name, str(choice.tile), *shown])
    print(f"Triton {gpu_facts.TRITON}. Instructions and spills are of the main loop. bfloat16, 64 heads, 4096 queries")
    print(f"and keys. Nothing was timed on a GPU.\n\n{results.table(header, lines)}")


if __name__ == "__main__":
    main()
