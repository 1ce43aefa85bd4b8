"""One tile of a backward kernel: a block of rows against a block of lanes.

S^T = C A^T;  dP^T = D B^T                      products
P, dS, gradients of loads                       vectors, see `element`
out_A^T += C^T dS;  out_B^T += D^T P            products; the latter where lanes are keys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fusion.ir.expr import I0, I1, J0, J1
from fusion.ir.reads import dense_loads
from fusion.ir.spec import AttentionSpec, Operand
from fusion.lowering.backward_plan import (
    ROW_VALUES,
    STATISTICS,
    BackwardPlan,
    Form,
    LaneAxis,
    RowSum,
    TileProgram,
    normalized,
)
from fusion.planning.register_tiles import HALF_KEY_SPAN, KEY_SPAN, Target, Tiling

from ..amx import Products, products_of
from ..builder import Value, vector_of
from ..dense import DenseLoad
from ..packing import STATE_BYTES, PackedRows
from ..scope import MEMORY_TYPE, Lanes, Scope
from ..skeleton import KernelFunction
from ..values import Array
from .centring import CentredKeys
from .element import PAIR, Elements, GroupElements, Pair
from .loads import GradientSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the backward kernels of a spec have in common: tiles, and the widths of Q and K (d) and of V (d_v)."""

    spec: AttentionSpec
    plan: BackwardPlan
    tiling: Tiling
    target: Target
    d: int
    d_v: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientProducts:
    """The two products over one width: of A and C over d, or of B and D over d_v. keys, values: C or D, packed for the
    first and the second product."""

    operand: int  # the operand whose gradient the second product sums up
    width: int
    scale: float  # a factor that the sums lack
    products: Products
    lanes: Value  # A or B, packed
    keys: Value
    values: Value
    tile: Value  # the first product, S or dP
    weights: Value  # the right side of the second, dS or P
    sums: Value  # the second product, `size` bytes for each span of rows
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`count` lane rows from `first` on, in `groups` groups of lanes; products see `padded` groups. scope: knows the
    batch coordinates. span: these rows; where they are those of a list, from number `first` on, all between them, too.
    """

    scope: Scope
    first: Value
    count: Value
    groups: Value
    padded: Value
    span: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`count` rows from `first` on."""

    first: Value
    count: Value


class BackwardTile(KernelFunction):
    """The stages of a tile, and the memory that they work in. needs: which operands' gradients are wanted."""

    loads: Sequence[DenseLoad]
    sinks: Sequence[GradientSink]
    flat_query: Value
    """What `BackwardKernel` makes for each batch element: readers of dense operands, where gradients of loads go, and
    the number of its first query among those of all elements."""

    axis: ClassVar[LaneAxis]
    forms: ClassVar[tuple[Form, ...]]
    """In which gradients of loads are collected."""
    gradients: ClassVar[tuple[int, ...]]
    """Which of Q, K and V (0, 1, 2) have their gradients written, where these are needed."""
    uneven: ClassVar[bool] = False
    """Whether batch elements differ in what there is to do."""
    sums_further: ClassVar[bool] = False
    """Whether all that is wanted are the sums of P times what further outputs give: there is no second half."""
    sides: ClassVar[tuple[int, int, int, int]]  # operand numbers of A, B, C and D

    def __init__(self, problem: Problem, needs: Sequence[bool]):
        spec, tiling = problem.spec, problem.tiling
        degree = 5 if spec.out_dtype == "float32" else {1: 3, 2: 4}.get(tiling.planes, 5)
        super().__init__(
            spec, problem.target, problem.d, problem.d_v, degree, flush=tiling.planes > 0, may_flag=tiling.planes > 1
        )
        self.plan, self.tiling = problem.plan, tiling
        wanted = [n for n in self.gradients if needs[n]]
        dtypes = {n: spec.operands[n].dtype if self.plan.writes(n) else "float32" for n in wanted}
        self.results = {n: MEMORY_TYPE[dtype] for n, dtype in dtypes.items()}
        self.collected = self.plan.of(self.forms, needs)
        self.sums = self._sums(needs)
        self.lane_sums = tuple(entry for entry in self.sums if entry.axis is self.axis)
        grad = Operand(dtype=spec.out_dtype, rank=len(spec.output.dims), name="grad")
        arriving = (Operand(dtype=f.dtype, rank=len(f.dims), name="arriving") for f in spec.further)
        self.context.operands = (*spec.operands, grad, *arriving, replace(grad, name="out"))
        self.skips = spec.mask is not None and spec.mask.skips and not self.plan.everywhere
        self.read = (self.programs.masked, self.programs.full, self.weight, self.plan.at_weight)
        masked = self.plan.variants[0].gradients
        self.dense = dense_loads(*self.read, *(masked[entry.load] for entry in self.collected))
        self._areas()

    def _sums(self, needs: Sequence[bool]) -> tuple[RowSum, ...]:
        """What is added up besides the products."""
        return self.plan.sums(self.forms, needs)

    @property
    def wants_slopes(self) -> bool:
        """Whether anything is made of dS."""
        return self.score_half.operand in self.results or bool(self.collected)

    @property
    def reduces_lanes(self) -> bool:
        """Whether a product with dS reduces over whole groups of lanes: what lies behind the last one must be 0."""
        return self.together > 1

    @property
    def rows_per_block(self) -> int:
        return self.tiling.groups * self.lanes

    @property
    def rows_per_item(self) -> int:
        """How many a thread takes at a time."""
        return self.rows_per_block

    def _areas(self) -> None:
        mirrored = self.axis is LaneAxis.KEYS
        products = tuple(
            products_of(self.b, self.target, self.tiling, n, n, self.max_abs, True, mirrored)
            for n in (self.d, self.d_v)
        )
        groups, rows, row = self.tiling.groups, self.tiling.keys, 4 * self.lanes
        lanes = [self.area(groups * p.query_bytes(), f"packed_{side}") for p, side in zip(products, "ab", strict=True)]
        tiles = [self.area(groups * rows * row, name) for name in ("scores", "slopes")]
        names = ("score_weights", "value_weights")
        weights = [self.area(groups * p.weight_bytes(rows), name) for p, name in zip(products, names, strict=True)]
        # Sums begin anew every so many rows, as in the forward kernel; those of the spans before lie behind them.
        self.span = KEY_SPAN if self.spec.out_dtype == "float32" else HALF_KEY_SPAN
        sizes = [groups * p.e_padded * row for p in products]
        sums = [self.area(2 * size, f"out_{side}") for size, side in zip(sizes, "ab", strict=True)]
        self.staging = self.area(8 * max(p.staging_elements() for p in products), "staging")
        self.finished = self.area(self.lanes * max(p.e_padded for p in products) * 4, "finished")
        self.together = products[0].group_step if products[0].overlaps else 1
        self.staged = [self.area(self.together * rows * row, "staged") for _ in self.dense]
        self.kept = self.area(len(self.lane_sums) * groups * row, "sums")
        self.packed = PackedRows(self.b, self.area(STATE_BYTES, "state"))
        self.centred = CentredKeys(self) if normalized(self.spec) and 0 in self.results else None
        packed = self._packed_areas(products)
        scales, widths = (self.programs.scale, 1.0), (self.d, self.d_v)
        self.halves = tuple(
            GradientProducts(
                operand=self.sides[n], width=widths[n], scale=scales[n], products=products[n], lanes=lanes[n],
                keys=packed[2 * n], values=packed[2 * n + 1], tile=tiles[n], weights=weights[n], sums=sums[n],
                size=sizes[n],
            )
            for n in ((0,) if self.sums_further else (0, 1))
        )  # fmt: skip
        self.score_half, self.value_half = self.halves[0], self.halves[-1]

    def _packed_areas(self, products: Sequence[Products]) -> list[Value]:
        """Areas behind the fixed ones, whose lengths follow the number of rows: C and D, each packed in two ways."""
        b, steps, fixed = self.b, self.params[("key_steps",)], self.workspace_bytes
        sizes = self._step_sizes(products)
        self.step_bytes = sum(sizes)
        packed: list[Value] = []
        with b.at_entry():
            here = b.at(self.base, fixed, "i8", "packed")
            for product in products:
                product.note_key_steps(steps)
            for size in sizes:
                packed.append(here)
                here = b.row(here, steps, size, "i8", "packed")
        return packed

    def _step_sizes(self, products: Sequence[Products]) -> list[int]:
        """Bytes of one key step in each of these areas."""
        return [size for p in products for size in (p.key_bytes(), p.value_bytes())]

    def part(self, base: Value, g: Value | int, size: int) -> Value:
        return self.b.row(base, g, size, "i8")

    def _ends_key_span(self, first: Value, count: int, span: int) -> Value:
        b = self.b
        before, after = (b.div(b.add(first, n), span, "chapter") for n in (0, count))
        return b.compare("ne", before, after, "ends")

    def _add_partial_sums(self, source: Value, target: Value, size: Value | int) -> None:
        """Add `size` bytes of sums to others, and clear them."""
        b, vector = self.b, vector_of("f32", 16)
        with b.loop(0, size, 64, hint="at") as at:
            places = [b.at(base, at, "i8") for base in (source, target)]
            b.store(b.add(*(b.load(place, vector, "o") for place in places)), places[1])
            b.store(b.constant(0.0, vector), places[0])

    def _tile(self, block: Block, rows: Rows) -> None:
        b, step = self.b, self.score_half.products.key_step
        steps = b.ceil_div(rows.count, step, "steps")
        start = b.div(rows.first, step)
        masked, *full = self.plan.variants
        whole = self._whole(self._tile_scope(block, rows)) if full else None
        self._first_products(block, rows, start, steps)
        if whole is None:
            self._groups(block, rows, steps, masked)
        else:
            with b.when(whole):
                self._groups(block, rows, steps, *full)
            with b.otherwise():
                self._groups(block, rows, steps, masked)
        self._second_products(block, start, steps)

    def _first_products(self, block: Block, rows: Rows, start: Value, steps: Value) -> None:
        """S and dP of a tile."""
        b, lanes = self.b, self.lanes
        for half in self.halves:
            p = half.products
            with b.loop(0, steps, hint="step") as step:
                if half is self.score_half:
                    self._prefetch(block, Rows(first=b.add(rows.first, b.mul(step, p.key_step)), count=p.key_step))
                with b.loop(0, block.padded, p.group_step, hint="g") as g:
                    members = [b.add(g, k) for k in range(p.group_step)]
                    at = self.part(half.keys, b.add(start, step), p.key_bytes())
                    places = [
                        b.row(half.tile, b.add(b.mul(m, self.tiling.keys), b.mul(step, p.key_step)), lanes)
                        for m in members
                    ]
                    p.scores(at, [self.part(half.lanes, m, p.query_bytes()) for m in members], places)

    def _second_products(self, block: Block, start: Value, steps: Value) -> None:
        """The tile's part of the gradients of A and B."""
        b, rows = self.b, self.tiling.keys
        for half in self.halves:
            if half.operand not in self.results:
                continue
            p = half.products
            sets = b.div(block.padded, p.group_step)
            weights = Array(b, half.weights, p.weight_bytes(rows))
            sums = Array(b, half.sums, 4 * p.e_padded * self.lanes)
            p.accumulate_sets(p.values_of(half.values, start), steps, weights, sums, sets)

    def _prefetch(self, block: Block, rows: Rows) -> None:
        """Ask for what will be read and written of these rows, while products are computed."""

    def _groups(self, block: Block, rows: Rows, steps: Value, variant: TileProgram) -> None:
        """P and dS of a tile."""
        b, n = self.b, rows.count
        with b.loop(0, block.groups, self.together, hint="g") as g:
            members = [GroupElements(self, block, rows, b.add(g, k), k, variant) for k in range(self.together)]
            tile = Elements(self, g, members)
            pairs = b.floor_to(n, PAIR, "pairs")
            with b.carry(0, pairs, PAIR, tile.no_sums, hint="r") as (loop, r, sums):
                loop.yields(*tile.pair(r, sums))
            with b.carry(pairs, n, PAIR, loop.results, hint="r") as (rest, r, sums):
                rest.yields(*tile.pair(r, sums, both=False))
            tile.add_sums(rest.results)
            tail = b.floor_to(b.add(n, 1), PAIR)
            nothing = [[b.constant(0.0, self.vector)] * PAIR] * self.together
            with b.loop(tail, b.mul(steps, self.score_half.products.key_step), PAIR, hint="r") as r:
                tile.store(r, nothing, nothing)

    def sum_at(self, k: int, g: Value) -> Value:
        """Where sum k of a group's lanes lies."""
        return self.b.row(self.kept, self.b.add(g, k * self.tiling.groups), self.lanes)

    def lane_scope(self, block: Block, g: Value) -> Scope:
        """A scope that knows the lanes of a group."""
        b, offset = self.b, self.b.mul(g, self.lanes)
        first, valid = b.add(block.first, offset), self._valid(b.sub(block.count, offset))
        return block.scope.inner(lanes=Lanes(coord=self.axis.lane, first=first, count=self.lanes, valid=valid))

    def lane_statistics(self, scope: Scope) -> dict[str, Value] | None:
        """`STATISTICS` of the lanes of a scope; None where lanes are no queries, or there are none."""
        return None

    def row_statistics(self, row: Value) -> dict[str, Value] | None:
        """Of one query, the same for all lanes; None where there are none."""
        if not normalized(self.spec):
            return None
        b = self.b
        return {n: b.broadcast(b.load(self.statistic(n, row), "f32", n), self.lanes) for n in STATISTICS}

    def add_to_row(self, number: int, row: Scope, term: Value) -> None:
        """Add a vector of lanes to sum `number` of a row; only where such sums are kept."""
        raise NotImplementedError

    def keep_slopes(self, row: Value, g: Value, slopes: Sequence[Pair]) -> None:
        """What else is to be done with dS of rows `row` and `row` + 1 of the groups from g on."""

    def _tile_scope(self, block: Block, rows: Rows) -> Scope:
        """A scope that knows the first and last query and key of a tile."""
        b, lanes = self.b, block.span
        queries, keys = (lanes, rows) if self.axis is LaneAxis.QUERIES else (rows, lanes)
        i0, j0 = queries.first, keys.first
        known = {I0: i0, I1: b.sub(b.add(i0, queries.count), 1), J0: j0, J1: b.sub(b.add(j0, keys.count), 1)}
        return block.scope.inner(known)

    def statistic(self, name: str, query: Value) -> Value:
        """Where one of the `ROW_VALUES` of a query of this batch element lies."""
        b = self.b
        with b.at_entry():
            apart = b.mul(self.params[("rows_apart",)], ROW_VALUES.index(name))
            row = b.at(self.params[("ptr", "rows")], apart, "f32", name)
        return b.at(row, b.add(self.flat_query, query), "f32")
