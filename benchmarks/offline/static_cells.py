"""What a user's call compiles for a device that is not there: the kernels of a measured variant, and their facts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.rows import GPU_ROWS, Problem, traced
from benchmarks.offline.absent import absent, meta
from benchmarks.offline.disassembly import StaticFacts, static_facts
from fusion.codegen.triton.backward import may_join
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.forward import Forward
from fusion.codegen.triton.launch import Kernel
from fusion.ir import AttentionSpec
from fusion.machine import Machine
from fusion.planning.choice import Tile
from fusion.planning.gpu import Extents, GpuPlanner
from fusion.planning.gpu_clocks import BACKWARD
from fusion.planning.gpu_model import PREPARE, WAYS, TileModel

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
        """Without memory."""
        problem = Problem(B=B, H=H, N=N, d=self.d, dtype=torch.bfloat16)
        return tuple(map(meta, problem.tensors(GPU_ROWS[self.name])))

    @property
    def needs(self) -> tuple[bool, ...]:
        """Which operands' gradients are wanted: of captured tensors those that the variant trains."""
        learned = GPU_ROWS[self.name].learned
        return tuple(tensor.is_floating_point() and (n < 3 or learned) for n, tensor in enumerate(self.operands))

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


def backward_tiles(cell: Cell, machine: Machine) -> Mapping[str, Tile]:
    """The tiles that are chosen for the kernels of a cell's backward."""
    return TileModel().backward(cell.spec, machine, cell.spec.d.integer, cell.spec.d_v.integer, cell.joins)
