"""Vector lanes of a backward kernel, queries or keys, and what follows: which rows they may meet, what is read and
written beside the products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from fusion.ir.expr import I0, I1
from fusion.lowering.backward_plan import STATISTICS, Form, LaneAxis, normalized

from ..amx import Products
from ..builder import Value
from ..dense import DenseLoad
from ..rows import LINE
from ..scope import Scope
from ..values import SIZE
from .loads import GradientSink, LaneLoad
from .tile import Block, Kind, RowRange

if TYPE_CHECKING:
    from .kernel import BackwardKernel

OUTPUT_GRADIENT, OUTPUT = -1, -2  # stand for dO and O where the number of an operand is expected


class Lanes:
    """Lanes that are rows in their order, some groups of them at a time."""

    operands: ClassVar[tuple[int, int, int, int]]
    """The numbers of A, B, C and D: see `tile`."""
    load: ClassVar[type[DenseLoad]] = DenseLoad
    loads: list[DenseLoad]
    """Readers of dense operands, made for each batch element."""

    def __init__(self, kernel: BackwardKernel):
        self.kernel, self.b, self.lanes, self.vector = kernel, kernel.b, kernel.lanes, kernel.vector
        self.spec, self.params = kernel.spec, kernel.params
        self.rows_per_block = self.rows_per_item = kernel.tiling.groups * self.lanes

    def reserve(self, products: list[Products]) -> None:
        """Memory of its own."""

    def begin_element(self, scope: Scope) -> None:
        """Before the first block of a batch element."""

    def blocks(self, scope: Scope, number: Value) -> Iterator[Block]:
        """The rows that a thread takes at a time, block by block."""
        b, rows = self.b, self.rows_per_block
        first = b.mul(number, rows, "first")
        count = b.least(b.sub(self.kernel.n_lanes, first), rows, "count")
        yield self.block(scope, first, count, RowRange(first=first, count=count))

    def block(self, scope: Scope, first: Value, count: Value, extent: RowRange) -> Block:
        b, step = self.b, self.kernel.tiles.score_gemms.products.nr
        groups = b.ceil_div(count, self.lanes, "groups")
        padded = b.mul(b.ceil_div(groups, step), step, "padded_groups")
        return Block(scope=scope, first=first, count=count, groups=groups, padded=padded, extent=extent)

    def rows(self, block: Block) -> tuple[Value, Value]:
        """The rows that a block's lanes may meet, from and up to: all here."""
        return self.b.constant(0, "i64"), self.kernel.n_rows

    def may_meet(self, block: Block, rows: RowRange) -> Value:
        """Whether a query of this tile may look at a key of it, or met no live key."""
        raise NotImplementedError

    def prefetch(self, block: Block, rows: RowRange) -> None:
        """Ask for what will be read and written of these rows, while products are computed."""

    def scope(self, block: Block, g: Value) -> Scope:
        """A scope that knows the lanes of a group."""
        b, offset = self.b, self.b.mul(g, self.lanes)
        return block.scope.along(self.kernel.axis.lane, b.add(block.first, offset), b.sub(block.count, offset))

    def statistics(self, scope: Scope) -> dict[str, Value] | None:
        """`STATISTICS` of the lanes of a scope; None where lanes are no queries, or there are none."""
        return None

    def finish(self, block: Block, g: Value) -> None:
        """Write what is summed up for a group."""
        self.kernel.write_group(block, g)


class QueryLanes(Lanes):
    """Lanes are queries."""

    operands = (0, OUTPUT_GRADIENT, 1, 2)

    def rows(self, block: Block) -> tuple[Value, Value]:
        """The keys that the mask leaves for these queries; all where one of them met no live key."""
        b, kernel = self.b, self.kernel
        if not kernel.skips:
            return super().rows(block)
        first, count = block.extent.first, block.extent.count
        ranged = block.scope.inner({I0: first, I1: b.sub(b.add(first, count), 1)})
        step = kernel.tiling.keys if self.spec.reproducible else kernel.tiles.key_step
        low, high = kernel.key_range(ranged, step)
        low = b.as_value(low, "i64")
        if not normalized(self.spec):
            return low, high
        self.dead = kernel.any_dead(block.extent)
        return b.select(self.dead, b.constant(0, "i64"), low, "low"), b.select(self.dead, kernel.n_k, high, "high")

    def may_meet(self, block: Block, rows: RowRange) -> Value:
        """By the map of live tiles: `rows` has seen to the keys' closed-form range."""
        b, mask = self.b, self.spec.mask
        if mask is None or not self.kernel.skips or mask.tile_live is None:
            return b.constant(1, "i1")
        live = b.as_value(self.kernel.tiles.scope(block, rows).integer(mask.tile_live), "i64")
        meets = b.compare("ne", live, 0, "meets")
        return b.or_(meets, self.dead, "meets") if normalized(self.spec) else meets

    def prefetch(self, block: Block, rows: RowRange) -> None:
        size, keys = self.rows_per_block, self.kernel.tiles.key_step
        for load in self.loads:
            load.prefetch_tile(block.first, size, rows.first, keys, size, self.kernel.n_k)

    def statistics(self, scope: Scope) -> dict[str, Value] | None:
        if not normalized(self.spec):
            return None
        first = scope.lanes.first
        return {name: self.b.load(self.kernel.statistic(name, first), self.vector, name) for name in STATISTICS}


class KeyLanes(Lanes):
    """Lanes are keys."""

    operands = (1, 2, 0, OUTPUT_GRADIENT)
    load = LaneLoad

    def may_meet(self, block: Block, rows: RowRange) -> Value:
        b, kernel, mask = self.b, self.kernel, self.spec.mask
        if mask is None or not kernel.skips:
            return b.constant(1, "i1")
        meets = kernel.all_of(kernel.tiles.scope(block, rows), mask.live_conditions())
        return b.or_(meets, kernel.any_dead(rows), "meets") if normalized(self.spec) else meets

    def prefetch(self, block: Block, rows: RowRange) -> None:
        """Dense tensors that are read, and their gradients that are written."""
        b, lanes, axis = self.b, self.lanes, self.kernel.axis
        for tensor in (*self.loads, *(sink for sink in self.kernel.sinks if sink.entry.form is Form.DENSE)):
            assert isinstance(tensor, LaneLoad | GradientSink)
            per_line = max(1, LINE // (lanes * SIZE[tensor.memory]))
            with b.loop(0, block.groups, per_line, hint="g") as g, b.loop(0, rows.count, hint="r") as r:
                start, all_lanes = b.add(block.first, b.mul(g, lanes)), b.constant(lanes, "i64")
                here = block.scope.along(axis.lane, start, all_lanes)
                tensor.prefetch(here.inner({axis.row: b.add(rows.first, r)}))


KEY_FORMS = (Form.PER_KEY, Form.DENSE, Form.SCATTERED)
QUERIES = Kind(name="queries", lanes=QueryLanes, axis=LaneAxis.QUERIES, gradients=(0,))
"""dQ += dS K, and gradients of loads that are free of the key."""
KEYS = Kind(name="keys", lanes=KeyLanes, axis=LaneAxis.KEYS, gradients=(1, 2), forms=KEY_FORMS)
"""dK += dS^T Q, dV += P^T dO, and gradients of all other loads."""
FUSED = Kind(name="fused", lanes=KeyLanes, axis=LaneAxis.KEYS, gradients=(0, 1, 2), forms=tuple(Form), fused=True)
"""All of these."""
AUX_SUMS = Kind(name="auxiliary sums", lanes=QueryLanes, axis=LaneAxis.QUERIES, at_weight=True)
"""Sums over the keys of P times what auxiliary outputs give: their part of delta."""
