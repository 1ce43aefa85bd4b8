"""The whole kernel: the function `attention(params)` that every thread of a parallel region runs.

    for each work item (batch coordinates, block of query rows) of this thread
        pack K and V, as far as needed, if the item reads other keys than the one before
        pack Q^T
        for each block of keys in range
            S^T = K Q^T;  score program, softmax statistics, weights;  O^T += V^T P^T
        where a row met no live key although keys were skipped: once more over all keys
        divide by the sum, transpose, write

All sizes and strides are run-time arguments. d and d_v are compile-time constants, as are the tile sizes. Everything
between memory and registers lies in the thread's part of a workspace that the launcher provides; packed K and V are as
long as the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.codegen.mlir.amx import LARGE_BITS, Amx
from fusion.codegen.mlir.builder import Value, vector_of
from fusion.codegen.mlir.dense import DenseLoad, dense_loads
from fusion.codegen.mlir.products import Groups, MultiplyAdd, Products
from fusion.codegen.mlir.programs import J0, J1
from fusion.codegen.mlir.rows import RowReader
from fusion.codegen.mlir.scope import Lanes, Scope
from fusion.codegen.mlir.skeleton import KernelFunction, KernelText
from fusion.codegen.mlir.softmax import Group, GroupSoftmax, KeyBlock
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.toeplitz import DistanceTable, distance_parts, without_parts
from fusion.codegen.mlir.transpose import transpose
from fusion.ir.expr import Expr, I, coord
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.ir.tile_map import CELL_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """groups: lane vectors of queries in a work item; together: how many of them (a multiple of the products' group
    step; 0 for one such step) go through a block of keys at a time; keys: keys in a block. planes: of AMX
    products, 0 for multiply-add."""

    groups: int
    keys: int
    planes: int
    together: int = 0


def emit(spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int) -> KernelText:
    """The kernel of a spec whose Q and K have d columns and V d_v."""
    return _Kernel(spec, tiling, target, d, d_v).text()


class _Kernel(KernelFunction):
    def __init__(self, spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int):
        degree = 5 if spec.out_dtype == "float32" else {1: 3, 2: 4}.get(tiling.planes, 5)
        super().__init__(spec, target, d, d_v, degree)
        self.tiling = tiling
        whole = (self.programs.masked, self.programs.full, self.weight)
        self.by_distance = distance_parts(*whole)
        self.dense = dense_loads(*(without_parts(program, self.by_distance) for program in whole))
        self.may_flag = tiling.planes > 1
        worst = self._area(64, "worst") if self.may_flag else None
        self.products: Products
        if tiling.planes:
            exact_pairs = spec.normalizer is Normalizer.NONE or self.weight is not None
            self.products = Amx(self.b, d, d_v, tiling.planes, tiling.keys, worst, exact_pairs)
        else:
            self.products = MultiplyAdd(self.b, self.lanes, d, d_v, target.tile_rows, target.tile_groups)
        self.worst = worst
        self._areas()

    def _areas(self) -> None:
        p, groups, keys, lanes = self.products, self.tiling.groups, self.tiling.keys, self.lanes
        row = 4 * lanes
        self.queries = self._area(groups * p.query_bytes(), "queries")
        # Scores and weights of a few groups at a time: they stay in the first-level cache.
        together = self.together = self.tiling.together or p.group_step
        self.scores = self._area(together * keys * row, "scores")
        self.factors = self._area(together * keys * row, "factors") if self.weight is not None else None
        self.weights = self._area(together * p.weight_bytes(keys), "weights")
        self.output = self._area(groups * p.e_padded * row, "output")
        self.maxima = self._area(groups * row, "maxima")
        self.totals = self._area(groups * row, "totals")
        self.staging = self._area(8 * p.staging_elements(), "staging")
        self.finished = self._area(lanes * p.e_padded * 4, "finished")
        entries = keys + (together + 1) * lanes
        self.tables = [DistanceTable(self.context, part, self._area(4 * entries, "table")) for part in self.by_distance]
        self.staged = [self._area(keys * row, "staged") for _ in self.dense]
        self.state = self._area(64 * 4, "state")
        b = self.b
        fixed = self.layout.size
        with b.at_entry():
            self.packed_keys = b.at(self.base, fixed, "i8", "packed_keys")
            steps = self.params[("key_steps",)]
            self.packed_values = b.at(self.packed_keys, b.mul(steps, p.key_bytes()), "i8", "packed_values")

    def _group_memory(self, g: Value, member: Value | int = 0) -> Group:
        """Memory of group g, number `member` of those that are worked on together."""
        b, p, keys, lanes = self.b, self.products, self.tiling.keys, self.lanes

        def part(base: Value, number: Value | int, size: int, hint: str) -> Value:
            return b.at(base, b.mul(number, size), "i8", hint)

        return Group(
            scores=part(self.scores, member, keys * lanes * 4, "s_rows"),
            factors=None if self.factors is None else part(self.factors, member, keys * lanes * 4, "w_rows"),
            weights=part(self.weights, member, p.weight_bytes(keys), "p_rows"),
            output=part(self.output, g, p.e_padded * lanes * 4, "o_rows"),
            maximum=part(self.maxima, g, 4 * lanes, "m_at"),
            total=part(self.totals, g, 4 * lanes, "l_at"),
        )

    def text(self) -> KernelText:
        b = self.b
        top = self._top()
        if self.worst is not None:
            b.store(b.constant(0, vector_of("i32", 16)), self.worst)
        for slot in range(2 + 8):
            b.store(b.constant(-1, "i64"), b.at(self.state, slot, "i64"))
        with self._items() as item:
            self._item(top, item)
        if self.worst is not None:
            self._raise_flag()
        return KernelText(
            source=self._function(), slots=self._slots(), rows=self.tiling.groups * self.lanes,
            key_step=self.products.key_step, fixed_bytes=self.layout.size,
            step_bytes=self.products.key_bytes() + self.products.value_bytes(), may_flag=self.may_flag,
        )  # fmt: skip

    def _raise_flag(self) -> None:
        b = self.b
        seen = b.load(self.worst, vector_of("i32", 16), "worst")
        worst = b.op(f"vector.reduction <maxsi>, {seen} : {seen.type} into i32", "i32", "worst")
        with b.when(b.compare("sge", worst, LARGE_BITS)):
            b.store(b.constant(1, "i64"), self.params[("ptr", "flag")])

    def _item(self, top: Scope, item: Value) -> None:
        b, rows, mask = self.b, self.tiling.groups * self.lanes, self.spec.mask
        blocks = self.params[("blocks",)]
        block = b.rem(item, blocks, "block")
        scope = self._batch_scope(top, b.div(item, blocks))
        first = b.mul(block, rows, "i0")
        count = b.least(b.sub(self.n_q, first), rows, "rows")
        groups = b.div(b.add(count, self.lanes - 1), self.lanes, "groups")
        readers = self._readers(scope)
        self.loads = [DenseLoad(self.context, scope, expr) for expr in self.dense]
        self._note_identity(readers[1:])
        padded_groups = b.mul(
            b.div(b.add(groups, self.products.group_step - 1), self.products.group_step), self.products.group_step
        )
        with b.loop(0, groups, hint="g") as g:
            at = b.at(self.queries, b.mul(g, self.products.query_bytes()), "i8")
            self.products.pack_queries(readers[0], b.add(first, b.mul(g, self.lanes)), self.n_q, at, self.staging)
        last = b.sub(b.add(first, count), 1)
        ranged = Scope(context=self.context, parent=scope, known={coord("i0"): first, coord("i1"): last})
        low, high = self._key_range(
            ranged, mask.key_lo if mask else None, mask.key_hi if mask else None, self.products.key_step
        )
        if mask is not None and mask.tile_live is not None:
            low, high = self._live_range(ranged, mask.tile_live, low, high)
        self._attend(scope, readers, first, count, groups, padded_groups, low, high)
        with b.loop(0, groups, hint="g") as g:
            self._finish(scope, first, count, g)

    def _live_range(self, rows: Scope, live: Expr, low: Value | int, high: Value) -> tuple[Value, Value]:
        """The key range of an item without the dead cells at its ends, by the map of live tiles."""
        b, step = self.b, self.products.key_step
        cells = b.div(b.add(self.n_k, CELL_KEYS - 1), CELL_KEYS, "cells")
        zero, last = b.constant(0, "i64"), b.sub(self.n_k, 1)

        def dead(first: Value, end: Value) -> Value:
            tile = Scope(context=self.context, parent=rows, known={J0: first, J1: b.least(end, last)})
            none = b.compare("eq", b.as_value(tile.integer(live), "i64"), 0)
            return b.convert("arith.extui", none, "i64", "dead")

        with b.carry(0, cells, 1, [zero, zero], hint="cell") as (loop, cell, (before, behind)):
            first = b.mul(cell, CELL_KEYS)
            until = dead(zero, b.add(first, CELL_KEYS - 1))
            loop.yields(b.add(before, until, "before"), b.add(behind, dead(first, last), "behind"))
        start = b.mul(loop.results[0], CELL_KEYS)
        stop = b.mul(b.sub(cells, loop.results[1]), CELL_KEYS)
        start = b.mul(b.div(b.least(start, self.n_k), step), step)
        return b.most(low, start, "key_lo"), b.least(high, stop, "key_hi")

    def _note_identity(self, readers: list[RowReader]) -> None:
        """Forget what is packed where this item reads other keys or values than the last one."""
        b = self.b
        values = [b.as_value(v, "i64") for reader in readers for v in reader.identity()]
        changed: Value = b.constant(0, "i1")
        for slot, value in enumerate(values):
            old = b.load(b.at(self.state, 2 + slot, "i64"), "i64", "seen")
            changed = b.binary("arith.ori", changed, b.compare("ne", old, value), "changed")
        first = b.compare("slt", b.load(self.state, "i64"), 0, "nothing")
        with b.when(b.binary("arith.ori", changed, first)):
            for slot, value in enumerate([b.constant(0, "i64"), b.constant(0, "i64"), *values]):
                b.store(value, b.at(self.state, slot, "i64"))

    def _pack(self, readers: list[RowReader], low: Value | int, high: Value) -> None:
        """Make sure that key steps [low, high) (in keys, low on a step) are packed: extend the packed range to both
        sides."""
        b, step = self.b, self.products.key_step
        have_low, have_high = b.load(self.state, "i64", "have_lo"), b.load(b.at(self.state, 1, "i64"), "i64", "have_hi")
        end = b.mul(b.div(b.add(high, step - 1), step), step, "end")
        low = b.as_value(low, "i64")
        empty = b.compare("sge", have_low, have_high, "empty")
        have_low, have_high = b.select(empty, low, have_low), b.select(empty, low, have_high)
        for start, stop in ((low, have_low), (have_high, end)):
            with b.loop(start, stop, step, hint="j") as j:
                n = b.div(j, step)
                self.products.pack_keys(
                    readers[1],
                    j,
                    self.n_k,
                    b.at(self.packed_keys, b.mul(n, self.products.key_bytes()), "i8"),
                    self.staging,
                )
                at = b.at(self.packed_values, b.mul(n, self.products.value_bytes()), "i8")
                self.products.pack_values(readers[2], j, self.n_k, at, self.staging)
        b.store(b.least(low, have_low), self.state)
        b.store(b.most(end, have_high), b.at(self.state, 1, "i64"))

    def _attend(self, scope, readers, first, count, groups, padded_groups, low, high) -> None:
        """All key blocks; a second time over all keys where the mask let keys be skipped and a row met none that is
        live."""
        b, mask = self.b, self.spec.mask
        if mask is None or not mask.skips:
            self._visit(scope, readers, first, count, groups, padded_groups, low, high)
            return
        yes = b.constant(1, "i1")
        if self.spec.normalizer is Normalizer.NONE:  # dead keys have no weight, whatever the others have
            self._visit(scope, readers, first, count, groups, padded_groups, low, high, yes)
            return
        with b.carry(0, 2, 1, [b.as_value(low, "i64"), high, yes], hint="attempt") as (loop, attempt, (lo, hi, needed)):
            skipping = b.compare("eq", attempt, 0, "skipping")
            with b.when(needed):
                self._visit(scope, readers, first, count, groups, padded_groups, lo, hi, skipping)
            again = b.binary("arith.andi", skipping, self._any_dead(count, groups, mask.fill), "again")
            loop.yields(b.constant(0, "i64"), self.n_k, again)

    def _any_dead(self, count: Value, groups: Value, fill: float) -> Value:
        b, lanes = self.b, self.lanes
        no = b.constant(0, "i1")
        with b.carry(0, groups, 1, [no], hint="g") as (loop, g, (dead,)):
            m = b.load(b.at(self.maxima, b.mul(g, lanes), "f32"), self.vector, "m")
            alive = self._alive(m, fill)
            not_alive = b.binary("arith.xori", alive, b.constant(-1, alive.type))
            found = b.binary("arith.andi", not_alive, self._valid(b.sub(count, b.mul(g, lanes))))
            loop.yields(
                b.binary(
                    "arith.ori", dead, b.op(f"vector.reduction <or>, {found} : {found.type} into i1", "i1", "dead")
                )
            )
        return loop.results[0]

    def _visit(self, scope, readers, first, count, groups, padded_groups, low, high, skipping=None) -> None:
        """Keys [low, high). Where `skipping` (i1) holds, each register tile visits only the keys that its rows need."""
        b, p, keys = self.b, self.products, self.tiling.keys
        lanes = self.lanes
        with b.loop(0, padded_groups, hint="g") as g:
            memory = self._group_memory(g)
            b.store(b.constant(float("-inf"), self.vector), memory.maximum)
            b.store(b.constant(0.0, self.vector), memory.total)
            with b.loop(0, p.e_padded, hint="e") as e:
                b.store(b.constant(0.0, self.vector), b.at(memory.output, b.mul(e, lanes), "f32"))
        self._pack(readers, low, high)
        with b.loop(low, high, keys, hint="j0") as j0, b.loop(0, groups, self.together, hint="g") as g:
            start, rows = b.add(first, b.mul(g, lanes)), b.sub(count, b.mul(g, lanes))
            last = b.sub(b.add(start, b.least(rows, self.together * lanes)), 1)
            tile = Scope(context=self.context, parent=scope, known={coord("i0"): start, coord("i1"): last})
            n = b.least(b.sub(high, j0), keys, "n_keys")
            if skipping is not None:
                n = self._tile_keys(tile, j0, n, skipping)
            with b.when(b.compare("sgt", n, 0)):
                self._tile(tile, first, count, groups, g, j0, n)

    def _tile_keys(self, tile: Scope, j0: Value, n: Value, skipping: Value) -> Value:
        """How many of the n keys from j0 on the rows of a tile need."""
        b, mask = self.b, self.spec.mask
        assert mask is not None
        low, high = self._key_range(tile, mask.key_lo, mask.key_hi, self.products.key_step)
        needed = b.least(n, b.sub(high, j0))
        needed = b.select(b.compare("sle", b.add(j0, n), b.as_value(low, "i64")), 0, needed)
        if mask.tile_live is not None:
            cells = Scope(context=self.context, parent=tile, known={J0: j0, J1: b.sub(b.add(j0, n), 1)})
            live = b.as_value(cells.integer(mask.tile_live), "i64")
            needed = b.select(b.compare("eq", live, 0), 0, needed)
        return b.select(skipping, needed, n, "n_keys")

    def _tile(self, scope: Scope, first: Value, count: Value, groups: Value, g: Value, j0: Value, n: Value) -> None:
        """n keys from j0 on and the groups of one register tile, from g on: both products and the softmax between."""
        b, p, lanes = self.b, self.products, self.lanes
        steps = b.div(b.add(n, p.key_step - 1), p.key_step, "steps")
        block = KeyBlock(first=j0, count=n, padded=b.mul(steps, p.key_step))
        ends = {J0: j0, J1: b.sub(b.add(j0, n), 1)}
        whole = self._whole(Scope(context=self.context, parent=scope, known=ends))
        start, last = scope.value(coord("i0")), scope.value(coord("i1"))
        for table in self.tables:
            table.fill(scope, start, last, j0, b.sub(b.add(j0, n), 1))
        first_step = b.div(j0, p.key_step)
        here = b.least(b.sub(groups, g), self.together, "here")
        sets = b.div(b.add(here, p.group_step - 1), p.group_step, "sets")
        queries = Groups(first=b.at(self.queries, b.mul(g, p.query_bytes()), "i8"), stride=p.query_bytes())
        with b.loop(0, steps, hint="step") as step, b.loop(0, sets, hint="set") as number:
            at = b.at(self.packed_keys, b.mul(b.add(first_step, step), p.key_bytes()), "i8")
            members = [b.add(b.mul(number, p.group_step), k) for k in range(p.group_step)]
            rows = [b.add(b.mul(m, self.tiling.keys), b.mul(step, p.key_step)) for m in members]
            targets = [b.at(self.scores, b.mul(r, lanes), "f32") for r in rows]
            p.scores(at, [queries.member(b, m) for m in members], targets)
        with b.loop(0, here, hint="member") as member:
            self._group(scope, first, count, b.add(g, member), member, block, whole)
        at = b.at(self.packed_values, b.mul(first_step, p.value_bytes()), "i8")
        weights = Groups(first=self.weights, stride=p.weight_bytes(self.tiling.keys))
        row = p.e_padded * lanes * 4
        p.accumulate_sets(at, steps, weights, Groups(first=b.at(self.output, b.mul(g, row), "i8"), stride=row), sets)

    def _lane_scope(self, scope: Scope, first: Value, count: Value, g: Value) -> Scope:
        b = self.b
        offset = b.mul(g, self.lanes)
        lanes = Lanes(coord=I, first=b.add(first, offset), count=self.lanes, valid=self._valid(b.sub(count, offset)))
        return Scope(context=self.context, parent=scope, lanes=lanes)

    def _group(self, scope, first, count, g: Value, member: Value, block: KeyBlock, whole: Value | None) -> None:
        """Scores to weights for one group and one key block."""
        b, memory = self.b, self._group_memory(g, member)
        lanes = self._lane_scope(scope, first, count, g)
        softmax = GroupSoftmax(self.context, memory, block, self.exponent)
        if whole is None:
            self._scores_to_maximum(lanes, softmax, block, self.programs.masked)
        else:
            assert self.programs.full is not None
            with b.when(whole):
                self._scores_to_maximum(Scope(context=self.context, parent=lanes), softmax, block, self.programs.full)
            with b.otherwise():
                self._scores_to_maximum(Scope(context=self.context, parent=lanes), softmax, block, self.programs.masked)

        def store(key: Value, x: Value, y: Value) -> None:
            self.products.store_weights(memory.weights, key, x, y)

        if self.spec.normalizer is Normalizer.NONE:
            softmax.plain_weights(store)
        else:
            softmax.exponentials(store)

    def _scores_to_maximum(self, lanes: Scope, softmax: GroupSoftmax, block: KeyBlock, program: Expr) -> None:
        b = self.b
        assert lanes.lanes is not None
        lanes.prepare(program, self.weight, bound=self.batch_names | {"i"})
        wanted = dense_loads(*(without_parts(part, self.by_distance) for part in (program, self.weight)))
        staged = [
            (load.expr, load.stage(lanes, block.first, block.count, area))
            for load, area in zip(self.loads, self.staged, strict=True)
            if load.expr in wanted
        ]
        row = lanes.lanes.first
        staged += [
            (table.part, lambda key, table=table: table.read(row, b.add(block.first, key))) for table in self.tables
        ]
        highest = softmax.apply(lanes, program, self.weight, staged)
        if self.spec.normalizer is Normalizer.NONE:
            softmax.fill_beyond(0.0)
            return
        softmax.fill_beyond(float("-inf"))
        softmax.rescale(highest, self.products.e_padded, exact=self.spec.row_scale is not None)

    def _finish(self, scope: Scope, first: Value, count: Value, g: Value) -> None:
        """Scale, transpose and write one group."""
        b, memory, lanes = self.b, self._group_memory(g), self.lanes
        rows = self._lane_scope(scope, first, count, g)
        factor = None
        if self.spec.normalizer is not Normalizer.NONE:
            m, total = (b.load(at, self.vector, name) for at, name in ((memory.maximum, "m"), (memory.total, "l")))
            factor = self._row_factor(rows, m, total)
        padded = self.products.e_padded
        with b.loop(0, padded, lanes, hint="e") as e:
            cells = [
                b.load(b.at(memory.output, b.mul(b.add(e, r), lanes), "f32"), self.vector, "o") for r in range(lanes)
            ]
            if factor is not None:
                cells = [b.mul(cell, factor) for cell in cells]
            for r, line in enumerate(transpose(b, cells)):
                b.store(line, b.at(self.finished, b.add(e, r * padded), "f32"))
        remaining = b.least(b.sub(count, b.mul(g, lanes)), lanes)
        with b.loop(0, remaining, hint="r") as r:
            target = self._row_address(scope, b.add(b.add(first, b.mul(g, lanes)), r))
            self._write_row(b.at(self.finished, b.mul(r, padded), "f32"), target)
