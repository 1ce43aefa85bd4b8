"""Tile sizes, warps and stages of the kernels on a GPU, from what ahead-of-time compilation shows to fit without
spilling.

`benchmarks/triton_versions.py` prints the facts behind these choices: shared memory, registers and spills of each
kernel and target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion.codegen.triton.descriptors import boxes
from fusion.codegen.triton.panels import panelled
from fusion.codegen.triton.programs import dead_rows_matter
from fusion.ir.expr import Expr, coordinates, loads, walk
from fusion.ir.spec import AttentionSpec, Normalizer

INTERPRETER = 0
AMD = 1
"""Stand for a capability where there is none."""


SCHEDULE = ("rotated", "described", "persistent", "specialized")
"""What of a tile says how a program goes about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """rows: query rows of a program. keys: keys of a tile. warps: warps of a program. stages: tiles in flight.

    described: tiles are read by tensor descriptors. Of the forward only: rotated, persistent, specialized (see
    `key_loop.Order`). The warps of specialised programs are those of one of three groups: one loads, two multiply.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    rotated: bool = False
    described: bool = False
    persistent: bool = False
    specialized: bool = False

    def with_schedule_of(self, other: Tile) -> Tile:
        """This tile, gone about as another is."""
        warps = self.warps if self.specialized == other.specialized else other.warps
        return replace(self, warps=warps, **{name: getattr(other, name) for name in SCHEDULE})

    def constants(self) -> dict[str, int]:
        """What a kernel is told of its tile at compile time, by name."""
        return {"ROWS": self.rows, "KEYS": self.keys}

    def options(self) -> dict[str, int]:
        """What Triton is told of it, by name."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def __str__(self) -> str:
        switches = "".join(f", {name}" for name in SCHEDULE if getattr(self, name))
        return f"{self.rows} x {self.keys}, {self.warps} warps, stages {self.stages}{switches}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a call runs. keys: of all; splits: parts that they are cut into; measured: whether the tile was timed (see
    `autotune`)."""

    tile: Tile
    keys: int
    splits: int = 1
    measured: bool = False

    @property
    def tiling(self) -> dict[str, int]:
        """By the names of the cost model."""
        cut = {"B_s": -(-self.keys // self.splits)} if self.splits > 1 else {}
        return {"B_r": self.tile.rows, "B_c": self.tile.keys, "stages": self.tile.stages, **cut}

    def __str__(self) -> str:
        parts = "" if self.splits == 1 else f"keys in {self.splits} parts, "
        return f"{parts}tiles of {self.tile}{', measured' if self.measured else ''}"


def power(extent: int) -> int:
    """The power of two that holds an extent."""
    return 1 << max(0, (max(1, extent) - 1).bit_length())


def reads_tiles(*programs: Expr) -> bool:
    """Whether a tensor is read that has an element for every score (a bias matrix)."""
    return any({"i", "j"} <= coordinates(load) for program in programs for load in loads(program))


def tile_for(spec: AttentionSpec, d: int, d_v: int, n_q: int, n_k: int, capability: int) -> Tile:
    """The forward's tile: the same for all n_q, and n_k, up to the same power of two. capability: 10 * major + minor of
    an NVIDIA device, or INTERPRETER, or AMD."""
    if capability == INTERPRETER:
        return Tile(rows=min(32, max(16, power(n_q))), keys=16, warps=4, stages=1)
    width, matrices = max(panelled(d), panelled(d_v)), reads_tiles(spec.score, spec.weight)
    if spec.dtype == "float32":
        tile = _float32(width, capability)
    elif capability == AMD:
        tile = _amd(width)
    else:
        tile = _hopper(width, matrices or spec.mask is not None) if 90 <= capability < 120 else _ampere(width)
    # With more than two tiles of a bias in flight ptxas has wgmma instructions wait for each other (C7515).
    simple = spec.dtype == "float32"  # whose products may be without matrix units
    if (tile.stages > 2 or tile.stages > 1 and 64 < width <= 128) and matrices and not simple:
        tile = replace(tile, stages=tile.stages - 1)
    rows = min(tile.rows, max(16, power(n_q)))
    keys = min(tile.keys, max(16, power(n_k)))
    warps = tile.warps if rows >= 64 or width > 256 or simple else 4
    # Up to 64 columns two programs share a multiprocessor, and one's products hide the other's exponentials.
    rotated = may_rotate(spec) and not (matrices or simple) and capability // 10 == 9
    return Tile(
        rows=rows, keys=keys, warps=warps, stages=tile.stages, rotated=rotated and rows >= 64 and 64 < width <= 128
    )


def may_rotate(spec: AttentionSpec) -> bool:
    """Whether there is a rotated order: there are exponentials, and a tile's neighbour is known (not from a list)."""
    return spec.normalizer is not Normalizer.NONE and (spec.mask is None or spec.mask.tile_live is None)


def may_specialize(spec: AttentionSpec, d: int, d_v: int) -> bool:
    """Whether there is a warp-specialised form that Triton compiles: one loop, all of whose tiles come by descriptors,
    on matrix units. Loads of masks and biases inside it fail or not from one version and spec to the next."""
    inside = [*loads(spec.score), *loads(spec.weight)]
    listed = spec.mask is not None and spec.mask.tile_live is not None
    return (
        {"q", "k", "v"} <= boxes(spec, d, d_v).keys()
        and max(panelled(d), panelled(d_v)) <= 256
        and spec.dtype != "float32"
        and not (listed or dead_rows_matter(spec) or any("j" in coordinates(load) for load in inside))
    )


def _hopper(width: int, more: bool) -> Tile:
    """227 KiB of shared memory. more: there are masks or biases, which take registers."""
    if width <= 128:
        return Tile(rows=128, keys=64, warps=8, stages=3)
    if width <= 256:
        return Tile(rows=128, keys=32 if more and width > 192 else 64, warps=8, stages=2)
    return Tile(rows=64, keys=32, warps=8, stages=2)


def _ampere(width: int) -> Tile:
    """99 to 163 KiB of shared memory."""
    if width <= 64:
        return Tile(rows=128, keys=64, warps=8, stages=2)
    if width <= 128:
        return Tile(rows=128, keys=32, warps=8, stages=2)
    return Tile(rows=64, keys=32 if width <= 256 else 16, warps=8, stages=1)


def _amd(width: int) -> Tile:
    """64 KiB of shared memory."""
    if width <= 128:
        return Tile(rows=128, keys=64 if width <= 64 else 32, warps=8, stages=1)
    return Tile(rows=64, keys=16, warps=8, stages=1)


def _float32(width: int, capability: int) -> Tile:
    """Products without matrix units take their operands from registers: small tiles, many threads, and two stages,
    which keep the next tile in shared memory."""
    if width <= 64:
        return Tile(rows=64, keys=32, warps=8, stages=2)
    if width <= 256:
        return Tile(rows=64 if width <= 128 else 32, keys=16, warps=8, stages=1 if capability == AMD else 2)
    return Tile(rows=16, keys=16, warps=8, stages=1)


def queries_tile(spec: AttentionSpec, d: int, d_v: int, capability: int) -> Tile:
    """The tile of the kernel of dQ."""
    width = max(power(d), power(d_v), 16)
    if capability == INTERPRETER:
        return Tile(rows=32, keys=32, warps=4, stages=1)
    if spec.dtype == "float32":
        return Tile(rows=32, keys=32 if width <= 64 else 16, warps=8, stages=1)
    if 90 <= capability < 120 and width <= 128:
        if reads_tiles(spec.score, spec.weight):  # an element for each score, in flight and in registers
            return Tile(rows=64 if width <= 64 else 128, keys=64 if width <= 64 else 32, warps=8, stages=2)
        return Tile(rows=128, keys=64, warps=8, stages=2)
    if 90 <= capability < 120:
        return Tile(rows=64 if width <= 256 else 32, keys=32, warps=8, stages=2)  # wgmma takes 64 rows
    return Tile(rows=64 if width <= 128 else 32, keys=32, warps=8, stages=1)


def keys_tile(spec: AttentionSpec, d: int, d_v: int, capability: int) -> Tile:
    """The tile of the kernel of dK and dV, which keeps two gradients and two tiles of scores."""
    width = max(power(d), power(d_v), 16)
    if capability == INTERPRETER:
        return Tile(rows=32, keys=32, warps=4, stages=1)
    if spec.dtype == "float32":
        return Tile(rows=32, keys=32 if width <= 64 else 16, warps=8, stages=1)
    if 90 <= capability < 120:
        listed, read = spec.mask is not None and spec.mask.tile_live is not None, reads_tiles(spec.score, spec.weight)
        if 64 < width <= 128 and (listed or read):
            return Tile(rows=32, keys=128, warps=8, stages=2)  # lists and biases take registers that 64 x 64 needs
        if width <= 128 and any(part.op == "hash" for part in walk(spec.weight)):
            # Beside dropout's random numbers ptxas serialises the products of two stages (C7519).
            return Tile(rows=64 if width <= 64 else 32, keys=128, warps=8, stages=1)
        keys = 128 if width <= 64 and not read else 64
        return Tile(rows=64 if width <= 128 else 32, keys=keys, warps=8, stages=2)
    return Tile(rows=32, keys=64 if width <= 128 else 32, warps=8, stages=1)


def backward_tiles(spec: AttentionSpec, d: int, d_v: int, capability: int) -> dict[str, Tile]:
    """The tile of each backward kernel by its name."""
    keys = keys_tile(spec, d, d_v, capability)
    return {
        "attention_backward_prepare": Tile(rows=keys.rows, keys=16, warps=4, stages=1),
        "attention_backward_queries": queries_tile(spec, d, d_v, capability),
        "attention_backward_keys": keys,
    }
