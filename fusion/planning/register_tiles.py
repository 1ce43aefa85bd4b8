"""The register tiles of CPU kernels: what B_r and B_c are multiples of, and the tile that suits calls of any length.

A kernel's innermost products keep a tile of scores in registers: vectors of queries (groups of lanes) by rows of keys.
The sizes follow from the number of vector registers: 32 of AVX-512 hold 3 x 8 accumulators, 32 of Arm 4 x 4 (enough for
four units with a latency of four), 16 of AVX2 3 x 4; tile registers of AMX hold 16 x 16, four of which make 32 x 32.
Products of bfloat16 pairs use the same registers as multiply-adds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion.machine import Machine

if TYPE_CHECKING:
    from fusion.ir.spec import AttentionSpec

#: bfloat16 planes that hold an element exactly; values that are made of stored ones are rounded to the products' dtype
PLANES = {"bfloat16": 1, "float16": 2, "float32": 3, "float8_e4m3fn": 1, "float8_e5m2": 1,
          "int8": 1, "uint8": 1}  # fmt: skip

_IN_FLOAT16 = {"float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"}

KEY_SPAN = 256
"""Sums of float32 begin anew every so many keys. Errors are then those of `scaled_dot_product_attention`. With 512, one
problem of fifty was beyond the numerics rule (benchmarks/cpu/accuracy.py)."""
TILE_SPAN = 1024
"""Those where the keys of a tile are summed up by themselves first."""
HALF_KEY_SPAN = 1 << 14
"""Those of results in narrower dtypes, which hide longer sums: 262,144 equal keys reach three quarters of the rule."""

REPRODUCIBLE_KEYS = 128
"""Keys of a tile where results are to be reproducible: blocks begin at multiples of it, whatever the sizes."""
REPRODUCIBLE_PART = 4096
"""Keys after which a row's maximum, sum and output begin anew there, to be merged in order, by any threads."""

_AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
_PAIRS = {"avx512_bf16"}
_AMX = {"amx_tile", "amx_bf16"} | _PAIRS


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The instruction set of a CPU kernel.

    lanes: float32 elements in a vector, a multiple of tile_rows.
    avx512: `vreduceps` and `vscalefps` exist, and 512-bit word shuffles.
    amx: bf16 tile products exist (`tdpbf16ps`).
    float16: beside `amx`, those of float16 exist (`tdpfp16ps`).
    pairs: vectors of bf16 pairs can be multiplied and summed (`vdpbf16ps`, Arm's `bfdot`); not used beside `amx`.
    looks_up_bytes: beside `amx` or `pairs`, bytes are looked up in a table of 128 (`vpermi2b`).
    tile_rows: keys (or value columns) in the register tile of vector products.
    tile_groups: lane vectors (groups of queries) in it.
    l1_bytes: capacity of the first-level cache, in which a tile of scores lives.
    """

    lanes: int
    avx512: bool = False
    amx: bool = False
    float16: bool = False
    pairs: bool = False
    looks_up_bytes: bool = False
    tile_rows: int = 4
    tile_groups: int = 2
    l1_bytes: int = 32 * 1024

    @property
    def bfloat16(self) -> bool:
        """Whether an instruction rounds float32 to bfloat16."""
        return self.amx or self.pairs

    @property
    def groups_rows(self) -> bool:
        """Whether there are vectors for two or four rows with the pairs of a key, where rows share keys."""
        return self.pairs and self.avx512

    def __str__(self) -> str:
        has = {"AVX-512": self.avx512, "bf16 pairs": self.pairs, "AMX": self.amx, "AMX-FP16": self.float16}
        return ", ".join([f"{self.lanes} lanes", *(name for name, there in has.items() if there)])

    @property
    def reproducible(self) -> Target:
        """Target for rows whose bits do not depend on others. On AMX tiles, the vectors of one tile are computed beside
        the products of the next, and a number that cannot be split changes the products of a whole call. Pairs are
        not used in their place: processors with AMX begin a `vdpbf16ps` every other cycle and two float32 multiply-adds
        in each, twice as many products (benchmarks/results/2026-11-29-amx.md)."""
        return replace(self, amx=False, float16=False)

    def register_tile(self, planes: int) -> tuple[int, int]:
        """(rows, keys) of products over so many bfloat16 planes; 0 of them for multiply-adds."""
        return (2 * self.lanes, 32) if planes and self.amx else (self.tile_groups * self.lanes, self.tile_rows)

    def keys(self, planes: int) -> int:
        """B_c for any lengths, with M the first-level cache: the scores and weights of the rows that are worked on
        together fill half of it, and leave the other half to the rows of K and V and the output that stream past.

        The traffic to the next level does not depend on B_c, only the number of times that the output is loaded and
        stored again does (n_k / B_c), so B_c is as large as that allows, a multiple of a few register tiles."""
        group_block, score_bytes = 2 if planes and self.amx else self.tile_groups, 4 + 2 * planes
        step = 64 if planes and self.amx else 12 * self.tile_rows
        return max(step, self.l1_bytes // 2 // (group_block * self.lanes * score_bytes) // step * step)


def target_of(machine: Machine) -> Target:
    """The best target for a machine."""
    near = machine.levels[0].capacity
    if machine.isa >= _AVX512:
        amx = machine.isa >= _AMX
        pairs, float16 = machine.isa >= _PAIRS and not amx, amx and "amx_fp16" in machine.isa
        return Target(
            lanes=16, avx512=True, amx=amx, float16=float16, pairs=pairs, tile_rows=8, tile_groups=3, l1_bytes=near,
            looks_up_bytes="avx512vbmi" in machine.isa and (amx or pairs),
        )  # fmt: skip
    if "avx2" in machine.isa:
        return Target(lanes=8, tile_rows=4, tile_groups=3, l1_bytes=near)
    if "neon" in machine.isa:
        return Target(lanes=4, pairs="bf16" in machine.isa, tile_rows=4, tile_groups=4, l1_bytes=near)
    lanes = max(4, machine.vector_bytes // 4 if machine.vector_bytes <= 64 else 4)
    return Target(lanes=lanes, l1_bytes=near)


def target_for(spec: AttentionSpec, machine: Machine) -> Target:
    """The target of a spec's kernels."""
    target = target_of(machine)
    return target.reproducible if spec.reproducible else target


def planes_of(spec: AttentionSpec, target: Target) -> int:
    """Over how many bfloat16 planes a spec's products go, or in 1 of float16 (`in_float16`); 0 for multiply-adds."""
    from fusion.ir.spec import Normalizer

    stored = (spec.operands[n].dtype for n in (0, 1, 2) if spec.values[n] is None)
    planes = max(PLANES.get(dtype, 0) for dtype in (spec.dtype, *stored))
    if planes == 1:
        return 1 if target.amx or target.pairs else 0
    # Without a softmax weights may be infinite, which has no planes.
    if not target.amx or spec.normalizer is Normalizer.NONE:
        return 0
    return 1 if target.float16 and _fits_float16(spec) else planes


def _fits_float16(spec: AttentionSpec) -> bool:
    """Whether operands, weights and the gradient of the output are numbers of float16: stored so or rounded to it in
    eager mode, or at most 1."""
    from fusion.ir.expr import const

    stored = {spec.operands[n].dtype for n in (0, 1, 2) if spec.values[n] is None}
    whole = spec.weight is const(1.0) and not spec.scales_rows and not spec.aux_outputs and spec.mixing is None
    return whole and spec.dtype == spec.out_dtype == "float16" and stored <= _IN_FLOAT16


def in_float16(spec: AttentionSpec, planes: int) -> bool:
    """Whether the products of a kernel over so many planes are in float16: it has two of bfloat16."""
    return spec.dtype == "float16" and planes == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The tiles of a kernel. group_block: how many groups (a multiple of the products' group step; 0 for one such step)
    go through a block of keys at a time. cut: whether the keys of an item may be in parts. chain: words of a score's
    product that are summed one after the other by multiply-adds; 0 for `LONGEST_CHAIN`."""

    groups: int  # lane vectors of queries in a work item
    keys: int  # keys in a block
    planes: int  # of AMX products, 0 for multiply-add
    group_block: int = 0
    cut: bool = False
    chain: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRows:
    """In place of a tiling: the kernel for few queries. rows_at_once: rows that it may multiply with keys at a time, 1,
    2 or 4; 1 where no two rows of a call read the same keys."""

    rows_at_once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllHeads:
    """In place of a tiling: the kernel whose work items are rows of all heads, which are mixed."""


def key_span(target: Target, planes: int, dtype: str) -> int:
    """Keys after which the sums of tiles begin anew, for a result of a dtype."""
    if dtype != "float32":
        return HALF_KEY_SPAN
    return KEY_SPAN if target.amx and planes else TILE_SPAN


def edge_of_spans(target: Target, planes: int, dtype: str) -> int:
    """Keys beyond which a proof tries a kernel in tiles: those of a span, unless that would take too long."""
    return key_span(target, planes, dtype) if dtype == "float32" else KEY_SPAN


def tilings_for(spec: AttentionSpec, target: Target) -> tuple[Tiling, ...]:
    """Ways to form products, with a tile for any lengths; and where that is by split planes, multiply-adds for inputs
    that cannot be split."""
    group_block, planes = target.tile_groups, planes_of(spec, target)
    multiply_add = Tiling(groups=2 * group_block, group_block=group_block, keys=target.keys(0), planes=0)
    if spec.reproducible:
        return (replace(multiply_add, planes=planes, keys=REPRODUCIBLE_KEYS, cut=not spec.aux_outputs),)
    if not planes:
        return (multiply_add,)
    if not target.amx:
        return (replace(multiply_add, keys=target.keys(planes), planes=planes),)
    return (Tiling(groups=4, group_block=2, keys=target.keys(planes), planes=planes), multiply_add)


def backward_tiling(tiling: Tiling, target: Target) -> Tiling:
    """Blocks of the backward: rows such that the tile's six matrices stay in the second-level cache; on AMX tiles twice
    the lanes of the forward, for which packed rows are read once."""
    wide = tiling.planes > 0 and target.amx
    return replace(tiling, groups=tiling.groups * (2 if wide else 1), keys=min(tiling.keys, 128))
