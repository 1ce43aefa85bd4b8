"""Auxiliary outputs of the forward kernel: weights, and statistics of rows and of keys.

The exponentials of an item's rows are kept as they are made, [group][key][L], relative to the maximum in use, and
scaled with the output where that rises. When a group of rows is done, its final factor is known while they are still
in the cache: each becomes a weight, and that the values of all auxiliary outputs.

    of queries and keys        transposed, and written row by row
    reduced over the keys      in registers; so are those of rows alone
    reduced over the queries   in a row of keys per item, then in a copy of the output per thread
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusion.ir.expr import LOG_WEIGHT, ROW_MAX, ROW_SUM, WEIGHT, J, Kind, node, substitute, walk
from fusion.ir.results import keeps_ends
from fusion.ir.spec import AuxOutput, Reduction
from fusion.lowering.numbers import LOG2E
from fusion.lowering.rows import concentrated, log_weight

from .builder import Value, vector_of
from .scope import MEMORY_TYPE, Scope
from .softmax import GroupSoftmax
from .vectormath import transpose

if TYPE_CHECKING:
    from .skeleton import KernelFunction
    from .tile import Item

_EXPONENT = node("score", (), Kind.FLOAT, "program")
"""Logarithm of a weight before it is divided, less the row's maximum: the score program's value."""
LINE = 64  # keys of a row that are written in one go

IDENTITY = {Reduction.SUM: 0.0, Reduction.MAX: -math.inf, Reduction.MIN: math.inf}
_COMBINE = {Reduction.SUM: "arith.addf", Reduction.MAX: "arith.maximumf", Reduction.MIN: "arith.minimumf"}


class AuxOutputs:
    """Writes them for one kernel. keeps, keeps_scores: whether weights and their exponents are kept, which statistics
    of rows need not."""

    def __init__(self, kernel: KernelFunction, key_step: int, groups: int):
        self.kernel, self.b, self.lanes, self.vector = kernel, kernel.b, kernel.lanes, kernel.vector
        self.step = key_step
        numbered = list(enumerate(kernel.spec.aux_outputs))
        self.whole = [(k, f) for k, f in numbered if {"i", "j"} <= {*f.dims}]
        self.of_rows = [(k, f) for k, f in numbered if "j" not in f.dims]
        self.of_keys = [(k, f) for k, f in numbered if f.over == "i"]
        self.values = [substitute(f.value, {LOG_WEIGHT: log_weight(_EXPONENT)}) for _, f in numbered]
        made_of = {*walk(*self.values)}
        self.keeps, self.keeps_scores = WEIGHT in made_of, _EXPONENT in made_of
        self.kept_groups = groups * self.keeps
        self.areas = self.kept_groups + groups * self.keeps_scores + len(self.of_keys)
        self.lines = [kernel.area(4 * self.lanes * LINE, "lines") for _ in self.whole]

    @property
    def step_bytes(self) -> int:
        return self.areas * self.step * self.lanes * 4

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a vector of keys beyond the last step, which is read with it."""
        return self.areas * self.lanes * self.lanes * 4

    def lie_at(self, start: Value, key_steps: Value) -> None:
        """Set the addresses of the kept weights, in a function's entry. key_steps: those that a thread has room for."""
        b = self.b
        self.keys = b.add(b.mul(key_steps, self.step), self.lanes, "kept_keys")
        self.kept, first = start, self.areas - len(self.of_keys)
        self.scored = self._area(start, self.kept_groups, "scored")
        self.sums = [self._area(start, first + n, "key_sums") for n in range(len(self.of_keys))]

    def _area(self, start: Value, number: Value | int, hint: str) -> Value:
        return self.b.row(start, self.b.mul(self.keys, number), self.lanes, "f32", hint)

    def kept_rows(self, g: Value) -> Value:
        """The kept weights of a group, [key][L]."""
        return self._area(self.kept, g, "kept_rows")

    def scored_rows(self, g: Value) -> Value:
        """Their exponents, likewise, in units of the programs' scale."""
        return self._area(self.scored, g, "scored_rows")

    def clear(self, groups: Value) -> None:
        """Before keys are visited of which some may be skipped: these have no weight."""
        b, nothing = self.b, self.b.constant(0.0, self.vector)
        with b.loop(0, groups, hint="g") as g:
            b.fill(self.kept_rows(g), self.keys, nothing, hint="j")

    def begin(self) -> None:
        """Before the first group of an item is finished."""
        for (_, aux), sums in zip(self.of_keys, self.sums, strict=True):
            self.b.fill(sums, self.keys, self.b.constant(IDENTITY[aux.reduction], self.vector), hint="j")

    def finish(self, item: Item, g: Value, rows: Scope, factor: Value | None) -> None:
        """Write the outputs of a group whose lanes and statistics `rows` knows. factor: of its weights; None without a
        normaliser."""
        b, kernel = self.b, self.kernel
        rows.prepare(*self.values, bound=kernel.batch_names | {"i"})
        start = [
            b.constant(IDENTITY[f.reduction], self.vector) if f.over else rows.vector(self.values[k])
            for k, f in self.of_rows
        ]
        if self.whole or self.of_keys or any(f.over for _, f in self.of_rows):
            start = self._visit_keys(item, g, rows, factor, start)
        for (k, _), value in zip(self.of_rows, start, strict=True):
            place = b.at(self._base(k, item.scope), self._offset(k, "i", rows.lanes.first), "f32")
            b.masked_store(value, place, rows.lanes.valid)

    def _visit_keys(
        self, item: Item, g: Value, rows: Scope, factor: Value | None, start: Sequence[Value]
    ) -> list[Value]:
        """All keys of a group, a line at a time; returns the rows' statistics."""
        b, n_k, kept, scored = self.b, self.kernel.n_k, self.kept_rows(g), self.scored_rows(g)
        state = [*start] or [b.constant(0.0, self.vector)]
        with b.carry(0, n_k, LINE, state, hint="line") as (lines, first, totals):
            count = b.least(b.sub(n_k, first), LINE)
            with b.carry(0, count, self.lanes, totals, hint="part") as (parts, part, so_far):
                keys = b.add(first, part)
                each = [b.add(keys, n) for n in range(self.lanes)]
                values = b.side_by_side(
                    [functools.partial(self._values, rows, kept, scored, key, factor) for key in each]
                )
                parts.yields(*self._take(part, keys, values, rows, list(so_far)))
            lines.yields(*parts.results)
            for (k, aux), line in zip(self.whole, self.lines, strict=True):
                self._write(k, aux, line, item, g, first, count)
        return list(lines.results)[: len(start)]

    def _values(self, rows: Scope, kept: Value, scored: Value, key: Value, factor: Value | None) -> list[Value]:
        """Values of all outputs that depend on a key, for one key; of the last one where there is none."""
        b = self.b
        known = {J: b.least(key, b.sub(self.kernel.n_k, 1), "j")}
        if self.keeps:
            weight = b.load(b.row(kept, key, self.lanes), self.vector, "p")
            known[WEIGHT] = weight if factor is None else self.kernel.scaled(weight, factor)
        if self.keeps_scores:
            known[_EXPONENT] = self.kernel.in_own_units(b.load(b.row(scored, key, self.lanes), self.vector, "x"))
        scope = rows.inner(known)
        return [scope.vector(value) for value in self.values]

    def _take(self, part: Value, keys: Value, values: list[list[Value]], rows: Scope, totals: list[Value]):
        """Write or add up the values of a vector of keys; returns the statistics of rows with them."""
        b = self.b
        for (k, _), line in zip(self.whole, self.lines, strict=True):
            for r, cells in enumerate(transpose(b, [value[k] for value in values])):
                b.store(cells, b.at(line, b.add(part, r * LINE), "f32"))
        inside = [b.compare("slt", b.add(keys, n), self.kernel.n_k, "inside") for n in range(self.lanes)]
        for position, (k, aux) in enumerate(self.of_rows):
            if aux.over:
                nothing = b.constant(IDENTITY[aux.reduction], self.vector)
                terms = [b.select(there, value[k], nothing) for there, value in zip(inside, values, strict=True)]
                while len(terms) > 1:  # by twos: a long sum of equal terms, one after the other, drifts
                    pairs = zip(terms[::2], terms[1::2], strict=True)
                    terms = [b.binary(_COMBINE[aux.reduction], x, y, "total") for x, y in pairs]
                totals[position] = b.binary(_COMBINE[aux.reduction], totals[position], terms[0], "total")
        for n, value in enumerate(values):
            for (k, aux), sums in zip(self.of_keys, self.sums, strict=True):
                term = b.select(rows.lanes.valid, value[k], b.constant(IDENTITY[aux.reduction], self.vector))
                place = b.row(sums, b.add(keys, n), self.lanes)
                b.store(b.binary(_COMBINE[aux.reduction], b.load(place, self.vector, "of_key"), term), place)
        return totals

    def _write(self, k: int, aux: AuxOutput, lines: Value, item: Item, g: Value, first: Value, count: Value) -> None:
        b, lanes, memory = self.b, self.lanes, MEMORY_TYPE[aux.dtype]
        base, row = self._base(k, item.scope), b.add(item.first, b.mul(g, lanes))
        vectors = b.floor_to(count, lanes)
        with b.loop(0, b.least(b.sub(item.count, b.mul(g, lanes)), lanes), hint="r") as r:
            source = b.row(lines, r, LINE)
            target = b.at(base, b.add(self._offset(k, "i", b.add(row, r)), first), memory)
            with b.loop(0, vectors, lanes, hint="j") as j:
                line = b.load(b.at(source, j, "f32"), self.vector)
                b.store(self.kernel.narrow(line, memory), b.at(target, j, memory))
            with b.when(b.compare("slt", vectors, count)):
                line = self.kernel.narrow(b.load(b.at(source, vectors, "f32"), self.vector), memory)
                if memory == "bf16":  # of which LLVM would make single floats, and round them again
                    line = b.bitcast(line, vector_of("i16", lanes))
                b.masked_store(line, b.at(target, vectors, memory), b.first_lanes(b.sub(count, vectors), lanes))

    def end(self, item: Item) -> None:
        """After the last group of an item: its part of what is reduced over queries."""
        b, lanes, n_k = self.b, self.lanes, self.kernel.n_k
        for (k, aux), sums in zip(self.of_keys, self.sums, strict=True):
            combine = functools.partial(b.binary, _COMBINE[aux.reduction])
            copy = b.row(self._base(k, item.scope), self.kernel.thread, self.kernel.params[("aux_elements", k)])
            with b.loop(0, n_k, lanes, hint="j") as j:
                columns = transpose(b, [b.load(b.row(sums, b.add(j, n), lanes), self.vector) for n in range(lanes)])
                valid, place = b.first_lanes(b.sub(n_k, j), lanes), b.at(copy, j, "f32")
                before = b.masked_load(place, valid, vector_of("f32", lanes))
                b.masked_store(combine(before, functools.reduce(combine, columns)), place, valid)

    def _offset(self, k: int, name: str, position: Value | int) -> Value:
        return self.b.mul(position, self.kernel.params[("aux_stride", k, name)])

    def _base(self, k: int, scope: Scope) -> Value:
        """Address of an output's part for a batch element."""
        offset = self.kernel.batch_offset(scope, ("aux_stride", k), self.b.constant(0, "i64"))
        memory = MEMORY_TYPE[self.kernel.spec.aux_outputs[k].dtype]
        return self.b.at(self.kernel.params[("ptr", "aux", k)], offset, memory)


class TrainingStatistics:
    """Each row's `unit`, `shift` and `factor` (`lowering.backward_plan.STATISTICS`), and its maximum and sum where
    asked for. A unit is negative where a weight of the row is above `concentrated`. groups: of lanes in a work item."""

    def __init__(self, kernel: KernelFunction, groups: int):
        self.kernel, self.b = kernel, kernel.b
        self.peaks = kernel.array(groups, kernel.lanes, "peaks", "f32")

    def clear(self, groups: Value) -> None:
        """Before the first key of an item."""
        b = self.b
        with b.loop(0, groups, hint="g") as g:
            b.store(b.constant(float("-inf"), self.kernel.vector), self.peaks[g])

    def note_maximum(self, softmax: GroupSoftmax, g: Value, highest: Value) -> None:
        """Note the maximum of a group's scores in one block of keys."""
        at = self.peaks[g]
        self.b.store(softmax.largest(highest, self.b.load(at, self.kernel.vector, "peak")), at)

    def note_exponents(self, g: Value, first: Value, second: Value) -> None:
        """Keep the exponents of a group's scores of two keys, relative to a centre, in powers of 2."""
        b, at = self.b, self.peaks[g]
        peak = b.load(at, self.kernel.vector, "peak")
        for x in (first, second):
            peak = self.kernel.exponent.larger(peak, x, "peak")
        b.store(peak, at)

    def end_exponents(self, groups: Value, centre: float) -> None:
        """After the last of these: peaks in the programs' units."""
        b, vector = self.b, self.kernel.vector
        with b.loop(0, groups, hint="g") as g:
            at = self.peaks[g]
            unit = b.constant(1 / (self.kernel.programs.scale * LOG2E), vector)
            b.store(b.fma(b.load(at, vector, "peak"), unit, b.constant(centre, vector)), at)

    def write(self, rows: Scope, g: Value, raw: Value, factor: Value) -> None:
        """After the last key: of a group whose lanes and end (`lowering.rows`) `rows` knows, with the running maximum,
        and the factor of its output."""
        b, kernel = self.b, self.kernel
        unit, shift = kernel.exponent.coefficients(raw)
        at = b.add(b.mul(kernel.flat_number(rows), kernel.n_q), rows.lanes.first, "row")
        highest = b.load(self.peaks[g], kernel.vector, "peak")
        largest = b.mul(kernel.context.math.exp2(b.fma(highest, unit, shift), 5), factor, "largest_weight")
        marked = b.select(
            b.compare("ogt", largest, concentrated(kernel.spec)), b.unary("arith.negf", unit), unit, "marked"
        )
        ends = (rows.known[ROW_MAX], rows.known[ROW_SUM]) if keeps_ends(kernel.spec) else ()
        for plane, value in enumerate((marked, shift, factor, *ends)):
            start = b.add(at, b.mul(kernel.params[("statistics_rows",)], plane))
            place = b.at(kernel.params[("ptr", "statistics")], start, "f32")
            b.masked_store(b.as_value(value, kernel.vector), place, rows.lanes.valid)
