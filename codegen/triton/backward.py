"""The backward kernels: delta and dead rows first, then dQ by blocks of queries, dK and dV by blocks of keys.

Scores are computed again from the operands and the forward's statistics of each row. `gradients` has the formulas.

One file over the usual length: the three generated kernels are templates that are read side by side.
"""

from __future__ import annotations

import math

from fusion.codegen.triton import source
from fusion.codegen.triton.expressions import Level, Writer, number
from fusion.codegen.triton.forward import DTYPES, LOG2E, KernelText, padded, place_in_list, place_of, signature
from fusion.codegen.triton.gradients import (
    UPSTREAM_ROW,
    UPSTREAM_WEIGHT,
    Captured,
    Gradients,
    gradients_of,
)
from fusion.codegen.triton.matrices import Matrix, matrix, sum_of
from fusion.codegen.triton.programs import LARGEST
from fusion.codegen.triton.tile_lists import KeyLists, RowLists
from fusion.ir import integers
from fusion.ir.derivative import UPSTREAM
from fusion.ir.expr import SCORE, C, E, Expr, I, J, const, coord
from fusion.ir.spec import AttentionSpec, Normalizer


class Role:
    """What the two kernels share: coordinates, statistics, and the gradient of the scores of a tile.

    outer: the coordinate that a program owns a block of ("i" for dQ, "j" for dK and dV). Tiles are [outer, inner].
    """

    name = ""
    outer, inner = "i", "j"

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, needs: tuple[bool, ...]):
        self.spec, self.d, self.d_v, self.needs = spec, d, d_v, needs
        self.gradients: Gradients = gradients_of(spec, needs)
        self.softmax = spec.normalizer is not Normalizer.NONE
        known = {coord(f"b{axis}"): f"b{axis}" for axis in range(len(spec.batch))}
        known |= {
            I: "i",
            J: "j",
            C: "c",
            E: "e",
            SCORE: "s",
            UPSTREAM: "dx",
            UPSTREAM_WEIGHT: "dw",
            UPSTREAM_ROW: "dsink",
        }
        self.writer = Writer(spec=spec, known=known, outer=self.outer, inner=self.inner)
        w = self.writer
        # Columns of a tile whose rows are the inner coordinate, for reading matrices.
        inside = {I: "row"} if self.inner == "i" else {J: "key"}
        self.inside = Writer(
            spec=spec,
            known=known | inside,
            names=w.names,
            helpers=w.helpers,
            mask="key_ok",
            outer=self.outer,
            inner=self.inner,
        )
        self.inside.lines[Level.BLOCK], self.inside.lines[Level.ROW] = w.lines[Level.BLOCK], w.lines[Level.ROW]
        # Key ranges of a block of rows are computed in places of their own.
        self.ranges = Writer(
            spec=spec, known=known | {coord("i0"): "i0", coord("i1"): "i1"}, names=w.names, helpers=w.helpers
        )
        w.count(spec.score, spec.weight, self.gradients.score, *(item.gradient for item in self.gradients.captured))
        self.n_q, self.n_k = w.value(spec.n_q), w.value(spec.n_k)
        self.dtype = DTYPES[spec.dtype]

    def text(self) -> KernelText:
        """The kernel."""
        body = self.body()
        parameters, constants = signature(source.free_names(body), self.spec)
        doc = (self.__doc__ or "").strip().splitlines()[0]
        text = source.definition(self.name, [*parameters, *(f"{name}: tl.constexpr" for name in constants)], doc, body)
        return KernelText(name=self.name, text=text, helpers=frozenset(self.writer.helpers), parameters=parameters)

    def body(self) -> str:
        raise NotImplementedError

    # -- pieces ------------------------------------------------------------------------------------------------------

    def decode(self, number_: str, extents: list[str], names: list[str]) -> list[str]:
        """Statements that take a program's number apart, the last name fastest."""
        lines, rest = [], number_
        for name, extent in zip(names[::-1], extents[::-1], strict=True):
            lines += [f"{name} = {rest} % ({extent})", f"rest_{name} = {rest} // ({extent})"]
            rest = f"rest_{name}"
        return lines

    def read(self, name: str, part: Matrix, operand: int | None, column: str, extent: int, mask: str) -> list[str]:
        """Statements that read a matrix at its parts of offsets."""
        at = sum_of(f"{part.operand}_ptr", part.block, part.rows, part.columns, part.both)
        limits = [text for text in (mask, f"({column} < {extent})" if padded(extent) != extent else "") if text]
        inside = f", mask={' & '.join(limits)}, other=0.0" if limits else ""
        cast = (
            "" if operand is not None and self.spec.operands[operand].dtype == self.spec.dtype else f".to({self.dtype})"
        )
        return [f"{name} = tl.load({at}{inside}){cast}"]

    def store(
        self, name: str, value: str, part: Matrix, operand: int, column: str, extent: int, mask: str
    ) -> list[str]:
        at = sum_of(f"{part.operand}_ptr", part.block, part.rows, part.columns, part.both)
        limits = [text for text in (mask, f"({column} < {extent})" if padded(extent) != extent else "") if text]
        return [
            f"{name}_at = {at}",
            f"tl.store({name}_at, {value}.to({DTYPES[self.spec.operands[operand].dtype]}), mask={' & '.join(limits)})",
        ]

    def output_gradient(self, rows: str) -> str:
        """Pointers to the gradient of the output, [rows, d_v]."""
        axes = [f"tl.cast(b{axis}, tl.int64) * dout_stride_b{axis}" for axis in range(len(self.spec.batch))]
        return sum_of(
            "dout_ptr", *axes, f"tl.cast({rows}, tl.int64) * dout_stride_i", "tl.cast(e, tl.int64) * dout_stride_e"
        )

    def statistics(self, rows: str) -> list[str]:
        """row_max, share (1 / row_sum) and delta of rows, shaped as `rows`."""
        if not self.softmax:
            return []
        heads = " * ".join(self.writer.value(extent) for extent in self.spec.batch) or "1"
        lines = [
            f"row_place = tl.cast({place_of(self.writer)}, tl.int64) * {self.n_q} + {rows}",
            "row_max = tl.load(statistics_ptr + row_place)",
            f"row_sum = tl.load(statistics_ptr + tl.cast({heads}, tl.int64) * {self.n_q} + row_place)",
            "delta = tl.load(delta_ptr + row_place)",
            "share = 1.0 / row_sum",
        ]
        if self.spec.normalizer is Normalizer.SAFE_SOFTMAX:
            lines += [
                'share = tl.where(row_max == float("-inf"), 0.0, share)',
                'row_max = tl.where(row_max == float("-inf"), 0.0, row_max)',
            ]
        return lines

    def tile(self, score: str, upstream: str, shape: str, with_p: str = "") -> list[str]:
        """Statements from s to p (weights) and ds. score, upstream: products of the tile; with_p: what uses p, as soon
        as it is there."""
        spec, w = self.spec, self.writer
        w.forget(Level.TILE)
        lines = [f"s = {score}"]
        x = w.value(spec.score)
        weight = None if spec.weight is const(1.0) else w.value(spec.weight)
        lines += [*self._taken(), f"x = tl.broadcast_to({x}, {shape})"]
        if weight is not None:
            lines.append(f"w = {weight}")
        lines.append("valid = rows_ok & j_ok")
        times = "" if weight is None else " * w"
        if self.softmax:
            lines.append(f"y = tl.where(valid, tl.exp2((x - row_max) * {LOG2E}) * share, 0.0)")
        else:
            lines.append("y = tl.where(valid, x, 0.0)")
        lines += [f"p = y{times}", with_p, f"dp = {upstream}"]
        lines.append(f"dx = y * (dp{times} - delta)" if self.softmax else f"dx = tl.where(valid, dp{times}, 0.0)")
        lines.append("dw = y * dp")
        lines.append(f"ds = tl.broadcast_to({self._bound(self.gradients.score, lines)}, {shape})")
        return lines

    def _bound(self, expr: Expr, lines: list[str]) -> str:
        """The value of an expression, after the statements that it needs."""
        text = self.writer.value(expr)
        lines += self._taken()
        return text

    def _taken(self) -> list[str]:
        """The statements left for the tile so far; they are handed over."""
        taken = self.writer.lines[Level.TILE]
        self.writer.lines[Level.TILE] = []
        return taken

    def key_range(self) -> list[str]:
        """key_start and key_stop of the rows i0..i1."""
        mask = self.spec.mask
        low = "0" if mask is None or mask.key_lo is None else self.ranges.value(mask.key_lo)
        high = (
            self.n_k
            if mask is None or mask.key_hi is None
            else f"tl.minimum({self.ranges.value(mask.key_hi)}, {self.n_k})"
        )
        taken = self.ranges.lines[Level.BLOCK]
        self.ranges.lines[Level.BLOCK] = []
        return [*taken, f"key_start = tl.maximum({low}, 0)", f"key_stop = tl.maximum({high}, 0)"]

    @property
    def skips(self) -> bool:
        return self.spec.mask is not None and self.spec.mask.skips

    @property
    def listed(self) -> bool:
        """Whether the tiles to visit are listed (see `tile_lists`)."""
        return self.spec.mask is not None and self.spec.mask.tile_live is not None

    def list_of(self, across: str, block: str) -> list[str]:
        """Where the tiles of a block are listed, and how many they are of the `across` that there could be."""
        return [
            f"tiles_across = {across}",
            f"tile_place = {place_in_list(self.writer)} * {block}",
            "list_at = tile_list_ptr + tl.cast(tile_place, tl.int64) * tiles_across",
            "count = tl.load(tile_counts_ptr + tile_place)",
        ]

    def captured(self, *reaches: str) -> list[tuple[int, Captured]]:
        """The captured gradients of certain reaches, numbered."""
        items = enumerate(self.gradients.captured)
        return [(n, item) for n, item in items if item.reach in reaches and item.sink is None]

    def gradient_name(self, load: Expr) -> str:
        return f"d{self.writer.operand(int(load.attr))}"  # type: ignore[arg-type]

    def add(self, item: Captured, value: str, mask: str) -> list[str]:
        """Statements that add a value to the gradient of a load."""
        at = self.writer.address(item.load, self.writer.level_of(item.load), self.gradient_name(item.load))
        inside = f", mask={mask}" if mask else ""
        return [*self._taken(), f'tl.atomic_add({at}, {value}, sem="relaxed"{inside})']


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
            f"do = tl.load({self.output_gradient('i')}{self._within()}).to({self.dtype})",
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
        return source.block(*self._position(), *kept, later)

    def _within(self) -> str:
        return "" if padded(self.d_v) == self.d_v else f", mask=e < {self.d_v}, other=0.0"

    def _position(self) -> list[str]:
        extents = [self.writer.value(extent) for extent in self.spec.batch]
        names = [f"b{axis}" for axis in range(len(extents))]
        return [
            f"blocks = ({self.n_q} + ROWS - 1) // ROWS",
            "program = tl.program_id(0)",
            "block = blocks - 1 - program % blocks",
            *(self.decode("(program // blocks)", extents, names)),
            "i0 = block * ROWS",
            f"i1 = tl.minimum(i0 + ROWS, {self.n_q}) - 1",
            "rows = (i0 + tl.arange(0, ROWS))[:, None]",
            "rows_ok = rows <= i1",
            "i = tl.minimum(rows, i1)",
        ]

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
        q = matrix(self.inside, 0, spec.q, I, C)
        product = ", input_precision=PRECISION)"
        into_dv = f"dv = tl.dot(p.to({self.dtype}), do, dv{product}" if self.needs[2] else ""
        scores, upstream = f"tl.dot(k, tl.trans(q){product}", f"tl.dot(v, tl.trans(do){product}"
        tile = self.tile(scores, upstream, "[KEYS, ROWS]", into_dv)
        before, after = self._sums(tile)
        finish: list[str] = []
        if self.needs[2]:
            finish += self.store("dv", "dv", dv, 2, "e", self.d_v, "j_ok")
        if self.needs[1]:
            tile.append(f"dk = tl.dot(ds.to({self.dtype}), q, dk{product}")
            finish += self.store("dk", "dk", dk, 1, "c", self.d, "j_ok")
        reads = [
            *self.read("q", q, 0, "c", self.d, ""),
            f"do = tl.load({self.output_gradient('row')}{Queries._within(self)}).to({self.dtype})",
        ]  # type: ignore[arg-type]
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
        member = source.block(turns, source.indented(loop), *after)
        scan = source.block(*self._scan())
        levels = source.without_dead([*w.lines[Level.BLOCK], *w.lines[Level.ROW]], source.block(scan, *before, member))
        member = source.block(*levels, scan, *before, member)
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
        body = source.block(*reads, *start, *self._members(member), *finish)
        places = [f"c = tl.arange(0, {padded(self.d)})[None, :]", f"e = tl.arange(0, {padded(self.d_v)})[None, :]"]
        return source.block(*self._position(), *source.without_dead(places, body), body)

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


class Prepare(Role):
    """delta of one block of ROWS query rows: the row sums of dO * O; and whether a row of the head met no live key.

    Where tiles are listed, that is noted by blocks, for all heads that share lists: ROWS is that of the kernel of dK.
    """

    name = "attention_backward_prepare"

    def body(self) -> str:
        within = Queries._within(self)  # type: ignore[arg-type]
        out = self.output_gradient("i").replace("dout_", "out_")
        place = place_of(self.writer)
        lines = [
            f"e = tl.arange(0, {padded(self.d_v)})[None, :]",
            f"do = tl.load({self.output_gradient('i')}{within}).to(tl.float32)",
            f"o = tl.load({out}{within}).to(tl.float32)",
            f"row_place = tl.cast({place}, tl.int64) * {self.n_q} + i",
            "tl.store(delta_ptr + row_place, tl.sum(do * o, 1)[:, None], mask=rows_ok)",
        ]
        if self.skips:
            dead = f"{place_in_list(self.writer)} * blocks + block" if self.listed else place
            lines += [
                "row_max = tl.load(statistics_ptr + row_place)",
                f"if {any_dead(self.spec)} != 0:",
                f"    tl.store(dead_ptr + {dead}, 1)",
            ]
        return source.block(*Queries._position(self), *lines)  # type: ignore[arg-type]


def dead_limit(spec: AttentionSpec) -> str:
    """Maxima that are not above this belong to rows without a live key."""
    assert spec.mask is not None
    fill = spec.mask.fill
    return number(max(fill / 2, -LARGEST / 2)) if math.isfinite(fill) else 'float("-inf")'


def any_dead(spec: AttentionSpec) -> str:
    """1 where one of the maxima of a column of rows belongs to a row without a live key, else 0."""
    return f"tl.max(tl.max(((row_max > {dead_limit(spec)}) == 0).to(tl.int32), 1), 0)"


def backward_kernels(spec: AttentionSpec, d: int, d_v: int, needs: tuple[bool, ...]) -> list[KernelText]:
    """The kernels that are needed for the gradients of the operands that `needs` marks, in the order of their
    launch."""
    role = Role(spec, d, d_v, needs)
    reaches = {"rows" if item.reach == "rows" else "queries" for item in role.gradients.captured}
    kernels = []
    if role.softmax:
        kernels.append(Prepare(spec, d, d_v, needs).text())
    if needs[0] or "queries" in reaches:
        kernels += [KeyLists(spec).text()] if role.listed else []
        kernels.append(Queries(spec, d, d_v, needs).text())
    if needs[1] or needs[2] or "rows" in reaches:
        kernels += [RowLists(spec, dead=role.softmax).text()] if role.listed else []
        kernels.append(Keys(spec, d, d_v, needs).text())
    return kernels
