"""One tile of a backward kernel: a block of rows against a block of lanes.

S^T = C A^T;  dP^T = D B^T                      products
P, dS, gradients of loads                       vectors, see `GroupElements`
out_A^T += C^T dS;  out_B^T += D^T P            products; the latter where lanes are keys
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion.ir.derivative import AUX_UPSTREAM, UPSTREAM, WEIGHT_UPSTREAM
from fusion.ir.expr import I0, I1, J0, J1, SCORE, WEIGHT
from fusion.ir.reads import dense_loads
from fusion.ir.spec import AttentionSpec
from fusion.lowering.backward_plan import SUM_OF_DX, BackwardPlan, Form, LaneAxis, TileProgram, normalized
from fusion.planning.register_tiles import Target, Tiling, key_span

from ..amx import Products, products_of
from ..builder import Value
from ..dense import stage_loads
from ..rows import STATE_BYTES, PackedRows, RowReader
from ..scope import Scope, staged_leaf
from ..values import Array
from .centring import CentredKeys

if TYPE_CHECKING:
    from .kernel import BackwardKernel
    from .lanes import Lanes

PAIR = 2  # rows that are worked on at a time: the second products take weights in pairs

Pair = Sequence[Value]  # vectors of two rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Facts that the backward kernels of a spec share: tiles, and the widths of Q and K (d) and of V (d_v)."""

    spec: AttentionSpec
    plan: BackwardPlan
    tiling: Tiling
    target: Target
    d: int
    d_v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A backward kernel. lanes: makes what its vector lanes are. gradients: which of Q, K and V (0, 1, 2) have theirs
    written, where these are needed; forms: in which those of loads are collected. fused: dQ beside dK and dV.
    at_weight: only sums of P times what auxiliary outputs give are wanted, so that there is no second product pair.
    deltas: the sums go into the statistics of rows."""

    name: str
    lanes: Callable[[BackwardKernel], Lanes]
    axis: LaneAxis
    gradients: tuple[int, ...] = ()
    forms: tuple[Form, ...] = (Form.PER_QUERY,)
    fused: bool = False
    at_weight: bool = False
    deltas: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmPair:
    """The two products over one width: of A and C over d, or of B and D over d_v."""

    operand: int  # the operand whose gradient the second product sums up
    width: int
    scale: float  # a factor that the sums lack
    products: Products
    lanes: Array  # A or B, packed, by group
    keys: Array  # C or D, packed for the first product, by key step
    values: Value  # and for the second
    tile: Array  # the first product, S or dP, by group
    weights: Array  # the right side of the second, dS or P
    sums: Array  # the second product; behind it that of the spans of rows before
    rows: int  # vectors of all sums

    @property
    def before(self) -> Value:
        """The sums of the spans before."""
        return self.sums.b.at(self.sums.first, self.rows * 4 * self.products.lanes, "i8")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """`count` rows from `first` on."""

    first: Value
    count: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`count` lane rows from `first` on, in `groups` groups of lanes; products see `padded` groups. scope: knows the
    batch coordinates. extent: these rows, or where they are those of a list, from number `first` on, all from its first
    to its last."""

    scope: Scope
    first: Value
    count: Value
    groups: Value
    padded: Value
    extent: RowRange


class BackwardTiles:
    """The stages of a tile, and the memory that they work in."""

    def __init__(self, kernel: BackwardKernel):
        self.kernel, self.b, self.lanes, self.vector = kernel, kernel.b, kernel.lanes, kernel.vector
        spec, kind, tiling = kernel.spec, kernel.kind, kernel.tiling
        make = functools.partial(products_of, kernel, tiling, mirrored=kernel.axis is LaneAxis.KEYS)
        products = [make(kernel.d, kernel.d, any_weights=True), make(kernel.d_v, kernel.d_v)]  # of dS, P
        groups, rows, row = tiling.groups, tiling.keys, 4 * self.lanes
        lanes = [kernel.array(groups, p.query_bytes, f"packed_{x}") for p, x in zip(products, "ab", strict=True)]
        tiles = [kernel.array(groups, rows * row, name) for name in ("scores", "dp")]
        names = ("score_weights", "value_weights")
        weights = [kernel.array(groups, p.weight_bytes * rows, name) for p, name in zip(products, names, strict=True)]
        # Sums begin anew every so many rows, as in the forward kernel; those of the spans before lie behind them.
        self.span = key_span(kernel.target, tiling.planes, spec.out_dtype)
        sums = [kernel.array(2 * groups, p.e_padded * row, f"out_{x}") for p, x in zip(products, "ab", strict=True)]
        staging = kernel.area(8 * max(p.staging_elements for p in products), "staging")
        for product in products:
            product.staging = staging
        kernel.out_rows = kernel.area(self.lanes * max(p.e_padded for p in products) * 4, "out_rows")
        self.group_block = products[0].nr if products[0].overlaps else 1
        self.staged = [kernel.array(self.group_block, rows * row, "staged") for _ in kernel.dense]
        self.lane_sums = kernel.array(len(kernel.lane_sums) * groups, row, "sums")
        self.packed = PackedRows(self.b, kernel.area(STATE_BYTES, "state"), products[0].key_step)
        self.centred = CentredKeys(kernel) if normalized(spec) and 0 in kernel.results else None
        (kernel.query_gradients or kernel.side).reserve(products)
        sizes = [size for p in products for size in (p.key_bytes, p.value_bytes)]
        self.step_bytes, (keys_a, values_a, keys_b, values_b) = sum(sizes), kernel.packed_areas(sizes)
        numbers, scales, widths = kernel.side.operands, (kernel.programs.scale, 1 / kernel.unit), (kernel.d, kernel.d_v)
        packed = (keys_a, values_a.first), (keys_b, values_b.first)
        self.gemms = tuple(
            GemmPair(
                operand=numbers[n], width=widths[n], scale=scales[n], products=products[n], lanes=lanes[n],
                keys=packed[n][0], values=packed[n][1], tile=tiles[n], weights=weights[n], sums=sums[n],
                rows=groups * products[n].e_padded,
            )
            for n in ((0,) if kind.at_weight else (0, 1))
        )  # fmt: skip
        self.score_gemms = self.gemms[0]
        self.summed = [gemm for gemm in self.gemms if gemm.operand in kernel.results]  # whose second product is taken
        self.key_step = self.score_gemms.products.key_step

    def pack_lanes(self, block: Block, readers: list[RowReader]) -> None:
        """A and B."""
        b = self.b
        for reader, gemm in zip(readers, self.gemms, strict=False):
            with b.loop(0, block.padded, hint="g") as g:
                first = b.add(block.first, b.mul(g, self.lanes))
                gemm.products.pack_queries(reader, first, gemm.lanes[g])

    def pack_rows(self, row: Value, readers: list[RowReader]) -> None:
        """A step of C and D."""
        n = self.packed.number(row)
        for reader, gemm in zip(readers, self.gemms, strict=False):
            p = gemm.products
            p.pack_keys(reader, row, gemm.keys[n])
            if gemm in self.summed:
                values = self.centred if gemm.operand == 0 and self.centred else reader
                p.pack_values(values, row, p.values_of(gemm.values, n))

    def clear(self, block: Block, several: Value) -> None:
        """No row yet: sums of a block. several: whether there is more than one span of rows."""
        b, kernel = self.b, self.kernel
        for gemm in self.summed:
            size = gemm.products.weight_bytes * kernel.tiling.keys
            kernel.zero_unused(gemm.weights.first, b.mul(block.groups, size), b.mul(block.padded, size))
        for gemm in self.gemms:
            size = gemm.rows * 4 * self.lanes
            all_spans = b.constant(2 * size, "i64")
            kernel.zero(gemm.sums.first, b.select(several, all_spans, b.constant(size, "i64")))
        b.fill(self.lane_sums.first, len(kernel.lane_sums) * kernel.tiling.groups, b.constant(0.0, self.vector))

    def begin_span(self) -> None:
        """Add the sums to those of the spans before, and begin anew."""
        for gemm in self.gemms:
            self.b.move_sums(gemm.sums.first, gemm.before, gemm.rows, self.vector)

    def all_sums(self) -> None:
        """Add the sums of the spans before to those of the last, once."""
        for gemm in self.gemms:
            self.b.update(gemm.sums.first, gemm.rows * self.lanes, self.b.add, self.vector, gemm.before)

    def tile(self, block: Block, rows: RowRange) -> None:
        b, kernel = self.b, self.kernel
        steps = b.ceil_div(rows.count, self.key_step, "steps")
        start = self.packed.number(rows.first)
        masked, *full = kernel.plan.variants
        whole = kernel.whole(self.scope(block, rows)) if full else None
        self._first_products(block, rows, start, steps)
        if whole is None:
            self._groups(block, rows, steps, masked)
        else:
            with b.when(whole):
                self._groups(block, rows, steps, *full)
            with b.otherwise():
                self._groups(block, rows, steps, masked)
        for gemm in self.summed:
            p = gemm.products
            sets = b.div(block.padded, p.nr)
            p.accumulate(p.values_of(gemm.values, start), steps, gemm.weights, gemm.sums, sets)
        if kernel.query_gradients is not None:
            kernel.query_gradients.accumulate(block, b.div(rows.first, self.key_step), steps)

    def _first_products(self, block: Block, rows: RowRange, start: Value, steps: Value) -> None:
        """S and dP of a tile."""
        b = self.b
        for gemm in self.gemms:
            p = gemm.products
            with b.loop(0, steps, hint="step") as step:
                if gemm is self.score_gemms:  # what will be read and written of these rows
                    ahead = RowRange(first=b.add(rows.first, b.mul(step, p.key_step)), count=p.key_step)
                    self.kernel.side.prefetch(block, ahead)
                with b.loop(0, block.padded, p.nr, hint="g") as g:
                    members = [b.add(g, k) for k in range(p.nr)]
                    keys = self.kernel.tiling.keys
                    numbers = [b.add(b.mul(m, keys), b.mul(step, p.key_step)) for m in members]
                    places = [b.row(gemm.tile.first, number, self.lanes) for number in numbers]
                    p.scores(gemm.keys[b.add(start, step)], [gemm.lanes[m] for m in members], places)

    def _groups(self, block: Block, rows: RowRange, steps: Value, variant: TileProgram) -> None:
        """P and dS of a tile."""
        b, n = self.b, rows.count
        with b.loop(0, block.groups, self.group_block, hint="g") as g:
            members = [GroupElements(self, block, rows, b.add(g, k), k, variant) for k in range(self.group_block)]
            pairs, zero = b.floor_to(n, PAIR, "pairs"), b.constant(0.0, self.vector)
            sums = [zero] * (len(self.kernel.lane_sums) * len(members))  # of one group after the other
            for low, high, both in ((0, pairs, True), (pairs, n, False)):
                with b.carry(low, high, PAIR, sums, hint="r") as (loop, r, before):
                    loop.yields(*self._pair(members, r, before, both))
                sums = loop.results
            for k, total in enumerate(sums):
                number, entry = divmod(k, len(self.kernel.lane_sums))
                place = self.sum_at(entry, b.add(g, number))
                b.store(b.add(b.load(place, self.vector, "before"), total, "sum"), place)
            nothing = [[zero] * PAIR] * len(members)
            with b.loop(b.floor_to(b.add(n, 1), PAIR), b.mul(steps, self.key_step), PAIR, hint="r") as r:
                self._store(members, r, nothing, nothing)

    def _pair(self, members: Sequence[GroupElements], r: Value, sums: Sequence[Value], both: bool) -> list[Value]:
        """Rows r and r + 1 (or r alone) of some groups, from scores and dP to P and dS; returns the sums with their
        contributions."""
        count = len(self.kernel.lane_sums)
        results = [group.pair(r, sums[k * count :][:count], both) for k, group in enumerate(members)]
        self._store(members, r, [weights for weights, _, _ in results], [ds for _, ds, _ in results])
        return [total for *_, part in results for total in part]

    def _store(self, members: Sequence[GroupElements], r: Value, weights: Sequence[Pair], ds: Sequence[Pair]) -> None:
        """Rows r and r + 1 of each group to the right sides of the second products."""
        for group, *both in zip(members, ds, weights, strict=True):
            for gemm, place, pair in zip(self.gemms, group.weights, both, strict=False):
                if gemm in self.summed:
                    gemm.products.store_weights(place, r, *pair)
        if self.kernel.query_gradients is not None:
            self.kernel.query_gradients.store(r, members[0].g, ds)

    def sum_at(self, k: int, g: Value) -> Value:
        """Address of sum k of a group's lanes."""
        return self.lane_sums[self.b.add(g, k * self.kernel.tiling.groups)]

    def scope(self, block: Block, rows: RowRange) -> Scope:
        """A scope that knows the first and last query and key of a tile."""
        b, lanes = self.b, block.extent
        queries, keys = (lanes, rows) if self.kernel.axis is LaneAxis.QUERIES else (rows, lanes)
        i0, j0 = queries.first, keys.first
        known = {I0: i0, I1: b.sub(b.add(i0, queries.count), 1), J0: j0, J1: b.sub(b.add(j0, keys.count), 1)}
        return block.scope.inner(known)


class GroupElements:
    """Rows of one tile for one group of lanes; what they read of dense tensors is staged."""

    def __init__(self, tiles: BackwardTiles, block: Block, rows: RowRange, g: Value, member: int, variant: TileProgram):
        """member: of those worked on together."""
        self.kernel, self.b, self.g, self.first, self.variant = tiles.kernel, tiles.b, g, rows.first, variant
        kernel = tiles.kernel
        self.scope = kernel.side.scope(block, g)
        collected = (variant.gradients[target] for target in (SCORE, *(entry.load for entry in kernel.collected)))
        exprs = (variant.program, kernel.weight, kernel.plan.at_weight, *collected)
        self.scope.prepare(*exprs, bound=kernel.batch_names | {kernel.axis.lane.name})
        wanted, areas = dense_loads(*exprs), zip(kernel.side.loads, tiles.staged, strict=True)
        loads = ((load, area[member]) for load, area in areas if load.expr in wanted)
        self.staged = stage_loads(loads, self.scope, rows.first, rows.count)
        self.statistics = kernel.side.statistics(self.scope)
        self.scores, *dp = (gemm.tile[g] for gemm in tiles.gemms)
        self.dp = dp[0] if dp else None
        self.weights = [gemm.weights[g] for gemm in tiles.gemms]

    def pair(self, r: Value, sums: Sequence[Value], both: bool) -> tuple[Pair, Pair, list[Value]]:
        """(weights for V, dS, sums) of rows r and r + 1, or of r alone."""
        zero = self.b.constant(0.0, self.kernel.vector)
        first = self._row(r, sums)
        second = self._row(self.b.add(r, 1), first[2]) if both else (zero, zero, first[2])
        return (first[0], second[0]), (first[1], second[1]), second[2]

    def _row(self, r: Value, sums: Sequence[Value]) -> tuple[Value, Value, list[Value]]:
        """(weight for V, dS, sums) of one row."""
        b, kernel, plan = self.b, self.kernel, self.kernel.plan
        at = b.mul(r, kernel.lanes)
        align = 4 * kernel.lanes
        score = b.load(b.at(self.scores, at, "f32"), kernel.vector, "s", align=align)
        position = b.add(self.first, r, "row")
        row = self.scope.inner({SCORE: score, kernel.axis.row: position}, leaf=staged_leaf(self.staged, r))
        x = row.vector(self.variant.program)
        known, weight = self.statistics or kernel.row_statistics(position), x
        if known is not None:
            weight = b.mul(kernel.context.math.exp2(b.fma(x, known["unit"], known["shift"])), known["factor"], "p")
        row.known[WEIGHT] = weight
        aux = None if plan.at_weight is None else row.vector(plan.at_weight)
        if self.dp is None:
            assert aux is not None
            return weight, weight, [b.fma(weight, aux, sums[0], "sum")]
        dp = b.load(b.at(self.dp, at, "f32"), kernel.vector, "dp", align=align)
        factor = None if kernel.weight is None else row.vector(kernel.weight)
        scaled = dp if factor is None else b.mul(dp, factor)
        if aux is not None:
            scaled = b.add(scaled, aux, "dw")
        upstream = scaled if known is None else b.mul(weight, b.sub(scaled, known["delta"]), "dx")
        weight_upstream = None if factor is None else b.mul(dp, weight, "dw")
        gradients = self._scope(row, upstream, weight_upstream)
        for entry, sink in zip(kernel.collected, kernel.sinks, strict=True):
            if entry.form in (Form.DENSE, Form.SCATTERED):
                sink.add(gradients, gradients.vector(self.variant.gradients[entry.load]))
        no_upstream = None if weight_upstream is None else b.constant(0.0, kernel.vector)
        shares = self._scope(row, weight, no_upstream, aux=0)
        dx = b.mul(weight, scaled) if kernel.spec.sinks else upstream
        collected = self._add_up(sums, gradients, shares, dx)
        ds = gradients.vector(self.variant.gradients[SCORE]) if kernel.wants_ds else upstream
        if kernel.reduces_lanes:
            ds = b.select(self.scope.lanes.valid, ds, b.constant(0.0, kernel.vector), "ds")
        return b.mul(weight, kernel.unit) if factor is None else b.mul(weight, factor), ds, collected

    def _scope(self, row: Scope, upstream: Value, weight_upstream: Value | None, aux: int = 1) -> Scope:
        known = {UPSTREAM: upstream}
        if self.kernel.spec.aux_outputs:
            known[AUX_UPSTREAM] = self.b.constant(float(aux), self.kernel.vector)
        if weight_upstream is not None:
            known[WEIGHT_UPSTREAM] = weight_upstream
        return row.inner(known)

    def _add_up(self, sums: Sequence[Value], gradients: Scope, shares: Scope, dx: Value) -> list[Value]:
        """`sums` of lanes with what this row adds, `dx` to `SUM_OF_DX`; sums of the row itself are added to in
        memory."""
        b, kernel, result = self.b, self.kernel, list(sums)
        for number, entry in enumerate(kernel.sums):
            scope = shares if entry.share else gradients
            term = dx if entry == SUM_OF_DX else scope.vector(self.variant.gradients[entry.of])
            if entry in kernel.lane_sums:
                place = kernel.lane_sums.index(entry)
                result[place] = b.add(result[place], term, "sum")
            else:
                assert kernel.query_gradients is not None
                kernel.query_gradients.add_to_row(number, gradients, term)
        return result
