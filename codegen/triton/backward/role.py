"""What the backward kernels share: coordinates, statistics, and the gradient of the scores of a tile."""

from __future__ import annotations

import math

from fusion.codegen.triton import source
from fusion.codegen.triton.expressions import Level, Writer, number
from fusion.codegen.triton.forward import KernelText, place_in_list, place_of, signature
from fusion.codegen.triton.gradients import UPSTREAM_ROW, UPSTREAM_WEIGHT, Captured, Gradients, gradients_of
from fusion.codegen.triton.key_loop import DTYPES, LOG2E
from fusion.codegen.triton.matrices import Matrix, sum_of
from fusion.codegen.triton.panels import padded
from fusion.codegen.triton.programs import LARGEST
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
        known |= {I: "i", J: "j", C: "c", E: "e", SCORE: "s"}
        known |= {UPSTREAM: "dx", UPSTREAM_WEIGHT: "dw", UPSTREAM_ROW: "dsink"}
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

    def within(self) -> str:
        """The rest of a load of a row of V's width."""
        return "" if padded(self.d_v) == self.d_v else f", mask=e < {self.d_v}, other=0.0"

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


def dead_limit(spec: AttentionSpec) -> str:
    """Maxima that are not above this belong to rows without a live key."""
    assert spec.mask is not None
    fill = spec.mask.fill
    return number(max(fill / 2, -LARGEST / 2)) if math.isfinite(fill) else 'float("-inf")'


def any_dead(spec: AttentionSpec) -> str:
    """1 where one of the maxima of a column of rows belongs to a row without a live key, else 0."""
    return f"tl.max(tl.max(((row_max > {dead_limit(spec)}) == 0).to(tl.int32), 1), 0)"
