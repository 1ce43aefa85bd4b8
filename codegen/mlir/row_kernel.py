"""The kernel for few queries (decoding): one query row at a time, lanes are keys, K and V are read in place.

Packing K and V pays off only over many queries. Here a work item is one row; for every L keys

    x = K q           L dot products, their partial sums added across by a transposition that adds
    score program     with the key as the lane coordinate, statistics for the whole row
    o += p V          one weight at a time against a row of V

What is read from memory is K and V, once per row, in their own dtype. Output and sum begin anew every `CHAPTER` keys
(see `tile`).
"""

from __future__ import annotations

from fusion.codegen.mlir.builder import Value
from fusion.codegen.mlir.products import round_up
from fusion.codegen.mlir.rows import RowReader, Rows, load_f32
from fusion.codegen.mlir.scope import Lanes, Scope
from fusion.codegen.mlir.skeleton import KernelFunction, KernelText
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.tile import CHAPTER
from fusion.codegen.mlir.transpose import sum_rows
from fusion.codegen.mlir.vectormath import LOG2E
from fusion.ir.expr import SCORE, I, J, coord
from fusion.ir.spec import AttentionSpec, Normalizer


def emit_rows(spec: AttentionSpec, target: Target, d: int, d_v: int) -> KernelText:
    """The kernel for few queries of a spec whose Q and K have d columns and V d_v."""
    return _RowKernel(spec, target, d, d_v).text()


class _RowKernel(KernelFunction):
    def __init__(self, spec: AttentionSpec, target: Target, d: int, d_v: int):
        super().__init__(spec, target, d, d_v, degree=5)
        self.d_padded, self.e_padded = round_up(d, self.lanes), round_up(d_v, self.lanes)
        self.query = self._area(4 * self.d_padded, "query")
        self.output = self._area(4 * self.e_padded, "output")
        self.chapter = self._area(4 * self.e_padded, "chapter")
        self.chances = self._area(4 * self.lanes, "weights")
        self.staging = self._area(8 * self.lanes * max(self.d_padded, self.e_padded), "staging")

    def text(self) -> KernelText:
        top = self._top()
        with self._items() as item:
            self._row(top, item)
        return KernelText(
            source=self._function(), slots=self._slots(), rows=1, key_step=self.lanes,
            fixed_bytes=self.layout.size, step_bytes=0, may_flag=False,
        )  # fmt: skip

    def _row(self, top: Scope, item: Value) -> None:
        b, mask, lanes = self.b, self.spec.mask, self.lanes
        blocks = self.params[("blocks",)]
        i, batch = b.rem(item, blocks, "i"), self._batch_scope(top, b.div(item, blocks))
        readers = self._readers(batch)
        # The row's coordinate is bound under three names: as a row, and as first and last row of a block.
        scope = Scope(context=self.context, parent=batch, known={I: i, coord("i0"): i, coord("i1"): i})
        scope.prepare(self.programs.masked, self.weight, bound=self.batch_names | {"i"})
        source = readers[0].rows(i, 1, self.n_q, self.d, self.d_padded, self.staging)
        with b.loop(0, self.d_padded, lanes, hint="c") as c:
            b.store(load_f32(b, source, 0, c, lanes), b.at(self.query, c, "f32"))
        low, high = self._key_range(scope, mask.key_lo if mask else None, mask.key_hi if mask else None, 1)
        m, total = self._attend(scope, readers, b.as_value(low, "i64"), high)
        factor = None
        if self.spec.normalizer is not Normalizer.NONE:
            factor = self._row_factor(scope, m, total)
            with b.loop(0, self.e_padded, lanes, hint="e") as e:
                at = b.at(self.output, e, "f32")
                b.store(b.mul(b.load(at, self.vector, "o"), factor), at)
        self._write_row(self.output, self._row_address(batch, i))

    def _attend(self, scope: Scope, readers: list[RowReader], low: Value, high: Value) -> tuple[Value, Value]:
        """The row's maximum and sum, broadcast; the weighted sum of V is in `output`. Twice where the mask let keys be
        skipped and none of the others was live."""
        b, mask = self.b, self.spec.mask
        if mask is None or (mask.key_lo is None and mask.key_hi is None) or self.spec.normalizer is Normalizer.NONE:
            return self._visit(scope, readers, low, high)
        start = b.constant(0.0, self.vector)
        yes = b.constant(1, "i1")
        with b.carry(0, 2, 1, [low, high, yes, start, start], hint="attempt") as (loop, attempt, (lo, hi, go, m, l)):
            hi = b.select(go, hi, lo)
            m_new, l_new = self._visit(scope, readers, lo, hi, keep=b.binary("arith.xori", go, yes))
            m, l = b.select(go, m_new, m), b.select(go, l_new, l)
            dead = b.binary("arith.xori", self._alive(m, mask.fill), b.constant(-1, f"vector<{self.lanes}xi1>"))
            dead = b.op(f"vector.extract {dead}[0] : i1 from {dead.type}", "i1", "dead")
            again = b.binary("arith.andi", b.compare("eq", attempt, 0), dead, "again")
            loop.yields(b.constant(0, "i64"), self.n_k, again, m, l)
        return loop.results[3], loop.results[4]

    def _visit(
        self, scope: Scope, readers: list[RowReader], low: Value, high: Value, keep: Value | None = None
    ) -> tuple[Value, Value]:
        """Keys [low, high). keep: where it holds the output is left as it is (there are no keys then)."""
        b, lanes = self.b, self.lanes
        zero, lowest = b.constant(0.0, self.vector), b.constant(float("-inf"), self.vector)
        with b.loop(0, self.e_padded, lanes, hint="e") as e:
            at = b.at(self.output, e, "f32")
            b.store(zero if keep is None else b.select(keep, b.load(at, self.vector), zero), at)
        with b.carry(low, high, CHAPTER, [lowest, zero], hint="chapter") as (chapters, start, (m, total)):
            m_new, own = self._chapter(scope, readers, start, b.least(b.add(start, CHAPTER), high), m)
            factor = None
            if self.spec.normalizer is not Normalizer.NONE:
                factor = self._factor(m, m_new)
                total = b.mul(total, factor)
            with b.loop(0, self.e_padded, lanes, hint="e") as e:
                at = b.at(self.output, e, "f32")
                before, new = (b.load(x, self.vector, "o") for x in (at, b.at(self.chapter, e, "f32")))
                b.store(b.add(before if factor is None else b.mul(before, factor), new), at)
            chapters.yields(m_new, b.add(total, own))
        total = chapters.results[1]
        total = b.op(f"vector.reduction <add>, {total} : {self.vector} into f32", "f32", "sum")
        return chapters.results[0], b.broadcast(total, lanes)

    def _chapter(
        self, scope: Scope, readers: list[RowReader], low: Value, high: Value, m: Value
    ) -> tuple[Value, Value]:
        """Keys [low, high), which come after others whose maximum was m: the maximum of all, the sum of these per lane,
        and their weighted sum of V in `chapter`."""
        b, lanes = self.b, self.lanes
        zero = b.constant(0.0, self.vector)
        with b.loop(0, self.e_padded, lanes, hint="e") as e:
            b.store(zero, b.at(self.chapter, e, "f32"))
        with b.carry(low, high, lanes, [m, zero], hint="j0") as (loop, j0, (m, total)):
            x, weight = self._scores(scope, readers[1], j0, high)
            if self.spec.normalizer is Normalizer.NONE:
                p, m_new, total_new, factor = x, m, total, None
            else:
                p, m_new, total_new, factor = self._softmax(x, m, total)
            if weight is not None:
                p = b.mul(p, weight)
            b.store(p, self.chances)
            self._add_values(readers[2], j0, factor)
            loop.yields(m_new, total_new)
        return loop.results[0], loop.results[1]

    def _scores(self, scope: Scope, keys: RowReader, j0: Value, high: Value) -> tuple[Value, Value | None]:
        """The score program (and weight program) of L keys; -inf (or weight 0) beyond the last."""
        b, lanes = self.b, self.lanes
        rows = keys.rows(j0, lanes, self.n_k, self.d, self.d_padded, self.staging)
        score = sum_rows(b, self._dot_products(rows))
        valid = self._valid(b.sub(high, j0))
        lane = Lanes(coord=J, first=j0, count=lanes, valid=valid)
        here = Scope(context=self.context, parent=scope, lanes=lane, known={SCORE: score})
        outside = 0.0 if self.spec.normalizer is Normalizer.NONE else float("-inf")
        x = b.select(valid, here.vector(self.programs.masked), outside, "x")
        return x, None if self.weight is None else b.select(valid, here.vector(self.weight), 0.0, "w")

    def _dot_products(self, rows: Rows) -> list[Value]:
        """For each of L keys the products with the query, summed within lanes only."""
        b, lanes = self.b, self.lanes
        zero = b.constant(0.0, self.vector)
        with b.carry(0, self.d_padded, lanes, [zero] * lanes, hint="c") as (loop, c, sums):
            q = b.load(b.at(self.query, c, "f32"), self.vector, "q")
            loop.yields(*(b.fma(load_f32(b, rows, r, c, lanes), q, s, "s") for r, s in enumerate(sums)))
        return loop.results

    def _softmax(self, x: Value, m: Value, total: Value) -> tuple[Value, Value, Value, Value]:
        """(weights, maximum, sum per lane, factor for what was summed before)."""
        b = self.b
        # A NaN does not become the maximum: it goes through the exponential.
        ordered = b.select(b.compare("ord", x, x), x, float("-inf"))
        top = b.op(f"vector.reduction <maxnumf>, {ordered} : {self.vector} into f32", "f32", "top")
        top = b.broadcast(top, self.lanes)
        m_new = b.select(b.compare("ogt", top, m), top, m, "m")
        c, shift = self.exponent.coefficients(m_new)
        p = self.context.math.exp2(b.fma(x, c, shift))
        factor = self._factor(m, m_new)
        return p, m_new, b.fma(total, factor, p), factor

    def _factor(self, m: Value, m_new: Value) -> Value:
        """What sums in units of the maximum m are multiplied by when it becomes m_new."""
        b = self.b
        factor = self.context.math.exp2(b.mul(b.sub(m, m_new), self.programs.scale * LOG2E))
        same = b.binary("arith.ori", b.compare("oeq", m, m_new), b.compare("oeq", m, float("-inf")))
        return b.select(same, 1.0, factor, "factor")  # before the first live key there is nothing to scale

    def _add_values(self, values: RowReader, j0: Value, factor: Value | None) -> None:
        """chapter = chapter * factor + weights x V."""
        b, lanes = self.b, self.lanes
        rows = values.rows(j0, lanes, self.n_k, self.d_v, self.e_padded, self.staging)
        weights = [b.broadcast(b.load(b.at(self.chances, r, "f32"), "f32", "p"), lanes) for r in range(lanes)]
        with b.loop(0, self.e_padded, lanes, hint="e") as e:
            at = b.at(self.chapter, e, "f32")
            o = b.load(at, self.vector, "o")
            o = o if factor is None else b.mul(o, factor)
            # Two chains, so that additions overlap.
            parts = [o, b.constant(0.0, self.vector)]
            for r in range(lanes):
                parts[r % 2] = b.fma(load_f32(b, rows, r, e, lanes), weights[r], parts[r % 2], "o")
            b.store(b.add(*parts), at)
