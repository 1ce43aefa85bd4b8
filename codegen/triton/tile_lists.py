"""Lists of the live tiles of a mask, built on the device from the mask's map before the attention's kernels.

The map (`fusion.ir.tile_map`) answers for any rectangle and is built once for all attentions that share the mask. A
loop over tiles that looked up each would have a branch around its loads and products, which Triton then does not
overlap; so a small kernel writes, for every block of rows and the tile size of the following kernel,

    tile_list[place, block, :]     numbers of the full tiles from the front, of those that need the mask from the back
    tile_counts[place, block, :]   number of the former, number of the latter

with one place for each combination of those batch coordinates that the mask depends on. The kernel of dK and dV walks
along blocks of rows, and gets the lists of the transpose: for every block of keys the numbers of blocks of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion.ir.expr import J0, J1, Expr, coord
from fusion.ir.ops import apply
from fusion.ir.spec import AttentionSpec

from . import source
from .expressions import Level
from .kernel import WrittenKernel, axes_of
from .stages import Visit

LANES = 128  # tiles that are looked up at once


def places(spec: AttentionSpec, batch: Sequence[int]) -> int:
    """Number of lists per block; batch: extents of the batch coordinates."""
    return math.prod(batch[axis] for axis in axes_of(spec))


class TileLists(WrittenKernel):
    """Numbers of the tiles of keys that one block of ROWS query rows meets, full ones first."""

    name = "attention_tiles"
    block, along = ("i0", "i1", "ROWS"), ("j0", "j1", "KEYS")
    ordered = True  # whether all live tiles are in front, in order, where results are to be reproducible

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec, {coord(name): name for name in ("i0", "i1", "j0", "j1")})
        assert spec.mask is not None and spec.mask.tile_live is not None
        self.mask, self.extents = spec.mask, {"i0": self.n_q, "j0": self.n_k}

    def body(self) -> tuple[list[Visit], str]:
        first, last, size = self.block
        count = self.extents[first]
        outside = [
            f"blocks = ({count} + {size} - 1) // {size}",
            f"tiles_across = ({self.extents[self.along[0]]} + {self.along[2]} - 1) // {self.along[2]}",
            "program = tl.program_id(0)",
            *self._coordinates("program // blocks"),
            f"{first} = program % blocks * {size}",
            f"{last} = tl.minimum({first} + {size}, {count}) - 1",
            "list_at = tile_list_ptr + tl.cast(program, tl.int64) * tiles_across",
        ]
        return [], source.block(
            *outside,
            "full_count = 0",
            "partial_count = 0",
            f"for start in tl.range(0, tiles_across, {LANES}):",
            source.indented(self._lanes()),
            "tl.store(tile_counts_ptr + 2 * program, full_count)",
            "tl.store(tile_counts_ptr + 2 * program + 1, partial_count)",
        )

    def _coordinates(self, rest: str) -> list[str]:
        lines = [f"rest = {rest}"]
        for axis in reversed(axes_of(self.spec)):
            extent = self.writer.factor(self.spec.batch[axis])
            lines += [f"b{axis} = rest % {extent}", f"rest = rest // {extent}"]
        return lines

    def _lanes(self) -> str:
        """Look up LANES tiles and add the live ones to the lists."""
        first, last, size = self.along
        live, whole = self._conditions(*self.mask.live_conditions()), self._whole()
        return source.block(
            f"number = start + tl.arange(0, {LANES})",
            f"{first} = tl.minimum(number, tiles_across - 1) * {size}",
            f"{last} = tl.minimum({first} + {size}, {self.extents[first]}) - 1",
            *self.writer.take(Level.BLOCK),
            f"meets = (number < tiles_across) & {' & '.join(live)}",
            *self._more(),
            f"full = {' & '.join(['meets', *whole])}",
            "partial = meets & (full == 0)",
            "tl.store(list_at + full_count - 1 + tl.cumsum(full.to(tl.int32), 0), number, mask=full)",
            "full_count += tl.sum(full.to(tl.int32), 0)",
            "partial_at = list_at + tiles_across - partial_count",
            "tl.store(partial_at - tl.cumsum(partial.to(tl.int32), 0), number, mask=partial)",
            "partial_count += tl.sum(partial.to(tl.int32), 0)",
        )

    def _more(self) -> list[str]:
        return []

    def _conditions(self, *conditions: Expr) -> list[str]:
        return [f"({self.writer.bind(condition, 'n')})" for condition in conditions]

    def _whole(self) -> list[str]:
        """Conditions for a tile that is not cut off along the list and needs no mask."""
        if self.ordered and self.spec.reproducible:
            return []
        mask, (first, _, size) = self.mask, self.along
        inside = [] if mask.key_lo is None else [apply("ile", mask.key_lo, J0)]
        inside += [] if mask.key_hi is None else [apply("ilt", J1, mask.key_hi)]
        return [f"({first} + {size} <= {self.extents[first]})", *self._conditions(*inside, *mask.whole())]


class KeyLists(TileLists):
    """Numbers of the tiles of keys that one block of ROWS query rows of dQ meets, full ones first."""

    name, ordered = "attention_key_tiles", False


class RowLists(TileLists):
    """Numbers of the blocks of ROWS query rows that meet one block of KEYS keys, full ones first.

    dead: whether blocks with a row that met no live key, told by `dead`, [place, block of rows], meet all keys."""

    name, ordered = "attention_row_blocks", False
    block, along = TileLists.along, TileLists.block

    def __init__(self, spec: AttentionSpec, dead: bool):
        super().__init__(spec)
        self.dead = dead

    def _more(self) -> list[str]:
        if not self.dead:
            return []
        found = "tl.load(dead_ptr + program // blocks * tiles_across + number, mask=inside, other=0) != 0"
        return ["inside = number < tiles_across", f"meets = meets | ({found})"]
