"""The kernel for attention whose heads are mixed before or after the softmax (`fusion.ir.spec.Mixing`).

A work item is a block of query rows of all heads: scores of one head cannot become weights without those of the others.
The scores of its rows stay whole, [head][group][key][L], until the weights are multiplied with V:

    for each head      pack K, V and Q, as far as needed;  S^T = K Q^T;  what is mixed of it
    for each key       the scores of all heads, mixed
    for each head      score program, maximum, exponentials and their sum
    for each key       the weights of all heads, mixed
    for each head      O^T = V^T P^T;  transpose, write

So nothing is computed twice, no maximum is stale, and a thread holds n_k * H numbers for each of its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from fusion.ir.expr import HEAD, SCORE, WEIGHT, Expr, I, J, coord
from fusion.ir.reads import dense_loads
from fusion.ir.results import keeps_ends
from fusion.ir.spec import AttentionSpec
from fusion.lowering.numbers import is_moderate
from fusion.lowering.score_programs import plain_scale
from fusion.planning.register_tiles import KEY_SPAN, Target, planes_of

from .builder import Value
from .dense import DenseLoad, stage_loads
from .micro_kernel import FmaVectors, MatrixOperand
from .products import vector_products
from .rows import STATE_BYTES, PackedRows
from .scope import Scope
from .skeleton import KernelFunction
from .softmax import Group, GroupSoftmax, KeyBlock, RowProgram
from .thread_function import KernelText
from .values import Array, round_up

KEYS_AT_ONCE = 4
"""Keys whose heads are mixed at a time, no more than a key step: a head's factor is read once for all of them."""


class MixedHeadsKernel(KernelFunction):
    """Writes the function; see the module."""

    def __init__(self, spec: AttentionSpec, target: Target, d: int, d_v: int):
        super().__init__(spec, target, d, d_v, degree=5)
        assert spec.mixing is not None
        self.mixing, self.axis = spec.mixing, spec.mixing.head
        self.heads = spec.batch[spec.mixing.axis].integer
        pairs, self.steps = planes_of(spec, target) == 1 and target.bfloat16, self.params[("key_steps",)]
        self.products = p = vector_products(self.b, target, pairs, d, d_v, self.steps)
        self.groups, self.row = p.nr, 4 * self.lanes
        # Sums over heads take half of the registers.
        self.heads_at_once = 4 if target.tile_rows * target.tile_groups > 12 else 2
        self.keys_at_once = min(KEYS_AT_ONCE, p.key_step)
        scale = plain_scale(self.mixing.scored) or 0.0
        folds = is_moderate(scale)  # becomes one with what scores are mixed by
        self.scored, self.scale = (SCORE, scale) if folds else (self.mixing.scored, 1.0)
        self.dense = dense_loads(self.programs.masked, self.weight, self.mixing.scored)
        self._areas()

    def _areas(self) -> None:
        p, heads = self.products, self.heads
        matrix = 4 * heads * round_up(heads, self.heads_at_once)
        self.matrices = {
            name: self.area(matrix, name) for name in ("scores", "weights") if getattr(self.mixing, name) is not None
        }
        self.matrix_bytes = round_up(matrix, 64)
        self.state = self.array(heads, STATE_BYTES, "state")
        self.queries = self.array(self.groups, p.query_bytes, "queries")
        p.staging = self.area(8 * p.staging_elements, "staging")
        self.out_rows = self.area(self.lanes * p.e_padded * 4, "out_rows")
        self.maximum, self.total = self.area(self.row, "maximum"), self.area(self.row, "total")
        self.row_factors = self.array(heads * self.groups, self.lanes, "row_factors", "f32")
        self.mixed = self.array(heads * self.keys_at_once, self.lanes, "mixed", "f32")
        self.output, self.part = (self.array(self.groups, p.e_padded * self.row, name) for name in ("output", "part"))
        # Of a key step: packed keys and values, scores, dense loads and factors of the weights.
        step_row, staged = p.key_step * self.row, len(self.dense) + 1
        sizes = [heads * p.key_bytes, heads * p.value_bytes, heads * self.groups * step_row, *[step_row] * staged]
        self.step_bytes, areas = sum(sizes), [area.first for area in self.packed_areas(sizes)]
        self.packed_keys, self.packed_values, self.scores, *self.staged = areas
        with self.b.at_entry():
            self.group_bytes = self.b.mul(self.steps, step_row, "group_bytes")

    def text(self) -> KernelText:
        b, p = self.b, self.products
        top = self._top()
        self.padded = b.mul(self.steps, p.key_step, "padded")
        with b.loop(0, self.heads, hint="head") as head:
            self._packed(head).clear()
        for area in self.matrices.values():
            self.zero(area, self.matrix_bytes)
        with self._items() as item:
            self._item(top, item)
        return self.kernel_text(rows=self.groups * self.lanes, key_step=p.key_step, step_bytes=self.step_bytes)

    def _item(self, top: Scope, number: Value) -> None:
        b = self.b
        blocks = self.params[("blocks",)]
        scope = self._batch_scope(top, b.div(number, blocks), but=self.mixing.axis)
        first = b.mul(b.rem(number, blocks, "block"), self.groups * self.lanes, "i0")
        for name, area in self.matrices.items():
            self._read_matrix(scope, getattr(self.mixing, name), area, self.scale if name == "scores" else 1.0)
        with b.loop(0, self.heads, hint="head") as head:
            self._score_head(self._head_scope(scope, head), head, first)
        with b.loop(0, self.groups, hint="g") as g:
            start = b.add(first, b.mul(g, self.lanes), "row")
            rows = scope.along(I, start, b.sub(self.n_q, start))
            with b.when(b.compare("slt", start, self.n_q)):
                self._weigh(rows, g)
        with b.loop(0, self.heads, hint="head") as head:
            self._finish(self._head_scope(scope, head), head, first)

    def _head_scope(self, scope: Scope, head: Value) -> Scope:
        """The scope of one head, which knows all batch coordinates."""
        batch = [coord(name) for name in self.batch_names]
        known = {name: head if name is self.axis else scope.value(name) for name in batch}
        return scope.inner(known)

    def _packed(self, head: Value) -> PackedRows:
        return PackedRows(self.b, self.state[head], self.products.key_step)

    def _rows(self, head: Value, g: Value | int) -> Value:
        """Address of the scores, and later the weights, of a head and a group of queries."""
        return self.b.row(self.scores, self._number(head, g), self.group_bytes, "i8", "rows")

    def _number(self, head: Value, g: Value | int) -> Value:
        """Number of a head's group of queries among those of all heads."""
        return self.b.add(self.b.mul(head, self.groups), g)

    def _read_matrix(self, scope: Scope, matrix: Expr, area: Value, scale: float) -> None:
        """Copy what heads are mixed by: blocks of [h][`heads_at_once` results]."""
        b, heads, width = self.b, self.heads, self.heads_at_once
        with b.loop(0, heads, hint="to") as to, b.loop(0, heads, hint="of") as of:
            inner = self._head_scope(scope, to)
            inner.known[HEAD] = of
            place = b.add(b.mul(b.div(to, width), width * heads), b.add(b.mul(of, width), b.rem(to, width)))
            x = inner.value(matrix)
            b.store(b.mul(x, scale) if scale != 1.0 else x, b.at(area, place, "f32"))

    def _mix(
        self, matrix: Value, of: Callable[[Value, Value], Value], put: Callable[..., None], own: float = 0.0
    ) -> None:
        """Sums over heads. of: (head, key) -> the vector that is mixed. put: takes (head, first of some keys, the
        vectors of these). own: how often what is mixed of a head is added to its sum."""
        b, heads, width, count = self.b, self.heads, self.heads_at_once, self.keys_at_once
        kernel = FmaVectors(b, self.lanes)
        right = MatrixOperand(bases=[self.mixed.first], step=count * self.lanes, count=count, part=self.lanes)
        with b.loop(0, self.padded, count, hint="j") as j:
            with b.loop(0, heads, hint="of") as head:
                for u in range(count):
                    b.store(of(head, b.add(j, u)), self.mixed[b.add(b.mul(head, count), u)])
            with b.loop(0, heads, width, hint="to") as to:
                left = MatrixOperand(bases=[b.row(matrix, to, heads)], step=width, count=width, part=1)
                sums = kernel.gemm(kernel.zeros(width * count), left, right, 0, heads)
                for r in range(width):
                    head, result = b.add(to, r), sums[r * count : (r + 1) * count]
                    there = b.compare("slt", b.as_value(head, "i64"), heads) if heads % width else b.constant(1, "i1")
                    with b.when(there):
                        if own:
                            places = [self.mixed[b.add(b.mul(head, count), u)] for u in range(count)]
                            pairs = zip(places, result, strict=True)
                            result = [b.fma(b.load(at, self.vector), own, x) for at, x in pairs]
                        put(head, j, result)

    def _score_head(self, scope: Scope, head: Value, first: Value) -> None:
        """The scores of a head, with everything packed that they are made of."""
        b, p = self.b, self.products
        readers, packed = self._readers(scope), self._packed(head)
        first_step = b.mul(b.mul(head, self.steps), p.key_bytes)
        keys = Array(b, b.at(self.packed_keys, first_step, "i8", "keys"), p.key_bytes)
        values = self._values_of(head)
        packed.note(readers[1:])

        def pack(key: Value) -> None:
            n = b.div(key, p.key_step)
            p.pack_keys(readers[1], key, keys[n])
            p.pack_values(readers[2], key, p.values_of(values, n))

        packed.extend(0, self.n_k, pack)
        queries = [self.queries[g] for g in range(self.groups)]
        for g, place in enumerate(queries):
            p.pack_queries(readers[0], b.add(first, g * self.lanes), place)
        rows = [self._rows(head, g) for g in range(self.groups)]
        with b.loop(0, self.steps, hint="step") as step:
            places = [b.row(at, b.mul(step, p.key_step), self.lanes) for at in rows]
            p.scores(keys[step], queries, places)

    def _values_of(self, head: Value) -> Value:
        at = self.b.mul(self.b.mul(head, self.steps), self.products.value_bytes)
        return self.b.at(self.packed_values, at, "i8", "values")

    def _weigh(self, lanes: Scope, g: Value) -> None:
        """From the scores of a group of queries to its weights, as the products take them."""
        b, mixing = self.b, self.mixing
        if mixing.scores is not None:
            if self.scored is not SCORE:
                with b.loop(0, self.heads, hint="head") as head:
                    self._apply(self._head_scope(lanes, head), head, g, self.scored, None)
            own = self.scale * mixing.own_score
            put = functools.partial(self._put_scores, g)
            self._mix(self.matrices["scores"], lambda head, key: self._at(head, g, key), put, own)
        with b.loop(0, self.heads, hint="head") as head:
            self._exponentials(self._head_scope(lanes, head), head, g)
        weight, put = (lambda head, key: self._weight_at(head, g, key)), functools.partial(self._put_weights, lanes, g)
        if mixing.weights is not None:
            self._mix(self.matrices["weights"], weight, put, float(mixing.own_weight))
            return
        with b.loop(0, self.heads, hint="head") as head, b.loop(0, self.padded, 2, hint="j") as key:
            put(head, key, [weight(head, b.add(key, u)) for u in range(2)])

    def _at(self, head: Value, g: Value, key: Value) -> Value:
        return self.b.load(self.b.row(self._rows(head, g), key, self.lanes), self.vector, "s", align=self.row)

    def _weight_at(self, head: Value, g: Value, key: Value) -> Value:
        factor = self.b.load(self.row_factors[self._number(head, g)], self.vector, "factor")
        return self.scaled(self._at(head, g, key), factor)

    def _put_scores(self, g: Value, head: Value, first: Value, values: Sequence[Value]) -> None:
        rows = self.b.row(self._rows(head, g), first, self.lanes)
        for u, value in enumerate(values):
            self.b.store(value, self.b.row(rows, u, self.lanes), align=self.row)

    def _put_weights(self, lanes: Scope, g: Value, head: Value, first: Value, values: Sequence[Value]) -> None:
        b, program = self.b, self.mixing.weighted
        if program is not WEIGHT:
            scope = self._head_scope(lanes, head)
            scope.prepare(program, bound=self.batch_names)
            values = [self._weighted(scope, b.add(first, u), value) for u, value in enumerate(values)]
        for u in range(0, len(values), 2):
            self.products.store_weights(self._rows(head, g), b.add(first, u), values[u], values[u + 1])

    def _weighted(self, scope: Scope, key: Value, value: Value) -> Value:
        """The program behind the sums; 0 where there is no key."""
        b = self.b
        known = {WEIGHT: value, J: b.least(key, b.sub(self.n_k, 1))}
        result = scope.inner(known).vector(self.mixing.weighted)
        return b.select(b.broadcast(b.compare("slt", key, self.n_k), self.lanes), result, 0.0, "w")

    def _softmax(self, head: Value, g: Value) -> GroupSoftmax:
        rows, factors = self._rows(head, g), None if self.weight is None else self.staged[-1]
        group = Group(
            scores=rows, factors=factors, weights=rows, output=self.output.first, maximum=self.maximum,
            total=self.total, block_total=self.total, rows=self.b.constant(0, "i64"),
        )  # fmt: skip
        block = KeyBlock(first=self.b.constant(0, "i64"), count=self.n_k, padded=self.padded)
        return GroupSoftmax(self.context, group, block, self.exponent, keeps_ends(self.spec))

    def _apply(self, scope: Scope, head: Value, g: Value, program: Expr, weight: Expr | None) -> Value:
        """A program on a head's rows of scores, in place; their maxima."""
        wanted, areas = dense_loads(program, weight), zip(self.dense, self.staged, strict=False)
        loads = ((DenseLoad(scope, expr), area) for expr, area in areas if expr in wanted)
        staged = stage_loads(loads, scope, self.b.constant(0, "i64"), self.n_k)
        scope.prepare(program, weight, bound=self.batch_names | {"i"})
        rows = RowProgram(program=program, weight=weight, scope=scope, staged=staged)
        return self._softmax(head, g).apply(rows, 0, self.n_k, self.b.constant(float("-inf"), self.vector))

    def _exponentials(self, scope: Scope, head: Value, g: Value) -> None:
        """The score program and the weights of a head but for the factor of a row, which is kept."""
        b, softmax = self.b, self._softmax(head, g)
        b.store(self._apply(scope, head, g, self.programs.masked, self.weight), self.maximum)
        b.store(b.constant(0.0, self.vector), self.total)
        softmax.fill_beyond(float("-inf"))
        softmax.weigh_rows(lambda key, *pair: self._put_scores(g, head, key, pair), 0, self.padded)
        m, total = (b.load(at, self.vector) for at in (self.maximum, self.total))
        b.store(self._row_factor(scope, m, total), self.row_factors[self._number(head, g)])

    def _finish(self, scope: Scope, head: Value, first: Value) -> None:
        """The product of a head's weights with V, and its rows of the result."""
        b, p, values = self.b, self.products, self._values_of(head)
        size = self.groups * p.e_padded * self.row
        self.zero(self.output.first, size)
        span = KEY_SPAN // p.key_step
        with b.loop(0, self.steps, span, hint="step") as step:
            self.zero(self.part.first, size)
            at = b.mul(step, p.weight_bytes * p.key_step)
            weights = Array(b, b.at(self._rows(head, 0), at, "i8"), self.group_bytes)
            count = b.least(b.sub(self.steps, step), span)
            p.accumulate(p.values_of(values, step), count, weights, self.part, b.constant(1, "i64"))
            b.update(self.output.first, size // 4, b.add, self.vector, self.part.first)
        with b.loop(0, self.groups, hint="g") as g:
            start = b.add(first, b.mul(g, self.lanes))
            count = b.least(b.most(b.sub(self.n_q, start), 0), self.lanes)
            with self._lines(self.output[g], p.e_padded, count) as (r, line):
                self._write_row(line, self._row_address(scope, b.add(start, r)))
