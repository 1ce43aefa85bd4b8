"""Facts about an attention's mask that are known at compile time, and fills of masks in score programs.

A program is `live if p else dead`, where `dead` is a constant (the score was replaced) or a sum with one (a mask was
added), which may be rounded to a narrower dtype. For live rows it only has to be far below. For rows without a live key
it is eager's value, rounding included, since the mean there is one over the keys with the largest of these values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from fusion.ir.expr import J0, J1, TRUE, Expr, Kind, const, walk
from fusion.ir.ops import apply, conjuncts, where
from fusion.ir.primitives import ROUNDED

MASK_EXPRESSIONS = ("live", "key_lo", "key_hi", "full_lo", "full_hi", "full", "tile_live", "tile_mixed")
"""The fields of `MaskFacts` that are expressions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFacts:
    """Facts about a mask that are known at compile time.

    live: predicate in b.., i, j; where it is false the score program is at most `fill`, below every live score, but for
        ordinary scores that a fill is added to.
    key_lo, key_hi: the keys that kernels visit (by `key_range` of codegen.mlir.skeleton and `key_limits` of
        codegen.triton.stages): INT expressions in b.. and `i0`, `i1` (first and last query row of a block);
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

    def live_conditions(self) -> list[Expr]:
        """Conditions for a score of the tile of rows I0..I1 and keys J0..J1 to be live: BOOL each."""
        conditions = [] if self.key_lo is None else [apply("ile", self.key_lo, J1)]
        conditions += [] if self.key_hi is None else [apply("ilt", J0, self.key_hi)]
        return conditions if self.tile_live is None else [*conditions, apply("ine", self.tile_live, const(0))]

    def whole(self) -> list[Expr]:
        """Conditions for `full` to replace the program in a tile whose keys are within key_lo and key_hi: BOOL each."""
        conditions = [] if self.full_lo is None else [apply("ile", self.full_lo, J0)]
        conditions += [] if self.full_hi is None else [apply("ilt", J1, self.full_hi)]
        return conditions if self.tile_mixed is None else [*conditions, apply("ieq", self.tile_mixed, const(0))]


LARGEST = 3.4028234663852886e38
"""The largest float32."""

SWALLOWS = 2.0**64
"""A finite fill beyond this stays what it is, or overflows, in a sum with scores in any dtype."""

_HIDES = 2.0**20
"""A unit of rounding of constants beyond this hides scores."""

_KEEPING = ("where", "fadd", "minimum", "maximum")
"""Operations of which -inf makes -inf, or nothing."""


@functools.lru_cache(maxsize=4096)
def fill_of(value: Expr) -> float:
    """Upper bound of a dead score, without what ordinary scores add; +inf for one that is not dead, or may be NaN."""
    if value.op == "const":
        return value.value
    if value.op == "where":
        return max(map(fill_of, value.args[1:]))
    if value.op in ROUNDED.values():
        return fill_of(value.args[0])
    if value.op == "fmul" and value.args[1].is_const and (by := fill_of(value.args[1])) > 0:
        return fill_of(value.args[0]) * by
    low = [fill for arg in value.args if (fill := fill_of(arg)) < -1e3] if value.op == "fadd" else []
    return sum(low) if low and not any(map(_loses_infinities, value.args)) else math.inf


@functools.lru_cache(maxsize=4096)
def _loses_infinities(value: Expr) -> bool:
    """Whether a value may be NaN at a score that was masked with -inf: -inf * 0, say."""
    if value.op in _KEEPING or value.op in ROUNDED.values():
        return any(_loses_infinities(arg) for arg in value.args if arg.kind is Kind.FLOAT)
    constants = (part.value for part in walk(value) if part.is_const and part.kind is Kind.FLOAT)
    return not value.is_const and any(map(math.isinf, constants))


def has_fill(value: Expr) -> bool:
    """Whether a value contains a constant beside which scores vanish."""
    return any(part.is_const and part.kind is Kind.FLOAT and abs(part.value) > _HIDES for part in walk(value))


def is_dead(value: Expr) -> bool:
    """Whether a value is a constant, or a sum with a fill."""
    return value.is_const or fill_of(value) < 0


def in_units(dead: Expr, scale: float, divide: Callable[[Expr], Expr | None]) -> Expr | None:
    """Dead score / `scale` such that its rows keep their weights, or None. divide: for values that are not dead."""
    if dead.is_const:
        value = dead.value / scale
        return const(max(-LARGEST, min(LARGEST, value)) if math.isfinite(dead.value) else value, Kind.FLOAT)
    if dead.op == "where":
        arms = [in_units(arm, scale, divide) if is_dead(arm) else divide(arm) for arm in dead.args[1:]]
        return None if None in arms else where(dead.args[0], *arms)  # type: ignore[arg-type]
    if dead.op in ROUNDED.values():  # values apart are further apart than the division rounds
        constants = [part.value for part in walk(dead) if part.is_const and part.kind is Kind.FLOAT]
        fits = all(math.isinf(value) or abs(value) / scale < LARGEST / 16 for value in constants)
        return dead * (1 / scale) if fits else None
    if dead.op != "fadd":
        return None
    fill, rest = sorted(dead.args, key=lambda arg: not arg.is_const)
    if not fill.is_const or not _stays(fill.value, scale):
        return None
    moved = in_units(rest, scale, divide) if is_dead(rest) else divide(rest)
    return None if moved is None else apply("fadd", moved, in_units(fill, scale, divide))  # type: ignore[arg-type]


def _stays(fill: float, scale: float) -> bool:
    """Whether x + fill rounds and overflows in units of `scale` as it does without."""
    if math.isinf(fill):
        return True
    if -fill < SWALLOWS:
        return math.frexp(scale)[0] == 0.5
    return scale <= 1 and (-fill / scale <= LARGEST or -fill > LARGEST / 2)
