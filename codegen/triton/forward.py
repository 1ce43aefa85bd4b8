"""The forward kernel of the `flash` schedule: one program per block of query rows, a loop over tiles of keys.

    for each stage of the key range        where every key is live without the mask, the rest with it
        S = Q K^T;  x = score program of S;  running maximum m and sum l;  O = O * alpha + P V
    where a row met no live key although keys were skipped: once more over all keys
    divide by the sum, write

All sizes and strides are run-time arguments; d and d_v are constants of the module, padded to powers of two with masks.

One file over the usual length: the kernel is one template, a method for each of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.codegen.triton import source
from fusion.codegen.triton.expressions import Level, Writer, number
from fusion.codegen.triton.matrices import Matrix, matrix, sum_of
from fusion.codegen.triton.programs import LARGEST, Programs, programs_of
from fusion.codegen.triton.stages import Visit, key_limits, listed, visit
from fusion.ir.expr import ROW_MAX, ROW_SUM, SCORE, C, E, Expr, I, J, const, coord, coordinates
from fusion.ir.spec import AttentionSpec, Normalizer

LOG2E = 1.4426950408889634
DTYPES = {"float32": "tl.float32", "float16": "tl.float16", "bfloat16": "tl.bfloat16"}


def padded(extent: int) -> int:
    """The power of two that holds a head dimension; products take at least 16."""
    return max(16, 1 << (extent - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """Functions of a module: their text, the helpers that they use, the kernel's name and run-time parameters in
    order."""

    name: str
    text: str
    helpers: frozenset[str]
    parameters: tuple[str, ...]


class Forward:
    """One block of ROWS query rows of one head.

    d, d_v: columns of Q and K, of V. statistics: also write each row's maximum and sum.
    """

    name = "attention_forward"

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, statistics: bool = False):
        self.spec, self.d, self.d_v, self.statistics = spec, d, d_v, statistics
        self.programs: Programs = programs_of(spec)
        self.softmax = spec.normalizer is not Normalizer.NONE
        batch = {coord(f"b{axis}"): f"b{axis}" for axis in range(len(spec.batch))}
        self.known = {**batch, coord("i0"): "i0", coord("i1"): "i1", I: "i", C: "c", E: "e"}
        self.writer = Writer(spec=spec, known={**self.known, J: "j", SCORE: "s"})
        w = self.writer
        self.keys = Writer(spec=spec, known={**self.known, J: "key"}, names=w.names, helpers=w.helpers, mask="key_ok")
        self.keys.lines[Level.BLOCK] = w.lines[Level.BLOCK]
        self.keys.lines[Level.ROW] = w.lines[Level.ROW]
        mask = spec.mask
        self.skips = mask is not None and mask.skips
        self.listed = mask is not None and mask.tile_live is not None
        w.count(self.programs.masked, self.programs.full, spec.weight, *spec.sinks, spec.row_scale)

    def text(self) -> KernelText:
        """The two functions: `visit_keys`, one stage of the loop over keys, and the kernel itself."""
        visit = self._visit()
        body = self._kernel(visit)
        names = source.free_names(body)
        parameters, constexprs = signature(names, self.spec)
        given = [*parameters, *(f"{name}: tl.constexpr" for name in constexprs)]
        kernel = source.definition(self.name, given, self._doc(), body)
        text, helpers = f"{visit.text}\n\n{kernel}", frozenset(self.writer.helpers)
        return KernelText(name=self.name, text=text, helpers=helpers, parameters=parameters)

    def _doc(self) -> str:
        return (self.__doc__ or "").strip().splitlines()[0]

    # -- the loop over keys ------------------------------------------------------------------------------------------

    def _visit(self) -> Visit:
        """`visit_keys`."""
        k = matrix(self.keys, 1, self.spec.k, J, C)
        v = matrix(self.keys, 2, self.spec.v, J, E)
        self.k_block, self.v_block = k.block, v.block
        score = "s = tl.dot(q, tl.trans(k), input_precision=PRECISION)"
        loop = source.block(
            *self._load("k", k, "c", self.d, 1),
            score,
            self._programs_text(),
            self._statistics(),
            *self._load("v", v, "e", self.d_v, 2),
            self._product(),
        )
        end = self.writer.value(self.spec.n_k) if self.listed else "stop"
        columns = [
            "key = (first + tl.arange(0, KEYS))[:, None]",
            f"key_ok = key < {end}",
            "j = (first + tl.arange(0, KEYS))[None, :]",
            f"j_ok = j < {end}",
        ]
        columns += self.keys.lines[Level.TILE]
        loop = source.block(*self._first(), *source.without_dead(columns, loop), loop)
        before = source.block(self._tile("k", k), self._tile("v", v))
        head = f"for {'number' if self.listed else 'first'} in tl.range(start, stop{'' if self.listed else ', KEYS'}):"
        doc = "Keys start <= j < stop, in tiles; BOUNDED: the last tile may be cut off; MASKED: keys may be dead."
        if self.listed:
            doc = "Tiles start <= number < stop, LISTED: of a list; BOUNDED: of the last; MASKED: keys may be dead."
        state = ("acc", "m", "l") if self.softmax else ("acc",)
        return visit(
            "visit_keys", doc, source.block(before, head, source.indented(loop)), state=state,
            first=("q", "start", "stop"), helpers=self.writer.helpers, sizes=self.spec.sizes,
        )  # fmt: skip

    def _first(self) -> list[str]:
        """`first`, the first key of a tile, from its number or its place in the list."""
        if not self.listed:
            return []
        return ["if LISTED:", "    first = tl.load(list_at + number) * KEYS", "else:", "    first = number * KEYS"]

    def _tile(self, name: str, part: Matrix) -> str:
        within = sum_of(part.rows if part.advance else "", part.columns)
        return f"{name}_tile = {name}_block + {within}" if within else f"{name}_tile = {name}_block"

    def _load(self, name: str, part: Matrix, column: str, extent: int, operand: int) -> list[str]:
        """Statements that read a tile of K or V, with masks only where the tile may be cut off or is padded."""
        moved = f"tl.cast(first, tl.int64) * {_factor(part.advance)}" if part.advance else ""
        at = sum_of(f"{name}_tile", moved, "" if part.advance else part.rows, part.both)
        inside = f"{column} < {extent}" if padded(extent) != extent else ""
        bounded = f"key_ok & ({inside})" if inside else "key_ok"
        whole = f"tl.load({name}_at, mask={inside}, other=0.0)" if inside else f"tl.load({name}_at)"
        cast = self._cast(operand)
        lines = [
            f"{name}_at = {at}",
            "if BOUNDED:",
            f"    {name} = tl.load({name}_at, mask={bounded}, other=0.0){cast}",
            "else:",
            f"    {name} = {whole}{cast}",
        ]
        if not part.rows and not part.both and not part.columns:  # one element for all
            lines.append(f"{name} = tl.broadcast_to({name}, [KEYS, {padded(extent)}])")
        return lines

    def _cast(self, operand: int) -> str:
        """The conversion of an operand to the dtype of the products."""
        return "" if self.spec.operands[operand].dtype == self.spec.dtype else f".to({DTYPES[self.spec.dtype]})"

    def _programs_text(self) -> str:
        """x, the score program of a tile, and w, the weight program, in the variants that there are."""
        masked = self._program(self.programs.masked)
        if self.programs.full is None:
            text = masked
        else:
            full = self._program(self.programs.full)
            text = source.block("if MASKED:", source.indented(masked), "else:", source.indented(full))
        beyond = 'float("-inf")' if self.softmax else "0.0"
        return source.block(text, "if BOUNDED:", f"    x = tl.where(j_ok, x, {beyond})")

    def _program(self, program: Expr) -> str:
        self.writer.forget(Level.TILE)
        value = self.writer.value(program)
        lines = [f"x = {value}"]
        if not {"i", "j"} <= coordinates(program):  # scores that do not depend on both: one value for many keys
            lines = [f"x = tl.broadcast_to({value}, [ROWS, KEYS])"]
        if self.spec.weight is not const(1.0):
            lines.append(f"w = {self.writer.value(self.spec.weight)}")
        text = source.block(*self.writer.lines[Level.TILE], *lines)
        self.writer.forget(Level.TILE)
        return text

    def _statistics(self) -> str:
        """The running maximum and sum, and the weights p."""
        if not self.softmax:
            return "p = x" if self.spec.weight is const(1.0) else "p = x * w"
        scale = self.programs.scale
        unit, lines = number(scale * LOG2E), ["m_new = tl.maximum(m, tl.max(x, 1))"]
        if self.programs.guarded:
            lines.append(f"unit = tl.where(tl.abs(m_new) > 1e38, {number(scale)}, {unit})")
            lines.append('shift = tl.where(m_new == float("-inf"), 0.0, m_new * unit)')
            lines += ["alpha = tl.exp2(m * unit - shift)", "p = tl.exp2(x * unit[:, None] - shift[:, None])"]
        else:
            lines.append(f"shift = m_new * {unit}")
            lines += [f"alpha = tl.exp2(m * {unit} - shift)", f"p = tl.exp2(x * {unit} - shift[:, None])"]
        lines += ["l = l * alpha + tl.sum(p, 1)", "acc = acc * alpha[:, None]", "m = m_new"]
        if self.spec.weight is not const(1.0):
            lines.append("p = p * w")
        return source.block(*lines)

    def _product(self) -> str:
        return f"acc = tl.dot(p.to({DTYPES[self.spec.dtype]}), v, acc, input_precision=PRECISION)"

    # -- the kernel --------------------------------------------------------------------------------------------------

    def _kernel(self, visit: Visit) -> str:
        q = matrix(self.writer, 0, self.spec.q, I, C)
        load_q = self._load_queries(q)
        range_text = self._key_range()
        stages = self._stages(visit)
        finish = self._finish()
        pointers = [
            f"{name}_block = {sum_of(f'{operand}_ptr', part)}"
            for name, operand, part in zip(
                "kv", (self.keys.operand(1), self.keys.operand(2)), (self.k_block, self.v_block), strict=True
            )
        ]
        later = source.block(load_q, *pointers, range_text, stages, finish)
        level_lines = [*self.writer.lines[Level.BLOCK], *self.writer.lines[Level.ROW]]
        places = [
            "rows = i0 + tl.arange(0, ROWS)",
            "i = tl.minimum(rows, i1)[:, None]",
            f"c = tl.arange(0, {padded(self.d)})[None, :]",
            f"e = tl.arange(0, {padded(self.d_v)})[None, :]",
        ]
        kept = source.without_dead([*places, *level_lines], later)
        return source.block(self._position(), *kept, later)

    def _position(self) -> str:
        """From the program's number to block and batch coordinates.

        Heads are taken in groups of `section`, whose keys fit the L2 cache together; within a group all heads'
        longest blocks go first.
        """
        n_q = self.writer.value(self.spec.n_q)
        extents = [self.writer.value(extent) for extent in self.spec.batch]
        lines = [f"blocks = ({n_q} + ROWS - 1) // ROWS", "program = tl.program_id(0)"]
        if extents:
            lines += [
                f"heads = {' * '.join(extents)}",
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
        lines += ["i0 = block * ROWS", f"i1 = tl.minimum(i0 + ROWS, {n_q}) - 1"]
        return source.block(*lines)

    def _load_queries(self, part: Matrix) -> str:
        inside = f", mask=c < {self.d}, other=0.0" if padded(self.d) != self.d else ""
        at = sum_of(f"{part.operand}_ptr", part.block, part.rows, part.columns, part.both)
        wide = "" if part.rows or part.both else f"\nq = tl.broadcast_to(q, [ROWS, {padded(self.d)}])"
        return f"q = tl.load({at}{inside}){self._cast(0)}{wide}"

    def _key_range(self) -> str:
        """Which keys to visit (see `stages`)."""
        n_k = self.writer.value(self.spec.n_k)
        if self.listed:
            across, place = f"({n_k} + KEYS - 1) // KEYS", f"{place_in_list(self.writer)} * blocks + block"
            return source.block(*listed(across, place))
        return source.block(*key_limits(self.spec.mask, n_k, self.writer.value))

    def _initial(self) -> list[str]:
        lines = [f"acc = tl.full([ROWS, {padded(self.d_v)}], 0.0, tl.float32)"]
        if self.softmax:
            lines += ['m = tl.full([ROWS], float("-inf"), tl.float32)', "l = tl.full([ROWS], 0.0, tl.float32)"]
        return lines

    def _call(
        self, visit: Visit, start: str, stop: str, masked: bool, bounded: bool, indent: int = 4, listed: bool = True
    ) -> str:
        return visit.call(indent, start=start, stop=stop, MASKED=masked, BOUNDED=bounded, LISTED=listed)

    def _stages(self, visit: Visit) -> str:
        """The calls of `visit_keys`."""
        lines = self._initial()
        if self.listed:
            lines += [
                self._call(visit, "0", "full_count", False, False),
                self._call(visit, "tiles_across - partial_count", "tiles_across", True, True),
            ]
        else:
            if self.spec.mask is not None and self.spec.mask.full_lo is not None and self.programs.full is not None:
                lines.append(self._call(visit, "start", "tl.minimum(full_start, stop)", True, True))
            lines += [
                self._call(visit, "full_start", "full_stop", False, False),
                self._call(visit, "full_stop", "stop", True, True),
            ]
        return source.block(*lines, self._again(visit))

    def _again(self, visit: Visit) -> str:
        """Rows that met no live key behave as in eager mode: their block is done again over all keys."""
        if not (self.skips and self.softmax):
            return ""
        assert self.spec.mask is not None
        n_k = self.writer.value(self.spec.n_k)
        limit = (
            number(max(self.spec.mask.fill / 2 / self.programs.scale, -LARGEST / 2))
            if math.isfinite(self.spec.mask.fill)
            else 'float("-inf")'
        )
        left_out = f"(start > 0) | (stop < {n_k})"
        every = self._call(visit, "0", "tiles_across" if self.listed else n_k, True, True, 8, listed=False)
        if self.listed:
            left_out = "full_count + partial_count < tiles_across"
        return source.block(
            f"dead = (m > {limit}) == 0",
            f"if (tl.max(dead.to(tl.int32), 0) != 0) & ({left_out}):",
            source.indented(source.block(*self._initial(), every)),
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> str:
        lines = self._row_factor() if self.softmax else []
        axes = [f"b{axis}" for axis in range(len(self.spec.batch))]
        head = [f"tl.cast({axis}, tl.int64) * out_stride_{axis}" for axis in axes]
        at = sum_of(
            "out_ptr", *head, "tl.cast(rows[:, None], tl.int64) * out_stride_i", "tl.cast(e, tl.int64) * out_stride_e"
        )
        inside = f" & (e < {self.d_v})" if padded(self.d_v) != self.d_v else ""
        result = "acc * factor" if self.softmax else "acc"
        lines += [
            f"out_at = {at}",
            f"tl.store(out_at, ({result}).to({DTYPES[self.spec.out_dtype]}), mask=(rows <= i1)[:, None]{inside})",
        ]
        return source.block(*lines)

    def _maximum_and_sum(self) -> list[str]:
        """row_max and row_sum over the keys, in the score's own units."""
        scale = self.programs.scale
        row_max = "m[:, None]" if scale == 1.0 else f"m[:, None] * {number(scale)}"
        if (clamped := self.programs.clamped) is not None:
            end = math.copysign(LARGEST, clamped)
            row_max = f"tl.where(m[:, None] == {number(end)}, {number(clamped)}, {row_max})"
        return [f"row_max = {row_max}", "row_sum = l[:, None]"]

    def _row_factor(self) -> list[str]:
        """`factor`, what each row of the output is multiplied by; sinks and the spec's own row scale included."""
        spec, w = self.spec, self.writer
        lines = self._maximum_and_sum()
        rescaled = ""
        if spec.sinks:
            sinks = [w.bind(sink, "sink") for sink in spec.sinks]
            lines.append(f"highest = {_nested('tl.maximum', ['row_max', *sinks])}")
            lines.append('base = tl.where(highest == float("-inf"), 0.0, highest)')
            lines.append(f"shrink = tl.exp2((row_max - base) * {LOG2E})")
            terms = [f"tl.exp2(({sink} - base) * {LOG2E})" for sink in sinks]
            lines += [f"row_sum = row_sum * shrink + {' + '.join(terms)}", "row_max = highest"]
            rescaled = " * shrink"
        if self.statistics:
            lines += self._write_statistics()
        if spec.row_scale is not None and spec.normalizer is Normalizer.SOFTMAX:
            lines.append('row_sum = tl.where(row_max == float("-inf"), float("nan"), row_sum)')
        if spec.row_scale is None:
            lines.append(f"factor = 1.0 / row_sum{rescaled}")
        else:
            w.known |= {ROW_MAX: "row_max", ROW_SUM: "row_sum"}
            before = len(w.lines[Level.ROW])
            value = w.value(spec.row_scale)
            lines += w.lines[Level.ROW][before:]
            del w.lines[Level.ROW][before:]
            lines.append(f"factor = {value}{rescaled}")
        if spec.normalizer is Normalizer.SAFE_SOFTMAX:
            lines.append('factor = tl.where((row_max == float("-inf")) & (row_sum == 0.0), 0.0, factor)')
        return lines

    def _write_statistics(self) -> list[str]:
        """Each row's maximum and sum, float32, packed as [2, b0, b1, ..., i]."""
        n_q = self.writer.value(self.spec.n_q)
        heads = " * ".join(self.writer.value(extent) for extent in self.spec.batch) or "1"
        return [
            f"statistics_at = statistics_ptr + tl.cast({place_of(self.writer)}, tl.int64) * {n_q} + rows[:, None]",
            "tl.store(statistics_at, row_max, mask=(rows <= i1)[:, None])",
            f"tl.store(statistics_at + tl.cast({heads}, tl.int64) * {n_q}, row_sum, mask=(rows <= i1)[:, None])",
        ]


def place_of(writer: Writer, axes: Sequence[int] | None = None) -> str:
    """The number of a batch element, counted with the last coordinate fastest, or of some of its coordinates."""
    place = "0"
    for axis in range(len(writer.spec.batch)) if axes is None else axes:
        inner = f"({place})" if " " in place else place
        place = f"b{axis}" if place == "0" else f"{inner} * {writer.value(writer.spec.batch[axis])} + b{axis}"
    return place


def place_in_list(writer: Writer) -> str:
    """The number of the lists of live tiles of the batch coordinates at hand, as a factor."""
    place = place_of(writer, axes_of(writer.spec))
    return f"({place})" if " " in place else place


def axes_of(spec: AttentionSpec) -> list[int]:
    """The batch coordinates that tell lists of live tiles apart (see `tile_lists`)."""
    mask = spec.mask
    assert mask is not None
    facts = (mask.key_lo, mask.key_hi, mask.full_lo, mask.full_hi, mask.tile_live, mask.tile_mixed)
    names = {name for fact in facts if fact is not None for name in coordinates(fact)}
    return sorted(int(name[1:]) for name in names if name.startswith("b"))


def _factor(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def _nested(function: str, values: list[str]) -> str:
    text = values[0]
    for value in values[1:]:
        text = f"{function}({text}, {value})"
    return text


def signature(names: list[str], spec: AttentionSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(run-time parameters: pointers, sizes, strides, others; constants) among the free names of a kernel."""
    pointers = sorted(n for n in names if n.endswith("_ptr"))
    sizes = [n for n in spec.sizes if n in names]
    strides = sorted(n for n in names if "_stride_" in n)
    others = [n for n in ("section", "splits") if n in names]
    strides = [n for n in strides if n not in spec.sizes]
    constants = [n for n in ("ROWS", "KEYS", "PRECISION") if n in names]
    return (*pointers, *sizes, *strides, *others), tuple(constants)
