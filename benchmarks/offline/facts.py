"""Compiling a spec's kernels for a target that is not here, and reading from the result what can be known without a
device.

Shared memory, registers, spills, matrix instructions, ptxas' warnings that it serialised them, and whether every store
and every atomic addition of the first intermediate form is still there in the last.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from fusion.codegen.triton import module
from fusion.codegen.triton.ahead_of_time import POINTERS, amd_number, assembled, gpu_target, registers_of, signature
from fusion.codegen.triton.aux_outputs import aux_kernels, aux_tiles
from fusion.codegen.triton.backward import Queries, backward_kernels, may_join
from fusion.codegen.triton.dtypes import FLOAT8
from fusion.codegen.triton.forward import Forward
from fusion.codegen.triton.kernel import KernelText
from fusion.codegen.triton.launch import forward_kernels, list_tile, order_of
from fusion.codegen.triton.tile_lists import KeyLists, RowLists, TileLists
from fusion.ir.spec import AttentionSpec
from fusion.machine import of_target
from fusion.planning.choice import Tile
from fusion.planning.gpu import GpuPlanner
from fusion.planning.gpu_clocks import shares_values
from fusion.planning.gpu_model import owner_of_keys

from .absent import TENSOR_COLUMNS
from .disassembly import Loop, disassemble, inner_loops


class OfflineCompilationError(RuntimeError):
    """A generated kernel was refused by Triton: a defect of this package or of Triton; the message has both."""


HEADS = 64
"""For which tiles are chosen: enough blocks for a whole device."""

#: ptxas' notes that matrix products wait for each other
SERIALISED = ("C7510", "C7511", "C7512", "C7514", "C7515", "C7519")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What compilation of one kernel for one target gave.

    shared: bytes.
    columns: of tensor memory.
    registers: per thread.
    spills: bytes stored and loaded.
    spilled: share of the main loop's instructions that do so.
    matrix: instructions by kind.
    lost: kinds of side effects of which fewer are in the machine code's text than in Triton's first form.
    exponentials: instructions, and those among them that are issued while a matrix product of Hopper is in flight.
    seconds: to compile.
    """

    kernel: str
    target: str
    shared: int
    registers: int
    spills: int
    matrix: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    exponentials: tuple[int, int] = (0, 0)
    spilled: float = 0.0
    columns: int = 0
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether a program's shared and tensor memory exist on the target."""
        return self.shared <= of_target(self.target).shared_memory and self.columns <= TENSOR_COLUMNS


def compile_offline(
    spec: AttentionSpec, kernels: Sequence[KernelText], d: int, d_v: int, tiles: Mapping[str, Tile], target: str
) -> list[Facts]:
    """Every kernel, with the tile of its name, compiled for `target`: NVIDIA's from sm_80, AMD's with matrix units. (Of
    sm_75 Triton 3.7 uses none.) Strides are taken to be multiples of 16, inner ones 1."""
    loaded = module.load(module.module_text(spec, kernels, d, d_v))
    return [_compile(spec, loaded, kernel, (d, d_v), tiles[kernel.name], target) for kernel in kernels]


def facts_of(
    spec: AttentionSpec,
    target: str,
    *,
    training: bool = False,
    apart: bool = False,
    n: int = 4096,
    changed: Mapping[str, int] = MappingProxyType({}),
) -> list[Facts]:
    """The kernels of a spec with constant d and d_v, in the tiles that they would run in on a target for n queries
    and keys; where V can be the first columns of K (latent attention), it is.

    training: also the statistics, and the backward kernels with gradients of every floating-point operand but float8.
    apart: gradients have kernels of their own, as where torch is told to be deterministic.
    changed: fields of the forward's tile, in place of the table's.
    """
    d, d_v = spec.d.integer, spec.d_v.integer
    planner = GpuPlanner(spec, of_target(target))
    tile = replace(planner.tile_for(n, n, d, d_v, HEADS), **changed)
    kernels = forward_kernels(spec, d, d_v, training, order_of(tile, split=False, shared=shares_values(spec), packed=1))
    tiles = {Forward.name: tile, TileLists.name: list_tile(tile), **aux_tiles(planner.backward(d, d_v))}
    if training:
        needs = tuple(o.torch_dtype.is_floating_point and o.dtype not in FLOAT8 for o in spec.operands)
        tiles |= (chosen := planner.backward(d, d_v, not apart and may_join(spec, needs)))
        listed = {KeyLists.name: Queries.name, RowLists.name: owner_of_keys(chosen)}  # by who visits the tiles
        tiles |= {name: list_tile(tiles[user]) for name, user in listed.items() if user in tiles}
        kernels += backward_kernels(spec, d, d_v, needs, by_keys=chosen.keys())
    kernels += aux_kernels(spec, d, d_v)
    return compile_offline(spec, kernels, d, d_v, tiles, target)


def facts_of_features(
    d: int, d_v: int, degree: int, target: str, *, planes: int = 2, causal: bool = False, dtype: str = "bfloat16"
) -> list[Facts]:
    """The kernels of attention with polynomial features, in the tile that they would run in. planes: of the top degree;
    dtype: of V."""
    from fusion.codegen.triton.features import features_module
    from fusion.codegen.triton.polynomial import MOST_FEATURES, feature_tile

    loaded, tile = module.load(features_module(d, d_v, degree)), feature_tile(d, d_v, MOST_FEATURES)
    given = {"ROWS": tile.rows, "PARENTS": tile.parents, "TOP_PLANES": planes, "CAUSAL": causal}
    pointers = {"v_ptr": POINTERS[dtype], "factors_ptr": "*i32", "owner_ptr": "*i32"}
    found = []
    for name, keys in (("polynomial_state", tile.keys), ("polynomial_readout", tile.near)):
        function = getattr(loaded, name)
        signature = _signature_by_names(function.arg_names, pointers, given | {"KEYS": keys})
        found.append(_facts(function, *signature, (tile.warps, 1), target, f"degree {degree}"))
    return found


def _signature_by_names(
    names: Sequence[str], pointers: Mapping[str, str], given: Mapping[str, int]
) -> tuple[dict, dict, dict]:
    """Of a kernel whose constants are in capitals. pointers: to what is not float32; strides are multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    for position, name in enumerate(names):
        if name.isupper():
            signature[name], constants[name] = "constexpr", given[name]
        elif name.endswith("_ptr"):
            signature[name] = pointers.get(name, "*fp32")
        else:
            signature[name] = "i32"
        if name.endswith(("_ptr", "_row", "_head")):
            attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _compile(spec: AttentionSpec, loaded, kernel: KernelText, sizes: tuple[int, int], tile: Tile, target: str) -> Facts:
    function = getattr(loaded, kernel.name)
    arguments = signature(spec, function.arg_names, sizes, tile, target)
    return _facts(function, *arguments, (tile.warps, tile.stages), target, str(spec))


def _facts(
    function, signature: dict, constants: dict, attributes: dict, size: tuple[int, int], target: str, what: str
) -> Facts:
    """size: warps and stages."""
    import triton
    from triton.compiler import ASTSource

    name = function.__name__
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    started = time.perf_counter()
    try:
        options = {"num_warps": size[0], "num_stages": size[1], **module.EXACT}
        made = triton.compile(source, target=gpu_target(target), options=options)
    except Exception as error:
        raise OfflineCompilationError(f"{name} of {what} does not compile for {target}: {error}") from error
    seconds = time.perf_counter() - started
    facts = _amd(made.asm["amdgcn"]) if target.startswith("gfx") else _nvidia(made.asm["ptx"], target)
    last = made.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    return Facts(
        kernel=name,
        target=target,
        shared=made.metadata.shared,
        columns=getattr(made.metadata, "tmem_size", None) or 0,
        seconds=seconds,
        lost=_lost(made.asm["ttir"], last),
        **facts,
    )


def _nvidia(ptx: str, target: str) -> dict:
    """Registers, spills, matrix instructions and warnings, from a run of ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kernel.cubin"
        try:
            said = assembled(ptx, target, place)
        except RuntimeError as error:
            raise OfflineCompilationError(str(error)) from error
        loops = _shortest_first(disassemble(place.read_bytes()))
    kinds = {"wgmma": r"wgmma\.mma_async", "mma": r"\bmma\.sync", "tcgen05": r"tcgen05\.mma"}
    matrix = {kind: len(re.findall(pattern, ptx)) for kind, pattern in kinds.items()}
    warnings = tuple(sorted(code for code in SERIALISED if code in said))
    return {
        **registers_of(said),
        "matrix": matrix,
        "warnings": warnings,
        "exponentials": tuple(map(sum, zip(*(loop.exponentials for loop in loops), strict=True))) or (0, 0),
        "spilled": loops[0].spills / len(loops[0].body) if loops else 0.0,
    }


def _shortest_first(text: str) -> list[Loop]:
    """The inner loops of a kernel that multiply, the shortest (without masks and bounds) first."""
    return sorted(inner_loops(text), key=lambda loop: len(loop.body))


def _amd(text: str) -> dict:
    """Registers, spills and matrix instructions, from machine code as text."""
    spills = 4 * (amd_number(text, "vgpr_spill_count") + amd_number(text, "sgpr_spill_count"))
    loops = _shortest_first(text)
    return {
        "registers": amd_number(text, "vgpr_count"),
        "spills": spills,
        "matrix": {kind: len(re.findall(f"v_{kind}", text)) for kind in ("mfma", "wmma")},
        "spilled": loops[0].spills / len(loops[0].body) if loops else 0.0,
    }


def _lost(first: str, last: str) -> tuple[str, ...]:
    """Side effects of which the last form has fewer than the first."""
    kinds = {
        "store": (r"\btt\.store\b", r"\bst\.global|global_store|buffer_store"),
        "atomic": (r"\btt\.atomic_rmw\b", r"\b(?:atom|red)\.\w*\.?global|global_atomic|buffer_atomic|\batom\.|\bred\."),
    }
    return tuple(
        k for k, (before, after) in kinds.items() if len(re.findall(after, last)) < len(re.findall(before, first))
    )
