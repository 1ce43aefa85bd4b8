"""Parts of a score program that depend on the distance i - j only (relative-position bias, ALiBi): computed once per
distance instead of once per pair.

Over a tile of R rows and K keys there are R + K - 1 distances. Their values are written to a small table, with the
distance as the lane coordinate; for a key and L consecutive rows the values are L consecutive entries of it.
"""

from __future__ import annotations

from fusion.ir.expr import Expr, I, J, Kind

from .builder import Value, vector_of
from .scope import Context, Lanes, Scope


class DistanceTable:
    """The table of one part. `area` has room for a tile's distances. Make it in the item's scope."""

    def __init__(self, context: Context, part: Expr, area: Value):
        self.context, self.part, self.area, self.b = context, part, area, context.b
        self.scalar = "i32" if part.kind is Kind.BOOL else "f32"

    def fill(self, scope: Scope, first_row: Value, last_row: Value, first_key: Value, last_key: Value) -> None:
        """Write the values of a tile's distances: the last key against rows that go on beyond the last one."""
        b, lanes = self.b, self.context.lanes
        count = b.add(b.sub(b.sub(last_row, first_key), b.sub(first_row, last_key)), 1)
        with b.loop(0, count, lanes, hint="at") as at:
            valid = b.first_lanes(b.sub(count, at), lanes)
            lane = Lanes(coord=I, first=b.add(first_row, at), count=lanes, valid=valid)
            here = scope.inner({J: last_key}, lanes=lane)
            value = here.vector(self.part)
            if self.scalar == "i32":
                value = b.convert("arith.extui", value, "i32")
            b.store(value, b.at(self.area, at, self.scalar))

    def read(self, row: Value, key: Value) -> Value:
        """The values of L rows from `row` on, at a key; `row` counted from the tile's first, `key` from its last."""
        b = self.b
        value = b.load(
            b.at(self.area, b.sub(row, key), self.scalar), vector_of(self.scalar, self.context.lanes), "by_distance"
        )
        return b.compare("ne", value, 0) if self.scalar == "i32" else value
