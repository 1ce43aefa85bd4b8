"""Format of the map of a mask's tiles, and the lookup of a tile in it.

Where a mask is data (padding, document numbers, a mask tensor), its live tiles are found by a pass over that data
before the attention, once for all heads, layers and calls that use it. The map is a summed-area table: for cells of
CELL_ROWS queries by CELL_KEYS keys,

    table[b.., r, c, 0] = number of cells (r' < r, c' < c) with a live score
    table[b.., r, c, 1] = number of cells (r' < r, c' < c) with a score that is not fully live

so that for any rectangle, whatever tile a kernel works in, four numbers give how many of the cells that it touches are
live, and how many need the mask. A mask that is the same for all queries has a single row of cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fusion.ir import integers, records
from fusion.ir.expr import I0, I1, J0, J1, Expr, Kind, coordinates, load, loads, walk
from fusion.ir.primitives import PRIMITIVES
from fusion.ir.results import size_value

CELL_ROWS, CELL_KEYS = 32, 64
HARD_BIAS = -1e9
"""Values of an additive mask that are not above this are a hard mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSpec:
    """Specification of a map.

    sizes: names of run-time sizes, in the order in which the op receives their values.
    batch: extents of the map's own batch coordinates b0, b1, ...
    live: where it is false a score is dead.
    full: where it is true a score needs no mask; predicates in b.., i, j.
    rows: whether the predicates depend on the query.

    Loads in them are numbered by the op's operands.
    """

    sizes: tuple[str, ...]
    batch: tuple[Expr, ...]
    n_q: Expr
    n_k: Expr
    live: Expr
    full: Expr
    rows: bool

    def __str__(self) -> str:
        return f"tile map of {self.live}"

    def shape(self, sizes: dict) -> list:
        """The table's shape; `sizes`: values by name, integers or symbolic."""
        *batch, n_q, n_k = (size_value(extent, sizes) for extent in (*self.batch, self.n_q, self.n_k))
        cells = (n_q + CELL_ROWS - 1) // CELL_ROWS if self.rows else 1
        return [*batch, cells + 1, (n_k + CELL_KEYS - 1) // CELL_KEYS + 1, 2]

    def to_json(self) -> str:
        """Map as text, for the op."""
        return records.to_json(self)

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> MapSpec:
        """The map that `to_json` wrote; equal text gives the same object."""
        return records.from_json(MapSpec, text)


def lookup(operand: int, batch: tuple[Expr, ...], rows: bool) -> tuple[Expr, Expr]:
    """(live, mixed): numbers of such cells in the tile i0..i1 x j0..j1, by the table in an operand at coordinates."""
    columns = [integers.floordiv(J0, CELL_KEYS), integers.add(integers.floordiv(J1, CELL_KEYS), 1)]
    lines = [integers.integer(0), integers.integer(1)]
    if rows:
        lines = [integers.floordiv(I0, CELL_ROWS), integers.add(integers.floordiv(I1, CELL_ROWS), 1)]

    def count(plane: int) -> Expr:
        corners = [
            integers.mul((-1) ** (r + c), load(operand, (*batch, line, column, integers.integer(plane)), Kind.INT))
            for r, line in enumerate(lines)
            for c, column in enumerate(columns)
            if r or rows  # without rows the first line of the table is zero
        ]
        return integers.add(*corners)

    return count(0), count(1)


_LOGIC = {"and", "or", "not"}
_INTERVAL_COMPARISONS = {"ile", "ilt", "ieq", "ine", "fle", "flt", "feq", "fne"}
_INTERVAL_ARITHMETIC = {"add", "mul", "iabs"}


@lru_cache(maxsize=4096)
def mappable(expr: Expr) -> bool:
    """Whether the extent of a predicate, or the bounds of a value, over a tile can be computed from their data."""
    names = coordinates(expr)
    if not {"i", "j"} <= names:
        return not any(part.op in ("score", "row_max", "row_sum", "hash") for part in walk(expr))
    if expr.op == "load":
        return is_dense(expr)
    if expr.op == "mul":
        return sum(not arg.is_const for arg in expr.args) == 1 and all(map(mappable, expr.args))
    if expr.op == "floordiv":
        return expr.args[1].is_const and mappable(expr.args[0])
    known = expr.op in _LOGIC | _INTERVAL_COMPARISONS | _INTERVAL_ARITHMETIC or expr.op == "coord"
    return known and all(map(mappable, expr.args))


def is_dense(expr: Expr) -> bool:
    """Whether a load's dimensions are each indexed by one coordinate at most, and no two of them by the same."""
    seen: list[str] = []
    for index in expr.args:
        if loads(index) or not all(part.op in PRIMITIVES or not part.args for part in walk(index)):
            return False
        names = coordinates(index)
        if len(names) > 1:
            return False
        seen += names
    return len(seen) == len(set(seen))
