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

import functools
import math
from dataclasses import dataclass

from fusion.codegen.mlir.amx import LARGE_BITS, Amx
from fusion.codegen.mlir.builder import PTR, Builder, Value, vector_of
from fusion.codegen.mlir.dense import DenseLoad, dense_loads
from fusion.codegen.mlir.products import MultiplyAdd, Products, round_up
from fusion.codegen.mlir.programs import J0, J1, Programs, programs_of
from fusion.codegen.mlir.rows import Access, RowReader
from fusion.codegen.mlir.scope import MEMORY_TYPE, Context, Lanes, Params, Scope
from fusion.codegen.mlir.softmax import Group, GroupSoftmax, KeyBlock
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.transpose import transpose
from fusion.codegen.mlir.vectormath import LIBM, LOG2E, VectorMath
from fusion.ir.expr import ROW_MAX, ROW_SUM, C, E, Expr, I, J, const, coord
from fusion.ir.spec import AttentionSpec, Normalizer

HEADER = """module {
llvm.func @omp_get_thread_num() -> i32
llvm.func @omp_get_num_threads() -> i32
""" + "".join(f"llvm.func @{name}(f32) -> f32\n" for name in LIBM.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """groups: lane vectors of queries in a block; keys: keys in a block. planes: of AMX products, 0 for
    multiply-add."""

    groups: int
    keys: int
    planes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """MLIR text and what the launcher must know: parameter slots in order, rows per item, the workspace of a thread in
    bytes as fixed + steps * per_step with steps = ceil(n_k / key_step), and whether the kernel may raise the flag for
    large values."""

    source: str
    slots: tuple[tuple, ...]
    rows: int
    key_step: int
    fixed_bytes: int
    step_bytes: int
    may_flag: bool


class Workspace:
    """Static layout of a thread's scratch memory: `area(bytes)` gives the offset of a new part, on a cache line."""

    def __init__(self) -> None:
        self.size = 0

    def area(self, size: int) -> int:
        offset = self.size
        self.size += round_up(size, 64)
        return offset


def emit(spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int) -> KernelText:
    """The kernel of a spec whose Q and K have d columns and V d_v."""
    return _Kernel(spec, tiling, target, d, d_v).text()


class _Kernel:
    def __init__(self, spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int):
        self.spec, self.tiling, self.target, self.d_v = spec, tiling, target, d_v
        self.b = b = Builder()
        self.lanes = target.lanes
        self.vector = vector_of("f32", self.lanes)
        degree = 5 if spec.out_dtype == "float32" else {1: 3, 2: 4}.get(tiling.planes, 5)
        self.context = Context(
            b=b,
            params=Params(b, Value("%params", PTR)),
            math=VectorMath(b, target.avx512, degree),
            operands=spec.operands,
            lanes=self.lanes,
        )
        self.params = self.context.params
        self.programs: Programs = programs_of(spec)
        self.weight: Expr | None = None if spec.weight is const(1.0) else spec.weight
        self.dense = dense_loads(self.programs.masked, self.programs.full, self.weight)
        self.may_flag = tiling.planes > 1
        self.layout = Workspace()
        self.base = self._thread_base()
        worst = self._area(64, "worst") if self.may_flag else None
        self.products: Products = (
            Amx(b, d, d_v, tiling.planes, tiling.keys, worst)
            if tiling.planes
            else MultiplyAdd(b, self.lanes, d, d_v, target.tile_rows, target.tile_groups)
        )
        self.worst = worst
        self._areas()

    def _thread_base(self) -> Value:
        b = self.b
        with b.at_entry():
            for name, function in (("thread", "omp_get_thread_num"), ("threads", "omp_get_num_threads")):
                number = b.op(f"llvm.call @{function}() : () -> i32", "i32", name)
                setattr(self, name, b.op(f"arith.extsi {number} : i32 to i64", "i64", name))
            return b.at(
                self.params[("ptr", "workspace")], b.mul(self.thread, self.params[("workspace_bytes",)]), "i8", "mine"
            )

    def _area(self, size: int, hint: str) -> Value:
        offset = self.layout.area(size)
        with self.b.at_entry():
            return self.b.at(self.base, offset, "i8", hint)

    def _areas(self) -> None:
        p, groups, keys, lanes = self.products, self.tiling.groups, self.tiling.keys, self.lanes
        row = 4 * lanes
        self.queries = self._area(groups * p.query_bytes(), "queries")
        self.scores = self._area(groups * keys * row, "scores")
        self.factors = self._area(groups * keys * row, "factors") if self.weight is not None else None
        self.weights = self._area(groups * p.weight_bytes(keys), "weights")
        self.output = self._area(groups * p.e_padded * row, "output")
        self.maxima = self._area(groups * row, "maxima")
        self.totals = self._area(groups * row, "totals")
        self.staging = self._area(8 * p.staging_elements(), "staging")
        self.finished = self._area(lanes * p.e_padded * 4, "finished")
        self.staged = [self._area(keys * row, "staged") for _ in self.dense]
        self.state = self._area(64 * 4, "state")
        b = self.b
        fixed = self.layout.size
        with b.at_entry():
            self.packed_keys = b.at(self.base, fixed, "i8", "packed_keys")
            steps = self.params[("key_steps",)]
            self.packed_values = b.at(self.packed_keys, b.mul(steps, p.key_bytes()), "i8", "packed_values")

    def _group_memory(self, g: Value) -> Group:
        b, p, keys, lanes = self.b, self.products, self.tiling.keys, self.lanes

        def part(base: Value, size: int, hint: str) -> Value:
            return b.at(base, b.mul(g, size), "i8", hint)

        return Group(
            scores=part(self.scores, keys * lanes * 4, "s_rows"),
            factors=None if self.factors is None else part(self.factors, keys * lanes * 4, "w_rows"),
            weights=part(self.weights, p.weight_bytes(keys), "p_rows"),
            output=part(self.output, p.e_padded * lanes * 4, "o_rows"),
            maximum=part(self.maxima, 4 * lanes, "m_at"),
            total=part(self.totals, 4 * lanes, "l_at"),
        )

    def text(self) -> KernelText:
        b, spec = self.b, self.spec
        top = Scope(context=self.context)
        self.n_q, self.n_k = (
            b.as_value(self._entry_integer(top, spec.n_q), "i64"),
            b.as_value(self._entry_integer(top, spec.n_k), "i64"),
        )
        if self.worst is not None:
            b.store(b.constant(0, vector_of("i32", 16)), self.worst)
        for slot in range(2 + 8):
            b.store(b.constant(-1, "i64"), b.at(self.state, slot, "i64"))
        items = self.params[("items",)]
        low = b.div(b.mul(items, self.thread), self.threads, "low")
        high = b.div(b.mul(items, b.add(self.thread, 1)), self.threads, "high")
        with b.loop(low, high, hint="item") as item:
            self._item(top, item)
        if self.worst is not None:
            self._raise_flag()
        source = f"{HEADER}func.func @attention(%params: {PTR}) {{\n{b.text()}\n  return\n}}\n}}\n"
        slots = tuple(sorted(self.params.slots, key=self.params.slots.__getitem__))
        return KernelText(
            source=source, slots=slots, rows=self.tiling.groups * self.lanes, key_step=self.products.key_step,
            fixed_bytes=self.layout.size, step_bytes=self.products.key_bytes() + self.products.value_bytes(),
            may_flag=self.may_flag,
        )  # fmt: skip

    def _entry_integer(self, top: Scope, expr: Expr) -> Value | int:
        with self.b.at_entry():
            return top.integer(expr)

    def _raise_flag(self) -> None:
        b = self.b
        seen = b.load(self.worst, vector_of("i32", 16), "worst")
        worst = b.op(f"vector.reduction <maxsi>, {seen} : {seen.type} into i32", "i32", "worst")
        with b.when(b.compare("sge", worst, LARGE_BITS)):
            b.store(b.constant(1, "i64"), self.params[("ptr", "flag")])

    def _item(self, top: Scope, item: Value) -> None:
        b, spec, rows = self.b, self.spec, self.tiling.groups * self.lanes
        blocks = self.params[("blocks",)]
        block, rest = b.rem(item, blocks, "block"), b.div(item, blocks)
        known: dict[Expr, Value] = {}
        for axis in reversed(range(len(spec.batch))):
            extent = b.as_value(top.integer(spec.batch[axis]), "i64")
            known[coord(f"b{axis}")], rest = b.rem(rest, extent, f"b{axis}"), b.div(rest, extent)
        scope = Scope(context=self.context, parent=top, known=known)
        self.batch_names = frozenset(f"b{axis}" for axis in range(len(spec.batch)))
        mask = spec.mask
        scope.prepare(self.programs.masked, self.programs.full, self.weight, *spec.sinks, bound=self.batch_names)
        first = b.mul(block, rows, "i0")
        count = b.least(b.sub(self.n_q, first), rows, "rows")
        groups = b.div(b.add(count, self.lanes - 1), self.lanes, "groups")
        readers = [
            RowReader(self.context, scope, Access(operand=n, index=index, row=row, column=column))
            for n, index, row, column in ((0, spec.q, I, C), (1, spec.k, J, C), (2, spec.v, J, E))
        ]
        self.loads = [DenseLoad(self.context, scope, expr) for expr in self.dense]
        self._note_identity(readers[1:])
        padded_groups = b.mul(
            b.div(b.add(groups, self.products.group_step - 1), self.products.group_step), self.products.group_step
        )
        with b.loop(0, padded_groups, hint="g") as g:
            at = b.at(self.queries, b.mul(g, self.products.query_bytes()), "i8")
            self.products.pack_queries(readers[0], b.add(first, b.mul(g, self.lanes)), self.n_q, at, self.staging)
        last = b.sub(b.add(first, count), 1)
        ranged = Scope(context=self.context, parent=scope, known={coord("i0"): first, coord("i1"): last})
        low, high = self._key_range(ranged, mask.key_lo if mask else None, mask.key_hi if mask else None)
        self._attend(ranged, readers, first, count, groups, padded_groups, low, high)
        with b.loop(0, groups, hint="g") as g:
            self._finish(scope, first, count, g)

    def _key_range(self, scope: Scope, low: Expr | None, high: Expr | None) -> tuple[Value | int, Value]:
        """The keys to visit, clamped; the start on a key step."""
        b, step = self.b, self.products.key_step
        start: Value | int = 0
        end = self.n_k
        if low is not None:
            start = b.most(b.least(b.as_value(scope.integer(low), "i64"), self.n_k), 0)
            start = b.mul(b.div(start, step), step, "key_lo")
        if high is not None:
            end = b.most(b.least(b.as_value(scope.integer(high), "i64"), self.n_k), 0, "key_hi")
        return start, end

    # -- packing K and V
    # ------------------------------------------------------------------------------------------------------

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
        b = self.b
        mask = self.spec.mask
        skips = mask is not None and (mask.key_lo is not None or mask.key_hi is not None)
        if mask is None or not skips or self.spec.normalizer is Normalizer.NONE:
            self._visit(scope, readers, first, count, groups, padded_groups, low, high)
            return
        yes, start = b.constant(1, "i1"), [b.as_value(low, "i64"), high]
        with b.carry(0, 2, 1, [*start, yes], hint="attempt") as (loop, _, (lo, hi, needed)):
            with b.when(needed):
                self._visit(scope, readers, first, count, groups, padded_groups, lo, hi)
            everything = b.binary("arith.andi", b.compare("sle", lo, 0), b.compare("sge", hi, self.n_k))
            partial = b.binary("arith.xori", everything, yes)
            again = b.binary(
                "arith.andi", b.binary("arith.andi", needed, partial), self._any_dead(count, groups, mask.fill), "again"
            )
            loop.yields(b.constant(0, "i64"), self.n_k, again)

    def _any_dead(self, count: Value, groups: Value, fill: float) -> Value:
        b, lanes = self.b, self.lanes
        no = b.constant(0, "i1")
        with b.carry(0, groups, 1, [no], hint="g") as (loop, g, (dead,)):
            m = b.load(b.at(self.maxima, b.mul(g, lanes), "f32"), self.vector, "m")
            # In units of the scale the fill was clamped to the largest float32: the limit must stay above that.
            alive = b.compare("ogt", m, max(fill / 2 / self.programs.scale, -3e38) if math.isfinite(fill) else fill)
            not_alive = b.binary("arith.xori", alive, b.constant(-1, alive.type))
            found = b.binary("arith.andi", not_alive, self._valid(b.sub(count, b.mul(g, lanes))))
            loop.yields(
                b.binary(
                    "arith.ori", dead, b.op(f"vector.reduction <or>, {found} : {found.type} into i1", "i1", "dead")
                )
            )
        return loop.results[0]

    def _valid(self, remaining: Value) -> Value:
        b, lanes = self.b, self.lanes
        limit = b.op(f"arith.trunci {b.least(remaining, lanes)} : i64 to i32", "i32", "limit")
        return b.compare(
            "slt", b.dense(range(lanes), vector_of("i32", lanes), "lane"), b.broadcast(limit, lanes), "valid"
        )

    def _visit(self, scope, readers, first, count, groups, padded_groups, low, high) -> None:
        b, p, keys = self.b, self.products, self.tiling.keys
        lanes = self.lanes
        with b.loop(0, padded_groups, hint="g") as g:
            memory = self._group_memory(g)
            b.store(b.constant(float("-inf"), self.vector), memory.maximum)
            b.store(b.constant(0.0, self.vector), memory.total)
            with b.loop(0, p.e_padded, hint="e") as e:
                b.store(b.constant(0.0, self.vector), b.at(memory.output, b.mul(e, lanes), "f32"))
        self._pack(readers, low, high)
        with b.loop(low, high, keys, hint="j0") as j0:
            n = b.least(b.sub(high, j0), keys, "n_keys")
            steps = b.div(b.add(n, p.key_step - 1), p.key_step, "steps")
            block = KeyBlock(first=j0, count=n, padded=b.mul(steps, p.key_step))
            whole = self._all_live(scope, j0, n)
            with b.loop(0, steps, hint="step") as step, b.loop(0, padded_groups, p.group_step, hint="g") as g:
                at = b.at(self.packed_keys, b.mul(b.add(b.div(j0, p.key_step), step), p.key_bytes()), "i8")
                members = [b.add(g, k) for k in range(p.group_step)]
                queries = [b.at(self.queries, b.mul(m, p.query_bytes()), "i8") for m in members]
                rows = [b.add(b.mul(m, keys), b.mul(step, p.key_step)) for m in members]
                p.scores(at, queries, [b.at(self.scores, b.mul(r, lanes), "f32") for r in rows])
            with b.loop(0, groups, hint="g") as g:
                self._group(scope, first, count, g, block, whole)
            with b.loop(0, padded_groups, p.group_step, hint="g") as g:
                members = [self._group_memory(b.add(g, k)) for k in range(p.group_step)]
                at = b.at(self.packed_values, b.mul(b.div(j0, p.key_step), p.value_bytes()), "i8")
                p.accumulate(at, steps, [m.weights for m in members], [m.output for m in members])

    def _all_live(self, scope: Scope, first: Value, count: Value) -> Value | None:
        """Whether the conditions that the variant for full blocks leaves out hold for all rows and keys of the
        block."""
        if self.programs.full is None:
            return None
        b = self.b
        block = Scope(context=self.context, parent=scope, known={J0: first, J1: b.sub(b.add(first, count), 1)})
        conditions = [b.compare("sge", block.value(g), 0) for g in self.programs.margins]
        return functools.reduce(lambda x, y: b.binary("arith.andi", x, y, "all_live"), conditions)

    def _lane_scope(self, scope: Scope, first: Value, count: Value, g: Value) -> Scope:
        b = self.b
        offset = b.mul(g, self.lanes)
        lanes = Lanes(coord=I, first=b.add(first, offset), count=self.lanes, valid=self._valid(b.sub(count, offset)))
        return Scope(context=self.context, parent=scope, lanes=lanes)

    def _group(self, scope: Scope, first: Value, count: Value, g: Value, block: KeyBlock, whole: Value | None) -> None:
        """Scores to weights for one group and one key block."""
        b, memory = self.b, self._group_memory(g)
        lanes = self._lane_scope(scope, first, count, g)
        softmax = GroupSoftmax(self.context, memory, block, self.programs.scale)
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
        lanes.prepare(program, self.weight, bound=self.batch_names | {"i"})
        wanted = dense_loads(program, self.weight)
        staged = [
            (load.expr, load.stage(lanes, block.first, block.count, area))
            for load, area in zip(self.loads, self.staged, strict=True)
            if load.expr in wanted
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
        factor = None if self.spec.normalizer is Normalizer.NONE else self._row_factor(rows, memory)
        padded = self.products.e_padded
        with b.loop(0, padded, lanes, hint="e") as e:
            cells = [
                b.load(b.at(memory.output, b.mul(b.add(e, r), lanes), "f32"), self.vector, "o") for r in range(lanes)
            ]
            if factor is not None:
                cells = [b.mul(cell, factor) for cell in cells]
            for r, line in enumerate(transpose(b, cells)):
                b.store(line, b.at(self.finished, b.add(e, r * padded), "f32"))
        offset: Value | int = 0
        for axis in range(len(self.spec.batch)):
            offset = b.add(offset, b.mul(scope.value(coord(f"b{axis}")), self.params[("out_stride", f"b{axis}")]))
        memory_type = MEMORY_TYPE[self.spec.out_dtype]
        target = b.at(self.params[("ptr", "out")], offset, memory_type)
        remaining = b.least(b.sub(count, b.mul(g, lanes)), lanes)
        with b.loop(0, remaining, hint="r") as r:
            position = b.mul(b.add(b.add(first, b.mul(g, lanes)), r), self.params[("out_stride", "i")])
            self._write_row(
                b.at(self.finished, b.mul(r, padded), "f32"), b.at(target, position, memory_type), memory_type
            )

    def _write_row(self, source: Value, target: Value, memory: str) -> None:
        """d_v elements: vectors where the output is contiguous along them."""
        b, lanes, stride = self.b, self.lanes, self.params[("out_stride", "e")]
        unit = b.compare("eq", stride, 1)
        whole = b.select(unit, b.constant(self.d_v // lanes * lanes, "i64"), b.constant(0, "i64"))
        with b.loop(0, whole, lanes, hint="e") as e:
            b.store(self._narrow(b.load(b.at(source, e, "f32"), self.vector), memory), b.at(target, e, memory))
        with b.loop(whole, self.d_v, hint="e") as e:
            b.store(self._narrow(b.load(b.at(source, e, "f32"), "f32"), memory), b.at(target, b.mul(e, stride), memory))

    def _narrow(self, x: Value, memory: str) -> Value:
        return x if memory == "f32" else self.b.convert("arith.extf" if memory == "f64" else "arith.truncf", x, memory)

    def _row_factor(self, rows: Scope, memory: Group) -> Value:
        """What each lane's output is multiplied by; sinks and the spec's own row scale included."""
        b, spec, exp2 = self.b, self.spec, self.context.math.exp2
        unused = self.b.constant(0, "i64")
        softmax = GroupSoftmax(
            self.context, memory, KeyBlock(first=unused, count=unused, padded=unused), self.programs.scale
        )
        raw = b.load(memory.maximum, self.vector, "m")
        m = b.mul(raw, self.programs.scale)
        total = b.load(memory.total, self.vector, "l")
        shift: Value | None = None
        if spec.sinks or spec.row_scale is not None:
            shift = b.div(1.0, softmax.excess(raw))
            total = b.mul(total, shift)
        if spec.sinks:
            highest = m
            sinks = [rows.vector(sink) for sink in spec.sinks]
            for sink in sinks:
                highest = b.select(b.compare("ogt", sink, highest), sink, highest, "m_all")
            base = b.select(b.compare("oeq", highest, float("-inf")), 0.0, highest)
            down = exp2(b.mul(b.sub(m, base), LOG2E), 5)
            shift, total = b.mul(shift, down), b.mul(total, down)
            for sink in sinks:
                total = b.add(total, exp2(b.mul(b.sub(sink, base), LOG2E), 5), "l_all")
            m = highest
        if spec.row_scale is None:
            factor = b.div(1.0, total, "factor")
        else:
            rows.known |= {ROW_MAX: m, ROW_SUM: total}
            factor = rows.vector(spec.row_scale)
        if shift is not None:
            factor = b.mul(factor, shift)
        if spec.normalizer is Normalizer.SAFE_SOFTMAX:
            dead = b.binary("arith.andi", b.compare("oeq", m, float("-inf")), b.compare("oeq", total, 0.0), "dead")
            factor = b.select(dead, 0.0, factor, "factor")  # a row of NaN has a NaN sum
        return factor
