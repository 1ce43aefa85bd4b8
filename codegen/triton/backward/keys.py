"""dK and dV by blocks of keys."""

from __future__ import annotations

from collections.abc import Callable

from fusion.ir import integers
from fusion.ir.expr import Expr
from fusion.ir.mask_facts import MaskFacts
from fusion.lowering.gradients import Axes
from fusion.planning.gpu_clocks import JOINT, KEYS, KEYS_ALONE, VALUES_ALONE

from .. import source
from ..expressions import Level
from ..stages import Visit, listed
from ..tile_lists import LANES
from .role import Role


class Keys(Role):
    """dK and dV of one block of KEYS keys of one head of K, summed over the query heads that share it."""

    name, visits, written = KEYS, "differentiate_rows", frozenset({1, 2})
    outer, inner = "j", "i"

    @property
    def differentiates(self) -> bool:
        return self.needs[1] or bool(self.captured(Axes.QUERIES))

    def body(self) -> tuple[list[Visit], str]:
        w = self.writer
        head = w.apart(w.known)
        k, v = self.parts(head, 1), self.parts(head, 2)
        dk, dv = self.parts(head, 1, "dk"), self.parts(head, 2, "dv")
        visit = self._visit()
        reads = [
            *head.lines[Level.BLOCK],
            *head.lines[Level.ROW],
            self.read(1, k, "j_ok"),
            self.read(2, v, "j_ok") if self.differentiates else "",
        ]
        start, finish = [*self.zeros(1), *self.zeros(2)], [*self.store(2, dv), *self.store(1, dk)]
        body = source.block(*reads, *start, *self._members(self._member(visit)), *finish)
        return [visit], source.block(*self._position(), source.with_used(self.places(), body))

    def _member(self, visit: Visit) -> str:
        """Statements for one query head: the blocks of its rows that visit these keys."""
        mask = self.spec.mask
        after: list[str] = []
        for n, item in self.captured(Axes.QUERIES):
            after += self.add(item, f"sum_{n}[:, None]", "j_ok")
        member = source.block(
            *self._rows(),
            *self.sums_to(Axes.QUERIES),
            *self.stages(visit, self._notes_dead or mask is not None and mask.full is not None),
            *after,
        )
        lines = self.writer.lines
        return source.with_used([*lines[Level.BLOCK], *lines[Level.ROW]], member)

    def _visit(self) -> Visit:
        """Function that visits blocks of rows. In the rotated order that for dP runs beside the exponentials, since the
        product for dV, which waits for them, comes behind it."""
        into_dv = source.block(*self.accumulated(2, f"p.to({self.dtype})", "do"))
        plain, rotated = into_dv, ""
        if self.softmax and self.differentiates and into_dv:
            plain, rotated = (f"if {order}:\n{source.indented(into_dv)}" for order in ("not ROTATED", "ROTATED"))
        scores, upstream = self.product("k", "q", 0), self.product("v", "do", 2)
        inner = source.block(
            self.boxed("q", "block * ROWS") or self.read(0, self.parts(self.inside, 0), ""),
            self.boxed("do", "block * ROWS") or source.block(*self.rows_of_output("do", "row")),
            *self.statistics(),
            self.tile(scores, upstream, plain),
            rotated,
            *self.accumulated(1, f"ds.to({self.dtype})", "q"),
            *self.to_queries(),
        )
        rows = [
            "rows = block * ROWS + tl.arange(0, ROWS)",
            f"if MASKED:\n    rows_ok = (rows < {self.n_q})[None, :]\n    rows = tl.minimum(rows, {self.n_q} - 1)",
            "row = rows[:, None]",
            "i = rows[None, :]",
            *self.inside.lines[Level.TILE],
        ]
        loop = source.with_used(rows, inner)
        turns, doc, first = "for block in tl.range(start, stop):", "Blocks of rows start <= block < stop", ""
        if self.listed:
            turns, doc = "for number in tl.range(start, stop):", "Blocks of rows start <= number < stop of a list"
            first = "block = tl.load(list_at + number)"
        elif self._notes_dead:
            turns, doc = "for number in tl.range(start, stop):", f"{doc}, or those before dead_stop in place of others"
            first = "block = number\nif MASKED:\n    block += tl.where(number < live_start, dead_stop - live_start, 0)"
        text = source.block(turns, source.indented(source.block(first, loop)))
        state = [*self.gradient(1), *self.gradient(2)]
        state += [f"sum_{n}" for n, _ in self.captured(Axes.QUERIES)]
        return self.visit(self.visits, f"{doc}; MASKED: scores may be dead, or rows not exist.", text, state)

    @property
    def _notes_dead(self) -> bool:
        """Whether blocks with rows without a live key are marked: such rows have weights everywhere."""
        return self.skips and self.softmax and not self.listed

    def to_queries(self) -> list[str]:
        """Statements that add a tile's part to dQ."""
        return []

    def _position(self) -> list[str]:
        groups = [self.writer.value(group) for group in self.gradients.groups]
        extents = [self._shared(axis) for axis in range(len(groups))]
        names = [f"kv{axis}" for axis in range(len(groups))]
        first = [f"b{axis} = kv{axis} * {groups[axis]}" for axis in range(len(groups))]
        return self.key_block(extents, names, first)

    def _shared(self, axis: int) -> str:
        """Number of values of a batch coordinate for which K and V differ."""
        extent, group = self.spec.batch[axis], self.gradients.groups[axis]
        if extent is group:
            return "1"
        text = self.writer.value(extent)
        return text if group is integers.integer(1) else f"{text} // {self.writer.value(group)}"

    def _members(self, member: str) -> list[str]:
        """The loop over the query heads that share the keys."""
        groups = self.gradients.groups
        shared = [axis for axis, group in enumerate(groups) if group is not integers.integer(1)]
        if not shared:
            return [member]
        extents = [self.writer.value(groups[axis]) for axis in shared]
        lines = self.decode("member", extents, [f"in{axis}" for axis in shared])
        lines += [f"b{axis} = kv{axis} * {extent} + in{axis}" for axis, extent in zip(shared, extents, strict=True)]
        return [f"for member in tl.range({' * '.join(extents)}):", source.indented(source.block(*lines, member))]

    def _rows(self) -> list[str]:
        """Statements of the blocks of rows that visit these keys: start..stop, full_start..full_stop (see `stages`), or
        their list."""
        blocks = f"({self.n_q} + ROWS - 1) // ROWS"
        if self.listed:
            return listed(blocks, f"{self.place_factor(listed=True)} * key_blocks + program % key_blocks")
        mask = self.spec.mask
        whole = f"full_stop = tl.maximum(full_start, tl.minimum(stop, {self.n_q} // ROWS))"
        if mask is None or not (self.skips or mask.full is not None):
            return ["start = 0", f"stop = {blocks}", "full_start = start", whole]
        lines = [
            f"blocks = {blocks}",
            "start = blocks",
            "stop = 0",
            "full_start = blocks",
            "full_stop = blocks",
            *(["dead_start = blocks", "dead_stop = 0"] if self._notes_dead else []),
            f"for begin in tl.range(0, blocks, {LANES}):",
            source.indented(self._scan(mask)),
            *(self._with_dead() if self._notes_dead else []),
        ]
        if mask.full is None:
            return [*lines, f"full_start = {'live_start' if self._notes_dead else 'start'}", whole]
        return [*lines, "full_start = tl.minimum(full_start, stop)", "full_stop = tl.minimum(full_stop, stop)"]

    def _with_dead(self) -> list[str]:
        """Statements that add the blocks with dead rows, first to last: to the range where the two touch; else (padding
        at the beginning) they are visited before it, as if they were the numbers before `live_start`."""
        return [
            "apart = (dead_start < dead_stop) & (start < stop) & ((dead_stop < start) | (stop < dead_start))",
            "live_start = tl.where(apart, start, tl.minimum(start, dead_start))",
            "stop = tl.where(apart, stop, tl.maximum(stop, dead_stop))",
            "start = tl.where(apart, live_start - (dead_stop - dead_start), live_start)",
        ]

    def _scan(self, mask: MaskFacts) -> str:
        """Statements that check the key ranges of some blocks of rows: which of them visit these keys, and the first
        consecutive blocks for which all of these keys need no mask."""

        def conditions(value: Callable[[Expr], str]) -> list[str]:
            last = f"tl.minimum(first + KEYS, {self.n_k})"
            meets = ["(number < blocks)"]
            meets += [] if mask.key_lo is None else [f"({value(mask.key_lo)} < {last})"]
            meets += [] if mask.key_hi is None else [f"({value(mask.key_hi)} > first)"]
            full = [f"(i0 + ROWS <= {self.n_q})"]
            full += [] if mask.full_lo is None else [f"({value(mask.full_lo)} <= first)"]
            full += [] if mask.full_hi is None else [f"({value(mask.full_hi)} >= {last})"]
            return [f"meets = {' & '.join(meets)}", f"full = meets & {' & '.join(full)}"]

        dead: list[str] = []
        if self._notes_dead:
            at = f"dead_ptr + {self.place_factor()} * blocks + number"
            dead = [
                f"dead = tl.load({at}, mask=number < blocks, other=0) != 0",
                "dead_start = tl.minimum(dead_start, tl.min(tl.where(dead, number, blocks), 0))",
                "dead_stop = tl.maximum(dead_stop, tl.max(tl.where(dead, number + 1, 0), 0))",
            ]
        return source.block(
            f"number = begin + tl.arange(0, {LANES})",
            "i0 = tl.minimum(number, blocks - 1) * ROWS",
            f"i1 = tl.minimum(i0 + ROWS, {self.n_q}) - 1",
            *self.ranges_of(conditions),
            "start = tl.minimum(start, tl.min(tl.where(meets, number, blocks), 0))",
            "stop = tl.maximum(stop, tl.max(tl.where(meets, number + 1, 0), 0))",
            "full_start = tl.minimum(full_start, tl.min(tl.where(full, number, blocks), 0))",
            "full_stop = tl.minimum(full_stop, tl.min(tl.where(full | (number < full_start), blocks, number), 0))",
            *dead,
        )

    def summed(self, full: bool) -> list[str]:
        lines: list[str] = []
        for n, _, gradient in self.gradients_of_tile(full, Axes.QUERIES):
            value = self.bound(gradient, lines)
            lines.append(f"sum_{n} += tl.sum({source.spread(value, self.shape)}, 1)")
        return lines


class KeysAlone(Keys):
    """dK alone, beside `ValuesAlone`."""

    name, written = KEYS_ALONE, frozenset({1})


class ValuesAlone(Keys):
    """dV alone: of the scores only the weights are wanted."""

    name, visits, written = VALUES_ALONE, "weigh_rows", frozenset({2})
    captures = False


class Joint(Keys):
    """dK and dV as `Keys` makes them; what the block adds to dQ is added in memory, to float32 numbers [batch, Nq, d],
    in no certain order."""

    name = JOINT

    def to_queries(self) -> list[str]:
        """Statements that add a tile's part to dQ. Keys that do not exist add nothing. Tiles with such keys need the
        mask; those of lists may be full all the same, since a list says only whether rows are cut off."""
        existing = "ds = tl.where(j_ok, ds, 0.0)"
        existing = existing if self.listed else f"if MASKED:\n    {existing}"
        lines = [
            existing,
            f"to_dq = tl.trans(ds.to({self.dtype}))",
            f"sums_at = dq_sums_ptr + (tl.cast({self.place()}, tl.int64) * {self.n_q} + block * ROWS) * {self.d}",
            f"sums_at += (row - block * ROWS) * {self.d}",
        ]
        for panel in self.columns:
            mask = f", mask={panel.inside}" if panel.inside else ""
            added = f"tl.dot(to_dq, k{panel.suffix}, input_precision=PRECISION)"
            lines.append(f'tl.atomic_add(sums_at + {panel.column}, {added}, sem="relaxed"{mask})')
        return lines

    def _rows(self) -> list[str]:
        cut = f"full_stop = tl.where(first + KEYS <= {self.n_k}, full_stop, full_start)"
        return super()._rows() if self.listed else [*super()._rows(), cut]
