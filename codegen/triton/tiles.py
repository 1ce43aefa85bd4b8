"""Common parts of kernels that recompute scores from the operands and the forward's statistics of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion.ir.expr import SCORE, C, E, Expr, I, J
from fusion.ir.spec import AttentionSpec, Normalizer

from . import source
from .dtypes import DTYPES, cast
from .expressions import OUTER_FIRST, Level, Writer
from .kernel import WrittenKernel
from .matrices import Matrix, made, matrix
from .panels import Panel, panels
from .stages import Visit, visit


class Tiles(WrittenKernel):
    """Coordinates, tiles of Q, K and V, and statistics of rows. outer: the coordinate that a program owns a block of:
    "i", or "j". Tiles are [outer, inner], `shape`; `length`: outer places of a block; `owned`, `visited`: which of the
    outer and of the inner places exist. known: names of other leaves of expressions."""

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, known: Mapping[Expr, str]):
        first = "i0" if self.outer == "i" else "first"
        super().__init__(spec, {I: "i", J: "j", C: "c", E: "e", SCORE: "s", OUTER_FIRST: first, **known})
        self.d, self.d_v, w = d, d_v, self.writer
        self.columns, self.values = panels(d, "c"), panels(d_v, "e")
        self.softmax = spec.normalizer is not Normalizer.NONE
        # Columns of a tile whose rows are the inner coordinate, for reading matrices.
        inside = {I: "row"} if self.inner == "i" else {J: "key"}
        self.inside = w.apart(self.known | inside, mask="key_ok")
        self.inside.lines[Level.BLOCK], self.inside.lines[Level.ROW] = w.lines[Level.BLOCK], w.lines[Level.ROW]
        self.dtype, by_rows = DTYPES[spec.dtype], self.outer == "i"
        self.length, self.shape = ("ROWS", "[ROWS, KEYS]") if by_rows else ("KEYS", "[KEYS, ROWS]")
        self.owned, self.visited = ("rows_ok", "j_ok") if by_rows else ("j_ok", "rows_ok")

    def visit(self, name: str, doc: str, body: str, state: Sequence[str]) -> Visit:
        return visit(name, doc, body, state=state, first=("start", "stop"), writer=self.writer)

    def decode(self, number_: str, extents: list[str], names: list[str]) -> list[str]:
        """Statements that split a program's number into coordinates, the last name fastest."""
        lines, rest = [], number_
        for name, extent in zip(names[::-1], extents[::-1], strict=True):
            lines += [f"{name} = {rest} % ({extent})", f"rest_{name} = {rest} // ({extent})"]
            rest = f"rest_{name}"
        return lines

    def key_block(self, extents: list[str], names: list[str], more: Sequence[str] = ()) -> list[str]:
        """Statements that locate the keys and the head that a program owns. more: behind the names of batch
        coordinates."""
        return [
            f"key_blocks = ({self.n_k} + KEYS - 1) // KEYS",
            "program = tl.program_id(0)",
            "first = program % key_blocks * KEYS",
            *self.decode("(program // key_blocks)", extents, names),
            *more,
            "j = (first + tl.arange(0, KEYS))[:, None]",
            f"j_ok = j < {self.n_k}",
        ]

    def tile_of_keys(self) -> list[str]:
        """Statements of the keys from `first` on, as rows and as columns."""
        return [
            "key = (first + tl.arange(0, KEYS))[:, None]",
            f"key_ok = key < {self.n_k}",
            "j = (first + tl.arange(0, KEYS))[None, :]",
            f"j_ok = j < {self.n_k}",
            *self.inside.lines[Level.TILE],
        ]

    def places(self) -> list[str]:
        """Statements of the columns of Q and K, and of V, by panels."""
        return [panel.numbers for panel in (*self.columns, *self.values)]

    def of_block(self, later: str) -> str:
        """`later`, after the statements of the block's columns and values that it uses."""
        lines = self.writer.lines
        return source.with_used([*self.places(), *lines[Level.BLOCK], *lines[Level.ROW]], later)

    def parts(self, writer: Writer, number: int, name: str = "") -> list[Matrix]:
        """Q, K or V, operand `number`, or its gradient of that name, by panels."""
        index, row, column = self.spec.access(number)
        found = []
        for panel in self.panels_of(number):
            at = writer.where({column: panel.column}) if panel.suffix else writer
            found.append(matrix(at, number, index, row, column, name=name, moving=False))
        return found

    def panels_of(self, number: int) -> tuple[Panel, ...]:
        """The panels of operand `number` (Q, K, V)."""
        return self.values if number == 2 else self.columns

    def read(self, number: int, parts: Sequence[Matrix], mask: str, bounded: bool = False) -> str:
        """Statements that read Q, K or V at its parts of offsets; bounded: with the mask only where tiles are cut
        off."""
        widened = cast(self.spec.operands[number].dtype, self.spec.dtype)
        lines = []
        for part, panel in zip(parts, self.panels_of(number), strict=True):
            to = f"{'qkv'[number]}{panel.suffix}"
            at, inside = f"{to}_at", panel.inside
            whole, cut = (load_where(to, at, limits, widened) for limits in ((inside,), (mask, inside)))
            lines += [f"{at} = {part.pointers}", source.by_mask(cut, whole) if bounded else cut]
        return source.block(*lines)

    def keys(self, writer: Writer, mask: str) -> str:
        """Statements that read a tile of K, or compute it from the stored one."""
        if self.spec.k_value is None:
            return self.read(1, self.parts(writer, 1), mask)
        lines = []
        for panel in self.columns:
            limits = {C.name: panel.inside} if panel.inside else {}
            at = writer.where({C: panel.column}, mask, limits)
            lines.append(made(f"k{panel.suffix}", self.spec.k_value, at))
        return source.block(*lines)

    def boxed(self, name: str, first: str) -> str:
        """Statements that read the tile of the rows from `first` on by descriptors, if they are used."""
        if (box := self.boxes.get(name)) is None:
            return ""
        widened = cast(box.dtype(self.spec), self.spec.dtype)
        return source.block(*(f"{name}{p.suffix} = {box.load(self.inside, p, first)}{widened}" for p in box.panels))

    def product(self, left: str, right: str, number: int) -> str:
        """left @ right^T over the columns of Q and K, or of V, as one expression."""
        text = ""
        for panel in self.panels_of(number):
            pair = f"{left}{panel.suffix}, tl.trans({right}{panel.suffix})"
            text = f"tl.dot({pair}{f', {text}' if text else ''}, input_precision=PRECISION)"
        return text

    def query_block(self) -> list[str]:
        """Statements that locate the rows and the head that a program owns: the last blocks first."""
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

    def plane(self, name: str, number: int) -> str:
        return f"{name} = tl.load({self.in_plane('statistics', number)})"

    def in_plane(self, tensor: str, number: int) -> str:
        """Pointer to the rows in a plane, from 1 on, of a tensor of numbers of rows."""
        planes = self.heads if number == 1 else f"{number} * {self.heads}"
        return f"{tensor}_ptr + tl.cast({planes}, tl.int64) * {self.n_q} + row_place"

    def bound(self, expr: Expr, lines: list[str]) -> str:
        """The value of an expression, after the statements that it needs."""
        text = self.writer.value(expr)
        lines += self.writer.take(Level.TILE)
        return text

    def statement(self, name: str, expr: Expr) -> str:
        """The statements of a value for each score of a tile under a name."""
        lines: list[str] = []
        text = source.spread(self.bound(expr, lines), self.shape)
        return source.block(*lines, f"{name} = {text}")

    def maximum(self) -> list[str]:
        """Statements that read row_max of the rows i, and locate their statistics."""
        return [
            f"row_place = tl.cast({self.place()}, tl.int64) * {self.n_q} + i",
            "row_max = tl.load(statistics_ptr + row_place)",
        ]


def load_where(name: str, at: str, limits: Sequence[str], cast: str) -> str:
    """Statement that loads the elements within the limits, of which empty ones do not restrict."""
    shown = [text for text in limits if text]
    shown = [f"({text})" for text in shown] if len(shown) > 1 else shown
    mask = f", mask={' & '.join(shown)}, other=0.0" if shown else ""
    return f"{name} = tl.load({at}{mask}){cast}"
