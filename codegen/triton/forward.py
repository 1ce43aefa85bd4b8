"""Forward kernel of the `flash` schedule: one program per block of query rows, a loop over tiles of keys.

    for each stage of the key range        where every key is live without the mask, the rest with it
        S = Q K^T;  x = score program of S;  running maximum m and sum l;  O = O * alpha + P V
    where a row has no live key and eager averages over all: once more over all keys
    divide by the sum, write

All sizes and strides are run-time arguments; d and d_v are constants of the module, read in panels (`panels`). The loop
itself is `key_loop`'s.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.ir.expr import I0, I1, ROW_MAX, ROW_SUM
from fusion.ir.mask_facts import LARGEST
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.numbers import exponent_units, in_float32
from fusion.lowering.rows import KEY_MAX, KEY_SUM, row_epilogue
from fusion.lowering.score_programs import ScorePrograms, dead_rows_matter, first_key_lives, score_programs
from fusion.planning.gpu_layout import panelled

from . import source
from .dtypes import DTYPES, cast
from .expressions import Level, number
from .key_loop import PLAIN, KeyLoop, Order
from .matrices import sum_of
from .panels import Panel
from .stages import Visit, key_limits, listed
from .tiles import Tiles, load_where

SINGLE_FROM = 512
"""Columns of K and V together from which all keys are visited in one stage: pointers and masks of several stages take
registers that the output needs (they spill), and products take so long that masks cost little."""


class Forward(Tiles):
    """One block of ROWS query rows of one head.

    d, d_v: columns of Q and K, of V. statistics: also write each row's maximum and sum."""

    name = "attention_forward"
    whole_rows = True

    relative_to_maximum = False  # whether sums come from the loop relative to the maximum itself, see `_excess`

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, statistics: bool = False, order: Order = PLAIN):
        super().__init__(spec, d, d_v, {I0: "i0", I1: "i1"})
        self.statistics, self.order = statistics, order
        # Folding constants rounds scores otherwise than the backward does: by far less than 16 bits, but not than 32.
        self.programs: ScorePrograms = score_programs(spec, folded=spec.dtype != "float32")
        if self.whole_rows and first_key_lives(spec):  # each row has an ordinary score from the first tile on
            self.programs = replace(self.programs, guarded=False)
        # One stage has the same instructions for a tile whatever rows share it, as reproducible results take.
        self.single = panelled(d) + panelled(d_v) >= SINGLE_FROM or spec.reproducible
        values = [value for *_, value in row_epilogue(spec)] if self.softmax else []
        self.writer.count(self.programs.masked, self.programs.full, spec.weight, *values)

    def body(self) -> tuple[list[Visit], str]:
        self.loop = KeyLoop(self, self.programs, self.order)
        self.boxes = self.loop.boxes
        load_q = self._load_queries()
        range_text = self._key_range()
        stages = [self.loop.call(*stage, begin="start") for stage in self._stages()]
        after = self.loop.finish("start", "stop"), self._again(), self._finish()
        loops = source.with_used(range_text, source.block(*self.loop.initial(), *stages, *after))
        later = source.block(*load_q, *self.loop.pointers(), loops)
        return self.loop.functions, self._programs(self._placed(later))

    def _placed(self, later: str) -> str:
        """Statements for a block of rows, after those that locate it and the coordinates that they use."""
        rows = ["rows = i0 + tl.arange(0, ROWS)", "i = tl.minimum(rows, i1)[:, None]"]
        return source.block(self._position(), source.with_used(rows, self.of_block(later)))

    def _programs(self, body: str) -> str:
        """The body for a program's block of rows."""
        return source.block("program = tl.program_id(0)", body)

    def _position(self) -> str:
        """Statements from the program's number to block and batch coordinates. Heads are processed in groups of
        `section`, whose keys fit the L2 cache together; within a group all heads' longest blocks go first."""
        extents = [self.writer.factor(extent) for extent in self.spec.batch]
        lines = [f"blocks = ({self.n_q} + ROWS - 1) // ROWS"]
        if extents:
            lines += [
                f"heads = {self.heads}",
                "group = program // (section * blocks)",
                "place = program % (section * blocks)",
                "members = tl.minimum(section, heads - group * section)",
                "head = group * section + place % members",
                "block = blocks - 1 - place // members",
            ]
        else:
            lines.append("block = blocks - 1 - program")
        for axis in reversed(range(len(extents))):
            if axis:
                lines += [f"b{axis} = head % {extents[axis]}", f"head = head // {extents[axis]}"]
            else:
                lines.append("b0 = head")
        lines += ["i0 = block * ROWS", f"i1 = tl.minimum(i0 + ROWS, {self.n_q}) - 1"]
        return source.block(*lines)

    def _load_queries(self) -> list[str]:
        widened, lines = cast(self.spec.operands[0].dtype, self.spec.dtype), []
        for part, panel in zip(self.parts(self.writer, 0), self.columns, strict=True):
            name = f"q{panel.suffix}"
            lines.append(load_where(name, part.pointers, (panel.inside,), widened))
            if not (part.rows or part.both):
                lines.append(f"{name} = tl.broadcast_to({name}, [ROWS, {panel.width}])")
        return lines

    def _key_range(self) -> list[str]:
        """Statements of the range of keys to visit (see `stages`)."""
        if self.listed:
            return listed(f"({self.n_k} + KEYS - 1) // KEYS", f"{self.place_factor(listed=True)} * blocks + block")
        return key_limits(self.spec.mask, self.n_k, self.writer.value)

    def _stages(self) -> list[tuple[str, str, bool]]:
        """(start, stop, whether tiles need neither the mask nor bounds) of each stage."""
        if self.listed and self.spec.reproducible:  # all live tiles, in the order of their keys
            return [("0", "full_count", False)]
        if self.listed:
            return [("0", "full_count", True), ("tiles_across - partial_count", "tiles_across", False)]
        if self.single:
            return [("start", "stop", False)]
        stages = [("full_start", "full_stop", True), ("full_stop", "stop", False)]
        if self.spec.mask is not None and self.spec.mask.full_lo is not None and self.programs.full is not None:
            return [("start", "tl.minimum(full_start, stop)", False), *stages]
        return stages

    def _again(self) -> str:
        """Statements that compute a block once more over all keys if one of its rows has no live key and eager averages
        there."""
        if not dead_rows_matter(self.spec):
            return ""
        end, left_out = self.n_k, f"(start > 0) | (stop < {self.n_k})"
        if self.listed:
            end, left_out = "tiles_across", "full_count + partial_count < tiles_across"
        every = self.loop.call("0", end, False, listed=False, begin="0")
        again = [*self.loop.initial(), every, self.loop.finish("0", self.n_k)]
        if self.spec.reproducible:  # only for these rows: a row has the same bits whether or not it is beside them
            sums = {f"acc{panel.suffix}": "dead[:, None]" for panel in self.values} | {"m": "dead", "l": "dead"}
            again = [f"{name}_before = {name}" for name in sums] + again
            again += [f"{name} = tl.where({dead}, {name}, {name}_before)" for name, dead in sums.items()]
        return source.block(
            f"dead = {self._dead()}",
            f"if (tl.max(dead.to(tl.int32), 0) != 0) & ({left_out}):",
            source.indented(source.block(*again)),
        )

    def _dead(self) -> str:
        """Predicate of the rows without a live key."""
        assert self.spec.mask is not None
        return f"(m > {number(max(self.spec.mask.fill / 2 / self.programs.scale, -LARGEST / 2))}) == 0"

    def _finish(self) -> str:
        lines = self._row_factor() if self.softmax else []
        dtype = DTYPES[self.spec.out_dtype]
        lines.append(f"out_rows = {self._output_rows()}")
        for panel in self.values:
            result = f"acc{panel.suffix} * factor" if self.softmax else f"acc{panel.suffix}"
            if self.spec.normalizer is Normalizer.ZERO_SOFTMAX:
                result = f"tl.where(factor == factor, {result}, 0.0)"
            if self.spec.reproducible:  # skipped tiles may change the sign of a zero
                result = f"{result} + 0.0"
            lines += [
                f"out{panel.suffix}_at = out_rows + tl.cast({panel.column}, tl.int64) * out_stride_e",
                f"tl.store(out{panel.suffix}_at, ({result}).to({dtype}), mask={self._rows_inside(panel)})",
            ]
        return source.block(*lines)

    def _rows_inside(self, panel: Panel) -> str:
        """Predicate of the elements of a block's panel of the output that exist."""
        return f"(rows <= i1)[:, None] & ({panel.inside})" if panel.inside else "(rows <= i1)[:, None]"

    def _output_rows(self) -> str:
        """Pointers to the rows of the output; those of packed heads lie side by side in the block."""
        axes = [f"b{axis}" for axis in range(len(self.spec.batch))]
        rows, places = "rows[:, None]", list(axes)
        if (packed := self.order.packed) > 1:
            places[-1] = f"{axes[-1]} * {packed} + {rows} % {packed}"
            rows = f"{rows} // {packed}"
        head = [f"tl.cast({p}, tl.int64) * out_stride_{a}" for p, a in zip(places, axes, strict=True)]
        return sum_of("out_ptr", *head, f"tl.cast({rows}, tl.int64) * out_stride_i")

    def _maximum_and_sum(self) -> list[str]:
        """row_max and row_sum over the keys, in the score's own units."""
        return [f"row_max = {in_own_units('m[:, None]', self.programs)}", "row_sum = l[:, None]"]

    def _excess(self, programs: ScorePrograms) -> list[str]:
        """Factor that makes l and acc relative to m: in the loop over the keys they are relative to m * unit, rounded.
        It cancels in their quotient."""
        unit, limit, _ = map(in_float32, exponent_units(programs.scale))
        return [
            f"rounding = (m * {unit}).to(tl.float64) - m.to(tl.float64) * {unit}",
            f"excess = tl.exp2(tl.where(tl.abs(m) > {limit}, 0.0, rounding).to(tl.float32))",
        ]

    def _settled(self, programs: ScorePrograms) -> list[str]:
        """l and acc relative to m."""
        scaled = (f"acc{panel.suffix} = acc{panel.suffix} * excess[:, None]" for panel in self.values)
        return [*self._excess(programs), "l = l * excess", *scaled]

    def _row_factor(self) -> list[str]:
        """Statements of `factor`, which multiplies each row of the output; and of the statistics as early as
        possible."""
        lines, w = self._maximum_and_sum(), self.writer
        excess = "" if self.relative_to_maximum else " * excess[:, None]"
        if excess and (self.spec.sinks or self.spec.row_scale is not None):
            lines, excess = [*self._settled(self.programs), *lines], ""
        w.known |= {KEY_MAX: "row_max", KEY_SUM: "row_sum"}
        for name, leaf, value in row_epilogue(self.spec):
            before = len(w.lines[Level.ROW])
            text = w.value(value)
            lines += w.lines[Level.ROW][before:]
            del w.lines[Level.ROW][before:]
            if not text.isidentifier():
                lines.append(f"{name} = {text}")
            w.known[leaf] = text if text.isidentifier() else name
            if leaf is ROW_SUM and self.statistics:
                lines += self._write_statistics(excess)
        return lines

    def _write_statistics(self, excess: str) -> list[str]:
        """Write each row's maximum and sum, float32, packed as [2, b0, b1, ..., i]. excess: the factor that the sum
        lacks."""
        return [
            *(self._excess(self.programs) if excess else []),
            f"statistics_at = statistics_ptr + tl.cast({self.place()}, tl.int64) * {self.n_q} + rows[:, None]",
            f"tl.store(statistics_at, {self.writer.known[ROW_MAX]}, mask=(rows <= i1)[:, None])",
            f"statistics_at += tl.cast({self.heads}, tl.int64) * {self.n_q}",
            f"tl.store(statistics_at, row_sum{excess}, mask=(rows <= i1)[:, None])",
        ]


def in_own_units(m: str, programs: ScorePrograms) -> str:
    """Maxima, converted from units of the programs' scale to the score's own."""
    row_max = m if programs.scale == 1.0 else f"{m} * {number(programs.scale)}"
    for unit, value in programs.fills:
        row_max = f"tl.where({m} == {number(unit)}, {number(value)}, {row_max})"
    return row_max
