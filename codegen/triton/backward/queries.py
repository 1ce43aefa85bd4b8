"""dQ by blocks of queries."""

from __future__ import annotations

from fusion.codegen.triton import source
from fusion.codegen.triton.backward.role import Role, any_dead
from fusion.codegen.triton.expressions import Level
from fusion.codegen.triton.forward import place_in_list
from fusion.codegen.triton.key_loop import LOG2E
from fusion.codegen.triton.stages import Visit, key_limits, listed


class Queries(Role):
    """dQ of one block of ROWS query rows of one head, and gradients of what the rows' scores read."""

    name = "attention_backward_queries"

    def body(self) -> tuple[list[Visit], str]:
        w, mask = self.writer, self.spec.mask
        q, dq = (self.parts(w, 0, name) for name in ("", "dq"))
        visit = self._visit()
        finish = self._finish()
        if self.needs[0]:
            finish += self.store("dq", dq, 0, "rows_ok")
        finish += self._sinks()
        later = source.block(
            self.read("q", q, 0, ""),
            *self.rows_of_output("do", "i"),
            *self.statistics("i"),
            *self._keys(),
            *self.zeros("dq", 0, "ROWS"),
            *self.sums_to("ROWS", "keys", "all"),
            *self.stages(visit, mask is not None and mask.full is not None and mask.full_lo is not None),
            *finish,
        )
        kept = source.without_dead([*self.places(), *w.lines[Level.BLOCK], *w.lines[Level.ROW]], later)
        return [visit], source.block(*self.query_block(), *kept, later)

    def _visit(self) -> Visit:
        """`differentiate_keys`."""
        k, v = (self.parts(self.inside, number) for number in (1, 2))
        inner = source.block(
            self.read("k", k, 1, "key_ok", bounded=True),
            self.read("v", v, 2, "key_ok", bounded=True),
            self.tile(self.product("q", "k", 0), self.product("do", "v", 2), "[ROWS, KEYS]", "j_ok"),
            *self.accumulated("dq", f"ds.to({self.dtype})", "k", 0),
        )
        columns = [
            "key = (first + tl.arange(0, KEYS))[:, None]",
            f"key_ok = key < {self.n_k}",
            "j = (first + tl.arange(0, KEYS))[None, :]",
            f"j_ok = j < {self.n_k}",
            *self.inside.lines[Level.TILE],
        ]
        turns, doc = "for first in tl.range(start, stop, KEYS):", "Keys start <= first < stop, in tiles"
        if self.listed:
            turns, doc = "for number in tl.range(start, stop):", "Tiles start <= number < stop of a list"
        tile = source.block(*self._first(), *source.without_dead(columns, inner), inner)
        loop = source.block(turns, source.indented(tile))
        state = self.sums("dq", 0)
        state += [f"sum_{n}" for n, _ in self.captured("keys", "all")]
        return self.visit("differentiate_keys", f"{doc}; MASKED: keys may be dead, or not exist.", loop, state)

    def _first(self) -> list[str]:
        """Statements of `first`, the first key of a tile, where tiles are listed."""
        if not self.listed:
            return []
        lines = ["first = tl.load(list_at + number) * KEYS"]
        if self.skips and self.softmax:
            lines += ["if MASKED:", "    first = tl.where(every, number * KEYS, first)"]
        return lines

    def _keys(self) -> list[str]:
        """Which keys to visit. A block with a row that met no live key visits all: eager's weights there are not
        zero."""
        dead = any_dead(self.spec) if self.skips and self.softmax else ""
        if not self.listed:
            limits = self.ranges_of(lambda value: key_limits(self.spec.mask, self.n_k, value))
            every = ("start = 0", f"stop = {self.n_k}", "full_start = 0", "full_stop = 0")
            return [*limits, *([f"if {dead} != 0:", *(f"    {line}" for line in every)] if dead else [])]
        lines = listed(f"({self.n_k} + KEYS - 1) // KEYS", f"{place_in_list(self.writer)} * blocks + block")
        if dead:
            lines += [
                f"every = {dead} != 0",
                "full_count = tl.where(every, 0, full_count)",
                "partial_count = tl.where(every, tiles_across, partial_count)",
            ]
        return lines

    def summed(self, full: bool) -> list[str]:
        lines: list[str] = []
        for n, _, gradient in self.gradients_of_tile(full, "keys", "all"):
            value = self.bound(gradient, lines)
            lines.append(f"sum_{n} += tl.sum(tl.broadcast_to({value}, [ROWS, KEYS]), 1)")
        for _, item, gradient in self.gradients_of_tile(full, "none"):
            value = self.bound(gradient, lines)
            lines += self.add(item, f"tl.broadcast_to({value}, [ROWS, KEYS])", "rows_ok & j_ok")
        return lines

    def _finish(self) -> list[str]:
        """Statements that add up what was summed."""
        lines: list[str] = []
        for n, item in self.captured("keys", "all"):
            if item.reach == "keys":
                lines += self.add(item, f"sum_{n}[:, None]", "rows_ok")
            else:
                lines += self.add(item, f"tl.sum(tl.sum(tl.where(rows_ok, sum_{n}[:, None], 0.0), 1), 0)", "")
        return lines

    def _sinks(self) -> list[str]:
        """Gradients of sinks: their share of the row sum times -delta."""
        lines: list[str] = []
        for item in self.gradients.captured:
            if item.sink is None:
                continue
            sink = self.writer.value(self.spec.sinks[item.sink])
            lines.append(f"dsink = tl.where(rows_ok, -tl.exp2(({sink} - row_max) * {LOG2E}) * share * delta, 0.0)")
            self.writer.lines[Level.ROW], outside = [], self.writer.lines[Level.ROW]
            value = self.writer.value(item.gradient)
            added = self.writer.lines[Level.ROW]
            self.writer.lines[Level.ROW] = outside
            lines += added
            if item.reach == "keys":
                lines += self.add(item, f"tl.broadcast_to({value}, [ROWS, 1])", "rows_ok")
            else:
                lines += self.add(item, f"tl.sum(tl.sum(tl.broadcast_to({value}, [ROWS, 1]), 1), 0)", "")
        return lines
