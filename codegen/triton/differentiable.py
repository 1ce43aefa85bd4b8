"""Training with a spec: the forward that keeps statistics, and the gradients by kernels or, where there are none, by
the reference."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion.codegen import reference
from fusion.codegen.emitter import Backward
from fusion.codegen.reference import gradients as pulled
from fusion.codegen.triton import autotune
from fusion.codegen.triton.apart import Request
from fusion.codegen.triton.autotune import Call, Stage, Tuner, call_of
from fusion.codegen.triton.backward import (
    WRITTEN,
    Joint,
    Prepare,
    Queries,
    backward_kernels,
    may_join,
    query_coordinates,
)
from fusion.codegen.triton.candidates import candidates
from fusion.codegen.triton.descriptors import READ, descriptors
from fusion.codegen.triton.expressions import Writer
from fusion.codegen.triton.further import FurtherByKeys, FurtherByRows, further_kernels, tiles_of_further
from fusion.codegen.triton.gradients import (
    arriving,
    delta_of_further,
    gradients_of,
    unsupported_gradient,
    with_arriving,
)
from fusion.codegen.triton.launch import Kernel, check_sizes, empty_lists, fixed_constants, list_tile, precision
from fusion.codegen.triton.tile_lists import KeyLists, RowLists, places
from fusion.codegen.triton.variant import Variant
from fusion.ir.expr import ZERO
from fusion.ir.results import coordinate_extents, further_shape, no_statistics, size_of
from fusion.ir.sizes import size_function
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.ir.strided import strided
from fusion.kept import Made
from fusion.lowering.row_gradients import lost_logarithms
from fusion.machine import Machine
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_clocks import BY_KEYS

log = logging.getLogger(__name__)


class Differentiable:
    """The outputs and gradients of one spec: see `emitter.TrainingKernel`.

    dK and dV are deterministic. dQ and gradients of captured tensors may be added up in float32 in no certain order,
    unless torch is told to be deterministic.

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
        self.spec, self.tile, self.plan = spec, tile, plan
        self.trained = spec if arriving else replace(spec, further=())
        self.tuner = tuner if tile is None else None
        self.kernel = Kernel(
            spec, tile, statistics=True, tuner=tuner, plan=plan and (lambda machine: plan(machine).for_training())
        )
        self.source, self.choice, self.prepare = self.kernel.source, self.kernel.choice, self.kernel.prepare
        self._made = Made()
        # Derived once: a call would spend 70 to 400 us on each.
        self._unsupported = functools.cache(lambda needs: unsupported_gradient(self.trained, needs))
        self._joins = functools.cache(lambda needs: may_join(self.trained, needs))
        # Values of `spec.sizes` -> how many values of each batch coordinate share keys.
        none = (False,) * len(spec.operands)
        self._groups = functools.cache(lambda: size_function(gradients_of(self.trained, none).groups, self.spec.sizes))

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """[output, statistics, *further outputs]."""
        if self.spec.further and 0 in self.kernel.extents(sizes):
            out, *further = reference.run_all(self.spec, operands, sizes)
            return [out, no_statistics(self.spec, operands, sizes), *further]
        out, statistics = self.kernel.forward(operands, sizes)
        assert statistics is not None
        return [out, statistics, *(self._further(operands, sizes, statistics) if self.spec.further else ())]

    def _further(self, operands: Sequence[Tensor], sizes: Sequence[int], statistics: Tensor) -> list[Tensor]:
        *batch, n_q, n_k, d, d_v = self.kernel.extents(sizes)
        device, extents = operands[0].device, coordinate_extents(self.spec, sizes)
        made = [
            torch.empty(further_shape(f, extents), dtype=getattr(torch, f.dtype), device=device)
            for f in self.spec.further
        ]
        results = {"statistics": statistics} | {f"further{k}": tensor for k, tensor in enumerate(made)}
        variant = self._made.of(
            (d, d_v, device.type == "cpu", "further"),
            lambda: Variant(self.spec, further_kernels(self.spec, d, d_v), d, d_v, device.type == "cpu"),
        )
        fixed, arguments = fixed_constants(self.spec.dtype, device), (operands, sizes, results, {})
        tiles = tiles_of_further(self.kernel.planner(device).backward(d, d_v))
        call = Call(device=device, sizes=sizes)
        heads, blocks = math.prod(batch), {FurtherByRows.name: lambda tile: -(-n_q // tile.rows)}
        blocks[FurtherByKeys.name] = lambda tile: -(-n_k // tile.keys)
        for name in variant.kernels:

            def launch(tile: Tile, name: str = name) -> None:
                variant.launch(name, heads * blocks[name](tile), tile, fixed, arguments)

            tile = self.tile or tiles[name]
            autotune.launch(Stage(kernel=name, variant=variant, tile=tile, launch=launch, others=None), call)
        return made

    def backward(self, *given: Any) -> list[Tensor]:
        """The gradients, in order, of each wanted operand's shape. given: the fields of `Backward`."""
        grad, out, statistics, operands, sizes, needs, further = Backward(*given)
        places = tuple(place for place, g in enumerate(further) if g is not None)
        kernels, found = self._with(places) if places else self, [g for g in further if g is not None]
        read, of_read = (*operands, *found), (*needs, *(False for _ in found))
        reason = kernels.without_kernels(of_read)
        if self.spec.mask is not None and not all(math.isfinite(size_of(g)) for g in found):
            reason = "what arrives at a further output is not finite, where a mask may hide it"
        if reason is None:
            return kernels._gradients(grad, out, statistics, read, sizes, of_read)
        log.debug("gradients of %s by the reference: %s", self.spec, reason)
        return reference.backward(self.spec, grad, operands, sizes, needs, further=further)

    def _with(self, places: tuple[int, ...]) -> Differentiable:
        """What differentiates where gradients arrive at these of the further outputs."""
        spec, own = with_arriving(self.spec, places), ("arriving", places)
        return self._made.of(own, lambda: Differentiable(spec, self.tile, plan=self.plan, arriving=True))

    def without_kernels(self, needs: tuple[bool, ...]) -> str | None:
        """Why gradients are left to the reference interpreter, or None."""
        if (reason := self._unsupported(needs)) is not None:
            return reason
        if torch.are_deterministic_algorithms_enabled() and gradients_of(self.trained, needs).captured:
            return "deterministic algorithms are asked for, and gradients of captured tensors are summed atomically"
        return None

    def _gradients(self, grad, out, statistics, operands, sizes, needs) -> list[Tensor]:
        *batch, n_q, n_k, d, d_v = extents = self.kernel.extents(sizes)
        check_sizes(extents)
        if 0 in extents:
            count = len(operands) - len(self.trained.further)
            spec, further = replace(self.trained, operands=self.trained.operands[:count]), operands[count:]
            return reference.backward(spec, grad, operands[:count], sizes, needs[:count], further=further)
        joint = not torch.are_deterministic_algorithms_enabled() and self._joins(needs)
        tiles = self.kernel.planner(operands[0].device).backward(d, d_v, joint)
        made = {n: self._memory(n, tensor) for n, tensor in enumerate(operands) if needs[n]}
        sums = None
        if Joint.name in tiles:
            sums = torch.zeros((*batch, n_q, d), dtype=torch.float32, device=made[0].device)
        self._launch(grad, out, statistics, operands, sizes, needs, made, (batch, n_q, n_k, d, d_v), tiles, sums)
        if sums is not None:
            strided(made[0], self.trained.q, query_coordinates(self.trained), sums.shape).copy_(sums)
        return [made[n] for n in sorted(made)]

    def _memory(self, number: int, tensor: Tensor) -> Tensor:
        """A gradient to be filled: q, k and v in their dtype (zero, should the attention read only parts of them),
        others float32."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype if number < 3 else torch.float32, device=tensor.device)

    def _launch(self, grad, out, statistics, operands, sizes, needs, made, extents, tiles, sums) -> None:
        batch, n_q, n_k, d, d_v = extents
        device, by_keys = operands[0].device, tuple(name for name in BY_KEYS if name in tiles)
        machine = self.kernel.planner(device).machine
        made_for = (d, d_v, needs, device.type == "cpu", by_keys)
        variant, described = self._variant(made_for), functools.partial(self._variant, made_for, described=True)
        results = self._results(grad, out, statistics, operands, sizes, made, (*batch, n_q))
        results |= {} if sums is None else {"dq_sums": sums}
        # How many values of each batch coordinate K and V tell apart.
        shared = [extent // group for extent, group in zip(batch, self._groups()(sizes), strict=True)]
        launches = _Launches(self.trained, variant, described, operands, sizes, results, batch, (n_q, n_k), shared)
        stages = [
            Stage(
                kernel=name,
                variant=variant,
                tile=self.tile or tiles[name],
                launch=launch,
                others=functools.partial(candidates, name, self.trained, extents[1:], tiles[name], machine),
                results=[made[n] for n in sorted(made.keys() & WRITTEN.get(name, set()))],
            )
            for name, launch in launches.by_kernel.items()
            if name in variant.kernels
        ]
        call = call_of(operands, sizes, (math.prod(batch), n_q, n_k), precision(self.spec.dtype), self.tuner)
        owner = next((stage for stage in stages if stage.kernel in BY_KEYS), None)
        if launches.noted and stages[0].kernel == Prepare.name and owner is not None:
            rows = autotune.settled(owner, call, self.tuner).rows
            stages[0] = replace(stages[0], tile=replace(stages[0].tile, rows=rows), others=None)

        def reset() -> None:
            for tensor in (*made.values(), *(() if sums is None else (sums,))):
                tensor.zero_()

        def request() -> Request:
            given: dict[str, Any] = {"backward": (grad, out, statistics), "needs": tuple(needs)}
            return Request(spec=self.trained.to_json(), operands=operands, sizes=tuple(sizes), **given)

        autotune.run(stages, call, self.tuner, reset, request)

    def _results(self, grad, out, statistics, operands, sizes, made, rows) -> dict[str, Tensor]:
        """What kernels read and write beside the operands, by name."""
        names = [Writer(spec=self.spec).operand(n) for n in range(len(operands))]
        results = {f"d{'qkv'[n] if n < 3 else names[n]}": tensor for n, tensor in made.items()}
        results |= {"dout": grad, "out": out, "statistics": statistics}
        results["delta"] = torch.empty((2, *rows), dtype=torch.float32, device=out.device)  # and log_share
        if self.spec.row_scale is not None:  # planes: the maximum, and what `of_rows` returns
            row_max, row_sum = statistics[:2]
            scaled = pulled.of_rows(self.spec, operands, sizes, row_max, row_sum)
            results["statistics"] = torch.stack([row_max, *scaled])
        found = arriving(self.trained)
        if found.weight is not ZERO and self.trained.normalizer is not Normalizer.NONE:
            spec = delta_of_further(self.trained)
            kernels = self._made.of(("lacked",), lambda: Differentiable(spec, self.tile, plan=self.plan))
            results["lacked"] = kernels._further(operands, sizes, statistics)[0]
        if found.log_sum is not ZERO:
            off = pulled.value(self.trained, operands, sizes, found.log_sum).squeeze(-1)
            off = off * lost_logarithms(*statistics[:2])
            results["off"] = off.expand(rows).contiguous()
        return results

    def _variant(self, made_for: tuple, described: bool = False) -> Variant:
        d, d_v, needs, interpreted, by_keys = made_for

        def make() -> Variant:
            kernels = backward_kernels(self.trained, d, d_v, needs, described, by_keys)
            read = set().union(*READ.values()) if described else ()
            return Variant(self.trained, kernels, d, d_v, interpreted, read=read)

        return self._made.of((*made_for, described), make)


class _Launches:
    """The launches of one call, by the kernel whose tile they are in, in order. described: the module whose loops read
    by tensor descriptors."""

    def __init__(
        self,
        spec: AttentionSpec,
        variant: Variant,
        described: Callable[[], Variant],
        operands: Sequence[Tensor],
        sizes: Sequence[int],
        results: dict[str, Tensor],
        batch: Sequence[int],
        rows_and_keys: tuple[int, int],
        shared: Sequence[int],
    ):
        self.spec, self.variant, self.results, self.batch = spec, variant, results, batch
        self.described, self.operands, self.sizes = described, operands, sizes
        self.n_q, self.n_k = rows_and_keys
        self.heads, self.shared = math.prod(batch), math.prod(shared)
        self.device, self.fixed = operands[0].device, fixed_constants(spec.dtype, operands[0].device)
        self.listed = KeyLists.name in variant.kernels or RowLists.name in variant.kernels
        self.noted = spec.mask is not None and spec.mask.skips
        self.noted_rows = 0
        self.by_kernel = {Prepare.name: self.prepare, Queries.name: self.queries}
        self.by_kernel |= {name: functools.partial(self.keys, name) for name in BY_KEYS}

    def prepare(self, tile: Tile) -> None:
        """delta, and which blocks of as many rows as in the kernel of dK and dV have dead ones."""
        self.noted_rows = tile.rows
        blocks = -(-self.n_q // tile.rows)
        if self.noted:
            count = places(self.spec, self.batch) if self.listed else self.heads
            self.results["dead"] = torch.zeros([count * blocks], dtype=torch.int32, device=self.device)
        self._launch(Prepare.name, self.heads * blocks, tile)

    def queries(self, tile: Tile) -> None:
        rows, keys = -(-self.n_q // tile.rows), -(-self.n_k // tile.keys)
        self._list(KeyLists.name, tile, (rows, keys))
        self._launch(Queries.name, self.heads * rows, tile)

    def keys(self, name: str, tile: Tile) -> None:
        """A kernel whose programs own keys."""
        rows, keys = -(-self.n_q // tile.rows), -(-self.n_k // tile.keys)
        if self.noted and Prepare.name in self.variant.kernels and self.noted_rows != tile.rows:
            self.prepare(Tile(rows=tile.rows, keys=16, warps=4, stages=1))
        self._list(RowLists.name, tile, (keys, rows))
        self._launch(name, self.shared * keys, tile)

    def _list(self, name: str, tile: Tile, across: tuple[int, int]) -> None:
        if name in self.variant.kernels:
            self.results |= empty_lists(self.spec, self.batch, across, self.device)
            self._launch(name, len(self.results["tile_counts"]), list_tile(tile))

    def _launch(self, name: str, programs: int, tile: Tile) -> None:
        variant, others = self.variant, {}
        if tile.described and name in READ:
            tensors = dict(zip("qkv", self.operands, strict=False)) | {"do": self.results["dout"]}
            found = self.described()
            read = [box for box in found.boxes.values() if box.name in READ[name]]
            if all(box.fits(tensors[box.name]) for box in read):
                variant = found
                others = descriptors(read, tensors, (self.n_q, tile.rows), (self.n_k, tile.keys))
        variant.launch(name, programs, tile, self.fixed, (self.operands, self.sizes, self.results, others))
