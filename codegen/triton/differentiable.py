"""Training with a spec: the forward with statistics, and the gradients by kernels or, where there are none, by the
reference."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion.caching import OncePerKey
from fusion.ir.expr import ZERO, C, I
from fusion.ir.reads import strided
from fusion.ir.results import empty_result, no_statistics, size_function, size_of
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.rows import lost_logarithms
from fusion.machine import Machine
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_clocks import BY_KEYS

from .. import reference
from ..emitter import Backward
from ..reference import gradients as pulled
from . import autotune
from .apart import Request
from .autotune import Call, Stage, Tuner
from .aux_outputs import AuxByKeys, aux_kernels, aux_tiles
from .backward import WRITTEN, Delta, Joint, Prepare, Queries, backward_kernels, may_join
from .candidates import candidates
from .expressions import Writer
from .gradients import arriving, delta_of_aux, gradients_of, unsupported_gradient, with_arriving
from .launch import Kernel, Launches, check_sizes
from .tile_lists import KeyLists, RowLists, places
from .variant import Variant

log = logging.getLogger(__name__)


class Differentiable:
    """Outputs and gradients of one spec: see `emitter.TrainingKernel`.

    dK and dV are deterministic. dQ and gradients of captured tensors may be added up in float32 in no certain order,
    unless torch is told to be deterministic or results are to be reproducible.

    tile: in place of those that are planned.
    tuner: measures tiles.
    plan: see `Kernel`.
    arriving: the spec is one of `with_arriving`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        tile: Tile | None = None,
        tuner: Tuner | None = None,
        plan: Callable[[Machine], GpuPlanner] | None = None,
        arriving: bool = False,
    ):
        self.spec, self.trained = spec, spec if arriving else replace(spec, aux_outputs=())
        self.tuner = tuner if tile is None and not spec.reproducible else None
        self.plan = plan = plan if tile is None else functools.partial(GpuPlanner, spec, tile=tile)
        own = plan and (lambda machine: plan(machine).for_training())
        self.kernel = Kernel(spec, statistics=True, tuner=self.tuner, plan=own)
        self.source, self.choice, self.prepare = self.kernel.source, self.kernel.choice, self.kernel.prepare
        self._made = OncePerKey()
        # Derived once: a call would spend 70 to 400 us on each.
        self._unsupported = functools.cache(lambda needs: unsupported_gradient(self.trained, needs))
        self._joins = functools.cache(lambda needs: may_join(self.trained, needs))
        # Values of `spec.sizes` -> how many values of each batch coordinate share keys.
        none = (False,) * len(spec.operands)
        self._groups = functools.cache(lambda: size_function(gradients_of(self.trained, none).groups, self.spec.sizes))

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """[output, statistics, *auxiliary outputs]."""
        if self.spec.aux_outputs and 0 in self.kernel.extents(sizes):
            out, *aux_outputs = reference.run_all(self.spec, operands, sizes)
            return [out, no_statistics(self.spec, operands, sizes), *aux_outputs]
        out, statistics = self.kernel.forward(operands, sizes)
        assert statistics is not None
        return [out, statistics, *(self._aux_outputs(operands, sizes, statistics) if self.spec.aux_outputs else ())]

    def _aux_outputs(self, operands: Sequence[Tensor], sizes: Sequence[int], statistics: Tensor) -> list[Tensor]:
        extents, device = self.kernel.extents(sizes), operands[0].device
        d, d_v = extents[-2:]
        made = [empty_result(self.spec, k + 1, operands[0], sizes) for k in range(len(self.spec.aux_outputs))]
        results = {"statistics": statistics} | {f"aux{k}": tensor for k, tensor in enumerate(made)}
        variant = self._made.get_or_make(
            (d, d_v, device.type == "cpu", "aux"),
            lambda: Variant(self.spec, aux_kernels(self.spec, d, d_v), d, d_v, device.type == "cpu"),
        )
        tiles = aux_tiles(self.kernel.planner(device).backward(d, d_v))
        launches, call = Launches(self.spec, operands, sizes, results, extents), Call(device=device, sizes=sizes)
        for name in variant.kernels:

            def launch(tile: Tile, name: str = name) -> None:
                blocks = launches.blocks(tile)[name == AuxByKeys.name]
                launches.run(variant, name, launches.heads * blocks, tile)

            autotune.launch(Stage(kernel=name, variant=variant, tile=tiles[name], launch=launch, others=None), call)
        return made

    def backward(self, *given: Any) -> list[Tensor]:
        """Gradients, in order, of each wanted operand's shape. given: the fields of `Backward`."""
        call = Backward(*given)
        places = tuple(place for place, g in enumerate(call.aux_outputs) if g is not None)
        kernels, found = self._with(places) if places else self, [g for g in call.aux_outputs if g is not None]
        of_read = (*call.needs, *(False for _ in found))
        reason = kernels.without_kernels(of_read)
        if self.spec.mask is not None and not all(math.isfinite(size_of(g)) for g in found):
            reason = "what arrives at an auxiliary output is not finite, where a mask may hide it"
        if reason is None:
            return kernels._gradients(call._replace(operands=(*call.operands, *found), needs=of_read))
        log.debug("gradients of %s by the reference: %s", self.spec, reason)
        return self._by_reference(self.spec, call)

    @staticmethod
    def _by_reference(spec: AttentionSpec, call: Backward) -> list[Tensor]:
        return reference.backward(spec, call.grad, call.operands, call.sizes, call.needs, aux_outputs=call.aux_outputs)

    def _with(self, places: tuple[int, ...]) -> Differentiable:
        """Training kernels for gradients that arrive at these of the auxiliary outputs."""
        spec, key = with_arriving(self.spec, places), ("arriving", places)
        return self._made.get_or_make(key, lambda: Differentiable(spec, plan=self.plan, arriving=True))

    @property
    def _deterministic(self) -> bool:
        return self.spec.reproducible or torch.are_deterministic_algorithms_enabled()

    def without_kernels(self, needs: tuple[bool, ...]) -> str | None:
        """Reason why gradients are left to the reference interpreter, or None."""
        if (reason := self._unsupported(needs)) is not None:
            return reason
        if self._deterministic and gradients_of(self.trained, needs).captured:
            return "deterministic algorithms are asked for, and gradients of captured tensors are summed atomically"
        return None

    def _gradients(self, given: Backward) -> list[Tensor]:
        operands, needs = given.operands, given.needs
        extents = self.kernel.extents(given.sizes)
        check_sizes(extents)
        if 0 in extents:
            count = len(operands) - len(self.trained.aux_outputs)
            spec = replace(self.trained, operands=self.trained.operands[:count])
            return self._by_reference(
                spec, given._replace(operands=operands[:count], needs=needs[:count], aux_outputs=operands[count:])
            )
        joint = not self._deterministic and self._joins(needs)
        tiles = self.kernel.planner(operands[0].device).backward(*extents[-2:], joint)
        made = self._made_for(given, extents)
        *batch, n_q, _, d, _ = extents
        results = self._results(given, made, (*batch, n_q))
        if Joint.name in tiles:
            results["dq_sums"] = torch.zeros((*batch, n_q, d), dtype=torch.float32, device=made[0].device)
        self._launch(given, extents, made, tiles, results)
        if (sums := results.get("dq_sums")) is not None:
            strided(made[0], self.trained.q, (*self.trained.axes, I, C), sums.shape).copy_(sums)
        return [made[n] for n in sorted(made)]

    def _made_for(self, given: Backward, extents: tuple[int, ...]) -> dict[int, Tensor]:
        """Gradients to be filled, by operand: of q, k and v in their dtype, of others in float32. Those that are added
        to are zero; so are those of which the attention reads only parts, the only elements that kernels write."""
        *batch, n_q, n_k, d, d_v = extents
        heads = math.prod(batch)
        of_keys = math.prod(extent // n for extent, n in zip(batch, self._groups()(given.sizes), strict=True)) * n_k
        written = (heads * n_q * d, of_keys * d, of_keys * d_v)
        made = {}
        for n, x in enumerate(given.operands):
            if given.needs[n]:
                make = torch.empty if n < 3 and written[n] == x.numel() else torch.zeros
                made[n] = make(x.shape, dtype=x.dtype if n < 3 else torch.float32, device=x.device)
        return made

    def _launch(
        self,
        given: Backward,
        extents: tuple[int, ...],
        made: dict[int, Tensor],
        tiles: Mapping[str, Tile],
        results: dict[str, Tensor],
    ) -> None:
        operands, sizes = given.operands, given.sizes
        by_keys = tuple(name for name in BY_KEYS if name in tiles)
        made_for = (*extents[-2:], given.needs, operands[0].device.type == "cpu", by_keys)
        variant, described = self._variant(made_for), functools.partial(self._variant, made_for, described=True)
        of_call = (self.trained, operands, sizes, results, extents)
        launches = _BackwardLaunches(variant, described, self._groups()(sizes), *of_call)
        stages = self._stages(launches, made, tiles)
        call = launches.call(self.tuner)
        owner = next((stage for stage in stages if stage.kernel in BY_KEYS), None)
        if launches.noted and stages[0].kernel == Prepare.name and owner is not None:
            rows = autotune.settled(owner, call, self.tuner).rows
            stages[0] = replace(stages[0], tile=replace(stages[0].tile, rows=rows), others=None)

        def reset() -> None:
            for tensor in (*made.values(), results.get("dq_sums")):
                if tensor is not None:
                    tensor.zero_()

        def request() -> Request:
            arrived: dict[str, Any] = {"backward": (given.grad, given.out, given.statistics), "needs": given.needs}
            return Request(spec=self.trained.to_json(), operands=operands, sizes=tuple(sizes), **arrived)

        autotune.run(stages, call, self.tuner, reset, request)

    def _stages(
        self, launches: _BackwardLaunches, made: Mapping[int, Tensor], tiles: Mapping[str, Tile]
    ) -> list[Stage]:
        machine = self.kernel.planner(launches.device).machine
        extents = (launches.n_q, launches.n_k, launches.d, launches.d_v)
        return [
            Stage(
                kernel=name,
                variant=launches.variant,
                tile=tiles[name],
                launch=launch,
                others=functools.partial(candidates, name, self.trained, extents, tiles[name], machine),
                results=[made[n] for n in sorted(made.keys() & WRITTEN[name])],
                shrinks=not self.spec.reproducible,
            )
            for name, launch in launches.by_kernel().items()
            if name in launches.variant.kernels
        ]

    def _results(self, given: Backward, made: Mapping[int, Tensor], rows: tuple[int, ...]) -> dict[str, Tensor]:
        """Tensors that kernels read and write beside the operands, by name."""
        out, statistics, operands, sizes = given.out, given.statistics, given.operands, given.sizes
        names = [Writer(spec=self.spec).operand(n) for n in range(len(operands))]
        results = {f"d{'qkv'[n] if n < 3 else names[n]}": tensor for n, tensor in made.items()}
        results |= {"dout": given.grad, "out": out, "statistics": statistics}
        results["delta"] = torch.empty((2, *rows), dtype=torch.float32, device=out.device)  # and log_share
        if self.spec.row_scale is not None:
            row_max, row_sum = statistics[:2]
            scale, slope, lost = pulled.of_rows(self.spec, operands, sizes, row_max, row_sum)
            results["statistics"] = torch.stack([row_max, scale, slope, 1 - lost])
        found = arriving(self.trained)
        if found.weight is not ZERO and self.trained.normalizer is not Normalizer.NONE:
            spec = delta_of_aux(self.trained)
            kernels = self._made.get_or_make(("lacked",), lambda: Differentiable(spec, plan=self.plan))
            results["lacked"] = kernels._aux_outputs(operands, sizes, statistics)[0]
        if found.log_sum is not ZERO:
            off = pulled.value(self.trained, operands, sizes, found.log_sum).squeeze(-1)
            off = off * lost_logarithms(*statistics[:2])
            results["off"] = off.expand(rows).contiguous()
        return results

    def _variant(self, made_for: tuple, described: bool = False) -> Variant:
        d, d_v, needs, interpreted, by_keys = made_for

        def make() -> Variant:
            kernels = backward_kernels(self.trained, d, d_v, needs, described, by_keys)
            return Variant(self.trained, kernels, d, d_v, interpreted)

        return self._made.get_or_make((*made_for, described), make)


class _BackwardLaunches(Launches):
    """Launches of a backward. with_descriptors: the module whose loops read by tensor descriptors. groups: the number
    of values of each batch coordinate that share K and V."""

    def __init__(self, variant: Variant, with_descriptors: Callable[[], Variant], groups: Sequence[int], *given: Any):
        super().__init__(*given)
        self.variant, self.with_descriptors, self.groups = variant, with_descriptors, groups
        self.described["do"] = self.results["dout"]
        self.noted = self.spec.mask is not None and self.spec.mask.skips
        self.noted_rows = 0
        self.delta_tile = Tile(rows=16, keys=16, warps=4, stages=1)

    def by_kernel(self) -> dict[str, Callable[[Tile], None]]:
        """Launches in order, by the kernel whose tile they run in."""
        by_keys = {name: functools.partial(self._keys, name) for name in BY_KEYS}
        return {Prepare.name: self._prepare, Delta.name: self._delta, Queries.name: self._queries} | by_keys

    def _prepare(self, tile: Tile) -> None:
        """Compute delta, and mark blocks with dead rows, of as many rows as in the kernel of dK and dV."""
        self.noted_rows, (blocks, _) = tile.rows, self.blocks(tile)
        if self.noted:
            listed = RowLists.name in self.variant.kernels or KeyLists.name in self.variant.kernels
            count = places(self.spec, self.batch) if listed else self.heads
            self.results["dead"] = torch.zeros([count * blocks], dtype=torch.int32, device=self.device)
        self.run(self.variant, Prepare.name, self.heads * blocks, tile)

    def _delta(self, tile: Tile) -> None:
        self.delta_tile = tile
        self.run(self.variant, Delta.name, self.heads * self.blocks(tile)[0], tile)

    def _queries(self, tile: Tile) -> None:
        rows, keys = self.blocks(tile)
        self.list_tiles(self.variant, KeyLists.name, tile, (rows, keys))
        self._loop(Queries.name, self.heads * rows, tile)

    def _keys(self, name: str, tile: Tile) -> None:
        """Launch a kernel whose programs own keys."""
        rows, keys = self.blocks(tile)
        if self.noted and Prepare.name in self.variant.kernels and self.noted_rows != tile.rows:
            self._prepare(Tile(rows=tile.rows, keys=16, warps=4, stages=1))
            if Delta.name in self.variant.kernels:  # has corrected what is there anew
                self._delta(self.delta_tile)
        self.list_tiles(self.variant, RowLists.name, tile, (keys, rows))
        shared = math.prod(extent // group for extent, group in zip(self.batch, self.groups, strict=True))
        self._loop(name, shared * keys, tile)

    def _loop(self, name: str, programs: int, tile: Tile) -> None:
        """Launch a kernel with a loop over tiles, read by descriptors where the tile asks for them and they are
        possible."""
        if tile.described:
            found = self.with_descriptors()
            if self.describes(found, name):
                return self.run(found, name, programs, tile)
        self.run(self.variant, name, programs, tile)
