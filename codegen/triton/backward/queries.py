"""The kernels by blocks of queries: what the others need of each row, first; the deltas that have to be exact; dQ."""

from __future__ import annotations

import math
from dataclasses import replace

from fusion.ir.derivative import UPSTREAM, WEIGHT_UPSTREAM
from fusion.ir.expr import ZERO, Expr, contains, substitute
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.backward_plan import column_dimension
from fusion.lowering.gradients import Axes
from fusion.lowering.rows import concentrated
from fusion.planning.gpu_clocks import QUERIES
from fusion.planning.gpu_model import DELTA

from .. import source
from ..expressions import Level, number
from ..gradients import gradients_of
from ..stages import Visit, key_limits, listed
from .role import ANY_DEAD, SHARE, Role, alive, dead_limit


class Prepare(Role):
    """delta of one block of ROWS query rows: the row sums of dO * O, with what auxiliary outputs add; the logarithm of
    1 / row_sum; and whether one of the rows met no live key.

    That is for the kernel of dK and dV, whose ROWS must be the same; where tiles are listed, for all heads that share
    lists.
    """

    name, reads_rows = "attention_backward_prepare", True

    def body(self) -> tuple[list[Visit], str]:
        delta = " + ".join(f"tl.sum(do{p.suffix} * o{p.suffix}, 1)[:, None]" for p in self.values)
        lines = [
            *(panel.numbers for panel in self.values),
            *self.rows_of_output("do", "i", dtype="tl.float32"),
            *self.rows_of_output("o", "i", "out", "tl.float32"),
            f"row_place = tl.cast({self.place()}, tl.int64) * {self.n_q} + i",
        ]
        if self.gradients.aux_outputs.weight is not ZERO:
            delta = f"{delta} + tl.load(lacked_ptr + row_place)"
        if self.spec.row_scale is not None:
            lines.append(self.plane("slope", 2))
            delta = f"({delta}) * slope"
        if self.gradients.aux_outputs.log_sum is not ZERO:
            delta = f"{delta} - tl.load(off_ptr + row_place)"
        lines += [f"tl.store(delta_ptr + row_place, {delta}, mask=rows_ok)", *self._log_share()]
        if self.skips:
            lines += [
                "row_max = tl.load(statistics_ptr + row_place)",
                alive(self.spec),
                f"if {ANY_DEAD} != 0:",
                f"    tl.store(dead_ptr + {self.place_factor(self.listed)} * blocks + block, 1)",
            ]
        return [], source.block(*self.query_block(), *lines)

    def _log_share(self) -> list[str]:
        """Statements that write the logarithm of the scale of weights; a row without a live key has none where that
        makes them 0."""
        if self.spec.row_scale is not None:
            return []
        lines = [self.plane("row_sum", 1), "log_share = -tl.log2(row_sum)"]
        if self.spec.normalizer is Normalizer.SAFE_SOFTMAX:
            lines += [
                "row_max = tl.load(statistics_ptr + row_place)",
                'log_share = tl.where(row_max == float("-inf"), float("-inf"), log_share)',
            ]
        return [*lines, f"tl.store({self.in_plane('delta', 1)}, log_share, mask=rows_ok)"]


class Queries(Role):
    """dQ of one block of ROWS query rows of one head, and gradients of what the rows' scores read."""

    name, visits, written = QUERIES, "differentiate_keys", frozenset({0})

    def body(self) -> tuple[list[Visit], str]:
        w = self.writer
        q, dq = (self.parts(w, 0, name) for name in ("", "dq"))
        visit = self._visit()
        finish = [*self._finish(), *self.store(0, dq), *self._sinks()]
        later = source.block(
            self.read(0, q, ""),
            *self.rows_of_output("do", "i"),
            *self.statistics(),
            *self._keys(),
            *self.zeros(0),
            *self.sums_to(Axes.KEYS, Axes.BOTH),
            *(f"{name} = tl.full([ROWS], 0.0, tl.float32)" for name in self._corrections()),
            *self._all_stages(visit),
            *finish,
        )
        return [visit], source.block(*self.query_block(), self.of_block(later))

    def _visit(self) -> Visit:
        """Function of the loop over tiles of keys."""
        k, v = (self.parts(self.inside, number) for number in (1, 2))
        inner = source.block(
            self.boxed("k", "first") or self.read(1, k, "key_ok", bounded=True),
            self.boxed("v", "first") or self.read(2, v, "key_ok", bounded=True),
            self.tile(self.product("q", "k", 0), self.product("do", "v", 2)),
            *self.accumulated(0, f"ds.to({self.dtype})", "k"),
        )
        turns, doc = "for first in tl.range(start, stop, KEYS):", "Keys start <= first < stop, in tiles"
        if self.listed:
            turns, doc = "for number in tl.range(start, stop):", "Tiles start <= number < stop of a list"
        tile = source.block(*self._first(), source.with_used(self.tile_of_keys(), inner))
        loop = source.block(turns, source.indented(tile))
        state = self.gradient(0)
        state += [*(f"sum_{n}" for n, _ in self.captured(Axes.KEYS, Axes.BOTH)), *self._corrections()]
        return self.visit(self.visits, f"{doc}; MASKED: keys may be dead, or not exist.", loop, state)

    def _first(self) -> list[str]:
        """Statements of `first`, the first key of a tile, where tiles are listed."""
        if not self.listed:
            return []
        lines = ["first = tl.load(list_at + number) * KEYS"]
        if self.skips and self.softmax:
            lines += ["if MASKED:", "    first = tl.where(every, number * KEYS, first)"]
        return lines

    def _keys(self) -> list[str]:
        """Statements of the range of keys to visit. A block with a row without a live key visits all: eager's weights
        there are not zero."""
        dead = self.skips and self.softmax
        if not self.listed:
            limits = self.ranges_of(lambda value: key_limits(self.spec.mask, self.n_k, value))
            every = ("start = 0", f"stop = {self.n_k}", "full_start = 0", "full_stop = 0")
            if dead:
                limits += [alive(self.spec), f"if {ANY_DEAD} != 0:", *(f"    {line}" for line in every)]
            return limits
        lines = listed(f"({self.n_k} + KEYS - 1) // KEYS", f"{self.place_factor(listed=True)} * blocks + block")
        if dead:
            lines += [
                alive(self.spec),
                f"every = {ANY_DEAD} != 0",
                "full_count = tl.where(every, 0, full_count)",
                "partial_count = tl.where(every, tiles_across, partial_count)",
            ]
        return lines

    def _corrections(self) -> list[str]:
        """Names of the sums that correct the rounding of delta in gradients that are sums over keys, in which it would
        not average out. `missing` is the sum of dx, which exactly is 0 (or the gradient of the log-sum-exp), or the
        sinks' weight times delta, or, in rows with another scale, the part that delta lacks; `share_n` is the value of
        `sum_n` for dx = y. It needs no mask: y is 0 where keys are dead, but in rows without a live one, which are not
        corrected."""
        found = [f"share_{n}" for n, item in self.captured(Axes.KEYS, Axes.BOTH) if contains(item.gradient, UPSTREAM)]
        return ["missing", *found] if found and self.softmax else []

    def summed(self, full: bool) -> list[str]:
        lines: list[str] = []
        corrections = self._corrections()
        if corrections:
            lines.append("missing += tl.sum(dx, 1)")
        for n, item, gradient in self.gradients_of_tile(full, Axes.KEYS, Axes.BOTH):
            sums = {f"sum_{n}": gradient}
            if f"share_{n}" in corrections:
                sums[f"share_{n}"] = substitute(item.full, {UPSTREAM: SHARE, WEIGHT_UPSTREAM: ZERO})
            for name, part in sums.items():
                value = source.spread(self.bound(part, lines), self.shape)
                if found := self.existing("part", part):
                    lines += [f"part = {value}", *found]
                    value = "part"
                lines.append(f"{name} += tl.sum({value}, 1)")
        for _, item, gradient in self.gradients_of_tile(full, Axes.NEITHER):
            value = self.bound(gradient, lines)
            lines += self.add(item, source.spread(value, self.shape), "rows_ok & j_ok")
        return lines

    def _missing(self) -> list[str]:
        """Statements that take from `missing` what the sum of dx is exactly; and of `met`, the rows with a live key."""
        lines: list[str] = []
        if weights := " + ".join(self._weight_of(sink) for sink in self.spec.sinks):
            lines.append(f"missing -= tl.reshape(({weights}) * delta, [ROWS])")
        if self.gradients.aux_outputs.log_sum is not ZERO:
            lines.append("missing -= tl.reshape(tl.load(off_ptr + row_place), [ROWS])")
        if self.spec.row_scale is not None:
            lines += [self.plane("row_slope", 2), self.plane("row_kept", 3)]
            lines += [
                "missing = tl.reshape(row_slope, [ROWS]) * missing + tl.reshape(row_kept * delta - delta, [ROWS])",
                "missing = tl.where(tl.reshape(row_kept, [ROWS]) < 2.0, missing, 0.0)",
            ]
        if self.spec.mask is not None:
            lines.append(f"met = tl.reshape(row_max > {dead_limit(self.spec)}, [ROWS])")
        return lines

    def _finish(self) -> list[str]:
        """Statements that combine the sums."""
        corrections = self._corrections()
        lines = self._missing() if corrections else []
        for n, item in self.captured(Axes.KEYS, Axes.BOTH):
            if f"share_{n}" in corrections:
                # Rows of NaN, which a program may keep out of its sums, stay out.
                right = f"{'met & ' if self.spec.mask else ''}(tl.abs(lost) < float('inf'))"
                lines += [f"lost = missing * share_{n}", f"sum_{n} -= tl.where({right}, lost, 0.0)"]
            if item.axes is Axes.KEYS:
                lines += self.add(item, f"sum_{n}[:, None]", "rows_ok")
            else:
                lines += self.add(item, f"tl.sum(tl.sum(tl.where(rows_ok, sum_{n}[:, None], 0.0), 1), 0)", "")
        return lines

    def _all_stages(self, visit: Visit) -> list[str]:
        mask = self.spec.mask
        return self.stages(visit, mask is not None and mask.full is not None and mask.full_lo is not None)

    def _weight_of(self, sink: Expr) -> str:
        """Share of a sink in the row sum, as a factor."""
        return self.weight_of(self.writer.value(sink))

    def _sinks(self) -> list[str]:
        """Gradients of sinks: their share of the row sum times -delta."""
        lines: list[str] = []
        for item in self.gradients.captured:
            if item.sink is None:
                continue
            weight = self._weight_of(self.spec.sinks[item.sink])
            lines.append(f"dsink = tl.where(rows_ok, -{weight} * delta, 0.0)")
            outside = self.writer.take(Level.ROW)
            value = self.writer.value(item.gradient)
            lines += self.writer.take(Level.ROW)
            self.writer.lines[Level.ROW] = outside
            if item.axes is Axes.KEYS:
                lines += self.add(item, source.spread(value, "[ROWS, 1]"), "rows_ok")
            else:
                lines += self.add(item, f"tl.sum(tl.sum({source.spread(value, '[ROWS, 1]')}, 1), 0)", "")
        return lines


def has_table(spec: AttentionSpec, needs: tuple[bool, ...]) -> bool:
    """Whether a gradient is wanted of a tensor of which many scores read an element, such as a table of distances."""
    items = gradients_of(spec, needs).captured
    return any(item.axes is Axes.NEITHER and column_dimension(item.load) is None for item in items)


class Delta(Queries):
    """Correction of delta, the row sums of dO * O, by the sum of dx over the keys, which should be 0.

    That is for rows in which the error shows: in float32 those with a large weight (`concentrated` says why), and all
    where a table has a gradient, of which one element collects the errors of many rows. Blocks without such a row are
    left as they are."""

    name, visits, written, captures = DELTA, "sum_dx", frozenset(), False

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, needs: tuple[bool, ...]):
        if spec.mask is not None and spec.mask.tile_live is not None:  # no lists are made for these few blocks
            spec = replace(spec, mask=replace(spec.mask, tile_live=None, tile_mixed=None, full=None, full_lo=None,
                                              full_hi=None))  # fmt: skip
        super().__init__(spec, d, d_v, needs)
        self.least_weight = 0.0 if has_table(spec, needs) else concentrated(spec)

    @staticmethod
    def needed(spec: AttentionSpec, needs: tuple[bool, ...]) -> bool:
        """Whether delta can be too far off. In narrow dtypes eager's gradients of Q and K are off by more."""
        reads = needs[0] or needs[1] or bool(gradients_of(spec, needs).captured)
        return reads and (spec.out_dtype == "float32" or has_table(spec, needs))

    def body(self) -> tuple[list[Visit], str]:
        least = self.least_weight
        share, limit = "share", number(least)
        if self.spec.row_scale is None:
            share, limit = "log_share", number(math.log2(least) if least else -math.inf)
        q, visit = self.parts(self.writer, 0), self._visit()
        right = f"{'met & ' if self.spec.mask else ''}peaked & (tl.abs(missing) < float('inf'))"
        inside = source.block(
            self.read(0, q, ""),
            *self.rows_of_output("do", "i"),
            *self._keys(),
            "missing = tl.full([ROWS], 0.0, tl.float32)",
            *self._all_stages(visit),
            *self._missing(),
            f"lacked = tl.where({right}, missing, 0.0)[:, None]",
            "tl.store(delta_ptr + row_place, delta + lacked, mask=rows_ok)",
        )
        later = source.block(
            *self.statistics(),
            f"peaked = tl.reshape({share} > {limit}, [ROWS])",
            "if tl.max(peaked.to(tl.int32), 0) != 0:",
            source.indented(inside),
        )
        return [visit], source.block(*self.query_block(), self.of_block(later))

    def _corrections(self) -> list[str]:
        return ["missing"]
