"""What the backward kernels share: coordinates, statistics, and the gradient of the scores of a tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fusion.codegen.triton import source
from fusion.codegen.triton.descriptors import READ, boxes
from fusion.codegen.triton.dtypes import DTYPES, cast
from fusion.codegen.triton.expressions import OUTER_FIRST, Level, Writer, number
from fusion.codegen.triton.forward import KernelText, kernel_text, place_of
from fusion.codegen.triton.gradients import Captured, Gradients, gradients_of
from fusion.codegen.triton.matrices import Matrix, matrix, sum_of
from fusion.codegen.triton.panels import Panel, panels
from fusion.codegen.triton.stages import Visit, visit
from fusion.ir.derivative import SINK_UPSTREAM, UPSTREAM, WEIGHT_UPSTREAM
from fusion.ir.expr import SCORE, ZERO, C, E, Expr, I, J, const, coord
from fusion.ir.fills import LARGEST
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.gradients import Axes
from fusion.lowering.numbers import LOG2E


class Role:
    """What the two kernels share: coordinates, statistics, and the gradient of the scores of a tile.

    described: tiles of the loop are read by tensor descriptors where they can be.
    outer: the coordinate that a program owns a block of ("i" for dQ, "j" for dK and dV). Tiles are [outer, inner].
    The loop over tiles is a function (see `stages`), called with MASKED for those that need the mask or are cut off.
    """

    name = ""
    outer, inner = "i", "j"

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, needs: tuple[bool, ...], described: bool = False):
        self.spec, self.needs = spec, needs
        read = READ.get(self.name, ()) if described else ()
        self.boxes = {name: box for name, box in boxes(spec, d, d_v).items() if name in read}
        self.columns, self.values = panels(d), panels(d_v)
        self.gradients: Gradients = gradients_of(spec, needs)
        self.softmax = spec.normalizer is not Normalizer.NONE
        known = {coord(f"b{axis}"): f"b{axis}" for axis in range(len(spec.batch))}
        known |= {I: "i", J: "j", C: "c", E: "e", SCORE: "s", OUTER_FIRST: "i0" if self.outer == "i" else "first"}
        known |= {UPSTREAM: "dx", WEIGHT_UPSTREAM: "dw", SINK_UPSTREAM: "dsink"}
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
        found = self.gradients
        captured = [part for item in found.captured for part in {item.gradient, item.full}]
        w.count(spec.score, spec.weight, found.score, found.program, found.full, *captured)
        self.n_q, self.n_k = w.value(spec.n_q), w.value(spec.n_k)
        self.dtype = DTYPES[spec.dtype]

    def text(self) -> KernelText:
        """The kernel."""
        visits, body = self.body()
        doc = (self.__doc__ or "").strip().splitlines()[0]
        return kernel_text(self.name, doc, body, self.writer, [part.text for part in visits])

    def body(self) -> tuple[list[Visit], str]:
        """(functions that the kernel calls, its body)."""
        raise NotImplementedError

    def visit(self, name: str, doc: str, body: str, state: Sequence[str]) -> Visit:
        """The function that visits tiles."""
        first = ("start", "stop")
        helpers, sizes = self.writer.helpers, self.spec.sizes
        return visit(name, doc, body, state=state, first=first, helpers=helpers, sizes=sizes)

    def stages(self, visit: Visit, before: bool, indent: int = 4) -> list[str]:
        """The calls of it: for tiles that need no mask, and for the others; before: also before the former."""
        if self.listed:
            return [
                visit.call(indent, start=0, stop="full_count", MASKED=False),
                visit.call(indent, start="tiles_across - partial_count", stop="tiles_across", MASKED=True),
            ]
        first = [visit.call(indent, stop="full_start", MASKED=True)] if before else []
        return [
            *first,
            visit.call(indent, start="full_start", stop="full_stop", MASKED=False),
            visit.call(indent, start="full_stop", MASKED=True),
        ]

    # -- pieces ------------------------------------------------------------------------------------------------------

    def decode(self, number_: str, extents: list[str], names: list[str]) -> list[str]:
        """Statements that take a program's number apart, the last name fastest."""
        lines, rest = [], number_
        for name, extent in zip(names[::-1], extents[::-1], strict=True):
            lines += [f"{name} = {rest} % ({extent})", f"rest_{name} = {rest} // ({extent})"]
            rest = f"rest_{name}"
        return lines

    def places(self) -> list[str]:
        """Statements of the columns of Q and K, and of V, by panels."""
        return [*(panel.columns("c") for panel in self.columns), *(panel.columns("e") for panel in self.values)]

    def parts(self, writer: Writer, number: int, name: str = "", moving: bool = False) -> list[Matrix]:
        """Q, K or V, operand `number`, or its gradient of that name, by panels."""
        index = (self.spec.q, self.spec.k, self.spec.v)[number]
        row, column = I if number == 0 else J, E if number == 2 else C
        found = []
        for panel in self.panels_of(number):
            at = writer.where({column: f"{column.attr}{panel.suffix}"}) if panel.suffix else writer
            found.append(matrix(at, number, index, row, column, name=name, moving=moving))
        return found

    def panels_of(self, number: int) -> tuple[Panel, ...]:
        """The panels of operand `number` (Q, K, V)."""
        return self.values if number == 2 else self.columns

    def read(self, name: str, parts: Sequence[Matrix], number: int, mask: str, bounded: bool = False) -> str:
        """Statements that read Q, K or V at its parts of offsets; bounded: with the mask only where tiles are cut
        off."""
        widened = cast(self.spec.operands[number].dtype, self.spec.dtype)
        lines = []
        for part, panel in zip(parts, self.panels_of(number), strict=True):
            to, at = f"{name}{panel.suffix}", f"{name}{panel.suffix}_at"
            inside = panel.inside("e" if number == 2 else "c")
            whole, cut = (_load(to, at, limits, widened) for limits in ((inside,), (mask, inside)))
            lines += [f"{at} = {part.pointers}", source.by_mask(cut, whole) if bounded else cut]
        return source.block(*lines)

    def boxed(self, name: str, first: str) -> str:
        """Statements that read the tile of the rows from `first` on by descriptors."""
        box = self.boxes[name]
        widened = cast(box.dtype(self.spec), self.spec.dtype)
        return source.block(*(f"{name}{p.suffix} = {box.load(self.inside, p, first)}{widened}" for p in box.panels))

    def store(self, name: str, parts: Sequence[Matrix], number: int, mask: str) -> list[str]:
        """Statements that write the gradient of Q, K or V."""
        dtype, lines = DTYPES[self.spec.operands[number].dtype], []
        for part, panel in zip(parts, self.panels_of(number), strict=True):
            to, at = f"{name}{panel.suffix}", f"{name}{panel.suffix}_at"
            inside = panel.inside("e" if number == 2 else "c")
            limits = " & ".join([mask, f"({inside})"] if inside else [mask])
            lines += [f"{at} = {part.pointers}", f"tl.store({at}, {to}.to({dtype}), mask={limits})"]
        return lines

    def zeros(self, name: str, number: int, rows: str) -> list[str]:
        """Statements that begin the gradient of Q, K or V, where it is wanted."""
        if not self.needs[number]:
            return []
        return [
            f"{name}{panel.suffix} = tl.full([{rows}, {panel.width}], 0.0, tl.float32)"
            for panel in self.panels_of(number)
        ]

    def sums(self, name: str, number: int) -> list[str]:
        """The names of the gradient of Q, K or V."""
        return [f"{name}{panel.suffix}" for panel in self.panels_of(number)] if self.needs[number] else []

    def accumulated(self, name: str, left: str, right: str, number: int) -> list[str]:
        """Statements that add left @ right to the gradient of Q, K or V, where it is wanted."""
        return [
            f"{name}{p.suffix} = tl.dot({left}, {right}{p.suffix}, {name}{p.suffix}, input_precision=PRECISION)"
            for p in (self.panels_of(number) if self.needs[number] else ())
        ]

    def product(self, left: str, right: str, number: int) -> str:
        """left @ right^T over the columns of Q and K, or of V, as one expression."""
        text = ""
        for panel in self.panels_of(number):
            pair = f"{left}{panel.suffix}, tl.trans({right}{panel.suffix})"
            text = f"tl.dot({pair}{f', {text}' if text else ''}, input_precision=PRECISION)"
        return text

    def rows_of_output(self, name: str, rows: str, tensor: str = "dout", dtype: str = "") -> list[str]:
        """Statements that read the output or its gradient, [rows, d_v]."""
        axes = [f"tl.cast(b{axis}, tl.int64) * {tensor}_stride_b{axis}" for axis in range(len(self.spec.batch))]
        lines = []
        for panel in self.values:
            across = f"tl.cast(e{panel.suffix}, tl.int64) * {tensor}_stride_e"
            at = sum_of(f"{tensor}_ptr", *axes, f"tl.cast({rows}, tl.int64) * {tensor}_stride_i", across)
            lines.append(_load(f"{name}{panel.suffix}", at, (panel.inside("e"),), f".to({dtype or self.dtype})"))
        return lines

    def query_block(self) -> list[str]:
        """Statements that say which rows of which head a program owns: the last blocks first."""
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

    def statistics(self, rows: str) -> list[str]:
        """row_max, share (1 / row_sum, or the scale of the row) and delta of rows, shaped as `rows`."""
        if not self.softmax:
            return []
        name = "row_sum" if self.spec.row_scale is None else "share"
        lines = [
            f"row_place = tl.cast({place_of(self.writer)}, tl.int64) * {self.n_q} + {rows}",
            "row_max = tl.load(statistics_ptr + row_place)",
            self.plane(name, 1),
            "delta = tl.load(delta_ptr + row_place)",
            "share = 1.0 / row_sum" if self.spec.row_scale is None else "",
        ]
        if self.spec.normalizer is Normalizer.SAFE_SOFTMAX:
            lines += [
                'share = tl.where(row_max == float("-inf"), 0.0, share)',
                'row_max = tl.where(row_max == float("-inf"), 0.0, row_max)',
            ]
        return lines

    def plane(self, name: str, number: int) -> str:
        """The statement that reads a plane of the statistics."""
        heads = " * ".join(self.writer.factor(extent) for extent in self.spec.batch) or "1"
        planes = heads if number == 1 else f"{number} * {heads}"
        return f"{name} = tl.load(statistics_ptr + tl.cast({planes}, tl.int64) * {self.n_q} + row_place)"

    def tile(self, score: str, upstream: str, shape: str, exists: str, with_p: str = "") -> str:
        """Statements from s to ds and to what is summed.

        score, upstream: products of the tile. exists: the inner places that do, where the tile is cut off. with_p: what
        uses the weights p, as soon as they are there.
        """
        times = "" if self.spec.weight is const(1.0) else " * w"
        whole = [] if self.gradients.program is None else [self._variant(True, shape)]
        programs, gradients = zip(self._variant(False, shape), *whole, strict=True)
        weight = f"tl.exp2((x - row_max) * {LOG2E}) * share" if self.softmax else "x"
        return source.block(
            f"s = {score}",
            source.by_mask(*programs),
            f"y = {weight}",
            f"if MASKED:\n    y = tl.where({exists}, y, 0.0)",
            f"p = y{times}",
            with_p,
            f"dp = {upstream}",
            f"dx = y * (dp{times} - delta)" if self.softmax else f"dx = dp{times}",
            "" if self.softmax else f"if MASKED:\n    dx = tl.where({exists}, dx, 0.0)",
            "dw = y * dp",
            source.by_mask(*gradients),
        )

    def _variant(self, full: bool, shape: str) -> tuple[str, str]:
        """(from s to x and w, from dx and dw to ds and what is summed), with the mask or, full, without."""
        w, found = self.writer, self.gradients
        outside = set(w.known)
        score, gradient = (found.program, found.full) if full else (self.spec.score, found.score)
        assert score is not None and gradient is not None
        lines: list[str] = []
        lines.append(f"x = {source.spread(self.bound(score, lines), shape)}")
        if self.spec.weight is not const(1.0):
            lines.append(f"w = {self.bound(self.spec.weight, lines)}")
        after = self.summed(full)  # before ds: then fewer values are held at a time
        after.append(f"ds = {source.spread(self.bound(gradient, after), shape)}")
        w.known = {e: name for e, name in w.known.items() if e in outside or w.level_of(e) is not Level.TILE}
        return source.block(*lines), source.block(*after)

    def summed(self, full: bool) -> list[str]:
        """Statements that add a tile's gradients of captured tensors."""
        raise NotImplementedError

    def sums_to(self, length: str, *axes: Axes) -> list[str]:
        """Statements that start sums along the inner coordinate."""
        return [f"sum_{n} = tl.full([{length}], 0.0, tl.float32)" for n, _ in self.captured(*axes)]

    def bound(self, expr: Expr, lines: list[str]) -> str:
        """The value of an expression, after the statements that it needs."""
        text = self.writer.value(expr)
        lines += self._taken()
        return text

    def _taken(self) -> list[str]:
        """The statements left for the tile so far; they are handed over."""
        taken = self.writer.lines[Level.TILE]
        self.writer.lines[Level.TILE] = []
        return taken

    def ranges_of(self, lines: Callable[[Callable[[Expr], str]], list[str]]) -> list[str]:
        """Statements about the rows i0..i1, made with a function that takes expressions in them to texts."""
        made = lines(self.ranges.value)
        taken, self.ranges.lines[Level.BLOCK] = self.ranges.lines[Level.BLOCK], []
        return [*taken, *made]

    @property
    def skips(self) -> bool:
        return self.spec.mask is not None and self.spec.mask.skips

    @property
    def listed(self) -> bool:
        """Whether the tiles to visit are listed (see `tile_lists`)."""
        return self.spec.mask is not None and self.spec.mask.tile_live is not None

    def captured(self, *axes: Axes) -> list[tuple[int, Captured]]:
        """The captured gradients that are summed over certain axes, numbered."""
        items = enumerate(self.gradients.captured)
        return [(n, item) for n, item in items if item.axes in axes and item.sink is None]

    def gradients_of_tile(self, full: bool, *axes: Axes) -> list[tuple[int, Captured, Expr]]:
        """The captured gradients that are summed over certain axes and are not zero in a tile, as expressions."""
        items = [(n, item, item.full if full else item.gradient) for n, item in self.captured(*axes)]
        return [(n, item, gradient) for n, item, gradient in items if gradient is not ZERO]

    def gradient_name(self, load: Expr) -> str:
        return f"d{self.writer.operand(load.operand)}"

    def add(self, item: Captured, value: str, mask: str) -> list[str]:
        """Statements that add a value to the gradient of a load."""
        at = self.writer.address(item.load, self.writer.level_of(item.load), self.gradient_name(item.load))
        inside = f", mask={mask}" if mask else ""
        return [*self._taken(), f'tl.atomic_add({at}, {value}, sem="relaxed"{inside})']


def _load(name: str, at: str, limits: Sequence[str], cast: str) -> str:
    """The statement that loads what is within the limits, of which empty ones are none."""
    shown = [text for text in limits if text]
    shown = [f"({text})" for text in shown] if len(shown) > 1 else shown
    mask = f", mask={' & '.join(shown)}, other=0.0" if shown else ""
    return f"{name} = tl.load({at}{mask}){cast}"


def dead_limit(spec: AttentionSpec) -> str:
    """Maxima that are not above this belong to rows without a live key."""
    assert spec.mask is not None
    fill = spec.mask.fill
    return number(max(fill / 2, -LARGEST / 2)) if math.isfinite(fill) else 'float("-inf")'


def any_dead(spec: AttentionSpec) -> str:
    """1 where one of the maxima of a column of rows belongs to a row without a live key, else 0."""
    return f"tl.max(tl.max(((row_max > {dead_limit(spec)}) == 0).to(tl.int32), 1), 0)"
