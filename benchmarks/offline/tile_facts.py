"""Compile kernels in the tiles that the model ranks best until the one that it chooses is known, and write what was
found as data of the planner.

    python -m benchmarks.offline.tile_facts [--targets sm_80 gfx942] [--rows causal] [--widths 64 128 256]
        [--kernels attention_forward] [--most 8] [--renew]

The data (`fusion/planning/gpu_facts-<version of Triton>.json`) are facts, not choices: shared memory, registers, spills
inside the main loop, serialised products. `fusion.planning.gpu_model` chooses by them. Facts that are there already are
kept, those compiled now are added; --renew begins the cells named again, which is needed where their kernels have
changed. Run it for every version of Triton. Needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os

import triton

from benchmarks.common.rows import GPU_ROWS
from benchmarks.offline.tile_choices import FORWARD_ONLY, Cell, compiled
from fusion.codegen.triton.forward import Forward
from fusion.machine import Machine, of_target
from fusion.planning import gpu_facts
from fusion.planning.choice import Tile
from fusion.planning.gpu_clocks import BACKWARD, JOINT, Work, registers
from fusion.planning.gpu_facts import Fact
from fusion.planning.gpu_feasible import cell_of, fact_of, fits, most_registers, place_of, slowed, spills_known
from fusion.planning.gpu_model import all_tiles, in_order, may_rotate

EXPLORED = 1.3
"""Tiles whose estimated registers exceed a thread's by more are not compiled."""


def next_tile(work: Work, machine: Machine, cell: Cell) -> Tile:
    """The tile that would be chosen if all that were not compiled, and are not far from fitting, were known to fit."""
    extent, rotates = cell.extent(work.kernel), may_rotate(cell.spec, work.kernel)

    def worth(tile: Tile) -> bool:
        if fact_of(work, tile, machine) is not None:
            return slowed(work, tile, machine) < math.inf
        fewer = registers(work, tile, machine) <= EXPLORED * most_registers(tile, machine)
        return fewer and fits(work, tile, machine) and not spills_known(work, tile, machine)

    every = list(all_tiles(work, machine, extent, rotates))
    return in_order(work, machine, extent, [tile for tile in every if worth(tile)] or every)[0]


def explore(cell: Cell, kernel: str, machine: Machine, most: int) -> None:
    """Add facts of a kernel until the tile that would be chosen is known."""
    work = cell.work(kernel)
    for _ in range(most):
        tile = next_tile(work, machine, cell)
        if fact_of(work, tile, machine) is not None:
            return
        started = sum(os.times()[:4])
        fact = compiled_fact(cell, kernel, machine, tile)
        gpu_facts.FACTS.setdefault(cell_of(work, machine), {})[place_of(tile)] = fact
        seconds = sum(os.times()[:4]) - started
        text = f"{work.program} {tile} {fact} x {fact.slowed:.2f}, {seconds:.1f} s"
        print(machine.architecture, cell, kernel, text, flush=True)
    print(f"{machine.architecture} {cell}: {kernel}: nothing known to be best after {most} tiles", flush=True)


def compiled_fact(cell: Cell, kernel: str, machine: Machine, tile: Tile) -> Fact:
    """What compiling a kernel shows; where it does not fit, shared memory that is not there, and nothing else."""
    try:
        facts = compiled(cell, machine, [kernel], {kernel: tile})[kernel]
    except triton.runtime.errors.OutOfResources as error:
        return Fact(max(error.required, machine.shared_memory + 1), 0, 0, 0, False)
    loop = facts.main
    return Fact(facts.shared, facts.registers, len(loop.body), loop.spills, loop.serialised)


def main() -> None:
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_90", "sm_100", "gfx942"])
    parser.add_argument("--rows", nargs="+", default=[n for n in GPU_ROWS if "decode" not in n], choices=list(GPU_ROWS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--kernels", nargs="+", default=[Forward.name, *BACKWARD], choices=[Forward.name, *BACKWARD])
    parser.add_argument("--most", type=int, default=8, help="tiles compiled for a kernel")
    parser.add_argument("--renew", action="store_true", help="begin the cells named again")
    options = parser.parse_args()
    gpu_facts.FACTS = gpu_facts.read(triton.__version__)  # not those of others that count
    begun: set[tuple] = set()
    for name, target in itertools.product(options.rows, options.targets):
        machine = of_target(target)
        for d in [576] if "latent" in name else options.widths:
            cell = Cell(name=name, d=d)
            found = [Forward.name] if name in FORWARD_ONLY else [Forward.name, *BACKWARD]
            if JOINT in found and not (machine.additions and cell.joins):
                found.remove(JOINT)
            for kernel in (kernel for kernel in found if kernel in options.kernels):
                key = (machine.architecture, *cell_of(cell.work(kernel), machine)[1:])
                if options.renew and key not in begun:
                    gpu_facts.FACTS.pop(key, None)
                begun.add(key)
                gpu_facts.FACTS.setdefault(key, {})  # its own, even if another architecture's count
                explore(cell, kernel, machine, options.most)
            gpu_facts.file_of(triton.__version__).write_text(gpu_facts.to_json(gpu_facts.FACTS))


if __name__ == "__main__":
    main()
