"""The tiles that are chosen for GPU kernels, over variants, widths and targets, as a Markdown table with what compiling
has shown of them.

    python -m benchmarks.offline.tile_choices > after.md        and `diff` with that of another commit

Nothing is compiled, and nothing was timed: the facts are those of `fusion.planning.gpu_facts`. `compiled` compiles the
kernels of a variant, a `Cell`, as a user's call does for a device that is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common import results
from benchmarks.common.rows import GPU_ROWS, Problem, traced
from benchmarks.offline.absent import absent, meta
from benchmarks.offline.disassembly import StaticFacts, static_facts
from fusion.codegen.triton.backward import may_join
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.forward import Forward
from fusion.codegen.triton.launch import Kernel
from fusion.ir import AttentionSpec
from fusion.machine import Machine, of_target
from fusion.planning import gpu_facts
from fusion.planning.choice import Tile
from fusion.planning.gpu import Extents, GpuPlanner
from fusion.planning.gpu_clocks import BACKWARD, Extent, Work, work_of
from fusion.planning.gpu_facts import Fact
from fusion.planning.gpu_feasible import fact_of
from fusion.planning.gpu_model import PREPARE, USUAL, USUAL_HEADS, WAYS, TileModel, best, extent_of, may_rotate

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
WIDTHS = (64, 128, 256)
B, H, N = 4, 16, 1024
"""Batch, query heads and length of the calls: enough blocks for all of a device. Longer ones compile the same."""

FORWARD_ONLY = {"decode", "float8 decode", "latent decode", "latent"}
"""Variants whose gradients are not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A variant with its head dimension, in bfloat16."""

    name: str
    d: int

    @property
    def spec(self) -> AttentionSpec:
        """The traced spec. Masks that are data have their map of tiles, as in models of many layers."""
        return _traced(self)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Operands of a call, which have no memory."""
        problem = Problem(B=B, H=H, N=N, d=self.d, dtype=torch.bfloat16)
        return tuple(map(meta, problem.tensors(GPU_ROWS[self.name])))

    @property
    def needs(self) -> tuple[bool, ...]:
        """Whether the gradient of each operand is wanted: of captured tensors those that the variant trains."""
        learned = GPU_ROWS[self.name].learned
        return tuple(tensor.is_floating_point() and (n < 3 or learned) for n, tensor in enumerate(self.operands))

    def work(self, kernel: str) -> Work:
        """Work of a kernel of this cell."""
        return work_of(self.spec, kernel, self.spec.d.integer, self.spec.d_v.integer)

    def extent(self, kernel: str) -> Extent:
        """Sizes of a call with long sequences."""
        return extent_of(self.spec, kernel, USUAL_HEADS, USUAL, USUAL)

    @property
    def joins(self) -> bool:
        """Whether one kernel can make all gradients."""
        return may_join(self.spec, self.needs)

    def __str__(self) -> str:
        return f"{self.name}, d = {self.d}"


@functools.cache
def _traced(cell: Cell) -> AttentionSpec:
    return traced(GPU_ROWS[cell.name], torch.bfloat16, cell.d, tile_maps="always" if cell.name == "packed" else "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A policy with some tiles settled, by kernel; others are chosen."""

    tiles: Mapping[str, Tile]

    def forward(self, spec: AttentionSpec, machine: Machine, extents: Extents) -> Tile:
        return self.tiles.get(Forward.name) or TileModel().forward(spec, machine, extents)

    def backward(self, spec: AttentionSpec, machine: Machine, d: int, d_v: int, joint: bool) -> dict[str, Tile]:
        settled = {name: tile for name, tile in self.tiles.items() if name in BACKWARD}
        chosen = TileModel().backward(spec, machine, d, d_v, joint)
        if settled.keys() - chosen.keys():
            chosen = TileModel().backward(spec, machine, d, d_v)
        if settled.keys() - chosen.keys():
            way = next(way for way in WAYS if settled.keys() <= set(way))
            chosen = {PREPARE: chosen[PREPARE], **dict.fromkeys(way, next(iter(settled.values())))}
        return chosen | settled


def compiled(
    cell: Cell, machine: Machine, kernels: Sequence[str], tiles: Mapping[str, Tile] | None = None
) -> dict[str, StaticFacts]:
    """Facts of some kernels of a cell by name. tiles: by kernel, in place of those that are chosen."""
    spec, operands, row = cell.spec, cell.operands, GPU_ROWS[cell.name]
    by_name = {"B0": B, "B1": H, "Nq": row.queries or N, "Nk": N}
    sizes = [by_name[name] for name in spec.sizes]
    planner = GpuPlanner(spec, machine, Settled(tiles=tiles or {}))
    with absent(machine, shared=row.latent, only=kernels) as launches:
        if Forward.name in kernels:
            Kernel(spec, plan=lambda _: planner)(operands, sizes)
        if set(BACKWARD) & set(kernels):
            *batch, n_q, _, _, d_v = planner.extents(sizes)
            out = torch.empty([*batch, n_q, d_v], dtype=torch.bfloat16, device="meta")
            statistics = torch.empty([3, *batch, n_q], device="meta")
            training = Differentiable(spec, plan=lambda _: planner)
            training.backward(torch.empty_like(out), out, statistics, operands, sizes, cell.needs)
    return {kernel.metadata.name: static_facts(kernel) for kernel in launches.kernels}


@dataclass(frozen=True, slots=True, kw_only=True)
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
    chosen = TileModel().backward(cell.spec, machine, cell.spec.d.integer, cell.spec.d_v.integer, cell.joins)
    backward = () if cell.name in FORWARD_ONLY else [name for name in chosen if name in BACKWARD]
    for kernel in (Forward.name, *backward):
        work = cell.work(kernel)
        tile = best(work, machine, cell.extent(kernel), may_rotate(cell.spec, kernel))
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
