"""What a user's call compiles for a device that is not there: the kernels of a measured variant, and their facts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.rows import GPU_ROWS, Problem
from benchmarks.common.tracing import traced
from benchmarks.offline.absent import absent, meta
from benchmarks.offline.static_facts import StaticFacts, static_facts
from fusion.codegen.triton.backward import Joint, Keys, KeysAlone, Queries, ValuesAlone, may_join
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

PRODUCTS = {
    Forward.name: (1, 1), Queries.name: (2, 1), Keys.name: (2, 2), KeysAlone.name: (2, 1), ValuesAlone.name: (1, 1),
    Joint.name: (3, 2),
}  # fmt: skip
"""Products of d, and of d_v, columns for each score, by kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A variant with its head dimension."""

    name: str
    d: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def problem(self) -> Problem:
        return Problem(B=B, H=H, N=N, d=self.d, dtype=self.dtype)

    @property
    def spec(self) -> AttentionSpec:
        return spec_of(self.name, self.d, self.dtype)

    def __str__(self) -> str:
        return f"{self.name}, d = {self.d}"


@functools.cache
def spec_of(name: str, d: int, dtype: torch.dtype) -> AttentionSpec:
    """The traced spec. Masks that are data have their map of tiles, as in models of many layers."""
    return traced(GPU_ROWS[name], dtype, d, tile_maps="always" if name == "packed" else "auto")


@functools.cache
def operands_of(name: str, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Without memory."""
    return tuple(map(meta, Problem(B=B, H=H, N=N, d=d, dtype=dtype).tensors(GPU_ROWS[name])))


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
    spec, operands, row = cell.spec, operands_of(cell.name, cell.d, cell.dtype), GPU_ROWS[cell.name]
    by_name = {"B0": B, "B1": H, "Nq": row.queries or N, "Nk": N}
    sizes = [by_name[name] for name in spec.sizes]
    planner = GpuPlanner(spec, machine, Settled(tiles=tiles or {}))
    with absent(machine, shared=row.latent, only=kernels) as launches:
        if Forward.name in kernels:
            Kernel(spec, plan=lambda _: planner)(operands, sizes)
        if set(BACKWARD) & set(kernels):
            _backward(Differentiable(spec, plan=lambda _: planner), operands, sizes, row.learned)
    return {kernel.metadata.name: static_facts(kernel, machine) for kernel in launches.kernels}


def _backward(differentiable: Differentiable, operands, sizes, learned: bool) -> None:
    *batch, n_q, _, _, d_v = differentiable.kernel.planner(operands[0].device).extents(sizes)
    out = torch.empty([*batch, n_q, d_v], dtype=operands[0].dtype, device="meta")
    statistics = torch.empty([3, *batch, n_q], device="meta")
    differentiable.backward(torch.empty_like(out), out, statistics, operands, sizes, needs_of(operands, learned))


def needs_of(operands: Sequence[torch.Tensor], learned: bool) -> tuple[bool, ...]:
    """Which operands' gradients are wanted. learned: those of captured tensors, too."""
    return tuple(tensor.is_floating_point() and (n < 3 or learned) for n, tensor in enumerate(operands))


def joins(cell: Cell) -> bool:
    """Whether one kernel can make all gradients of a cell."""
    return may_join(cell.spec, needs_of(operands_of(cell.name, cell.d, cell.dtype), GPU_ROWS[cell.name].learned))


def backward_tiles(cell: Cell, machine: Machine) -> Mapping[str, Tile]:
    """The tiles that are chosen for the kernels of a cell's backward."""
    return TileModel().backward(cell.spec, machine, cell.spec.d.integer, cell.spec.d_v.integer, joins(cell))


def tile_of(cell: Cell, kernel: str, machine: Machine) -> Tile:
    """The tile that is chosen for a kernel."""
    if kernel != Forward.name:
        return backward_tiles(cell, machine)[kernel]
    planner, n_q = GpuPlanner(cell.spec, machine, TileModel()), GPU_ROWS[cell.name].queries or N
    return planner.tile_for(n_q, N, cell.spec.d.integer, cell.spec.d_v.integer, B * H)


def flop_of_trip(cell: Cell, kernel: str, tile: Tile) -> float:
    """Operations of a kernel's products over one tile of scores."""
    d, d_v = int(cell.spec.d.attr), int(cell.spec.d_v.attr)  # type: ignore[arg-type]
    of_d, of_v = PRODUCTS[kernel]
    return 2.0 * tile.rows * tile.keys * (of_d * d + of_v * d_v)
