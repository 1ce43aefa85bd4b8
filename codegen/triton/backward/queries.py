"""dQ by blocks of queries."""

from __future__ import annotations

from fusion.codegen.triton import source
from fusion.codegen.triton.backward.role import Role, any_dead
from fusion.codegen.triton.expressions import Level
from fusion.codegen.triton.key_loop import LOG2E
from fusion.codegen.triton.matrices import matrix
from fusion.codegen.triton.panels import padded
from fusion.ir.expr import C, E, I, J


class Queries(Role):
    """dQ of one block of ROWS query rows of one head, and gradients of what the rows' scores read."""

    name = "attention_backward_queries"

    def body(self) -> str:
        spec, w = self.spec, self.writer
        q = matrix(w, 0, spec.q, I, C)
        dq = matrix(w, 0, spec.q, I, C, name="dq")
        k, v = matrix(self.inside, 1, spec.k, J, C, moving=False), matrix(self.inside, 2, spec.v, J, E, moving=False)
        product = ", input_precision=PRECISION)"
        tile = self.tile(f"tl.dot(q, tl.trans(k){product}", f"tl.dot(do, tl.trans(v){product}", "[ROWS, KEYS]")
        accumulate, finish = self._sums(tile)
        if self.needs[0]:
            tile.append(f"dq = tl.dot(ds.to({self.dtype}), k, dq{product}")
            finish += self.store("dq", "dq", dq, 0, "c", self.d, "rows_ok")
        reads = [*self.read("k", k, 1, "c", self.d, "key_ok"), *self.read("v", v, 2, "e", self.d_v, "key_ok")]
        loop_body = source.block(*reads, *tile)
        columns = [
            "key = (first + tl.arange(0, KEYS))[:, None]",
            f"key_ok = key < {self.n_k}",
            "j = (first + tl.arange(0, KEYS))[None, :]",
            f"j_ok = j < {self.n_k}",
            *self.inside.lines[Level.TILE],
        ]
        loop = source.block(*source.without_dead(columns, loop_body), loop_body)
        finish += self._sinks()
        statistics = self.statistics("i")
        head, ranges = self._keys()
        if self.listed:
            loop = f"{self._listed()}\n{loop}"
        before = source.block(
            *self.read("q", q, 0, "c", self.d, ""),
            f"do = tl.load({self.output_gradient('i')}{self.within()}).to({self.dtype})",
            *statistics,
        )
        later = source.block(
            before,
            *ranges,
            f"dq = tl.full([ROWS, {padded(self.d)}], 0.0, tl.float32)" if self.needs[0] else "",
            *accumulate,
            head,
            source.indented(loop),
            *finish,
        )
        places = [f"c = tl.arange(0, {padded(self.d)})[None, :]", f"e = tl.arange(0, {padded(self.d_v)})[None, :]"]
        kept = source.without_dead([*places, *w.lines[Level.BLOCK], *w.lines[Level.ROW]], later)
        return source.block(*self.query_block(), *kept, later)

    def _keys(self) -> tuple[str, list[str]]:
        """(head of the loop over tiles of keys, statements before it). A block with a row that met no live key visits
        all keys: eager's weights there are not zero."""
        dead = any_dead(self.spec) if self.skips and self.softmax else ""
        if not self.listed:
            every = [f"if {dead} != 0:", "    key_start = 0", f"    key_stop = {self.n_k}"] if dead else []
            lines = [*self.key_range(), *every, "key_start = key_start // KEYS * KEYS"]
            return "for first in tl.range(key_start, key_stop, KEYS):", lines
        lines = self.list_of(f"({self.n_k} + KEYS - 1) // KEYS", "blocks + block")
        if dead:
            lines += [f"every = {dead} != 0", "count = tl.where(every, tiles_across, count)"]
        return "for number in tl.range(0, count):", lines

    def _listed(self) -> str:
        """`first`, the first key of a tile."""
        listed = "tl.load(list_at + number)"
        return f"first = tl.where(every, number, {listed}) * KEYS" if self.softmax else f"first = {listed} * KEYS"

    def _sums(self, tile: list[str]) -> tuple[list[str], list[str]]:
        """(before the loop, after it) for sums over keys; adds to the tile what is done for every score."""
        before, after = [], []
        for n, item in self.captured("keys", "all"):
            value = self._bound(item.gradient, tile)
            before.append(f"sum_{n} = tl.full([ROWS], 0.0, tl.float32)")
            tile.append(f"sum_{n} += tl.sum(tl.broadcast_to({value}, [ROWS, KEYS]), 1)")
            if item.reach == "keys":
                after += self.add(item, f"sum_{n}[:, None]", "rows_ok")
            else:
                after += self.add(item, f"tl.sum(sum_{n}, 0)", "")
        for _, item in self.captured("none"):
            value = self._bound(item.gradient, tile)
            tile += self.add(item, f"tl.broadcast_to({value}, [ROWS, KEYS])", "valid")
        return before, after

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
