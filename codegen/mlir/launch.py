"""The forward kernels of a spec: the tile of a call, its parameters, its output."""

from __future__ import annotations

import functools
import math
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fusion.codegen import reference
from fusion.codegen.mlir.calling import (
    MOST_CUT,
    Function,
    bytes_per_thread,
    check_sizes,
    extents_function,
    memory,
)
from fusion.codegen.mlir.compile import compile_text
from fusion.codegen.mlir.kernel import emit
from fusion.codegen.mlir.products import round_up
from fusion.codegen.mlir.row_kernel import emit_rows
from fusion.codegen.mlir.skeleton import KernelText
from fusion.codegen.mlir.sparse_kernel import emit_sparse
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.work_items import ByRows, Tiling
from fusion.errors import RefusedChoiceError
from fusion.ir.spec import AttentionSpec
from fusion.planning.choice import Choice, Planner, Tile, query_stationary
from fusion.planning.cpu_planner import rows_choice
from fusion.planning.cpu_rows import FEW_QUERIES, WORTH_WAKING
from fusion.planning.portions import one_by_one, portions

FROM_CALL = {"workspace_bytes": "per_thread", "key_steps": "steps"} | {
    name: name for name in ("items", "blocks", "portions", "unit", "span", "together", "parts", "part_keys")
}
"""Parameters that are fields of a `Call`, and which."""


def slot_functions(text: KernelText, spec: AttentionSpec) -> tuple[Callable[..., list[int]], Callable[..., None]]:
    """Two functions that make a call's parameters.

    `fixed(sizes, strides of the operands, strides of the output, call)`: all slots, with 0 for addresses;
    `vary(slots, operands, out, workspace, partials, memory, selection)`: writes the others into `slots`. memory: a
    `ThreadMemory`.
    """
    places = {name: f"memory.{name}_address" for name in ("flag", "counter", "arrivals")} | {"out": "out.data_ptr()"}
    selected = {("ptr", "marks"): 0, ("ptr", "skipped"): 1, ("share",): 2}

    def fixed(slot: tuple) -> str:
        if slot[0] in FROM_CALL:
            return f"call.{FROM_CALL[slot[0]]}"
        if slot in selected or slot[0] == "ptr":
            return "0"
        if slot[0] == "stride":
            return f"t[{slot[1]}][{slot[2]}]"
        return f"s[{spec.sizes.index(slot[1])}]" if slot[0] == "size" else f"u[{spec.output.dims.index(slot[1])}]"

    def varying(slot: tuple) -> str | None:
        if slot in selected:
            return f"selection[{selected[slot]}]"
        if slot[0] != "ptr":
            return None
        if isinstance(slot[1], int):
            return f"o[{slot[1]}].data_ptr()"
        return places.get(slot[1], slot[1])

    written = [f"    slots[{n}] = {term}" for n, slot in enumerate(text.slots) if (term := varying(slot)) is not None]
    lines = [
        "def fixed(s, t, u, call):",
        f"    return [{', '.join(map(fixed, text.slots))}]",
        "def vary(slots, o, out, workspace, partials, memory, selection):",
        *written,
    ]
    namespace: dict[str, Callable] = {}
    exec("\n".join(lines), namespace)
    return namespace["fixed"], namespace["vary"]


class Variant:
    """One compiled kernel: for given d and d_v, and one strategy of products. selective: only tiles that are marked are
    computed."""

    def __init__(
        self, spec: AttentionSpec, tiling: Tiling | ByRows, target: Target, d: int, d_v: int, selective: bool = False
    ):
        self.tiled = isinstance(tiling, Tiling)
        self.text: KernelText = (
            (emit_sparse if selective else emit)(spec, tiling, target, d, d_v)
            if isinstance(tiling, Tiling)
            else emit_rows(spec, target, d, d_v, alone=tiling.alone)
        )
        self.function = Function(compile_text(self.text.source, "attention"), len(self.text.slots))
        self.spec, self.tiling = spec, tiling
        self._fixed, self._vary = slot_functions(self.text, spec)
        self._together = functools.cache(lambda *last: span_of(self.text, spec, last, 1))

    def call(self, extents: Sequence[int], threads: int, splits: int = 1) -> Call:
        """What follows from the sizes of a call (batch sizes.., n_q, n_k, d, d_v) on at most `threads` threads, keys in
        about `splits` parts."""
        *batch, n_q, n_k, d, d_v = extents
        text, rows = self.text, math.prod(batch) * n_q
        span, steps = n_q * self._together(*batch[-1:]), -(-n_k // text.key_step)
        # Rows of a tile are computed whether they exist or not.
        work = rows // n_q * -(-n_q // text.rows) * min(text.rows, n_q + 15) if self.tiled else rows
        work *= steps * text.key_step * (d + d_v)
        threads = min(threads, work // WORK_PER_THREAD[self.tiled] + 1)
        blocks = -(-span // text.rows)
        part_keys, parts = n_k, 1
        if splits > 1 and rows // span * blocks <= MOST_CUT:
            part_keys = round_up(-(-n_k // splits), text.part_step)
            parts = -(-n_k // part_keys)
        if parts == 1:
            blocks = -(-span // min(text.rows, span if self.tiled else -(-rows // min(threads, rows))))
        items = rows // span * blocks * parts
        threads = min(threads, items)
        count, unit = one_by_one(items) if parts > 1 else portions(rows // span, blocks, threads)
        return Call(
            threads=threads,
            per_thread=bytes_per_thread(text, steps),
            steps=steps,
            items=items,
            blocks=blocks,
            portions=count,
            unit=unit,
            span=span,
            together=-(-span // blocks),
            parts=parts,
            part_keys=part_keys,
            shared=items * text.part_bytes if parts > 1 else 0,
        )

    def launcher(
        self, sizes: Sequence[int], strides: Sequence[Sequence[int]], out_strides: Sequence[int], call: Call
    ) -> Launcher:
        """What runs all calls with these sizes and strides (of the operands, of the output).

        Between two calls a model reads megabytes of weights, so that whatever a call touches has left the caches: each
        object and frame more costs microseconds, not what a loop of calls shows. What can be looked up is, here.
        """
        fixed = memoryview(array("q", self._fixed(sizes, strides, out_strides, call)))
        own, count, vary, may_flag = call.threads * call.per_thread, len(fixed), self._vary, self.text.may_flag
        room, run = own + call.shared, self.function.on(call.threads)

        def launch(operands: Sequence[torch.Tensor], out: torch.Tensor, selection: tuple[int, ...] = ()) -> bool:
            mine = memory.own
            workspace, slots = mine.reserve(room), mine.slots
            mine.counter.value = 0
            slots[:count] = fixed
            vary(slots, operands, out, workspace, workspace + own, mine, selection)
            run(mine.packed)
            return not (may_flag and mine.flagged())

        return launch


Launcher = Callable[..., bool]
"""(operands, out, selection) writes the attention to `out`; False where values were met that the products cannot take.
selection: what a selective kernel is given (see `sparse_kernel`)."""


class Call(NamedTuple):
    """What a variant derives from the sizes of a call: threads, bytes of each one's workspace, key steps, work items
    (`blocks` per `span` of rows that read the same keys, of at most `together` rows, times `parts` of `part_keys`
    keys), in how many portions threads take them, how many items stay together, and bytes that parts leave for each
    other."""

    threads: int
    per_thread: int
    steps: int
    items: int
    blocks: int
    portions: int
    unit: int
    span: int
    together: int
    parts: int
    part_keys: int
    shared: int


class _Prepared(NamedTuple):
    """All that a call needs beside its tensors: what runs it, and the shape and strides of the output."""

    launch: Launcher
    shape: tuple[int, ...]
    strides: tuple[int, ...]


#: Padded multiply-adds that are worth waking a thread for (some 10 microseconds), in tiles and row by row
WORK_PER_THREAD = {True: 1 << 19, False: WORTH_WAKING}
CALLS_KEPT = 4096
empty_strided = torch._C._dynamo.guards._empty_strided_cpu  # what Inductor's code calls: half the time of torch's own
stride, get_num_threads = torch.Tensor.stride, torch.get_num_threads


def rows_together(spec: AttentionSpec, batch: Sequence[int], n_q: int) -> int:
    """How many rows that follow each other, in the order (batch coordinates.., query), read the same keys."""
    return n_q * spec.heads_per_key(batch[-1]) if batch else n_q


def span_of(text: KernelText, spec: AttentionSpec, batch: Sequence[int], n_q: int) -> int:
    """How many of these may be in one work item."""
    return rows_together(spec, batch, n_q) if text.across_heads else n_q


class Kernel:
    """A spec's kernel: call it with the operand tensors and the values of `spec.sizes`; returns the output tensor.

    tilings: how products are formed and, without a planner, the tile; what takes over where numbers cannot be split
    into bfloat16 planes. planner: makes the choice of every call. A kernel runs any lengths. Another d or d_v (where
    the spec has them as run-time sizes) compiles another variant at its first call.
    """

    def __init__(self, spec: AttentionSpec, tilings: Sequence[Tiling], target: Target, planner: Planner | None = None):
        self.spec, self.tilings, self.target, self.planner = spec, tuple(tilings), target, planner
        self._extents = extents_function(spec)
        self._variants: dict[tuple[int, int, Tiling | ByRows], Variant] = {}
        self._chosen: dict[tuple[int, ...], Choice] = {}
        self._calls: dict[tuple, _Prepared] = {}
        self._lock = threading.Lock()
        names = [*(f"b{axis}" for axis in range(len(spec.batch))), "i", "e"]
        self._dims = [names.index(name) for name in spec.output.dims]
        self._slowest_last = [spec.output.dims.index(name) for name in reversed(spec.output.order)]
        self._out_dtype: torch.dtype = getattr(torch, spec.out_dtype)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Compile what a call with these sizes will run."""
        *_, n_q, n_k, d, d_v = self._extents(sizes)
        if min(n_q, n_k, d, d_v) > 0:
            self.variant(d, d_v, self._tiling(sizes))

    def choice(self, sizes: Sequence[int]) -> Choice:
        """How a call with these sizes runs; calls that were met before run as before."""
        key = tuple(sizes)
        if (found := self._chosen.get(key)) is None:
            if len(self._chosen) >= CALLS_KEPT:
                self._chosen.clear()
            found = self._chosen[key] = self._choose(sizes)
        return found

    def _choose(self, sizes: Sequence[int]) -> Choice:
        *_, n_q, n_k, d, d_v = self._extents(sizes)
        if self.planner is not None:
            return self.planner.choose(sizes, self._made(d, d_v))
        schedule = query_stationary(self.spec)
        if n_q <= FEW_QUERIES:
            return rows_choice(schedule, self.target.lanes, n_k)
        return Choice(schedule=schedule, tile=self._tile(self.tilings[0]), keys=n_k)

    def _made(self, d: int, d_v: int) -> list[Choice]:
        """The choices whose kernels exist for these widths."""
        planes, schedule = self.tilings[0].planes, query_stationary(self.spec)
        return [
            Choice(schedule=schedule, tile=self._tile(tiling), keys=0)
            for *widths, tiling in list(self._variants)
            if isinstance(tiling, Tiling) and widths == [d, d_v] and tiling.planes == planes
        ]

    def _tile(self, tiling: Tiling) -> Tile:
        return Tile(rows=tiling.groups * self.target.lanes, keys=tiling.keys)

    def _tiling(self, sizes: Sequence[int]) -> Tiling | ByRows:
        """The tiling of a call's choice. Raises RefusedChoiceError where there is none."""
        choice = self.choice(sizes)
        base, tile = self.tilings[0], choice.tile
        if tile.rows == 1:
            *batch, n_q, _, _, _ = self._extents(sizes)
            return ByRows(alone=rows_together(self.spec, batch, n_q) == 1)
        rows, keys = self.target.register_tile(base.planes)
        if choice.splits > 1 or tile.rows % rows or tile.keys % keys:
            raise RefusedChoiceError(
                f"{choice.schedule} in {choice} cannot run: CPU kernels take whole multiples of {rows} x {keys}, and "
                "cut keys into parts only row by row"
            )
        return replace(base, groups=tile.rows // self.target.lanes, keys=tile.keys)

    def source(self, sizes: Sequence[int]) -> str:
        """The MLIR text of what a call with these sizes runs, headed by its choice; empty where no kernel runs."""
        *_, n_q, n_k, d, d_v = self._extents(sizes)
        if not min(n_q, n_k, d, d_v):
            return ""
        return self.choice(sizes).heading("//") + self.variant(d, d_v, self._tiling(sizes)).text.source

    def variant(self, d: int, d_v: int, tiling: Tiling | ByRows) -> Variant:
        """The variant for these sizes, compiled at first use."""
        key = (d, d_v, tiling)
        if (found := self._variants.get(key)) is None:
            with self._lock:
                if (found := self._variants.get(key)) is None:
                    found = self._variants[key] = Variant(self.spec, tiling, self.target, d, d_v)
        return found

    def __call__(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        # A short call takes no longer than its bookkeeping: what follows from sizes and strides is derived once.
        key = (get_num_threads(), *sizes, *map(stride, operands))
        prepared = self._calls.get(key)
        if prepared is None:
            extents = self._extents(sizes)
            if not math.prod(extents):
                return self._nothing(operands, sizes, extents)
            prepared = self._keep(key, operands, sizes)
        launch, shape, strides = prepared
        out = empty_strided(shape, strides, self._out_dtype)
        if not launch(operands, out):
            self._prepare_call(operands, sizes, self.tilings[1], 1).launch(operands, out)
        return out

    def _nothing(self, operands: Sequence[torch.Tensor], sizes: Sequence[int], extents: Sequence[int]) -> torch.Tensor:
        """The result where there are no keys, or vectors without elements, or nothing is asked for."""
        *batch, n_q, _, _, d_v = extents
        if math.prod(batch) and n_q and d_v:
            return reference.run(self.spec, operands, sizes)
        shape, strides = self._layout([*batch, n_q, d_v])
        return empty_strided(shape, strides, self._out_dtype)

    def _keep(self, key: tuple, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> _Prepared:
        if len(self._calls) >= CALLS_KEPT:
            self._calls.clear()
        splits = self.choice(sizes).splits
        return self._calls.setdefault(key, self._prepare_call(operands, sizes, self._tiling(sizes), splits))

    def _prepare_call(
        self, operands: Sequence[torch.Tensor], sizes: Sequence[int], tiling: Tiling | ByRows, splits: int
    ) -> _Prepared:
        extents = self._extents(sizes)
        *batch, n_q, n_k, d, d_v = extents
        check_sizes(n_q, n_k, *sizes)
        variant = self.variant(d, d_v, tiling)
        call = variant.call(extents, torch.get_num_threads(), splits)
        shape, strides = self._layout([*batch, n_q, d_v])
        launch = variant.launcher(sizes, [*map(stride, operands)], strides, call)
        return _Prepared(launch, shape, strides)

    def _layout(self, extents: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of the result; extents of the batch coordinates, i and e."""
        shape = [extents[axis] for axis in self._dims]
        strides, step = [0] * len(shape), 1
        for position in self._slowest_last:
            strides[position] = step
            step *= max(shape[position], 1)
        return tuple(shape), tuple(strides)
