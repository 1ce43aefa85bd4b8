"""Reads of a matrix (rows along one coordinate, columns along another) from a tensor of any strides through an index
map.

An offset is a sum of monomials; each is computed where it changes least often: with the block, down the rows, along the
columns. Along the keys it moves by a multiple of a stride per tile, so that the pointers of a tile are computed once
and only advanced.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.ir import integers
from fusion.ir.expr import Expr, J, coordinates

from .dtypes import DTYPES
from .expressions import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Texts of the parts of an operand's offset, in elements; empty where there is none."""

    operand: str
    block: str  # the same for the whole block
    advance: str  # factor of the tile's first key, where rows are keys at regular distances
    rows: str  # changes down the rows only
    columns: str  # along the columns only
    both: str  # in both

    @property
    def pointers(self) -> str:
        """Pointers to the elements, all parts of the offset added up."""
        return sum_of(f"{self.operand}_ptr", self.block, self.rows, self.columns, self.both)


def matrix(
    writer: Writer,
    operand: int,
    index: tuple[Expr, ...],
    row: Expr,
    column: Expr,
    *,
    name: str = "",
    moving: bool = True,
) -> Matrix:
    """Offset of an operand's element at `index`, by parts. `writer` knows the coordinates as columns and rows of a
    tile."""
    name = name or writer.operand(operand)
    parts: dict[str, list[str]] = {key: [] for key in ("block", "advance", "rows", "columns", "both")}
    for dim, expr in enumerate(index):
        stride = f"{name}_stride_{dim}"
        split = _split(expr, row.name, column.name)
        steps = integers.linear(split["rows"], row) if row is J and moving else None
        if steps is not None and not coordinates(steps[0]) & {"i", "j"} and not coordinates(steps[1]) & {"i", "j"}:
            factor = "" if steps[0] is integers.integer(1) else f" * {brackets(writer.value(steps[0]))}"
            if steps[0] is not integers.integer(0):
                parts["advance"].append(f"{stride}{factor}")
                parts["rows"].append(f"tl.cast(tl.arange(0, KEYS)[:, None], tl.int64) * {stride}{factor}")
            split["rows"] = integers.integer(0)
        for key, part in split.items():
            if part is not integers.integer(0):
                parts[key].append(f"tl.cast({writer.value(part)}, tl.int64) * {stride}")
    return Matrix(operand=name, **{key: " + ".join(texts) for key, texts in parts.items()})


def made(name: str, value: Expr, writer: Writer) -> str:
    """Statement that computes a tile of K or V from the stored one; zeros where there are no elements."""
    limits = " & ".join([writer.mask, *(f"({limit})" for limit in writer.limits.values())])
    return f"{name} = tl.where({limits}, {writer.value(value)}, 0.0).to({DTYPES[writer.spec.dtype]})"


def brackets(text: str) -> str:
    """Text that can be multiplied."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def _split(expr: Expr, row: str, column: str) -> dict[str, Expr]:
    groups: dict[str, dict] = {key: {} for key in ("block", "rows", "columns", "both")}
    for monomial, coefficient in integers.terms(expr).items():
        names = {name for atom in monomial for name in coordinates(atom)}
        key = {(False, False): "block", (True, False): "rows", (False, True): "columns", (True, True): "both"}
        groups[key[row in names, column in names]][monomial] = coefficient
    return {key: integers.from_terms(terms) for key, terms in groups.items()}


def accumulation(total: str, left: str, right: str, dtype: str, factor: str = "1.0") -> str:
    """Statement that adds left @ right to total * factor; of narrow dtypes to total, which has to be multiplied before.

    A float32 product would add its terms to the total one by one, so that each is rounded to the total's last place,
    and the error would grow with the root of their number. A tile is summed on its own, and added with one rounding:
    as a `tl.fma`, since Triton makes a product that starts with the total of a plain sum."""
    if dtype != "float32":
        return f"{total} = tl.dot({left}, {right}, {total}, input_precision=PRECISION)"
    return f"{total} = tl.fma({total}, {factor}, tl.dot({left}, {right}, input_precision=PRECISION))"


def sum_of(*parts: str) -> str:
    """The parts that are not empty, added up."""
    return " + ".join(part for part in parts if part)
