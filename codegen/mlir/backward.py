"""The two backward kernels: see `backward_plan` for what they compute. Both have the form

    for each outer batch element, for each inner one (dense gradients are summed over these)
        for each block of lane rows (queries or keys) of this thread
            pack the lane side: A (Q or K), B (dO or V); pack the row side as far as needed: C (K or Q), D (V or dO)
            for each block of rows that may meet the lanes
                S^T = C A^T;  dP^T = D B^T;  P, dS, gradients of loads;  out_A^T += C^T dS;  out_B^T += D^T P (role
                KEYS)
            transpose, write

Threads share outer batch elements, or blocks where there are too few of these. Nothing depends on the order in which
threads run, so that results are the same in every run.

One file over the usual length: the roles of the kernel share nearly every method.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence

from fusion.codegen.mlir.amx import LARGE_BITS, Amx
from fusion.codegen.mlir.backward_loads import GradientSink, LaneLoad
from fusion.codegen.mlir.backward_plan import BackwardPlan, Form, Role, normalized
from fusion.codegen.mlir.backward_queries import QueryGradient
from fusion.codegen.mlir.builder import PTR, Builder, Value, vector_of
from fusion.codegen.mlir.dense import DenseLoad, dense_loads
from fusion.codegen.mlir.products import MultiplyAdd, Products
from fusion.codegen.mlir.programs import I0, I1, J0, J1
from fusion.codegen.mlir.rows import Access, RowReader
from fusion.codegen.mlir.scope import Lanes, Scope
from fusion.codegen.mlir.skeleton import KernelFunction, KernelText
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.tile import CHAPTER, Tiling
from fusion.codegen.mlir.transpose import transpose
from fusion.ir.derivative import UPSTREAM, WEIGHT_UPSTREAM
from fusion.ir.expr import SCORE, C, E, Expr, I, J, coord
from fusion.ir.spec import AttentionSpec, Operand

GRAD = "grad"
QUERY_CHAPTER = 4 * CHAPTER  # keys after which the sums of a whole head's dQ begin anew: they pass through the caches


def emit_backward(
    spec: AttentionSpec,
    plan: BackwardPlan,
    role: Role,
    needs: Sequence[bool],
    results: dict[int, str],
    tiling: Tiling,
    target: Target,
    d: int,
    d_v: int,
    fused: bool = False,
    settles: bool = False,
) -> KernelText:
    """One kernel. results: the type in memory of the gradients of Q (role QUERIES) or K and V, by operand number,
    where needed.
    fused: role KEYS with products on AMX tiles, and the gradient of Q in it (operand 0 is then among the results).
    settles: role QUERIES without results, for the sums of dx in the blocks that are wanted."""
    return _Backward(spec, plan, role, needs, results, tiling, target, d, d_v, fused, settles).text()


class _Backward(KernelFunction):
    def __init__(self, spec, plan, role, needs, results, tiling, target, d, d_v, fused, settles):
        degree = 5 if spec.out_dtype == "float32" else {1: 3, 2: 4}.get(tiling.planes, 5)
        super().__init__(spec, target, d, d_v, degree, flush=tiling.planes > 0)
        self.plan, self.role, self.results, self.tiling, self.widths = plan, role, results, tiling, (d, d_v)
        self.collected = plan.of(role, needs)
        self.settles = settles
        self.corrects = role is Role.QUERIES and plan.corrects(needs)
        self.slots = 1 if settles else plan.sums(role, needs)
        grad = Operand(dtype=spec.out_dtype, rank=len(spec.output.dims), name=GRAD)
        self.context.operands = (*spec.operands, grad)
        self.worst = self._area(64, "worst") if tiling.planes > 1 else None
        self.inner_product = self._products(target, d)  # over d: scores; with dS: the gradient of the lane side
        self.outer_product = self._products(target, d_v)  # over d_v: dP; with P: the gradient of V
        self.wants_score = self.side[0] in results or bool(self.collected) or fused
        self.wants_value = role is Role.KEYS and 2 in results
        self.dense = dense_loads(self.programs.masked, self.programs.full, self.weight)
        self.queries = QueryGradient(self.b, self.inner_product, tiling.groups) if fused else None
        self._areas()

    @property
    def side(self) -> tuple[int, int, int, int]:
        """Operand numbers of A, B, C, D; -1 stands for dO."""
        return (0, -1, 1, 2) if self.role is Role.QUERIES else (1, 2, 0, -1)

    def _products(self, target: Target, width: int) -> Products:
        t = self.tiling
        if t.planes:
            return Amx(self.b, width, width, t.planes, t.keys, self.worst, True, self.role is Role.KEYS)
        return MultiplyAdd(self.b, self.lanes, width, width, target.tile_rows, target.tile_groups)

    # --- memory -------------------------------------------------------------------------------------------------

    def _areas(self) -> None:
        p, q, groups, rows, row = (
            self.inner_product,
            self.outer_product,
            self.tiling.groups,
            self.tiling.keys,
            4 * self.lanes,
        )
        self.packed_a = self._area(groups * p.query_bytes(), "packed_a")
        self.packed_b = self._area(groups * q.query_bytes(), "packed_b")
        self.scores = self._area(groups * rows * row, "scores")
        self.slopes = self._area(groups * rows * row, "slopes")
        self.score_weights = self._area(groups * p.weight_bytes(rows), "score_weights")
        self.value_weights = self._area(groups * q.weight_bytes(rows), "value_weights")
        # Sums begin anew every CHAPTER rows, as in the forward kernel; those of the chapters before lie behind them.
        self.chapters = 2 if self.spec.out_dtype == "float32" else 1
        self.out_bytes = {product: groups * product.e_padded * row for product in (p, q)}
        self.out_a = self._area(self.chapters * self.out_bytes[p], "out_a")
        self.out_b = self._area(self.chapters * self.out_bytes[q], "out_b")
        self.staging = self._area(8 * max(p.staging_elements(), q.staging_elements()), "staging")
        self.finished = self._area(self.lanes * max(p.e_padded, q.e_padded) * 4, "finished")
        self.staged = [self._area(rows * row, "staged") for _ in self.dense]
        self.sums = self._area(max(1, self.slots) * groups * row, "sums")
        self.state = self._area(64 * 8, "state")
        if self.queries is not None:
            self.row_slopes = self._area(self.queries.slope_bytes(rows), "row_slopes")
            self.key_pairs = self._area(self.queries.pair_bytes(), "key_pairs")
        b, steps = self.b, self.params[("key_steps",)]
        fixed = self.layout.size
        sizes = (p.key_bytes(), p.value_bytes(), q.key_bytes(), q.value_bytes())
        if self.queries is not None:
            sizes = (*sizes, *[self.queries.step_bytes()] * self.chapters)
        self.step_bytes = sum(sizes)
        self.packed: list[Value] = []
        with b.at_entry():
            here = b.at(self.base, fixed, "i8", "packed")
            for size in sizes:
                self.packed.append(here)
                here = b.at(here, b.mul(steps, size), "i8", "packed")

    def _part(self, base: Value, g: Value | int, size: int) -> Value:
        return self.b.at(base, self.b.mul(g, size), "i8")

    # --- the function -------------------------------------------------------------------------------------------

    def text(self) -> KernelText:
        b = self.b
        top = self._top()
        self.n_lanes, self.n_rows = (self.n_q, self.n_k) if self.role is Role.QUERIES else (self.n_k, self.n_q)
        if self.worst is not None:
            b.store(b.constant(0, vector_of("i32", 16)), self.worst)
        for slot in range(64):
            b.store(b.constant(-1, "i64"), b.at(self.state, slot, "i64"))
        self._loops(top)
        if self.worst is not None:
            self._raise_flag()
        return KernelText(
            source=self._function(), slots=self._slots(), rows=self.tiling.groups * self.lanes,
            key_step=self.inner_product.key_step,
            fixed_bytes=self.layout.size, step_bytes=self.step_bytes, may_flag=self.worst is not None,
        )  # fmt: skip

    def _loops(self, top: Scope) -> None:
        """Outer and inner batch elements, and blocks; `split`: threads share the blocks of all outer elements."""
        b, params = self.b, self.params
        outer, inner, blocks, split = (params[(name,)] for name in ("outer", "inner", "blocks", "split"))
        by_block = b.compare("ne", split, 0, "by_block")
        zero, one = b.constant(0, "i64"), b.constant(1, "i64")
        low = b.select(by_block, zero, b.div(b.mul(outer, self.thread), self.threads), "outer_lo")
        high = b.select(by_block, outer, b.div(b.mul(outer, b.add(self.thread, 1)), self.threads), "outer_hi")
        start, step = (
            b.select(by_block, self.thread, zero, "block_lo"),
            b.select(by_block, self.threads, one, "block_step"),
        )
        with b.loop(low, high, hint="outer") as o, b.loop(0, inner, hint="inner") as n:
            scope = self._element_scope(top, o, n)
            size = 0
            if self.queries is not None:
                size = b.mul(self.params[("key_steps",)], self.queries.step_bytes())
                for area in self.packed[4:]:
                    self._clear(area, size)
            with b.loop(start, blocks, step, hint="block") as block, self._when_wanted(block):
                self._block(Scope(context=self.context, parent=scope), block)
                if self.queries is not None and self.chapters > 1:
                    rows = self.tiling.groups * self.lanes
                    with b.when(self._ends_chapter(b.mul(block, rows), rows, QUERY_CHAPTER)):
                        self._settle(self.packed[4], self.packed[5], size)
            if self.queries is not None:
                if self.chapters > 1:
                    reached = b.mul(blocks, self.tiling.groups * self.lanes, "reached")
                    with b.when(b.compare("sge", reached, QUERY_CHAPTER)):
                        self._settle(self.packed[5], self.packed[4], size)
                self._write_queries(scope)

    def _ends_chapter(self, first: Value, count: int, chapter: int) -> Value:
        b = self.b
        before, after = (b.div(b.add(first, n), chapter, "chapter") for n in (0, count))
        return b.compare("ne", before, after, "ends")

    def _settle(self, source: Value, target: Value, size: Value | int) -> None:
        """Add `size` bytes of sums to others, and clear them."""
        b, vector = self.b, vector_of("f32", 16)
        with b.loop(0, size, 64, hint="at") as at:
            places = [b.at(base, at, "i8") for base in (source, target)]
            b.store(b.add(*(b.load(place, vector, "o") for place in places)), places[1])
            b.store(b.constant(0.0, vector), places[0])

    def _when_wanted(self, block: Value) -> contextlib.AbstractContextManager[object]:
        if not self.settles:
            return contextlib.nullcontext()
        b = self.b
        place = b.add(b.mul(self.flat, self.params[("blocks",)]), block)
        wanted = b.load(b.at(self.params[("ptr", "wanted")], place, "i64"), "i64", "wanted")
        return b.when(b.compare("ne", wanted, 0))

    def _clear(self, area: Value, size: Value | int) -> None:
        """Zeros; the size is a multiple of 64 bytes."""
        zero = self.b.constant(0.0, vector_of("f32", 16))
        with self.b.loop(0, size, 64, hint="at") as at:
            self.b.store(zero, self.b.at(area, at, "i8"))

    def _element_scope(self, top: Scope, outer: Value, inner: Value) -> Scope:
        b, spec = self.b, self.spec
        known: dict[Expr, Value] = {}
        for axes, index in (
            ([a for a in range(len(spec.batch)) if a not in self.plan.inner], outer),
            (self.plan.inner, inner),
        ):
            rest: Value | int = index
            for axis in reversed(axes):
                extent = b.as_value(top.integer(spec.batch[axis]), "i64")
                known[coord(f"b{axis}")], rest = b.rem(rest, extent, f"b{axis}"), b.div(rest, extent)
        scope = Scope(context=self.context, parent=top, known=known)
        flat: Value | int = 0
        for axis in range(len(spec.batch)):
            extent = b.as_value(top.integer(spec.batch[axis]), "i64")
            flat = b.add(b.mul(flat, extent), known[coord(f"b{axis}")])
        self.flat = flat
        self.flat_query, self.flat_key = b.mul(flat, self.n_q, "row_base"), b.mul(flat, self.n_k, "column_base")
        programs = self.programs
        scope.prepare(programs.masked, programs.full, self.weight, bound=self.batch_names)
        self.readers = [self._reader(scope, number) for number in self.side]
        if self.role is Role.QUERIES:
            self.loads = [DenseLoad(self.context, scope, expr) for expr in self.dense]
        else:
            self.loads = [LaneLoad(self.context, scope, expr) for expr in self.dense]
        self._note_identity()
        self.sinks = [
            GradientSink(self.context, scope, entry, self.thread, self.plan.written_once(entry))
            for entry in self.collected
        ]
        return scope

    def _reader(self, scope: Scope, number: int) -> RowReader:
        spec = self.spec
        if number == -1:
            index, row, column = tuple(coord(name) for name in spec.output.dims), I, E
            return RowReader(
                self.context, scope, Access(operand=len(spec.operands), index=index, row=row, column=column)
            )
        index, row, column = ((spec.q, I, C), (spec.k, J, C), (spec.v, J, E))[number]
        return RowReader(self.context, scope, Access(operand=number, index=index, row=row, column=column))

    def _raise_flag(self) -> None:
        b = self.b
        seen = b.load(self.worst, vector_of("i32", 16), "worst")
        worst = b.op(f"vector.reduction <maxsi>, {seen} : {seen.type} into i32", "i32", "worst")
        with b.when(b.compare("sge", worst, LARGE_BITS)):
            b.store(b.constant(1, "i64"), self.params[("ptr", "flag")])

    # --- packing ------------------------------------------------------------------------------------------------

    def _note_identity(self) -> None:
        """Forget what is packed where other rows are read than before."""
        b = self.b
        values = [b.as_value(v, "i64") for reader in self.readers[2:] for v in reader.identity()]
        changed: Value = b.compare("slt", b.load(self.state, "i64"), 0, "nothing")
        for slot, value in enumerate(values):
            old = b.load(b.at(self.state, 2 + slot, "i64"), "i64", "seen")
            changed = b.binary("arith.ori", changed, b.compare("ne", old, value), "changed")
        with b.when(changed):
            for slot, value in enumerate([b.constant(0, "i64"), b.constant(0, "i64"), *values]):
                b.store(value, b.at(self.state, slot, "i64"))

    def _pack_lanes(self, first: Value, padded: Value) -> None:
        b = self.b
        sides = ((self.inner_product, self.packed_a), (self.outer_product, self.packed_b))
        for reader, (product, area) in zip(self.readers[:2], sides, strict=True):
            with b.loop(0, padded, hint="g") as g:
                at = self._part(area, g, product.query_bytes())
                product.pack_queries(reader, b.add(first, b.mul(g, self.lanes)), self.n_lanes, at, self.staging)

    def _pack_rows(self, low: Value, high: Value) -> None:
        """Make sure that rows [low, high) of the row side are packed (low on a step): extend what is there to both
        sides."""
        b, step = self.b, self.inner_product.key_step
        have_low, have_high = b.load(self.state, "i64", "have_lo"), b.load(b.at(self.state, 1, "i64"), "i64", "have_hi")
        end = b.mul(b.div(b.add(high, step - 1), step), step, "end")
        empty = b.compare("sge", have_low, have_high, "empty")
        have_low, have_high = b.select(empty, low, have_low), b.select(empty, low, have_high)
        for start, stop in ((low, have_low), (have_high, end)):
            with b.loop(start, stop, step, hint="r") as r:
                self._pack_step(r, b.div(r, step))
        b.store(b.least(low, have_low), self.state)
        b.store(b.most(end, have_high), b.at(self.state, 1, "i64"))

    def _pack_step(self, row: Value, n: Value) -> None:
        p, q = self.inner_product, self.outer_product
        _, _, c, d = self.readers
        p.pack_keys(c, row, self.n_rows, self._part(self.packed[0], n, p.key_bytes()), self.staging)
        if self.side[0] in self.results:
            p.pack_values(c, row, self.n_rows, self._part(self.packed[1], n, p.value_bytes()), self.staging)
        q.pack_keys(d, row, self.n_rows, self._part(self.packed[2], n, q.key_bytes()), self.staging)
        if self.wants_value:
            q.pack_values(d, row, self.n_rows, self._part(self.packed[3], n, q.value_bytes()), self.staging)

    # --- one block of lanes -------------------------------------------------------------------------------------

    def _block(self, scope: Scope, block: Value) -> None:
        b, p, step = self.b, self.inner_product, self.inner_product.group_step
        rows = self.tiling.groups * self.lanes
        first = b.mul(block, rows, "first")
        count = b.least(b.sub(self.n_lanes, first), rows, "count")
        groups = b.div(b.add(count, self.lanes - 1), self.lanes, "groups")
        padded = b.mul(b.div(b.add(groups, step - 1), step), step, "padded_groups")
        self._pack_lanes(first, padded)
        if self.queries is not None:
            self.queries.pack_keys(self.readers[0], first, self.n_lanes, self.key_pairs, self.staging)
            with b.when(b.compare("slt", groups, self.tiling.groups, "partial")):
                self._clear(self.row_slopes, self.queries.slope_bytes(self.tiling.keys))
        zero = b.constant(0.0, self.vector)
        outputs = ((self.out_a, self.out_bytes[p]), (self.out_b, self.out_bytes[self.outer_product]))
        several = b.compare("sgt", self.n_rows, CHAPTER, "several")
        for area, size in outputs:
            self._clear(area, b.select(several, b.constant(self.chapters * size, "i64"), b.constant(size, "i64")))
        with b.loop(0, self.slots * self.tiling.groups, hint="n") as n:
            b.store(zero, b.at(self.sums, b.mul(n, self.lanes), "f32"))
        low, high = self._row_range(scope, first, count, groups)
        self._pack_rows(low, high)
        with b.loop(low, high, self.tiling.keys, hint="r0") as r0:
            n = b.least(b.sub(high, r0), self.tiling.keys, "n_rows")
            with b.when(self._may_meet(scope, first, count, r0, n)):
                self._tile(scope, first, count, groups, padded, r0, n)
            if self.chapters > 1:
                ends = b.binary("arith.andi", several, self._ends_chapter(r0, self.tiling.keys, CHAPTER))
                with b.when(ends):
                    for area, size in outputs:
                        self._settle(area, b.at(area, size, "i8"), size)
        if self.chapters > 1:
            with b.when(several):
                for area, size in outputs:
                    self._settle(b.at(area, size, "i8"), area, size)
        with b.loop(0, groups, hint="g") as g:
            self._finish(scope, first, count, g)

    def _row_range(self, scope: Scope, first: Value, count: Value, groups: Value) -> tuple[Value, Value]:
        """Role QUERIES: the keys that the mask leaves for these queries; all where one of them met no live key. Role
        KEYS: all."""
        b, mask, step = self.b, self.spec.mask, self.inner_product.key_step
        low, high = b.constant(0, "i64"), self.n_rows
        if self.role is Role.KEYS or mask is None or not mask.skips:
            return low, high
        ranged = self._with_rows(scope, first, count)
        if mask.key_lo is not None:
            low = b.most(b.least(b.as_value(ranged.integer(mask.key_lo), "i64"), self.n_k), 0)
            low = b.mul(b.div(low, step), step, "key_lo")
        if mask.key_hi is not None:
            high = b.most(b.least(b.as_value(ranged.integer(mask.key_hi), "i64"), self.n_k), 0, "key_hi")
        if not normalized(self.spec):
            return low, high
        self.dead = self._any_dead(first, count)
        return b.select(self.dead, b.constant(0, "i64"), low, "low"), b.select(self.dead, self.n_k, high, "high")

    def _with_rows(self, scope: Scope, first: Value, count: Value) -> Scope:
        last = self.b.sub(self.b.add(first, count), 1)
        return Scope(context=self.context, parent=scope, known={I0: first, I1: last})

    def _may_meet(self, scope: Scope, first: Value, count: Value, r0: Value, n: Value) -> Value:
        """Whether a query of this tile may look at a key of it, or met no live key. In role QUERIES the range of rows
        has seen to the keys' closed-form range."""
        b, mask = self.b, self.spec.mask
        meets: Value = b.constant(1, "i1")
        by_keys = self.role is Role.KEYS
        if mask is None or not (mask.skips if by_keys else mask.tile_live is not None):
            return meets
        if by_keys:
            ranged = self._with_rows(scope, r0, n)
            if mask.key_lo is not None:
                meets = b.compare("slt", b.as_value(ranged.integer(mask.key_lo), "i64"), b.add(first, count))
            if mask.key_hi is not None:
                meets = b.binary(
                    "arith.andi", meets, b.compare("sgt", b.as_value(ranged.integer(mask.key_hi), "i64"), first)
                )
        if mask.tile_live is not None:
            live = b.as_value(self._tile_scope(scope, first, count, r0, n).integer(mask.tile_live), "i64")
            meets = b.binary("arith.andi", meets, b.compare("ne", live, 0), "live")
        if not normalized(self.spec):
            return meets
        return b.binary("arith.ori", meets, self._any_dead(r0, n) if by_keys else self.dead, "meets")

    def _tile_scope(self, scope: Scope, first: Value, count: Value, r0: Value, n: Value) -> Scope:
        """A scope that knows the first and last query and key of a tile."""
        b = self.b
        ends = [(first, count), (r0, n)] if self.role is Role.QUERIES else [(r0, n), (first, count)]
        (i0, rows), (j0, columns) = ends
        known = {I0: i0, I1: b.sub(b.add(i0, rows), 1), J0: j0, J1: b.sub(b.add(j0, columns), 1)}
        return Scope(context=self.context, parent=scope, known=known)

    def _statistic(self, name: str, offset: Value) -> Value:
        return self.b.at(self.params[("ptr", name)], self.b.add(self.flat_query, offset), "f32")

    def _any_dead(self, first: Value, count: Value) -> Value:
        """Whether a query of these met no live key in the forward: its maximum is not above the fill, or its sum is
        nothing."""
        b, mask, lanes = self.b, self.spec.mask, self.lanes
        assert mask is not None
        with b.carry(0, count, lanes, [b.constant(0, "i1")], hint="i") as (loop, i, (dead,)):
            c, shift, factor = (
                b.load(self._statistic(n, b.add(first, i)), self.vector, n) for n in ("unit", "shift", "factor")
            )
            alive = b.compare("olt", b.unary("math.absf", factor), float("inf"))
            if math.isfinite(mask.fill):
                limit = max(mask.fill / 2 / self.programs.scale, -3e38)
                alive = b.binary("arith.andi", alive, b.compare("olt", shift, b.mul(c, -limit)))
            found = b.binary(
                "arith.andi", b.binary("arith.xori", alive, b.constant(-1, alive.type)), self._valid(b.sub(count, i))
            )
            loop.yields(
                b.binary(
                    "arith.ori", dead, b.op(f"vector.reduction <or>, {found} : {found.type} into i1", "i1", "dead")
                )
            )
        return loop.results[0]

    # --- one tile -----------------------------------------------------------------------------------------------

    def _tile(self, scope, first, count, groups, padded, r0, n) -> None:
        b, p, q, rows, lanes = self.b, self.inner_product, self.outer_product, self.tiling.keys, self.lanes
        steps = b.div(b.add(n, p.key_step - 1), p.key_step, "steps")
        start = b.div(r0, p.key_step)
        for product, packed, lane_side, target in (
            (p, self.packed[0], self.packed_a, self.scores),
            (q, self.packed[2], self.packed_b, self.slopes),
        ):
            with b.loop(0, steps, hint="step") as step:
                if product is p:
                    self._prefetch(scope, first, groups, b.add(r0, b.mul(step, p.key_step)), p.key_step)
                with b.loop(0, padded, product.group_step, hint="g") as g:
                    members = [b.add(g, k) for k in range(product.group_step)]
                    at = self._part(packed, b.add(start, step), product.key_bytes())
                    places = [
                        b.at(target, b.mul(b.add(b.mul(m, rows), b.mul(step, product.key_step)), lanes), "f32")
                        for m in members
                    ]
                    product.scores(at, [self._part(lane_side, m, product.query_bytes()) for m in members], places)
        whole = self._all_live(scope, first, count, r0, n)
        with b.loop(0, groups, hint="g") as g:
            if whole is None:
                self._group(scope, first, count, g, r0, n, steps, False)
            else:
                with b.when(whole):
                    self._group(scope, first, count, g, r0, n, steps, True)
                with b.otherwise():
                    self._group(scope, first, count, g, r0, n, steps, False)
        for wanted, product, packed, weights, output in (
            (self.side[0] in self.results, p, self.packed[1], self.score_weights, self.out_a),
            (self.wants_value, q, self.packed[3], self.value_weights, self.out_b),
        ):
            if wanted:
                at = self._part(packed, start, product.value_bytes())
                with b.loop(0, padded, product.group_step, hint="g") as g:
                    members = [b.add(g, k) for k in range(product.group_step)]
                    inputs = [self._part(weights, m, product.weight_bytes(rows)) for m in members]
                    product.accumulate(
                        at, steps, inputs, [self._part(output, m, 4 * product.e_padded * lanes) for m in members]
                    )

        if self.queries is not None:
            sums = self._part(self.packed[4], start, self.queries.step_bytes())
            self.queries.accumulate(self.row_slopes, self.key_pairs, sums, steps)

    def _prefetch(self, scope: Scope, first: Value, groups: Value, row: Value, count: int) -> None:
        """Ask for what `count` rows read of dense tensors and write of their gradients, while products are computed."""
        b, role, lanes = self.b, self.role, self.lanes
        if role is Role.QUERIES or not self.dense:
            return
        with b.loop(0, groups, hint="g") as g, b.loop(0, count, hint="r") as r:
            start, valid = b.add(first, b.mul(g, lanes)), self._valid(b.constant(lanes, "i64"))
            held, position = Lanes(coord=role.lane, first=start, count=lanes, valid=valid), b.add(row, r)
            for load in self.loads:
                if isinstance(load, LaneLoad):
                    load.prefetch(held, position)
            line = Scope(context=self.context, parent=scope, lanes=held, known={role.row: position})
            for sink in self.sinks:
                sink.prefetch(line)

    def _all_live(self, scope, first, count, r0, n) -> Value | None:
        return None if self.programs.full is None else self._whole(self._tile_scope(scope, first, count, r0, n))

    def _group(self, scope, first, count, g, r0, n, steps, full: bool) -> None:
        """P and dS of one group of lanes and one block of rows."""
        b, lanes, programs = self.b, self.lanes, self.programs
        program = programs.full if full else programs.masked
        offset = b.mul(g, lanes)
        held = Lanes(
            coord=self.role.lane, first=b.add(first, offset), count=lanes, valid=self._valid(b.sub(count, offset))
        )
        scope = Scope(context=self.context, parent=scope, lanes=held)
        collected = [entry.full if full else entry.masked for entry in self.collected]
        exprs = (program, self.weight, self.plan.score[1 if full else 0], *collected)
        scope.prepare(*exprs, bound=self.batch_names | {str(self.role.lane.attr)})
        wanted = dense_loads(*exprs)
        staged = []
        for load, area in zip(self.loads, self.staged, strict=True):
            if load.expr in wanted:
                load.stage(scope, r0, n, area)
                staged.append((load.expr, functools.partial(load.read, area)))
        statistics = self._lane_statistics(held.first) if self.role is Role.QUERIES else None
        tile = _Tile(self, scope, g, r0, program, full, staged, statistics, held.valid)
        pairs = b.mul(b.div(n, 2), 2, "pairs")
        start = [b.load(self._sum_at(k, g), self.vector, "sum") for k in range(self.slots)] or [
            b.constant(0.0, self.vector)
        ]
        with b.carry(0, pairs, 2, start, hint="r") as (loop, r, sums):
            loop.yields(*tile.pair(r, sums, both=True))
        results = loop.results
        with b.carry(pairs, n, 2, results, hint="r") as (rest, r, sums):
            rest.yields(*tile.pair(r, sums, both=False))
        for k in range(self.slots):
            b.store(rest.results[k], self._sum_at(k, g))
        tail = b.mul(b.div(b.add(n, 1), 2), 2)
        zero = b.constant(0.0, self.vector)
        with b.loop(tail, b.mul(steps, self.inner_product.key_step), 2, hint="r") as r:
            tile.store(r, (zero, zero), (zero, zero))

    def _sum_at(self, k: int, g: Value) -> Value:
        return self.b.at(self.sums, self.b.mul(self.b.add(g, k * self.tiling.groups), self.lanes), "f32")

    def _lane_statistics(self, first: Value) -> dict[str, Value] | None:
        if not normalized(self.spec):
            return None
        return {name: self.b.load(self._statistic(name, first), self.vector, name) for name in STATISTICS}

    def row_statistics(self, row: Value) -> dict[str, Value] | None:
        """Of one query, the same for all lanes."""
        if not normalized(self.spec):
            return None
        b = self.b
        return {n: b.broadcast(b.load(self._statistic(n, row), "f32", n), self.lanes) for n in STATISTICS}

    # --- the end of a block -------------------------------------------------------------------------------------

    def _finish(self, scope: Scope, first: Value, count: Value, g: Value) -> None:
        b, lanes = self.b, self.lanes
        offset = b.mul(g, lanes)
        remaining = b.least(b.sub(count, offset), lanes)
        row, valid = b.add(first, offset), self._valid(b.sub(count, offset))
        if self.side[0] in self.results:
            self._write(
                scope,
                self.side[0],
                self.inner_product,
                self.out_a,
                g,
                row,
                remaining,
                self.widths[0],
                self.programs.scale,
            )
        if self.wants_value:
            self._write(scope, 2, self.outer_product, self.out_b, g, row, remaining, self.widths[1], 1.0)
        base = self.flat_query if self.role is Role.QUERIES else self.flat_key
        for k in range(self.slots):
            if k >= len(self.collected) or self.collected[k].form in (Form.ROWS, Form.COLUMNS):
                at = b.at(self.params[("ptr", "sums", k)], b.add(base, row), "f32")
                value = b.load(self._sum_at(k, g), self.vector, "sum")
                types = f"{value.type}, {valid.type} into {PTR}"
                b.line(f"llvm.intr.masked.store {value}, {at}, {valid} {{alignment = 4 : i32}} : {types}")

    def _write(self, scope, operand, product, area, g, first, remaining, width, scale) -> None:
        """Transpose the lanes' sums and write them to the rows of the operand's gradient."""
        b, lanes, padded = self.b, self.lanes, product.e_padded
        source = self._part(area, g, 4 * padded * lanes)
        with b.loop(0, padded, lanes, hint="e") as e:
            cells = [b.load(b.at(source, b.mul(b.add(e, r), lanes), "f32"), self.vector, "o") for r in range(lanes)]
            cells = [cell if scale == 1.0 else b.mul(cell, scale) for cell in cells]
            for r, line in enumerate(transpose(b, cells)):
                b.store(line, b.at(self.finished, b.add(e, r * padded), "f32"))
        with b.loop(0, remaining, hint="r") as r:
            self._write_line(scope, operand, b.at(self.finished, b.mul(r, padded), "f32"), b.add(first, r), width)

    def _write_line(self, scope: Scope, operand: int, line: Value, row: Value, width: int) -> None:
        """`width` float32 numbers to a row of the operand's gradient."""
        b, lanes, memory = self.b, self.lanes, self.results[operand]
        offset = b.mul(row, self.params[("result_stride", operand, "row")])
        for axis in range(len(self.spec.batch)):
            stride = self.params[("result_stride", operand, f"b{axis}")]
            offset = b.add(offset, b.mul(scope.value(coord(f"b{axis}")), stride))
        at, column = (
            b.at(self.params[("ptr", "result", operand)], offset, memory),
            self.params[("result_stride", operand, "column")],
        )
        whole = b.select(b.compare("eq", column, 1), b.constant(width // lanes * lanes, "i64"), b.constant(0, "i64"))
        with b.loop(0, whole, lanes, hint="e") as e:
            b.store(self._narrow(b.load(b.at(line, e, "f32"), self.vector), memory), b.at(at, e, memory))
        with b.loop(whole, width, hint="e") as e:
            b.store(self._narrow(b.load(b.at(line, e, "f32"), "f32"), memory), b.at(at, b.mul(e, column), memory))

    def _write_queries(self, scope: Scope) -> None:
        """The gradient of Q of a whole batch element."""
        b = self.b
        assert self.queries is not None
        with b.loop(0, self.n_q, hint="i") as i:
            for block, part in enumerate(self.queries.line(self.packed[4], i)):
                b.store(b.mul(part, self.programs.scale), b.at(self.finished, 16 * block, "f32"))
            self._write_line(scope, 0, self.finished, i, self.widths[0])


STATISTICS = ("unit", "shift", "factor", "delta")
"""Per query row: the weight is exp2(x * unit + shift) * factor; delta is the sum of dO * O."""


class _Tile:
    """Rows of one tile for one group of lanes: from scores and dP to P and dS, both handed to the products."""

    def __init__(self, kernel, scope, g, r0, program, full, staged, statistics, valid):
        self.valid: Value = valid
        self.kernel, self.scope, self.g, self.r0, self.program, self.full = kernel, scope, g, r0, program, full
        self.b: Builder = kernel.b
        self.staged: list[tuple[Expr, Callable[[Value], Value]]] = staged
        self.statistics: dict[str, Value] | None = statistics
        rows = 4 * kernel.tiling.keys * kernel.lanes
        self.scores, self.slopes = kernel._part(kernel.scores, g, rows), kernel._part(kernel.slopes, g, rows)
        t = kernel.tiling.keys
        self.score_weights = kernel._part(kernel.score_weights, g, kernel.inner_product.weight_bytes(t))
        self.value_weights = kernel._part(kernel.value_weights, g, kernel.outer_product.weight_bytes(t))

    def pair(self, r: Value, sums: Sequence[Value], both: bool) -> list[Value]:
        """Rows r and r + 1 (or r alone); returns the sums with their contributions."""
        zero = self.b.constant(0.0, self.kernel.vector)
        first = self._row(r, sums)
        second = self._row(self.b.add(r, 1), first[2]) if both else (zero, zero, first[2])
        self.store(r, (first[0], second[0]), (first[1], second[1]))
        return second[2]

    def store(self, r: Value, weights: tuple[Value, Value], slopes: tuple[Value, Value]) -> None:
        kernel = self.kernel
        if kernel.side[0] in kernel.results:
            kernel.inner_product.store_weights(self.score_weights, r, *slopes)
        if kernel.wants_value:
            kernel.outer_product.store_weights(self.value_weights, r, *weights)
        if kernel.queries is not None:
            for u, slope in enumerate(slopes):
                kernel.queries.store(kernel.row_slopes, self.b.add(r, u), self.g, self.valid, slope)

    def _row(self, r: Value, sums: Sequence[Value]) -> tuple[Value, Value, list[Value]]:
        """(weight for V, dS, sums) of one row."""
        b, kernel, plan = self.b, self.kernel, self.kernel.plan
        at = b.mul(r, kernel.lanes)
        align = 4 * kernel.lanes
        score = b.load(b.at(self.scores, at, "f32"), kernel.vector, "s", align=align)
        slope = b.load(b.at(self.slopes, at, "f32"), kernel.vector, "dp", align=align)
        position = b.add(self.r0, r, "row")
        row = Scope(context=kernel.context, parent=self.scope, known={SCORE: score, kernel.role.row: position})
        row.leaf = self._leaf(r)
        x = row.vector(self.program)
        factor = None if kernel.weight is None else row.vector(kernel.weight)
        scaled = slope if factor is None else b.mul(slope, factor)
        if (known := self.statistics or kernel.row_statistics(position)) is None:
            weight, upstream = x, scaled
        else:
            weight = b.mul(kernel.context.math.exp2(b.fma(x, known["unit"], known["shift"])), known["factor"], "p")
            upstream = b.mul(weight, b.sub(scaled, known["delta"]), "dx")
        through = None if factor is None else b.mul(slope, weight, "dw")
        gradients = self._scope(row, upstream, through)
        collected = self._collect(gradients, sums)
        if kernel.settles:
            # With sinks the weights do not add up to one: what delta lacks is then not the sum of dx.
            missing = b.mul(weight, scaled) if kernel.spec.sinks else upstream
            collected[0] = b.add(collected[0], missing, "missing")
        elif kernel.corrects:
            self._collect_shares(row, weight, upstream, through, collected)
        slope = gradients.vector(plan.score[1 if self.full else 0]) if kernel.wants_score else upstream
        return weight if factor is None else b.mul(weight, factor), slope, collected

    def _scope(self, row: Scope, upstream: Value, through: Value | None) -> Scope:
        known = {UPSTREAM: upstream} if through is None else {UPSTREAM: upstream, WEIGHT_UPSTREAM: through}
        return Scope(context=self.kernel.context, parent=row, known=known)

    def _collect(self, gradients: Scope, sums: Sequence[Value]) -> list[Value]:
        collected = list(sums)
        for k, (entry, sink) in enumerate(zip(self.kernel.collected, self.kernel.sinks, strict=True)):
            term = gradients.vector(entry.full if self.full else entry.masked)
            if entry.form in (Form.ROWS, Form.COLUMNS):
                collected[k] = self.b.add(collected[k], term, "sum")
            else:
                sink.add(gradients, term)
        return collected

    def _collect_shares(
        self, row: Scope, weight: Value, upstream: Value, through: Value | None, sums: list[Value]
    ) -> None:
        """The sum of dx, which is 0 but for the rounding of delta, and what each collected sum would be for dx = P."""
        b, count = self.b, len(self.kernel.collected)
        sums[count] = b.add(sums[count], upstream, "drift")
        shares = self._scope(row, weight, None if through is None else b.constant(0.0, self.kernel.vector))
        for k, entry in enumerate(self.kernel.collected, start=count + 1):
            sums[k] = b.add(sums[k], shares.vector(entry.full if self.full else entry.masked), "share")

    def _leaf(self, r: Value) -> Callable[[Expr], Value | None]:
        memo: dict[Expr, Value] = {}

        def leaf(expr: Expr) -> Value | None:
            for load, read in self.staged:
                if load is expr:
                    if expr not in memo:
                        memo[expr] = read(r)
                    return memo[expr]
            return None

        return leaf
