"""CPU kernels that are made in a tenth of the time: of random targets and tiles, and most not optimised by LLVM.

What takes the time of a kernel is LLVM, which optimises 100 to 200 KB of text. What is tried here is the text. So LLVM
takes each instruction as it stands (`optnone`), and most kernels have fewer lanes and smaller register tiles than this
processor, which makes them shorter. Instructions that it does not have are emulated.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from fusion.caching import OncePerKey
from fusion.codegen import cpu as emitter
from fusion.codegen.cpu import launch, machine_code
from fusion.codegen.cpu.launch import Kernel
from fusion.codegen.cpu.training import TrainingKernel
from fusion.codegen.mlir import mixed_heads, tile
from fusion.codegen.mlir.backward import tile as backward_tile
from fusion.codegen.mlir.by_rows import kernel as row_kernel
from fusion.codegen.mlir.by_rows.tiles import TileRows, row_products
from fusion.ir import AttentionSpec
from fusion.lowering.backward_plan import unsupported
from fusion.machine import Machine, cpu
from fusion.planning.choice import Choice, Tile, query_stationary
from fusion.planning.cpu_planner import rows_choice
from fusion.planning.register_tiles import Target, Tiling, planes_of, tilings_for
from fusion.runtime import kernels
from tests import emulation

TARGETS = {
    emulation.AVX512: 6,
    replace(emulation.PAIRS, tile_rows=2, tile_groups=1): 8,
    emulation.AMX: 3,
    emulation.AVX2: 13,
    Target(lanes=4, tile_rows=4, tile_groups=2): 20,
    Target(lanes=4, tile_rows=2, tile_groups=1): 50,
}
"""Of a hundred specs, how many are run by AVX-512, pairs of bfloat16, AMX, AVX2, Arm and the smallest: by what they
find in a second. A kernel for AMX takes ten times as long as the others."""
ROWS_ON_TILES = 1 / 2
"""Share of AMX of the specs that go row by row and could do so on its tiles, which takes no longer."""
OPTIMISED = 1 / 40
"""Share of the kernels that LLVM optimises all the same."""

CUT = 1 / 3
"""Share of the kernels in tiles whose keys may be cut into parts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a spec's kernel is made for. It is a planner as well: every call gets the same tile, and its keys are cut
    into parts where the kernel goes row by row.

    tiling: None for the kernel that goes row by row
    span: after how many keys sums begin anew (`KEY_SPAN`)
    optimised: by LLVM, as it is for users
    cuts: whether keys are cut into parts in tiles, too
    """

    target: Target
    tiling: Tiling | None
    schedule: str
    span: int
    optimised: bool
    cuts: bool = False

    def choose(self, sizes: Sequence[int], made: Sequence[Choice] = ()) -> Choice:
        """By the sizes alone; the last is the number of keys."""
        parts = 1 + sum(sizes) % 3
        if self.tiling is None:
            return rows_choice(self.schedule, self.target.lanes, sizes[-1], parts)
        tile = Tile(rows=self.tiling.groups * self.target.lanes, keys=self.tiling.keys)
        return Choice(schedule=self.schedule, tile=tile, keys=sizes[-1], splits=parts if self.cuts else 1)


def plan(spec: AttentionSpec, rng: random.Random, *, by_rows: bool, targets: Mapping[Target, float] = TARGETS) -> Plan:
    """A target and a tile at random."""
    target = rng.choices([*targets], [*targets.values()])[0]
    if by_rows and row_products(spec, emulation.AMX, (spec.d.integer, spec.d_v.integer), 4) is TileRows:
        target = emulation.AMX if rng.random() < ROWS_ON_TILES else target
    if target == emulation.AMX and spec.dtype == "float16":
        target = rng.choice([emulation.AMX, emulation.AMX_FP16])
    planes = planes_of(spec, target)
    group_block, step = (2, 64) if planes and target.amx else (target.tile_groups, target.tile_rows)
    groups, keys = rng.choice([1, 1, 2]) * group_block, rng.choice([1, 2, 5, 12]) * step
    tiling = None if by_rows else Tiling(groups=groups, group_block=group_block, keys=keys, planes=planes)
    span, optimised = rng.choice([48, 96, 512]), rng.random() < OPTIMISED
    chosen = Plan(target=target, tiling=tiling, schedule=query_stationary(spec), span=span, optimised=optimised)
    return replace(chosen, cuts=not spec.aux_outputs and rng.random() < CUT)


def kernel(spec: AttentionSpec, chosen: Plan, trained: bool) -> Kernel | TrainingKernel | None:
    """What runs the spec; None where there is no kernel for it. No cache knows of it."""
    if emitter.supports(spec, Machine.detect()) is not None:
        return None
    tilings = [*tilings_for(spec, chosen.target)]
    if chosen.tiling:
        tilings[0] = chosen.tiling
    if not trained:
        return Kernel(spec, tilings, chosen.target, chosen)
    if unsupported(spec) is not None:
        return None
    result = TrainingKernel(spec, tilings, chosen.target)
    result.parts = 3 if chosen.cuts else None
    return result


@contextlib.contextmanager
def compiling_for(chosen: Plan) -> Iterator[None]:
    """Within it, kernels are written and compiled as planned, and none is kept on disk or read from there."""
    with contextlib.ExitStack() as stack:
        if not chosen.optimised:
            stack.enter_context(mock.patch.object(machine_code, "_engine", _engine))
        stack.enter_context(emulation.compiling(chosen.target))
        for module in (tile, backward_tile):
            stack.enter_context(mock.patch.object(module, "key_span", lambda *_: chosen.span))
        for module, name in ((mixed_heads, "KEY_SPAN"), (row_kernel, "MOST_KEYS")):
            stack.enter_context(mock.patch.object(module, name, chosen.span))
        if chosen.cuts:
            stack.enter_context(mock.patch.object(launch, "MOST_PACKED", 1 << 15))
        yield


_kept_apart = (OncePerKey(), OncePerKey()), (OncePerKey(), OncePerKey())
_object_name = machine_code._object_name


@contextlib.contextmanager
def unoptimised() -> Iterator[None]:
    """Within it, LLVM takes kernels for this processor as they stand. They are kept apart from those that it optimises,
    in the process and on disk."""
    (inference, training), (chosen, chosen_training) = _kept_apart
    with (
        mock.patch.multiple(machine_code, _engine=_engine, _object_name=_apart),
        mock.patch.multiple(emitter, _kernels=inference, _training=training),
        mock.patch.multiple(kernels, _forward=chosen, _training=chosen_training),
    ):
        yield


def _apart(source: str) -> str | None:
    name = _object_name(source)
    return None if name is None else f"unoptimised_{name}"


@functools.cache
def _context() -> Any:
    from torch_mlir import ir

    return ir.Context()


def _engine(source: str) -> Any:
    return _as_it_stands(machine_code.complete(source), cpu.left_out())


@functools.lru_cache(maxsize=64)
def _as_it_stands(source: str, features: str) -> Any:
    """The engine of a text, kept for kernels of the same one, which no cache on disk has where it is emulated."""
    from torch_mlir import ir
    from torch_mlir.execution_engine import ExecutionEngine

    with _context():
        module = ir.Module.parse(source)
        written = [ir.StringAttr.get(name) for name in ("noinline", "optnone")]
        if features:
            written.append(ir.ArrayAttr.get([ir.StringAttr.get(text) for text in ("target-features", features)]))
        as_it_stands = ir.ArrayAttr.get(written)
        for operation in module.body:
            if operation.operation.name == "func.func":
                operation.attributes["llvm.passthrough"] = as_it_stands
        machine_code.lower(module)
        return ExecutionEngine(module, opt_level=0)
