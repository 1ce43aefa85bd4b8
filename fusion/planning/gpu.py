"""Choices on GPUs: which schedule, in how many parts, with how many heads in a block of rows; the tile is a policy's.

`GpuPlanner` is what an emitter is given. A `TilePolicy` says which tile each kernel runs in, from the spec, the machine
and the sizes alone; by default the model of `fusion.planning.gpu_model`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from fusion.ir.integers import integer
from fusion.ir.results import extents_function, size_function
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning.choice import Choice, Tile, query_stationary
from fusion.planning.gpu_clocks import SPLIT_TRIPS
from fusion.planning.gpu_layout import heads_to_pack, packed, power
from fusion.planning.gpu_model import DELTA, USUAL, USUAL_HEADS, TileModel, delta_tile
from fusion.planning.problem import known_part

MOST_SPLITS = 64


class Extents(NamedTuple):
    """Sizes of a call: heads of all batches, queries, keys, and the two head dimensions."""

    heads: int
    n_q: int
    n_k: int
    d: int
    d_v: int


class TilePolicy(Protocol):
    """Says which tile each GPU kernel of a spec runs in."""

    def forward(self, spec: AttentionSpec, machine: Machine, extents: Extents) -> Tile:
        """Tile of the forward's kernel. Extents of queries, keys and heads are rounded up to powers of two."""
        ...

    def backward(self, spec: AttentionSpec, machine: Machine, d: int, d_v: int, joint: bool) -> Mapping[str, Tile]:
        """Tile of each kernel of the backward, by its name. joint: whether all gradients may come from one kernel."""
        ...


class GpuPlanner:
    """The choices of a spec on a GPU.

    policy: says the tile.
    tile, splits: in place of what would be chosen.
    packs: whether heads may share blocks of rows (not where statistics of rows are wanted).
    group: heads that share blocks of rows in `spec` already.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        machine: Machine,
        policy: TilePolicy | None = None,
        *,
        tile: Tile | None = None,
        splits: int | None = None,
        packs: bool = True,
        group: int = 1,
    ):
        self.spec, self.machine, self.policy = spec, machine, policy or TileModel()
        self.tile, self.splits, self.group = tile, splits, group
        self.packs = packs and group == 1 and not spec.reproducible
        self.extents = extents_function(spec)
        self._visited = visited_function(spec)
        # Derived once: a call would spend 20 to 100 us on it.
        self._tiles = functools.lru_cache(maxsize=1024)(lambda *e: self.policy.forward(spec, machine, Extents(*e)))
        self.packing = functools.cache(self._packing)
        self.backward = functools.cache(self._backward)

    def choose(self, sizes: Sequence[int], existing: Sequence[Choice] = ()) -> Choice:
        """The choice for a call. Raises what the policy raises where no tile fits."""
        *batch, n_q, n_k, d, d_v = self.extents(sizes)
        if (group := self.group_of(batch, n_q)) > 1:
            return self.packing(group).choose(sizes, existing)
        heads = math.prod(batch)
        tile = self.tile_for(n_q, n_k, d, d_v, heads)
        splits = self.splits_of(heads * -(-n_q // tile.rows), sizes, tile)
        schedule = "split_k" if splits > 1 else query_stationary(self.spec)
        return Choice(schedule=schedule, tile=tile, keys=n_k, splits=splits, packed=self.group)

    def tile_for(self, n_q: int, n_k: int, d: int, d_v: int, heads: int = 1) -> Tile:
        """The tile of the forward's kernel; where results are to be reproducible, that of a long prefill."""
        if self.spec.reproducible:
            heads, n_q, n_k = USUAL_HEADS, USUAL, USUAL
        return self.tile or self._tiles(power(heads), power(n_q), power(n_k), d, d_v)

    def in_tile(self, choice: Choice, tile: Tile, sizes: Sequence[int], measured: bool = False) -> Choice:
        """A choice with another tile: into how many parts keys are cut follows from it, whether they are does not."""
        *batch, n_q, _, _, _ = self.extents(sizes)
        cut = choice.splits > 1 and tile != choice.tile
        splits = self.splits_of(math.prod(batch) * -(-n_q // tile.rows), sizes, tile) if cut else choice.splits
        return replace(choice, tile=tile, splits=splits, measured=measured)

    def group_of(self, batch: Sequence[int], n_q: int) -> int:
        """Number of heads that share a block of rows in a call."""
        return heads_to_pack(self.spec, batch, n_q) if self.packs else 1

    def for_training(self) -> GpuPlanner:
        """The planner of the forward that writes statistics of its rows, which are of single heads."""
        return GpuPlanner(self.spec, self.machine, self.policy, tile=self.tile, splits=self.splits, packs=False)

    def _packing(self, group: int) -> GpuPlanner:
        """The planner of the spec in which so many heads share blocks of rows."""
        spec = packed(self.spec, group)
        return GpuPlanner(spec, self.machine, self.policy, tile=self.tile, splits=self.splits, group=group)

    def _backward(self, d: int, d_v: int, joint: bool = False) -> Mapping[str, Tile]:
        """The tile of each kernel of the backward, by its name. joint: see `TilePolicy`."""
        tiles = self.policy.backward(self.spec, self.machine, d, d_v, joint)
        tiles = {**tiles, DELTA: delta_tile(tiles)}
        return tiles if self.tile is None else dict.fromkeys(tiles, self.tile)

    def splits_of(self, programs: int, sizes: Sequence[int], tile: Tile) -> int:
        """Into how many parts the keys are cut where the tile makes so many programs."""
        if self.spec.reproducible:
            return 1
        if self.splits is not None:
            return self.splits
        if self.machine.cores == 1 or programs > self.machine.cores:
            return 1
        return splits_for(programs, self._visited(sizes, tile.rows), tile.keys, self.machine.cores)


def splits_for(programs: int, n_k: int, keys: int, processors: int) -> int:
    """Into how many parts the n_k keys that a block visits are cut, to have two programs per processor."""
    wanted = 2 * processors // max(1, programs)
    return max(1, min(wanted, n_k // (keys * SPLIT_TRIPS), MOST_SPLITS))


def visited_function(spec: AttentionSpec) -> Callable[[Sequence[int], int], int]:
    """(values of `spec.sizes`, rows of a block) -> the most keys that a block visits. Of the mask's range that is taken
    which sizes alone tell: where the mask depends on more, all keys count. Blocks differ little or steadily, so that
    the first, the middle and the last stand for all."""
    mask, names = spec.mask, (*spec.sizes, "i0", "i1")
    low = None if mask is None else known_part(mask.key_lo, "imax", names)
    high = None if mask is None else known_part(mask.key_hi, "imin", names)
    extents = size_function((spec.n_q, spec.n_k), spec.sizes)
    if low is None and high is None:
        return lambda sizes, rows: extents(sizes)[1]
    limits = size_function((low or integer(0), high or spec.n_k), names)

    def visited(sizes: Sequence[int], rows: int) -> int:
        (n_q, n_k), most = extents(sizes), 0
        last = (n_q - 1) // rows
        for block in {0, last // 2, last}:
            start, stop = limits((*sizes, block * rows, min(n_q, (block + 1) * rows) - 1))
            most = max(most, min(stop, n_k) - max(start, 0))
        return most

    return visited
