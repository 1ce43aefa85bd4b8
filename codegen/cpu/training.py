"""Training on CPUs: the forward kernel that also writes statistics of the rows, and the kernels of `backward`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusion.caching import BoundedCache, OncePerKey
from fusion.ir.results import REDUCE, aux_shape, packed_strides, size_of, statistics_shape
from fusion.ir.spec import AttentionSpec, AuxOutput
from fusion.lowering import aux_gradients, rows
from fusion.lowering.backward_plan import BackwardPlan, backward_plan
from fusion.lowering.gradients import hides_nan, left_to_reference
from fusion.machine import Machine
from fusion.planning.choice import Choice, query_stationary
from fusion.planning.cpu_planner import FEW_QUERIES
from fusion.planning.register_tiles import KEY_SPAN, AllHeads, ByRows, Target, Tiling, backward_tiling, edge_of_spans

from .. import reference
from ..emitter import Backward, Edges, Proof
from ..mlir.aux_outputs import IDENTITY
from ..mlir.backward.kernel import BackwardKernel
from ..mlir.backward.lanes import FUSED
from ..mlir.backward.tile import Kind, Problem
from .backward import BackwardCall
from .calling import CompiledKernel, address, check_sizes, empty_strided, in_huge_pages
from .launch import ForwardKernel, Prepared

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

SHORT_CHAIN = 16
"""Length of a chain in the products of few queries: of 64 words there are four sums then."""


class TrainingKernel(ForwardKernel):
    """The outputs and gradients of one spec: see `emitter.TrainingKernel`. Backward kernels are compiled by the first
    backward. machine: whose cores the work of a backward is cut for."""

    with_statistics = True

    def __init__(self, spec: AttentionSpec, tilings: Sequence[Tiling], target: Target, machine: Machine | None = None):
        super().__init__(spec, tilings, target)
        self.backward_tilings = [backward_tiling(tiling, target) for tiling in tilings]
        self.derived, self._compiled, self._plans = BoundedCache(), OncePerKey(), OncePerKey()
        self.machine = machine or Machine.detect()
        # Whether one kernel is to have all gradients, and parts of each batch element's blocks; None: as is planned.
        self.fused: bool | None = None
        self.parts: int | None = None
        self._hides_nan = functools.cache(functools.partial(hides_nan, spec))
        self._with = functools.cache(
            lambda places: replace(spec, aux_outputs=tuple(spec.aux_outputs[n] for n in places))
        )
        self._unsupported = functools.cache(self._without_kernels)

    def proved(self, proof: Proof) -> Self:
        result = super().proved(proof)
        result.derived = BoundedCache()
        return result

    def _only(self, tiling: Tiling | ByRows | AllHeads) -> Self:
        result = super()._only(tiling)
        result.choices = lambda: range(place, place + 1)  # type: ignore[method-assign]
        assert isinstance(tiling, Tiling)
        place = self.tilings.index(replace(tiling, chain=0))
        result._summed = lambda given, sizes: replace(given, chain=tiling.chain)  # type: ignore[method-assign]
        return result

    def prove_gradients(self, call: BackwardCall, choice: int) -> None:
        """Before the gradients of a call with what it derived are used for the first time. Raises KernelProofError."""
        if self.proof is None:
            return
        kernels = {
            kind: call.compiled(kind, choice) for kind, of_choice in call.derived.launchers if of_choice == choice
        }
        text = "\n".join(kernel.text.source for kernel in kernels.values())
        places = tuple(n for n, aux in enumerate(self.spec.aux_outputs) if aux in call.spec.aux_outputs)
        key = call.needs, places, text
        if key not in self._right:
            tiling = self._summed(self.tilings[choice], call.sizes)
            only = self._only(tiling)
            only.derived, only.fused, only.parts = BoundedCache(), FUSED in kernels, 2
            edges = Edges(rows=edge_of_spans(self.target, tiling.planes, self.spec.out_dtype), keys=3 * KEY_SPAN // 4)
            self.proof.gradients(only, call.sizes, edges, text, call.needs, places)
            self._right.add(key)

    def choice(self, sizes: Sequence[int]) -> Choice:
        """Choice for the forward of a call: in one tile for all lengths."""
        tile, n_k = self._tile(self._tiling(sizes)), self.extents(sizes)[-3]
        return Choice(schedule=query_stationary(self.spec), tile=tile, keys=n_k)

    def _tiling(self, sizes: Sequence[int]) -> Tiling:
        return self._summed(self.tilings[self.choices()[0]], sizes)

    def _summed(self, tiling: Tiling, sizes: Sequence[int]) -> Tiling:
        """A tiling whose scores are exact enough for the queries of a call. The gradients of K and V of a few have the
        error of the largest weight, which is that of its score; those of many average it out."""
        few = self.extents(sizes)[-4] <= FEW_QUERIES and not self.spec.reproducible
        return replace(tiling, chain=SHORT_CHAIN) if few else tiling

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """[output, what the backward needs of each row (see `TrainingStatistics`), *auxiliary outputs]."""
        key = (torch.get_num_threads(), *sizes, *map(Tensor.stride, operands))
        if (result := self._calls.get(key)) is None:
            shape = statistics_shape(self.spec, sizes)
            if not math.prod(self.extents(sizes)):
                out, *aux_outputs = reference.run_all(self.spec, operands, sizes)
                return [out, torch.empty(shape, dtype=torch.float32), *aux_outputs]
            result = self._calls.store(key, (self._prepare_forward(operands, sizes, self._tiling(sizes)), shape))
        prepared, shape = result
        out = empty_strided(prepared.shape, prepared.strides, self._out_dtype)
        statistics = torch.empty(shape, dtype=torch.float32)
        copies = [self._copies(aux, sizes) for aux in self.spec.aux_outputs]
        addresses = [*map(address, operands), *map(address, (out, statistics, *copies))]
        if not prepared.launch(addresses):
            done = self._prepare_forward(operands, sizes, self._summed(self.tilings[-1], sizes)).launch(addresses)
            assert done, "multiply-add kernels raise no flag"
        pairs = zip(self.spec.aux_outputs, copies, strict=True)
        return [out, statistics, *(REDUCE[aux.reduction](x, 0) if aux.over == "i" else x[0] for aux, x in pairs)]

    def _prepare_forward(self, operands: Sequence[Tensor], sizes: Sequence[int], tiling: Tiling) -> Prepared:
        *batch, n_q, _, _, _ = self.extents(sizes)
        values, given = {("statistics_rows",): math.prod(batch) * n_q}, [("ptr", "statistics")]
        for k, aux in enumerate(self.spec.aux_outputs):
            given.append(("ptr", "aux", k))
            shape = aux_shape(self.spec, aux, sizes)
            values["aux_elements", k] = math.prod(shape)
            for name, n in zip(aux.dims, packed_strides(shape, range(len(shape))), strict=True):
                values["aux_stride", k, name] = n
        return self._prepare_call(operands, sizes, tiling, more=values, given=given)

    def choices(self) -> range:
        """The tilings to try, in the forward and the backward alike: weights that are made anew of other scores are off
        by what these differ by. Products on AMX tiles are made beside other work, which keeps no weights."""
        count = len(self.tilings)
        return range(count - 1 if self.spec.aux_outputs and self.target.amx else 0, count)

    def _copies(self, aux: AuxOutput, sizes: Sequence[int]) -> Tensor:
        """Memory for an auxiliary output, [1 or threads, ..]: each thread collects sums over queries in a copy."""
        shape = aux_shape(self.spec, aux, sizes)
        dtype = getattr(torch, aux.dtype)
        if aux.over == "i":
            return torch.full((torch.get_num_threads(), *shape), IDENTITY[aux.reduction], dtype=dtype)
        result = torch.empty((1, *shape), dtype=dtype)
        in_huge_pages(result)
        return result

    def backward(self, *given: Any) -> list[Tensor]:
        """The gradients of the operands that are wanted. given: the fields of `Backward`."""
        grad, _, _, operands, sizes, needs, aux = arguments = Backward(*given)
        *batch, n_q, n_k, d, d_v = self.extents(sizes)
        arriving = [g for g in aux if g is not None]
        places = tuple(place for place, g in enumerate(aux) if g is not None)
        spec, reason = self._with(places), self._unsupported(places, needs)
        if reason is not None:
            log.debug("the gradient of %s is the reference interpreter's: %s", self.spec, reason)
        if reason is not None or 0 in (*batch, n_q, n_k, d, d_v):
            return reference.backward(spec, grad, operands, sizes, needs, aux_outputs=arriving)
        check_sizes(*batch, n_q, n_k, d, d_v, *sizes)
        everywhere = self._sees_hidden_keys(spec, needs, arriving)
        plan = self._plans.get_or_make((places, everywhere), lambda: backward_plan(spec, everywhere))
        return BackwardCall(self, plan, arguments).gradients()

    def without_kernels(self, needs: tuple[bool, ...]) -> str | None:
        """Reason why gradients are left to the reference interpreter, or None."""
        return self._unsupported((), needs)

    def _without_kernels(self, places: tuple[int, ...], needs: tuple[bool, ...]) -> str | None:
        """Why gradients, where some arrive at these of the auxiliary outputs, are left to the reference interpreter."""
        reason = left_to_reference(self.spec) or rows.unsupported(self.spec, needs)
        return reason or aux_gradients.unsupported(self._with(places), needs)

    def _sees_hidden_keys(self, spec: AttentionSpec, needs: tuple[bool, ...], arriving: Sequence[Tensor]) -> bool:
        """Whether a backward visits the keys that the mask hides, as they make gradients NaN."""
        if self._hides_nan(needs):
            return True
        skips = bool(arriving) and spec.mask is not None and spec.mask.skips
        return skips and not all(math.isfinite(size_of(g)) for g in arriving)

    def backward_kernel(
        self, kind: Kind, plan: BackwardPlan, needs: tuple[bool, ...], sizes: Sequence[int], choice: int
    ) -> CompiledKernel:
        """One of the backward kernels, with products and tile of the `choice`-th tiling."""
        (d, d_v), tiling = self.extents(sizes)[-2:], self._summed(self.backward_tilings[choice], sizes)

        def make(tiling: Tiling = tiling) -> CompiledKernel:
            if not kind.gradients:  # listed rows leave less of the forward's smaller blocks empty
                tiling = replace(tiling, groups=self.tilings[choice].groups)
            problem = Problem(spec=plan.spec, plan=plan, tiling=tiling, target=self.target, d=d, d_v=d_v)
            return CompiledKernel(BackwardKernel(kind, problem, needs).text())

        key = (kind, plan.spec.aux_outputs, plan.everywhere, needs, d, d_v, choice, tiling.chain)
        return self._compiled.get_or_make(key, make)
