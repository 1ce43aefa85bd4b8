"""Tiles of the kernels one by one: each is a step of its own, so that one that hangs or breaks the device costs its
own time and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fusion
from benchmarks.gpu.cells import Operands, Place, operands_of
from benchmarks.gpu.device import Device, Rehearsal
from benchmarks.offline.absent import absent, meta
from benchmarks.offline.tile_choices import Settled
from fusion.codegen.triton.autotune import agree
from fusion.codegen.triton.backward import may_join
from fusion.codegen.triton.candidates import candidates
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.forward import Forward
from fusion.codegen.triton.launch import Kernel
from fusion.ir import AttentionSpec
from fusion.machine import Machine
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_clocks import BY_KEYS, QUERIES
from fusion.planning.gpu_model import tile_clocks

MOST = 12  # tiles of a kernel


@dataclass(slots=True, kw_only=True)
class Tuned:
    """seconds: of a kernel (of the whole backward) by tile; failed: why others have none. table: the tile that is
    planned."""

    title: str
    kernel: str
    flop: float
    table: str
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A kernel of a place in a tile."""

    place: Place
    kernel: str
    tile: Tile
    planned: Tile
    spec: AttentionSpec
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"tile {self.tile} of {self.kernel.removeprefix('attention_')}, {self.place}"

    @property
    def flop(self) -> float:
        row = self.place.definition
        return row.flop(self.place.problem) * (2.5 if self.place.direction == "backward" else 1)

    def call(self, operands: Operands, tile: Tile) -> Callable[[], Sequence[Tensor]]:
        """The kernel in a tile, between others as they are planned: the output, or the gradients of q, k and v."""
        given: Operands = tuple(x.detach() for x in operands)
        settled = Settled(tiles={self.kernel: tile})

        def planner(machine: Machine) -> GpuPlanner:
            return GpuPlanner(self.spec, machine, settled)

        if self.kernel == Forward.name:
            kernel = Kernel(self.spec, plan=planner)
            return lambda: [kernel.forward(given, self.sizes)[0]]
        training = Differentiable(self.spec, plan=planner)
        needs = _needs(self.place, self.spec)
        if given[0].is_meta:
            out, statistics = _results(training, given, self.sizes)
        else:
            out, statistics = training.outputs(given, self.sizes)
        grad = torch.empty_like(out).normal_() if not out.is_meta else torch.empty_like(out)
        return lambda: training.backward(grad, out, statistics, given, self.sizes, needs)


def _needs(place: Place, spec: AttentionSpec) -> tuple[bool, ...]:
    """Which operands' gradients are wanted: those of Q, K and V."""
    return tuple(at < (2 if place.definition.latent else 3) for at in range(len(spec.operands)))


def _results(training: Differentiable, given: Operands, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    *batch, n_q, _, _, d_v = training.kernel.extents(sizes)
    out = torch.empty([*batch, n_q, d_v], dtype=given[0].dtype, device="meta")
    return out, torch.empty([3, *batch, n_q], device="meta")


def trials(place: Place, device: Device) -> Iterator[Trial]:
    """The planned tile of each kernel of a place, its other forms, and the tiles around it that are predicted to be the
    fastest. Forms that have never run are among them."""
    torch._dynamo.reset()
    site = fusion.explain(place.definition.plain, *operands_of(place, device)).sites[0]
    spec, sizes, machine = site.specs[0], tuple(site.sizes[0].values()), device.planned_for
    planner = GpuPlanner(spec, machine)
    *batch, n_q, n_k, d, d_v = planner.extents(sizes)
    times = tile_clocks(spec, machine)
    tiles = {Forward.name: planner.tile_for(n_q, n_k, d, d_v, torch.Size(batch).numel())}
    if place.direction == "backward":  # in one kernel and in several
        chosen = {**planner.backward(d, d_v), **planner.backward(d, d_v, may_join(spec, _needs(place, spec)))}
        tiles = {name: chosen[name] for name in (*BY_KEYS, QUERIES) if name in chosen}
    for kernel, planned in tiles.items():
        every = candidates(kernel, spec, (n_q, n_k, d, d_v), planned, machine)
        alike = [tile for tile in every[1:] if tile.with_form_of(planned) == tile]
        predicted = dict(zip(alike, times(kernel, sizes, alike), strict=True))
        alike.sort(key=lambda tile: predicted[tile])
        forms = [tile for tile in every[1:] if planned.with_form_of(tile) == tile]
        for tile in [planned, *forms, *alike][: 2 if device.rehearsal else MOST]:
            yield Trial(place=place, kernel=kernel, tile=tile, planned=planned, spec=spec, sizes=sizes)


def take(trial: Trial, tuned: list[Tuned], device: Device) -> None:
    """Time a tile whose results are those of the planned one, and add it to its kernel's."""
    title, kernel = str(trial.place), trial.kernel.removeprefix("attention_")
    found = next((each for each in tuned if (each.title, each.kernel) == (title, kernel)), None)
    if found is None:
        found = Tuned(title=title, kernel=kernel, flop=trial.flop, table=str(trial.planned))
        tuned.append(found)
    operands = operands_of(trial.place, device)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = trial.call(operands, trial.planned)()
        torch.manual_seed(0)
        call = trial.call(operands, trial.tile)
        if not all(map(agree, call(), expected)):
            found.failed[str(trial.tile)] = "its result is another than the planned tile's"
            return
        found.seconds[str(trial.tile)] = min(device.seconds(call)[0] for _ in range(2 if device.rehearsal else 20))


def compile_trial(trial: Trial, machine: Machine) -> None:
    """Compile a tile's kernel into Triton's cache on disk. Nothing runs: it may be one that hangs."""
    operands = tuple(map(meta, operands_of(trial.place, Rehearsal())))
    with absent(machine, only=[trial.kernel]), torch.no_grad():
        trial.call(operands, trial.tile)()
