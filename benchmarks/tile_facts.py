"""Compile kernels in the tiles that the model ranks best until one is good, and write what was
found as data of the planner.

    python benchmarks/tile_facts.py [--targets sm_90] [--rows causal] [--widths 64 128 256] [--most 6]

The data (`fusion/planning/gpu_facts.json`) are facts, not choices: shared memory, registers, spills inside the main
loop, serialised products. `fusion.planning.gpu_model` chooses by them. Cells that are there already are kept, those
compiled now are added. Run it after every update of Triton. Needs no GPU.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator

import triton

from fusion.codegen.triton.backward import Keys, Queries
from fusion.codegen.triton.forward import Forward
from fusion.machine import Machine, of_target
from fusion.planning import gpu_facts
from fusion.planning.choice import Tile
from fusion.planning.gpu_clocks import Work, registers, work_of
from fusion.planning.gpu_feasible import Fact, fact_of, fits
from fusion.planning.gpu_model import all_tiles, extent_of, in_order, may_rotate
from rows import GPU_ROWS
from static_cells import B, Cell, H, N, compiled
from triton_static import FORWARD_ONLY

GOOD = 1.1
"""No further tile is compiled where spills slow a kernel down by less."""

EXPLORED = 1.3
"""Tiles whose estimated registers exceed a thread's by more are not compiled."""


def candidates(work: Work, machine: Machine, cell: Cell) -> Iterator[Tile]:
    """Tiles in the order of the model, until one is known to be good; of each size the stages that the model likes
    best."""
    tried: set[tuple] = set()
    extent = extent_of(cell.spec, work.kernel, B * H, N, N)
    rotates = may_rotate(cell.spec) and work.kernel == Forward.name

    def worth(tile: Tile) -> bool:
        return fits(work, tile, machine) and registers(work, tile, machine) <= EXPLORED * 255

    every = filter(worth, all_tiles(work, machine, extent, rotates))
    for tile in in_order(work, machine, extent, list(every)):
        size = (tile.rows, tile.keys, tile.warps, tile.rotated)
        if size in tried:
            continue
        tried.add(size)
        if fact_of(work, tile, machine) is None:
            yield tile
        if (fact := fact_of(work, tile, machine)) is not None and fact.slowed < GOOD:
            return


def explore(cell: Cell, kernel: str, machine: Machine, most: int) -> None:
    """Add facts of a kernel."""
    d, d_v = int(cell.spec.d.attr), int(cell.spec.d_v.attr)  # type: ignore[arg-type]
    work = work_of(cell.spec, kernel, d, d_v)
    key = (machine.architecture, kernel, work.program, work.d, work.d_v)
    for number, tile in enumerate(candidates(work, machine, cell)):
        if number == most:
            print(f"{cell}: {kernel}: nothing good among {most} tiles", flush=True)
            return
        try:
            facts = compiled(cell, machine, [kernel], {kernel: tile})[kernel]
            loop = facts.main
            fact = Fact(facts.shared, facts.registers, len(loop.body), loop.spills, loop.serialised)
        except triton.runtime.errors.OutOfResources as error:
            fact = Fact(error.required, 0, 0, 0, False)
        gpu_facts.FACTS.setdefault(key, {})[tile.rows, tile.keys, tile.warps, tile.stages, tile.rotated] = fact
        print(machine.architecture, cell, kernel, work.program, tile, fact, f"x {fact.slowed:.2f}", flush=True)


def main() -> None:
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["sm_90"])
    parser.add_argument("--rows", nargs="+", default=[n for n in GPU_ROWS if "decode" not in n], choices=list(GPU_ROWS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--most", type=int, default=6, help="tiles compiled for a kernel")
    options = parser.parse_args()
    if gpu_facts.TRITON != triton.__version__:
        gpu_facts.FACTS.clear()  # facts of another version count for nothing
        gpu_facts.TRITON = triton.__version__
    for target in options.targets:
        for name in options.rows:
            for d in [576] if "latent" in name else options.widths:
                kernels = [Forward.name] if name in FORWARD_ONLY else [Forward.name, Queries.name, Keys.name]
                for kernel in kernels:
                    explore(Cell(name=name, d=d), kernel, of_target(target), options.most)
                gpu_facts.FILE.write_text(gpu_facts.to_json(triton.__version__, gpu_facts.FACTS))


if __name__ == "__main__":
    main()
