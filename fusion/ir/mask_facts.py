"""Facts about an attention's mask that are known at compile time."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fusion.ir.expr import J0, J1, TRUE, Expr, const, walk
from fusion.ir.ops import apply, conjuncts

MASK_EXPRESSIONS = ("live", "key_lo", "key_hi", "full_lo", "full_hi", "full", "tile_live", "tile_mixed")
"""The fields of `MaskFacts` that are expressions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFacts:
    """Facts about a mask that are known at compile time.

    live: predicate in b.., i, j; where it is false the score program is at most `fill`, below every live score, but for
        ordinary scores that a fill is added to.
    key_lo, key_hi: INT expressions in b.., and the coordinates `i0`, `i1` (first and last query row of a block);
        outside key_lo <= j < key_hi no key of rows i0..i1 is live. Not clamped to [0, n_k).
    full: the score program where it is simpler because masks need not be evaluated: for tiles within the full range
        and without mixed cells. None where there is no such range and no map, or nothing becomes simpler.
    full_lo, full_hi: likewise, the keys for which `full` may stand for all rows i0..i1; None where unbounded.
    tile_live, tile_mixed: INT expressions in b.., i0, i1, j0, j1 (first and last row and key of a tile), from a map
        that another op computed from the masks' data (`fusion.ir.tile_map`). tile_live = 0: no score of the tile lives;
        tile_mixed = 0 (and keys within the full range): `full` may stand for the whole tile. None without a map.
    fill: the largest value that a dead score can take (before base-2 scaling), e.g. finfo.min or -inf. A row whose
        maximum over the visited keys is not above `fill / 2` (for -inf: not above -inf) has no live key among them: its
        block must be computed again over all keys, because eager then gives NaN or a mean over all keys.
    """

    live: Expr
    key_lo: Expr | None = None
    key_hi: Expr | None = None
    full_lo: Expr | None = None
    full_hi: Expr | None = None
    full: Expr | None = None
    tile_live: Expr | None = None
    tile_mixed: Expr | None = None
    fill: float

    @property
    def skips(self) -> bool:
        """Whether these facts allow to skip tiles."""
        return not (self.key_lo is None and self.key_hi is None and self.tile_live is None)

    @property
    def maybe_live(self) -> Expr:
        """Part of `live` that is known before the score is: it holds wherever `live` does."""
        parts = (part for part in conjuncts(self.live) if not any(inner.op == "score" for inner in walk(part)))
        return functools.reduce(functools.partial(apply, "and"), parts, TRUE)

    def visits(self) -> list[Expr]:
        """Conditions for a score of the tile of rows I0..I1 and keys J0..J1 to be live: BOOL each."""
        conditions = [] if self.key_lo is None else [apply("ile", self.key_lo, J1)]
        conditions += [] if self.key_hi is None else [apply("ilt", J0, self.key_hi)]
        return conditions if self.tile_live is None else [*conditions, apply("ine", self.tile_live, const(0))]

    def whole(self) -> list[Expr]:
        """Conditions for `full` to replace the program in a tile whose keys are within key_lo and key_hi: BOOL each."""
        conditions = [] if self.full_lo is None else [apply("ile", self.full_lo, J0)]
        conditions += [] if self.full_hi is None else [apply("ilt", J1, self.full_hi)]
        return conditions if self.tile_mixed is None else [*conditions, apply("ieq", self.tile_mixed, const(0))]
