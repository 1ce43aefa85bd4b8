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

from fusion.codegen.mlir.amx import LARGE_BITS
from fusion.codegen.mlir.builder import Value, vector_of
from fusion.codegen.mlir.dense import DenseLoad
from fusion.codegen.mlir.programs import J0, J1
from fusion.codegen.mlir.rows import RowReader
from fusion.codegen.mlir.scope import Scope
from fusion.codegen.mlir.skeleton import KernelText
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.tile import TileKernel, Tiling
from fusion.codegen.mlir.transpose import transpose
from fusion.ir.expr import Expr, coord
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.ir.tile_map import CELL_KEYS


def emit(spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int) -> KernelText:
    """The kernel of a spec whose Q and K have d columns and V d_v."""
    return AttentionKernel(spec, tiling, target, d, d_v).text()


class AttentionKernel(TileKernel):
    """Writes the function; see the module. A selective kernel is made from it (`skipping`)."""

    def __init__(self, spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int):
        super().__init__(spec, tiling, target, d, d_v)
        p = self.products
        self.staging = self._area(8 * p.staging_elements(), "staging")
        self.finished = self._area(self.lanes * p.e_padded * 4, "finished")
        self.state = self._area(64 * 4, "state")
        b = self.b
        fixed = self.layout.size
        with b.at_entry():
            self.packed_keys = b.at(self.base, fixed, "i8", "packed_keys")
            steps = self.params[("key_steps",)]
            self.packed_values = b.at(self.packed_keys, b.mul(steps, p.key_bytes()), "i8", "packed_values")

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
        with b.loop(0, padded_groups, hint="g") as g:  # zeros where there is no group: products read them
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
        b, lanes = self.b, self.lanes
        with b.loop(0, padded_groups, hint="g") as g:
            memory = self._group_memory(g)
            b.store(b.constant(float("-inf"), self.vector), memory.maximum)
            with b.loop(0, memory.rows, hint="e") as e:
                b.store(b.constant(0.0, self.vector), b.at(memory.output, b.mul(e, lanes), "f32"))
        self._pack(readers, low, high)
        visit = self._visit_overlapped if self.products.overlaps else self._visit_in_turn
        visit(scope, first, count, groups, low, high, skipping)

    def _visit_in_turn(self, scope, first, count, groups, low, high, skipping) -> None:
        b = self.b
        with (
            b.loop(low, high, self.tiling.keys, hint="j0") as j0,
            b.loop(0, groups, self.together, hint="g") as g,
        ):
            rows, n = self._rows_and_keys(scope, first, count, g, j0, high, skipping)
            with b.when(b.compare("sgt", n, 0)):
                self._tile(self._make_tile(rows, first, count, groups, g, j0, n))

    def _visit_overlapped(self, scope, first, count, groups, low, high, skipping) -> None:
        """The same tiles in the same order, and one more turn to finish the last. A tile without keys takes no turn."""
        b, keys = self.b, self.tiling.keys
        sets = b.div(b.add(groups, self.together - 1), self.together, "sets")
        blocks = b.div(b.most(b.add(b.sub(high, low), keys - 1), 0), keys, "blocks_here")
        tiles = b.mul(blocks, sets, "tiles")
        nothing = b.constant(0, "i64")
        with b.carry(0, b.add(tiles, 1), 1, [nothing] * 3, hint="t") as (loop, t, (old_g, old_j0, old_n)):
            end = b.compare("eq", t, tiles, "end")
            j0 = b.add(b.mul(b.div(t, sets), keys), low, "j0")
            g = b.mul(b.rem(t, sets), self.together, "g")
            rows, n = self._rows_and_keys(scope, first, count, g, j0, high, skipping)
            n = b.select(end, 0, n, "n_keys")
            turn = b.binary("arith.ori", end, b.compare("sgt", n, 0), "turn")
            with b.when(turn):
                old = self._make_tile(scope, first, count, groups, old_g, old_j0, old_n)
                self._overlap(old, self._make_tile(rows, first, count, groups, g, j0, n))
            loop.yields(*(b.select(turn, x, y) for x, y in ((g, old_g), (j0, old_j0), (n, old_n))))

    def _rows_and_keys(self, scope: Scope, first, count, g, j0, high, skipping) -> tuple[Scope, Value]:
        """The scope that knows the rows of the groups from g on, and how many keys from j0 on they visit."""
        b, lanes = self.b, self.lanes
        start, rows = b.add(first, b.mul(g, lanes)), b.sub(count, b.mul(g, lanes))
        last = b.sub(b.add(start, b.least(rows, self.together * lanes)), 1)
        tile = Scope(context=self.context, parent=scope, known={coord("i0"): start, coord("i1"): last})
        n = b.least(b.sub(high, j0), self.tiling.keys, "n_keys")
        return tile, n if skipping is None else self._tile_keys(tile, j0, n, skipping)

    def _tile_keys(self, tile: Scope, j0: Value, n: Value, skipping: Value) -> Value:
        """How many of the n keys from j0 on the rows of a tile need."""
        b, mask = self.b, self.spec.mask
        assert mask is not None
        low, high = self._key_range(tile, mask.key_lo, mask.key_hi, self.products.key_step)
        needed = b.least(n, b.sub(high, j0))
        needed = b.select(b.compare("sle", b.add(j0, n), b.as_value(low, "i64")), 0, needed)
        if mask.tile_live is not None:
            live = b.as_value(self._with_keys(tile, j0, n).integer(mask.tile_live), "i64")
            needed = b.select(b.compare("eq", live, 0), 0, needed)
        return b.select(skipping, needed, n, "n_keys")

    def _finish(self, scope: Scope, first: Value, count: Value, g: Value) -> None:
        """Scale, transpose and write one group."""
        b, memory, lanes = self.b, self._group_memory(g), self.lanes
        rows = self._lane_scope(scope, first, count, g)
        if self.several is not None:
            with b.when(self.several):
                self._settle(g, 1, 0)
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
