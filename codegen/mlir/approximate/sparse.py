"""The exact kernel with tiles left out: those that a table rules out, and those whose scores turn out too low.

Parameters: `marks`, bytes [work item][set of groups that go together][key block], 0 for tiles not to be looked at;
`share`, the bits of the float32 epsilon / N_k; `skipped`, float32 [work item][2], where the kernel writes the sum of
the shares of the normaliser that a row of the item left out at most by looking, and the number of tiles that it
computed.

A tile that has been looked at (its scores are known) is left out if for each of its rows

    exp(highest score - m) <= share * l        with the running maximum m and sum l of that row

Each of its keys then has at most that share of the row's final sum: l only grows while m stays, and is rescaled with m.
Tiles are visited one after the other: there is nothing to overlap with a tile that may not take place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from fusion.caching import OncePerKey
from fusion.ir.expr import SCORE
from fusion.ir.spec import AttentionSpec
from fusion.lowering.numbers import LOG2E
from fusion.machine import Machine
from fusion.planning.register_tiles import Target, Tiling, target_of, tilings_for

from ..builder import Value
from ..calling import float_bits
from ..kernel import AttentionKernel
from ..launch import Variant, addresses_of, call_values
from ..scope import Scope
from ..softmax import RowProgram
from ..stream import InTurn
from ..thread_function import KernelText
from ..tile import Item, KeyRange, Tile, Tiles


def emit_sparse(spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int) -> KernelText:
    """The kernel of a spec of plain scaled scores, unmasked or with one mask."""
    return AttentionKernel(spec, tiling, target, d, d_v, selective=Selected).text()


class Selected(InTurn):
    """The tiles that are marked, as far as they matter."""

    def __init__(self, tiles: Tiles):
        super().__init__(tiles)
        programs, kernel, groups = tiles.programs, tiles.kernel, tiles.tiling.groups
        if programs.masked is not SCORE and programs.full is not SCORE:
            raise ValueError("a selective kernel takes plain scaled scores")
        self.kernel, self.params, self.lanes, self.vector = kernel, kernel.params, tiles.lanes, tiles.vector
        self.sets = -(-groups // tiles.together)
        self.left_out, self.computed = kernel.array(groups, 4 * self.lanes, "left_out"), kernel.area(64, "computed")

    @contextlib.contextmanager
    def around(self, item: Item) -> Iterator[None]:
        """Around the tiles of an item: what they left out, and how many were computed."""
        b = self.b
        worst = zero = b.constant(0.0, self.vector)
        for g in range(self.tiling.groups):
            b.store(zero, self.left_out[g])
        b.store(b.constant(0.0, "f32"), self.computed)
        yield
        for g in range(self.tiling.groups):
            worst = b.most(worst, b.load(self.left_out[g], self.vector, "left"))
        most = b.reduce("maxnumf", worst, "worst")
        target = b.row(self.params[("ptr", "skipped")], item.number, 2)
        b.store(most, target)
        b.store(b.load(self.computed, "f32", "computed"), b.at(target, 1, "f32"))

    def rows_and_keys(self, item: Item, keys: KeyRange, g: Value, j0: Value) -> tuple[Scope, Value]:
        b, size = self.b, self.tiling.keys
        tile, n = super().rows_and_keys(item, keys, g, j0)
        columns = b.ceil_div(self.kernel.n_k, size, "key_blocks")
        row = b.add(b.mul(item.number, self.sets), b.div(g, self.tiles.together))
        place = b.add(b.mul(row, columns), b.div(j0, size))
        mark = b.load(b.at(self.params[("ptr", "marks")], place, "i8"), "i8", "mark")
        return tile, b.select(b.compare("ne", mark, b.constant(0, "i8"), "marked"), n, 0, "n_keys")

    def tile(self, tile: Tile) -> None:
        b, tiles = self.b, self.tiles
        tiles.score_all(tile)
        with b.when(self._matters(tile)):
            b.store(b.add(b.load(self.computed, "f32"), b.constant(1.0, "f32")), self.computed)
            for program in tiles.variants(tile):
                if program is not SCORE:  # whose maxima are there already
                    tiles.reset_maxima(tile)
                    tiles.maxima(tile, program, 0, tile.block.count, staging=True)
            tiles.rescale(tile)
            tiles.weigh(tile, 0, tile.block.padded)
            tiles.accumulate(tile)
        with b.otherwise(), tiles.members(tile) as member:
            self._record_left_out(tile, member)

    def _matters(self, tile: Tile) -> Value:
        """Whether the tile whose raw scores lie in memory has to be computed; leaves maxima in `highest`."""
        b, tiles = self.b, self.tiles
        share = b.broadcast(self.params.float32("share"), self.lanes)
        lowest = b.constant(float("-inf"), self.vector)

        def matters(member: Value) -> Value:
            lanes = tiles.lane_scope(tile.item, tile.scope, b.add(tile.g, member))
            raw = RowProgram(program=SCORE, weight=None, scope=lanes, staged=[])
            highest = tiles.softmax(tile, member).apply(raw, 0, tile.block.count, lowest)
            b.store(highest, tiles.highest[member])
            part, total = self._share(tile, member, highest)
            high = b.and_(b.compare("ugt", part, b.mul(total, share), "high"), self._rows(tile, member))
            return b.reduce("or", high, "found")

        return b.any(tile.here, 1, matters, "member")

    def _share(self, tile: Tile, member: Value, highest: Value) -> tuple[Value, Value]:
        """(exp(highest - m), l) of a group."""
        b, tiles = self.b, self.tiles
        group = tiles.group(b.add(tile.g, member), member)
        m = b.load(group.maximum, self.vector, "m")
        # No sum reaches 2**64 shares: beyond that, and before the first tile (m = -inf) and with NaN, a tile matters.
        raised = b.least(b.mul(b.sub(highest, m), self.kernel.exponent.scale * LOG2E), 64.0)
        total = b.load(group.total, self.vector, "l")
        before = b.load(b.at(group.total, tiles.own_rows * self.lanes, "f32"), self.vector, "before")
        total = b.add(total, b.select(tiles.several, before, 0.0), "l")
        return self.kernel.context.math.exp2(raised, 5), total

    def _rows(self, tile: Tile, member: Value) -> Value:
        """Lanes that are rows of the item."""
        b = self.b
        return self.kernel._valid(b.sub(tile.item.count, b.mul(b.add(tile.g, member), self.lanes)))

    def _record_left_out(self, tile: Tile, member: Value) -> None:
        """Add what a tile that is left out could have had to the shares of its rows."""
        b = self.b
        keys = b.convert("arith.uitofp", tile.block.count, "f32", "keys")
        part, total = self._share(tile, member, b.load(self.tiles.highest[member], self.vector, "h"))
        place = self.left_out[b.add(tile.g, member)]
        share = b.select(self._rows(tile, member), b.div(b.mul(part, keys), total), 0.0)
        b.store(b.add(b.load(place, self.vector), share), place)


class SparseKernel:
    """For a spec with one batch coordinate, output [b0, i, e] and plain scores. Tiles: `rows` queries, `keys` keys."""

    def __init__(self, spec: AttentionSpec, machine: Machine):
        self.spec, self.target = spec, target_of(machine)
        self.tiling = tilings_for(spec, self.target)[0]
        together = self.tiling.together or self.target.tile_groups
        self.keys, self.rows = self.tiling.keys, together * self.target.lanes
        self.sets = -(-self.tiling.groups // together)
        self._variants = OncePerKey()

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: Sequence[int], marks: torch.Tensor, share: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(output [h, N_q, d_v], share of the normaliser left out at most [h], tiles computed [h]); None for inputs
        beyond the range of split planes. marks: uint8 [h, row tiles, key tiles], row tiles a multiple of `sets`: the
        tiles to look at. share: the weight, relative to its row's sum, below which a key may be left out."""
        heads, n_q, d = q.shape
        n_k, d_v = v.shape[1:]
        variant = self._variants.get_or_make(
            (d, d_v), lambda: Variant(self.spec, self.tiling, self.target, d, d_v, write=emit_sparse)
        )
        out = torch.empty(heads, n_q, d_v, dtype=getattr(torch, self.spec.out_dtype))
        skipped = torch.zeros(heads, marks.shape[1] // self.sets, 2, dtype=torch.float32)
        values = call_values(self.spec, sizes, [x.stride() for x in (q, k, v)], out.stride())
        values[("share",)] = float_bits(share)
        tensors = dict(zip(addresses_of(self.spec), (q, k, v, out), strict=True))
        tensors |= {("ptr", "marks"): marks, ("ptr", "skipped"): skipped}
        launch = variant.launch_for((heads, n_q, n_k, d, d_v), values, [*tensors])
        if not launch([x.data_ptr() for x in tensors.values()]):
            return None
        return out, skipped[..., 0].amax(1), skipped[..., 1].sum(1)
