"""The forward kernels of a spec: the tile of a call, its parameters, its output."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from fusion.caching import BoundedCache, OncePerKey
from fusion.errors import RefusedChoiceError, UnsupportedSizeError
from fusion.ir.results import extents_function, output_layout
from fusion.ir.spec import AttentionSpec
from fusion.planning.choice import Choice, Planner, Tile, query_stationary
from fusion.planning.cpu import MOST_PACKED, one_by_one, portions
from fusion.planning.cpu_measured import MEASURED, Tuner
from fusion.planning.cpu_planner import FEW_QUERIES, WORTH_WAKING, CpuPlanner, all_heads_choice, rows_choice
from fusion.planning.register_tiles import KEY_SPAN, REPRODUCIBLE_PART, AllHeads, ByRows, Target, Tiling, edge_of_spans

from .. import reference
from ..emitter import Edges, Proof
from ..mlir.by_rows.kernel import MOST_KEYS
from ..mlir.kernel import emit
from ..mlir.thread_function import KernelText
from ..mlir.values import round_up
from .calling import MOST_CUT, CompiledKernel, Launch, address, check_sizes, empty_strided, operand_values

if TYPE_CHECKING:
    from typing_extensions import Self


class Variant(CompiledKernel):
    """One compiled kernel: for given d and d_v, and one strategy of products."""

    def __init__(self, spec: AttentionSpec, tiling: Tiling | ByRows | AllHeads, *others: Any):
        """others: see `emit`."""
        self.spec, self.tiled = spec, not isinstance(tiling, ByRows)
        super().__init__(emit(spec, tiling, *others))
        of_batch = lambda *last: shared_rows(self.text.across_heads, spec, last, 1)
        self._shared_rows = functools.lru_cache(maxsize=1024)(of_batch)

    def launch_for(
        self, extents: Sequence[int], values: Mapping[tuple, int], given: Sequence[tuple], splits: int = 1
    ) -> Launch:
        """Function that runs all calls with these sizes (batch sizes.., n_q, n_k, d, d_v) and `values` of other
        parameters, keys in about `splits` parts. given: as in `launcher`."""
        *batch, n_q, n_k, d, d_v = extents
        heads = 1 if self.spec.mixing is None else batch[self.spec.mixing.axis]
        batch = batch_of_items(self.spec, batch)
        text, rows = self.text, math.prod(batch) * n_q
        span, steps = n_q * self._shared_rows(*batch[-1:]), -(-n_k // text.key_step)
        # Rows of a tile are computed whether they exist or not.
        work = rows // n_q * -(-n_q // text.rows) * min(text.rows, n_q + 15) if self.tiled else rows
        work *= heads * steps * text.key_step * (d + d_v)
        threads = min(get_num_threads(), work // WORK_PER_THREAD[self.tiled] + 1)
        plan = work_items(rows, span, text.rows, n_k)
        fixed = REPRODUCIBLE_PART if self.spec.reproducible and text.part_bytes else 0
        if splits > 1 and plan["items"] <= MOST_CUT:
            part_keys = fixed or round_up(-(-n_k // splits), text.part_step)
            plan = work_items(rows, span, text.rows, n_k, part_keys)
        plan["part_keys"] = fixed or plan["part_keys"]
        items, cut = plan["items"], plan["parts"] > 1
        if not (cut or self.tiled):
            plan = work_items(rows, span, min(text.rows, -(-rows // min(threads, rows))), n_k)
            items = plan["items"]
        threads = min(threads, items)
        count, unit = one_by_one(items) if cut else portions(rows // span, plan["blocks"], threads)
        if items // unit * count**2 >= 1 << 63:  # see `KernelFunction._items`
            raise UnsupportedSizeError(f"{items} work items in {count} portions were asked for; split the batch")
        parts, window = -(-n_k // plan["part_keys"]), window_of(text, n_k, threads)
        records = items if cut else threads * parts * (parts > 1)
        plan |= {"portions": count, "unit": unit, "window": window}
        values = {**values, **{(name,): value for name, value in plan.items()}}
        return self.launcher(values, given, threads, min(n_k, window), records * text.part_bytes)


def work_items(rows: int, span: int, block: int, n_k: int, part_keys: int = 0) -> dict[str, int]:
    """Parameters of a call whose `rows` rows are in blocks of `block`, each `span` rows, which read the same keys, by
    themselves; the keys in parts of `part_keys`, if any."""
    blocks, parts = -(-span // block), -(-n_k // part_keys) if part_keys else 1
    return {
        "items": rows // span * blocks * parts, "blocks": blocks, "span": span, "block_rows": -(-span // blocks),
        "parts": parts, "part_keys": part_keys or n_k,
    }  # fmt: skip


def window_of(text: KernelText, rows: int, threads: int) -> int:
    """Number of the rows of keys (or queries, in a backward) that a thread packs at a time: all of them, unless that
    takes more than `MOST_PACKED` bytes."""
    most = MOST_PACKED // (threads * max(1, text.step_bytes)) * text.key_step
    return rows if not text.windowed or rows <= most else max(1, most // text.part_step) * text.part_step


class Prepared(NamedTuple):
    """All that a call needs beside its tensors: what runs it, the shape and strides of the output."""

    launch: Launch
    shape: tuple[int, ...]
    strides: tuple[int, ...]


#: Padded multiply-adds that are worth waking a thread for (some 10 microseconds), in tiles and row by row
WORK_PER_THREAD = {True: 1 << 19, False: WORTH_WAKING}
stride, get_num_threads = torch.Tensor.stride, torch.get_num_threads


def batch_of_items(spec: AttentionSpec, batch: Sequence[int]) -> list[int]:
    """The extents of the batch coordinates that work items are told apart by: all but heads that are mixed."""
    axis = -1 if spec.mixing is None else spec.mixing.axis
    return [1 if k == axis else extent for k, extent in enumerate(batch)]


def shared_rows(across_heads: bool, spec: AttentionSpec, batch: Sequence[int], n_q: int) -> int:
    """Number of successive rows, in the order (batch coordinates.., query), that read the same keys and may be in one
    work item, `across_heads` or not."""
    return n_q * spec.heads_per_key(batch[-1]) if batch and across_heads else n_q


class ForwardKernel:
    """A spec's forward kernel, with or without statistics of rows.

    tilings: how products are formed and, without a planner, the tile; what takes over where numbers cannot be split
    into bfloat16 planes. A kernel runs any lengths. Another d or d_v (where the spec has them as
    run-time sizes) compiles another variant at its first call.
    """

    with_statistics: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec, tilings: Sequence[Tiling], target: Target):
        self.spec, self.tilings, self.target = spec, tuple(tilings), target
        self.extents = extents_function(spec)
        self._variants, self._calls = OncePerKey(), BoundedCache()
        self._out_dtype: torch.dtype = getattr(torch, spec.out_dtype)
        self.proof: Proof | None = None
        self._right = set[tuple]()  # variants that have proved themselves

    def choice(self, sizes: Sequence[int]) -> Choice:
        """Choice for a call with these sizes."""
        raise NotImplementedError

    def _tiling(self, sizes: Sequence[int]) -> Tiling | ByRows | AllHeads:
        """The tiling of a call's choice."""
        raise NotImplementedError

    def prepare(self, sizes: Sequence[int]) -> None:
        """Compile what a call with these sizes will run."""
        *_, n_q, n_k, d, d_v = self.extents(sizes)
        if min(n_q, n_k, d, d_v) > 0:
            self._proven(sizes, self._tiling(sizes))

    def source(self, sizes: Sequence[int]) -> str:
        """The MLIR text of what a call with these sizes runs, headed by its choice; empty where no kernel runs."""
        *_, n_q, n_k, d, d_v = self.extents(sizes)
        if not min(n_q, n_k, d, d_v):
            return ""
        return self.choice(sizes).heading("//") + self.variant(d, d_v, self._tiling(sizes)).text.source

    def variant(self, d: int, d_v: int, tiling: Tiling | ByRows | AllHeads) -> Variant:
        """The variant for these sizes, compiled at first use."""
        make = functools.partial(Variant, self.spec, tiling, self.target, d, d_v, self.with_statistics)
        return self._variants.get_or_make((d, d_v, tiling), make)

    def proved(self, proof: Proof) -> Self:
        """This kernel, whose texts prove themselves before their first use."""
        result = copy.copy(self)
        result.proof, result._calls, result._right = proof, BoundedCache(), set()
        return result

    def _proven(self, sizes: Sequence[int], tiling: Tiling | ByRows | AllHeads) -> Variant:
        """The variant for a call. Raises KernelProofError where it is to be proved and is wrong."""
        *_, d, d_v = self.extents(sizes)
        result = self.variant(d, d_v, tiling)
        if self.proof is not None and (d, d_v, tiling) not in self._right:
            self.proof.results(self._only(tiling), sizes, self._edges(result, tiling), result.text.source)
            self._right.add((d, d_v, tiling))
        return result

    def _only(self, tiling: Tiling | ByRows | AllHeads) -> Self:
        """This kernel, unproved, with this tiling for calls of all sizes, whose keys are cut where they can be."""
        result = copy.copy(self)
        cut = isinstance(tiling, ByRows) or isinstance(tiling, Tiling) and tiling.cut
        chosen = Choice(schedule="", tile=Tile(rows=1, keys=1), keys=0, splits=3 if cut else 1)
        result.proof, result._calls = None, BoundedCache()
        result._tiling, result.choice = lambda sizes: tiling, lambda sizes: chosen  # type: ignore[method-assign]
        return result

    def _edges(self, variant: Variant, tiling: Tiling | ByRows | AllHeads) -> Edges:
        """Edges of its blocks and of the spans after which sums begin anew."""
        if isinstance(tiling, ByRows):
            return Edges(rows=None, keys=MOST_KEYS)
        if isinstance(tiling, AllHeads):
            return Edges(rows=variant.text.rows, keys=KEY_SPAN)
        span = edge_of_spans(self.target, tiling.planes, self.spec.out_dtype)
        return Edges(rows=variant.text.rows, keys=max(span, tiling.keys))

    def _tile(self, tiling: Tiling) -> Tile:
        return Tile(rows=tiling.groups * self.target.lanes, keys=tiling.keys)

    def _prepare_call(
        self,
        operands: Sequence[torch.Tensor],
        sizes: Sequence[int],
        tiling: Tiling | ByRows | AllHeads,
        splits: int = 1,
        more: Mapping[tuple, int] = MappingProxyType({}),
        given: Sequence[tuple] = (),
    ) -> Prepared:
        """more, given: parameters beside those of every call, which `given` are addresses."""
        extents = self.extents(sizes)
        *batch, n_q, n_k, d, d_v = extents
        check_sizes(*extents, *sizes)
        shape, strides = output_layout(self.spec, [*batch, n_q, d_v])
        out = {("out_stride", name): n for name, n in zip(self.spec.output.dims, strides, strict=True)}
        values = {**operand_values(self.spec, map(stride, operands), sizes), **out, **more}
        addresses = [*(("ptr", number) for number in range(len(operands))), ("ptr", "out"), *given]
        launch = self._proven(sizes, tiling).launch_for(extents, values, addresses, splits)
        return Prepared(launch, shape, strides)


class Kernel(ForwardKernel):
    """A spec's kernel: call it with the operand tensors and the values of `spec.sizes`; returns the output tensor.
    planner: makes the choice of every call. tuner: measures its best few."""

    def __init__(
        self, spec: AttentionSpec, tilings: Sequence[Tiling], target: Target, planner: Planner | None = None,
        tuner: Tuner | None = None,
    ):  # fmt: skip
        super().__init__(spec, tilings, target)
        self.planner, self.tuner, self._chosen = planner, tuner, BoundedCache()

    def _only(self, tiling: Tiling | ByRows | AllHeads) -> Self:
        result = super()._only(tiling)
        result.tuner = None
        return result

    def choice(self, sizes: Sequence[int]) -> Choice:
        """Choice for a call with these sizes, once for equal sizes."""
        key = tuple(sizes)
        return self._chosen.get(key) or self._chosen.store(key, self._choose(sizes))

    def _choose(self, sizes: Sequence[int]) -> Choice:
        *_, n_q, n_k, _, _ = self.extents(sizes)
        if self.planner is not None:
            planned = self.planner.choose(sizes, self._made(sizes))
            return (self.tuner and self.tuner.choice(self.extents(sizes), planned)) or planned
        if self.spec.mixing is not None:
            return all_heads_choice(self.target, n_k)
        schedule = query_stationary(self.spec)
        if n_q <= FEW_QUERIES and not self.spec.reproducible:
            return rows_choice(schedule, self.target.lanes, n_k)
        return Choice(schedule=schedule, tile=self._tile(self.tilings[0]), keys=n_k)

    def _made(self, sizes: Sequence[int]) -> list[Choice]:
        """The choices whose kernels exist for a call with these sizes."""
        *_, d, d_v = self.extents(sizes)
        planes, schedule = self.tilings[0].planes, query_stationary(self.spec)
        results = [tiling for *widths, tiling in list(self._variants) if widths == [d, d_v]]
        tilings = [tiling for tiling in results if isinstance(tiling, Tiling) and tiling.planes == planes]
        rows = [rows_choice(schedule, self.target.lanes, 0)] if self._by_rows(sizes) in results else []
        tiles = [(self._tile(tiling), 2 if tiling.cut else 1) for tiling in tilings]
        return [*rows, *(Choice(schedule=schedule, tile=tile, keys=0, splits=parts) for tile, parts in tiles)]

    def _by_rows(self, sizes: Sequence[int]) -> ByRows:
        *batch, n_q, _, _, _ = self.extents(sizes)
        return ByRows(rows_at_once=1 << min(shared_rows(True, self.spec, batch, n_q) - 1, 2).bit_length())

    def _tiling(self, sizes: Sequence[int]) -> Tiling | ByRows | AllHeads:
        """The tiling of a call's choice. Raises RefusedChoiceError where there is none."""
        return AllHeads() if self.spec.mixing is not None else self._tiling_of(self.choice(sizes), sizes)

    def _tiling_of(self, choice: Choice, sizes: Sequence[int]) -> Tiling | ByRows:
        base, tile = self.tilings[0], choice.tile
        if tile.rows == 1:
            return self._by_rows(sizes)
        rows, keys = self.target.register_tile(base.planes)
        if self.spec.reproducible:
            rows = min(rows, round_up(tile.rows, self.target.lanes))
        if tile.rows % rows or tile.keys % keys:
            raise RefusedChoiceError(
                f"{choice.schedule} in {choice} cannot run: CPU kernels take whole multiples of {rows} x {keys}"
            )
        if choice.splits > 1 and self.spec.aux_outputs:
            raise RefusedChoiceError(
                f"{choice.schedule} in {choice} cannot run: CPU kernels do not cut keys into parts where more than the "
                "output is wanted"
            )
        groups = tile.rows // self.target.lanes
        block = min(groups, base.group_block)
        return replace(base, groups=groups, group_block=block, keys=tile.keys, cut=base.cut or choice.splits > 1)

    def __call__(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        # A short call takes no longer than its bookkeeping: what follows from sizes and strides is derived once.
        key = (get_num_threads(), *sizes, *map(stride, operands))
        prepared = self._calls.get(key)
        if prepared is None:
            extents = self.extents(sizes)
            if not math.prod(extents):
                return self._nothing(operands, sizes, extents)
            prepared = self._keep(key, operands, sizes)
        launch, shape, strides = prepared
        out = empty_strided(shape, strides, self._out_dtype)
        addresses = (*map(address, operands), address(out))
        if not launch(addresses):
            self._prepare_call(operands, sizes, self.tilings[1]).launch(addresses)
        return out

    def _nothing(self, operands: Sequence[torch.Tensor], sizes: Sequence[int], extents: Sequence[int]) -> torch.Tensor:
        """The result where there are no keys, or vectors without elements, or nothing is asked for."""
        *batch, n_q, _, _, d_v = extents
        if math.prod(batch) and n_q and d_v:
            return reference.run(self.spec, operands, sizes)
        shape, strides = output_layout(self.spec, [*batch, n_q, d_v])
        return empty_strided(shape, strides, self._out_dtype)

    def _measure(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        """Time the planner's best choices for a call, unless the fastest is known."""
        if self.tuner is None or not isinstance(self.planner, CpuPlanner) or self.choice(sizes).measured:
            return
        choices = self.planner.best(sizes, MEASURED)
        if len(choices) == 1 or torch.are_deterministic_algorithms_enabled():
            return
        calls = [self._prepare_call(operands, sizes, self._tiling_of(each, sizes), each.splits) for each in choices]
        out = empty_strided(calls[0].shape, calls[0].strides, self._out_dtype)
        addresses = (*map(address, operands), address(out))
        launches = [functools.partial(call.launch, addresses) for call in calls]
        self.tuner.measure(self.extents(sizes), dict(zip(choices, launches, strict=True)))
        self._chosen.store(tuple(sizes), self._choose(sizes))

    def _keep(self, key: tuple, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> Prepared:
        self._measure(operands, sizes)
        splits = self.choice(sizes).splits
        return self._calls.store(key, self._prepare_call(operands, sizes, self._tiling(sizes), splits))
