"""dK and dV by blocks of keys."""

from __future__ import annotations

from fusion.codegen.triton import source
from fusion.codegen.triton.backward.role import Role
from fusion.codegen.triton.expressions import Level, Writer
from fusion.codegen.triton.forward import place_of
from fusion.codegen.triton.matrices import matrix
from fusion.codegen.triton.panels import padded
from fusion.ir import integers
from fusion.ir.expr import C, E, I, J


class Keys(Role):
    """dK and dV of one block of KEYS keys of one head of K, summed over the query heads that share it."""

    name = "attention_backward_keys"
    outer, inner = "j", "i"

    def body(self) -> str:
        spec, w = self.spec, self.writer
        head = Writer(spec=spec, known=dict(w.known), names=w.names, helpers=w.helpers, outer="j", inner="i")
        k, v = matrix(head, 1, spec.k, J, C, moving=False), matrix(head, 2, spec.v, J, E, moving=False)
        dk = matrix(head, 1, spec.k, J, C, name="dk", moving=False)
        dv = matrix(head, 2, spec.v, J, E, name="dv", moving=False)
        member = self._member()
        reads = [
            *head.lines[Level.BLOCK],
            *head.lines[Level.ROW],
            *self.read("k", k, 1, "c", self.d, "j_ok"),
            *self.read("v", v, 2, "e", self.d_v, "j_ok"),
        ]
        start = [
            f"dk = tl.full([KEYS, {padded(self.d)}], 0.0, tl.float32)" if self.needs[1] else "",
            f"dv = tl.full([KEYS, {padded(self.d_v)}], 0.0, tl.float32)" if self.needs[2] else "",
        ]
        finish = self.store("dv", "dv", dv, 2, "e", self.d_v, "j_ok") if self.needs[2] else []
        finish += self.store("dk", "dk", dk, 1, "c", self.d, "j_ok") if self.needs[1] else []
        body = source.block(*reads, *start, *self._members(member), *finish)
        places = [f"c = tl.arange(0, {padded(self.d)})[None, :]", f"e = tl.arange(0, {padded(self.d_v)})[None, :]"]
        return source.block(*self._position(), *source.without_dead(places, body), body)

    def _member(self) -> str:
        """What one query head adds: the loop over the blocks of its rows that visit these keys."""
        w, product = self.writer, ", input_precision=PRECISION)"
        q = matrix(self.inside, 0, self.spec.q, I, C)
        into_dv = f"dv = tl.dot(p.to({self.dtype}), do, dv{product}" if self.needs[2] else ""
        scores, upstream = f"tl.dot(k, tl.trans(q){product}", f"tl.dot(v, tl.trans(do){product}"
        tile = self.tile(scores, upstream, "[KEYS, ROWS]", into_dv)
        before, after = self._sums(tile)
        if self.needs[1]:
            tile.append(f"dk = tl.dot(ds.to({self.dtype}), q, dk{product}")
        reads = [
            *self.read("q", q, 0, "c", self.d, ""),
            f"do = tl.load({self.output_gradient('row')}{self.within()}).to({self.dtype})",
        ]
        inner = source.block(*reads, *self.statistics("i"), *tile)
        rows = [
            "rows = (block * ROWS + tl.arange(0, ROWS))",
            f"rows_ok = (rows < {self.n_q})[None, :]",
            f"row = tl.minimum(rows, {self.n_q} - 1)[:, None]",
            f"i = tl.minimum(rows, {self.n_q} - 1)[None, :]",
            *self.inside.lines[Level.TILE],
        ]
        loop = source.block(*source.without_dead(rows, inner), inner)
        turns = "for block in tl.range(block_start, block_stop):"
        if self.listed:
            turns = "for number in tl.range(0, count):"
            loop = f"block = tl.load(list_at + number)\n{loop}"
        visit = source.block(turns, source.indented(loop), *after)
        scan = source.block(*self._scan())
        levels = source.without_dead([*w.lines[Level.BLOCK], *w.lines[Level.ROW]], source.block(scan, *before, visit))
        return source.block(*levels, scan, *before, visit)

    def _position(self) -> list[str]:
        groups = [self.writer.value(group) for group in self.gradients.groups]
        extents = [self._shared(axis) for axis in range(len(groups))]
        names = [f"kv{axis}" for axis in range(len(groups))]
        first = [f"b{axis} = kv{axis} * {groups[axis]}" for axis in range(len(groups))]
        return [
            f"key_blocks = ({self.n_k} + KEYS - 1) // KEYS",
            "program = tl.program_id(0)",
            "first = program % key_blocks * KEYS",
            *self.decode("(program // key_blocks)", extents, names),
            *first,
            "j = (first + tl.arange(0, KEYS))[:, None]",
            f"j_ok = j < {self.n_k}",
        ]

    def _shared(self, axis: int) -> str:
        """How many values of a batch coordinate K and V tell apart."""
        extent, group = self.spec.batch[axis], self.gradients.groups[axis]
        if extent is group:
            return "1"
        return (
            self.writer.value(extent)
            if group is integers.integer(1)
            else f"{self.writer.value(extent)} // {self.writer.value(group)}"
        )

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

    def _scan(self) -> list[str]:
        """block_start and block_stop: the blocks of rows among which all are that visit these keys; or their list."""
        if self.listed:
            return self.list_of(f"({self.n_q} + ROWS - 1) // ROWS", "key_blocks + program % key_blocks")
        blocks = f"({self.n_q} + ROWS - 1) // ROWS"
        if not self.skips:
            return ["block_start = 0", f"block_stop = {blocks}"]
        inner = source.block(
            "i0 = block * ROWS",
            f"i1 = tl.minimum(i0 + ROWS, {self.n_q}) - 1",
            *self.key_range(),
            "meets = (key_start < first + KEYS) & (key_stop > first)",
            "block_start = tl.where(meets, tl.minimum(block_start, block), block_start)",
            "block_stop = tl.where(meets, block + 1, block_stop)",
        )
        lines = [
            f"block_start = {blocks}",
            "block_stop = 0",
            f"for block in tl.range({blocks}):",
            source.indented(inner),
        ]
        if self.softmax:  # rows that met no live key have weights everywhere
            lines += [
                f"dead = tl.load(dead_ptr + {place_of(self.writer)}) != 0",
                "block_start = tl.where(dead, 0, block_start)",
                f"block_stop = tl.where(dead, {blocks}, block_stop)",
            ]
        return lines

    def _sums(self, tile: list[str]) -> tuple[list[str], list[str]]:
        before, after = [], []
        for n, item in self.captured("rows"):
            value = self._bound(item.gradient, tile)
            before.append(f"sum_{n} = tl.full([KEYS], 0.0, tl.float32)")
            tile.append(f"sum_{n} += tl.sum(tl.broadcast_to({value}, [KEYS, ROWS]), 1)")
            after += self.add(item, f"sum_{n}[:, None]", "j_ok")
        return before, after
