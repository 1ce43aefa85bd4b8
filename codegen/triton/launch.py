"""Calls of a kernel: the output, the kernel's arguments from tensors and sizes, and the grid."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusion.caching import OncePerKey
from fusion.errors import UnsupportedSizeError
from fusion.ir.ranges import LARGEST_SIZE
from fusion.ir.results import extents_function, result_names, statistics_shape
from fusion.ir.spec import AttentionSpec
from fusion.machine import INTERPRETER, Machine, of_device
from fusion.planning.choice import Choice, Tile
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_clocks import may_share_values

from .. import reference
from . import autotune, module, peers
from .ahead_of_time import Resources, resources
from .apart import Request
from .autotune import Call, Stage, Tuner, call_of
from .candidates import candidates
from .descriptors import descriptors
from .dtypes import allows_tf32
from .forward import Forward
from .kernel import KernelText
from .key_loop import PLAIN, Order
from .split import Combine, Part
from .tile_lists import TileLists, places
from .variant import Variant


class Kernel:
    """A spec's forward kernel: call it with the operand tensors and the values of `spec.sizes`; returns the output
    tensor.

    CPU tensors are run by Triton's interpreter.

    tile, splits: in place of the planned ones.
    statistics: whether `forward` is used, which returns each row's statistics too.
    tuner: measures tiles.
    packed: heads that are merged into the rows of this spec (`fusion.planning.gpu_layout`).
    plan: the planner for a machine, which makes the choice of each call; without it a `GpuPlanner` does.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        tile: Tile | None = None,
        statistics: bool = False,
        splits: int | None = None,
        tuner: Tuner | None = None,
        packed: int = 1,
        plan: Callable[[Machine], GpuPlanner] | None = None,
    ):
        # Where results are to be reproducible, inference runs the text of training.
        self.spec, self.statistics, self.packed = spec, statistics or spec.reproducible, packed
        self.tuner = tuner if tile is None and not spec.reproducible else None
        fixed: Any = {"tile": tile, "splits": splits, "packs": not self.statistics, "group": packed}
        plan = plan or functools.partial(GpuPlanner, spec, **fixed)
        self.planner = functools.cache(lambda device: plan(machine_of(device)))
        self._packing = OncePerKey()  # by the number of heads and the device
        self._may_share = may_share_values(spec)
        self.extents = extents_function(spec)
        self._peers = functools.cache(functools.partial(peers.calls, spec))
        self._variants = OncePerKey()
        self._memory = [result_names(spec).index(name) for name in spec.output.order]
        self._dims = [spec.output.order.index(name) for name in spec.output.dims]
        self._out_dtype: torch.dtype = getattr(torch, spec.out_dtype)

    def source(self, sizes: Sequence[int]) -> str:
        """Text of the module that a call with these sizes and aligned tensors runs, headed by its choice; empty where
        no kernel runs."""
        *batch, n_q, n_k, d, d_v = self.extents(sizes)
        if not min(n_q, n_k, d, d_v):
            return ""
        device = current_device()
        if (other := self._packed(batch, n_q, device)) is not self:
            return other.source(sizes)
        choice = self.choice(sizes)
        return choice.heading("#") + self._variant_of(choice, choice.tile, device, (d, d_v)).source

    def resources(self, sizes: Sequence[int], target: str) -> list[Resources]:
        """Resources of the kernels of `source`, compiled for a GPU that need not be there; without the kernel that
        lists tiles. Raises RuntimeError where Triton or ptxas refuses one."""
        *batch, n_q, n_k, d, d_v = self.extents(sizes)
        device = current_device()
        if (other := self._packed(batch, n_q, device)) is not self:
            return other.resources(sizes, target)
        choice = self.choice(sizes)
        text, tile = self._variant_of(choice, choice.tile, device, (d, d_v)).source, choice.tile
        tiles = {_kernel_of(choice): tile} | ({Combine.name: combining_tile(tile)} if choice.splits > 1 else {})
        loaded = module.load(text)
        return [resources(self.spec, getattr(loaded, name), (d, d_v), tiles[name], target) for name in tiles]

    def variant(self, d: int, d_v: int, interpreted: bool, split: bool = False, order: Order = PLAIN) -> Variant:
        """Module for these sizes, schedule and order, built at first use."""

        def make() -> Variant:
            kernels = (split_kernels if split else forward_kernels)(self.spec, d, d_v, self.statistics, order)
            return Variant(self.spec, kernels, d, d_v, interpreted, order)

        return self._variants.get_or_make((d, d_v, interpreted, split, order), make)

    def __call__(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        return self.forward(operands, sizes)[0]

    def forward(
        self, operands: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output, statistics): for each row the maximum and the sum, float32 [3 or 5, b.., i], where they are needed;
        so many planes because that is the op's result on every device. The others hold nothing."""
        *batch, n_q, n_k, d, d_v = self.extents(sizes)
        device = operands[0].device
        extents = [*batch, n_q, d_v]
        stored = torch.empty([extents[axis] for axis in self._memory], dtype=self._out_dtype, device=device)
        out = stored.permute(self._dims)
        statistics = None
        if self.statistics:
            statistics = torch.empty(statistics_shape(self.spec, sizes), dtype=torch.float32, device=device)
        if n_k == 0 or d == 0 or out.numel() == 0:  # nothing worth a kernel
            out = reference.run(self.spec, operands, sizes) if out.numel() else out
            return out, None if statistics is None else statistics.zero_()
        check_sizes((*extents, n_k))
        self._packed(batch, n_q, device)._launch(operands, sizes, {"out": out, "statistics": statistics})
        return out, statistics

    def _packed(self, batch: Sequence[int], n_q: int, device: torch.device) -> Kernel:
        """Kernel in which heads that share keys share blocks of rows, or this one."""
        planner = self.planner(device)
        if (group := planner.group_of(batch, n_q)) == 1:
            return self
        other = planner.packing(group)
        make = functools.partial(Kernel, other.spec, tuner=self.tuner, packed=group, plan=lambda _: other)
        return self._packing.get_or_make((group, device), make)

    def _shares(self, operands: Sequence[torch.Tensor]) -> bool:
        """Whether V is the first columns of K in this call."""
        k, v = operands[1:3]
        alike = self._may_share and not self.spec.reproducible and k.dtype == v.dtype and k.stride() == v.stride()
        return alike and k.data_ptr() == v.data_ptr()

    def _launch(self, operands: Sequence[torch.Tensor], sizes: Sequence[int], results: dict[str, Any]) -> None:
        run = _ForwardLaunches(self, operands, sizes, results)

        def request() -> Request:
            given: dict[str, Any] = {"statistics": self.statistics, "packed": self.packed}
            return Request(spec=self.spec.to_json(), operands=operands, sizes=tuple(sizes), **given)

        autotune.run([self._stage(run.device, sizes, run)], run.call(self.tuner), self.tuner, lambda: None, request)

    def _stage(self, device: torch.device, sizes: Sequence[int], run: _ForwardLaunches | None = None) -> Stage:
        """Schedule and planned tile for a call, and the peers that may compute it: not where statistics of rows are
        needed. run: the launches; None where nothing is launched."""
        *_, n_q, n_k, d, d_v = extents = self.extents(sizes)
        planner = self.planner(device)
        choice = planner.choose(sizes)

        def variant(tile: Tile) -> Variant:
            return self._variant_of(choice, tile, device, (d, d_v), run)

        def launch(tile: Tile) -> None:
            assert run is not None
            run(variant(tile), tile)

        def trusted() -> bool:
            return run is None or peers.as_exact_as_eager(self.spec, run.operands, sizes, run.results["out"])

        calls = {} if self.tuner is None or self.statistics else self._peers(device)
        given = (run.operands, sizes, extents, run.results["out"]) if run is not None else ()
        return Stage(
            kernel=_kernel_of(choice),
            variant=variant(choice.tile),
            tile=choice.tile,
            launch=launch,
            others=lambda: candidates(Forward.name, self.spec, (n_q, n_k, d, d_v), choice.tile, planner.machine),
            results=[] if run is None else [run.results["out"]],
            peers={name: functools.partial(call, *given) for name, call in calls.items()},
            trusted=trusted,
            shrinks=not self.spec.reproducible,
        )

    def _variant_of(
        self,
        choice: Choice,
        tile: Tile,
        device: torch.device,
        widths: tuple[int, int],
        run: _ForwardLaunches | None = None,
    ) -> Variant:
        """Module for a tile in a choice's schedule: without descriptors, if they cannot describe the operands of the
        call `run`."""
        split, interpreted = choice.splits > 1, device.type == "cpu"
        order = order_of(tile, split, run is not None and self._shares(run.operands), self.packed)
        found = self.variant(*widths, interpreted, split, order)
        if run is None or run.describes(found, _kernel_of(choice)):
            return found
        return self.variant(*widths, interpreted, split, replace(order, described=False))

    def choice(self, sizes: Sequence[int]) -> Choice:
        """Choice for a call with these sizes and aligned tensors on the current device, as far as is known before
        it."""
        device = current_device()
        *batch, n_q, n_k, d, d_v = self.extents(sizes)
        if (other := self._packed(batch, n_q, device)) is not self:
            return other.choice(sizes)
        heads, planner = math.prod(batch), self.planner(device)
        choice = planner.choose(sizes)
        if (self.tuner is not None or self._variants) and 0 not in (heads, n_q, n_k, d, d_v):
            stage = self._stage(device, sizes)
            aligned = [torch.empty(0, dtype=torch.float32, device=device)]
            call = call_of(aligned, sizes, (heads, n_q, n_k), precision(self.spec.dtype), self.tuner)
            measured = self.tuner is not None and self.tuner.tile(stage, call) is not None
            choice = planner.in_tile(choice, autotune.settled(stage, call, self.tuner), sizes, measured)
            if self.tuner is not None:
                choice = replace(choice, peer=self.tuner.peer(stage, call))
        return choice

    def prepare(self, sizes: Sequence[int]) -> None:
        """Does nothing: Triton compiles a kernel for the tensors of its first launch."""


def _kernel_of(choice: Choice) -> str:
    return Part.name if choice.splits > 1 else Forward.name


class Launches:
    """Launches of one call. results: tensors that kernels read and write beside the operands, by name. extents: of the
    batch coordinates, queries, keys, columns of Q and of V."""

    def __init__(
        self,
        spec: AttentionSpec,
        operands: Sequence[torch.Tensor],
        sizes: Sequence[int],
        results: dict[str, Any],
        extents: Sequence[int],
    ):
        self.spec, self.operands, self.sizes, self.results = spec, operands, sizes, results
        *self.batch, self.n_q, self.n_k, self.d, self.d_v = extents
        self.heads, self.device = math.prod(self.batch), operands[0].device
        tanh = "tanh" in machine_of(self.device).isa
        self.fixed = {"PRECISION": precision(spec.dtype), "UNIT_TANH": tanh}  # constants of kernels beside their tile
        self.described = dict(zip("qkv", operands, strict=False))  # what descriptors may describe

    def call(self, tuner: Tuner | None) -> Call:
        return call_of(self.operands, self.sizes, (self.heads, self.n_q, self.n_k), precision(self.spec.dtype), tuner)

    def blocks(self, tile: Tile) -> tuple[int, int]:
        """(number of tiles along the queries, number of tiles along the keys)."""
        return -(-self.n_q // tile.rows), -(-self.n_k // tile.keys)

    def describes(self, variant: Variant, name: str) -> bool:
        """Whether descriptors can describe the tensors that a kernel reads by them."""
        return all(box.fits(self.described[box.name]) for box in variant.boxes[name])

    def run(self, variant: Variant, name: str, grid: int, tile: Tile, **others: int) -> None:
        """Launch a kernel. grid: the number of programs. others: integers that the kernel takes."""
        made = descriptors(variant.boxes[name], self.described, (self.n_q, tile.rows), (self.n_k, tile.keys))
        arguments = (self.operands, self.sizes, self.results, others | made)
        variant.launch(name, grid, tile, self.fixed, arguments)

    def list_tiles(self, variant: Variant, name: str, tile: Tile, across: tuple[int, int]) -> None:
        """Build the lists of `tile_lists`, where a module has the kernel. across: the number of blocks with a list
        each, and of the tiles that each may visit."""
        if name in variant.kernels:
            lists = places(self.spec, self.batch) * across[0]
            for what, each in (("tile_list", across[1]), ("tile_counts", 2)):
                self.results[what] = torch.empty([lists, each], dtype=torch.int32, device=self.device)
            self.run(variant, name, lists, list_tile(tile))


class _ForwardLaunches(Launches):
    def __init__(self, kernel: Kernel, operands: Sequence[torch.Tensor], sizes: Sequence[int], results: dict[str, Any]):
        super().__init__(kernel.spec, operands, sizes, results, kernel.extents(sizes))
        self.planner = kernel.planner(self.device)

    def __call__(self, variant: Variant, tile: Tile) -> None:
        self.list_tiles(variant, TileLists.name, tile, self.blocks(tile))
        schedule = self._split if Part.name in variant.kernels else self._flash
        schedule(variant, tile)

    def _flash(self, variant: Variant, tile: Tile) -> None:
        self.run(variant, Forward.name, self.heads * self.blocks(tile)[0], tile, section=self._section())

    def _split(self, variant: Variant, tile: Tile) -> None:
        programs, small = self.heads * self.blocks(tile)[0], combining_tile(tile)
        splits = self.planner.splits_of(programs, self.sizes, tile)
        rows = splits * self.heads * self.n_q
        parts = torch.empty([rows * (self.d_v + 2)], dtype=torch.float32, device=self.device)
        split = parts.split([rows * self.d_v, rows, rows])
        self.results |= dict(zip(("part", "part_max", "part_sum"), split, strict=True))
        others = {"section": self._section(), "splits": splits}
        self.run(variant, Part.name, programs * splits, tile, **others)
        self.run(variant, Combine.name, self.heads * self.blocks(small)[0], small, **others)

    def _section(self) -> int:
        """Number of heads that run side by side: their keys and values fill half of the L2 cache."""
        half = self.planner.machine.level("L2").capacity // 2
        each = max(1, self.n_k * (self.d + self.d_v) * self.operands[1].element_size())
        return max(1, min(self.heads, half // each))


def forward_kernels(spec: AttentionSpec, d: int, d_v: int, statistics: bool, order: Order = PLAIN) -> list[KernelText]:
    """Kernel of the schedule `flash`, or where a mask has a map those of `block_sparse`, in launch order."""
    forward = Forward(spec, d, d_v, statistics, order)
    return [TileLists(spec).text(), forward.text()] if forward.listed else [forward.text()]


def split_kernels(spec: AttentionSpec, d: int, d_v: int, statistics: bool, order: Order = PLAIN) -> list[KernelText]:
    """Kernels of the schedule `split_k`, in launch order."""
    part, combine = Part(spec, d, d_v, order=order), Combine(spec, d, d_v, statistics, order)
    return [*([TileLists(spec).text()] if part.listed else []), part.text(), combine.text()]


def combining_tile(tile: Tile) -> Tile:
    """Tile for the combination of partial results: a few rows, since all of them are read from memory anyway."""
    return Tile(rows=min(16, tile.rows), keys=tile.keys, warps=4, stages=1)


def list_tile(tile: Tile) -> Tile:
    """Sizes of a kernel's tile for the kernel that builds its lists: one warp looks up all of a block's tiles."""
    return Tile(rows=tile.rows, keys=tile.keys, warps=1, stages=1)


def check_sizes(extents: Sequence[int]) -> None:
    """Raise UnsupportedSizeError where a size does not fit the kernels' 32-bit coordinates."""
    if max(extents) >= LARGEST_SIZE:
        raise UnsupportedSizeError(f"a size of {max(extents)} was met; GPU kernels take sizes below {LARGEST_SIZE}")


def precision(dtype: str) -> str:
    """Precision of products: that of torch's own setting for float32."""
    return "tf32" if dtype == "float32" and allows_tf32() else "ieee"


@functools.lru_cache(maxsize=64)
def machine_of(device: torch.device) -> Machine:
    """Machine of a device; the interpreter for tensors of CPUs."""
    return INTERPRETER if device.type == "cpu" else of_device(device.index)


@functools.cache
def current_device() -> torch.device:
    """Device of the kernels: the current GPU, or the CPU for the interpreter."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def order_of(tile: Tile, split: bool, shared: bool, packed: int) -> Order:
    """Form of the loop that runs a tile. split: parts of the keys have separate programs. shared: V is the first
    columns of K."""
    return Order(
        rotated=tile.rotated and not shared,
        spread=tile.spread,
        shared=shared,
        packed=packed,
        described=tile.described,
    )
