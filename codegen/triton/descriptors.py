"""Reading tiles by tensor descriptors: the tensor memory accelerator of Hopper and later computes the addresses and
zeroes elements outside, from a description of the whole tensor that the host passes with the launch.

That frees registers (72 of 236 in the causal kernel for d = 128) and instructions. It wants an inner stride of 1, outer
ones of whole 16 bytes, and an index map that is a box: one dimension along the rows, one along the columns, the others
the same for the whole block. Other tensors are read by pointers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion.ir import integers
from fusion.ir.expr import C, E, Expr, I, coord, coordinates
from fusion.ir.spec import AttentionSpec
from fusion.lowering.numbers import magnitude
from fusion.planning.gpu_clocks import BY_KEYS, QUERIES

from .expressions import Writer
from .panels import Panel, panels

NOTHING = integers.integer(0)
MOST_DIMENSIONS = 5
UNIT = 16  # bytes of which the tensor's address and its outer strides must be multiples

READ = {QUERIES: {"k", "v"}, **dict.fromkeys(BY_KEYS, {"q", "do"})}  # what the loops of the backward kernels read


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A tensor whose tiles are boxes."""

    operand: int | None  # its number, None for the output's gradient
    name: str  # in the kernel, "q", "k", "v" or "do"
    dims: tuple[int, ...]  # of the tensor, without those that are not indexed, the columns' last
    index: tuple[Expr, ...]  # of a head's first element by these
    rows: int  # which of them counts queries or keys
    panels: tuple[Panel, ...]  # of the columns
    whole: bool  # whether the columns begin the dimension

    @property
    def size(self) -> str:
        """The constant with the number of rows of a tile."""
        return "KEYS" if self.name in ("k", "v") else "ROWS"

    def dtype(self, spec: AttentionSpec) -> str:
        return spec.out_dtype if self.operand is None else spec.operands[self.operand].dtype

    def parameter(self, panel: Panel) -> str:
        return f"{self.name}{panel.suffix}_tiles"

    def load(self, writer: Writer, panel: Panel, first: str) -> str:
        """Load of the tile of the rows from `first` on, [size, width]: zero where there are
        none."""
        starts = [_coordinate(writer, part) for part in self.index]
        starts[self.rows] = first
        if panel.start:
            starts[-1] = str(panel.start) if self.whole else f"{starts[-1]} + {panel.start}"
        return f"{self.parameter(panel)}.load([{', '.join(starts)}]).reshape([{self.size}, {panel.width}])"

    def fits(self, tensor: torch.Tensor) -> bool:
        *outer, inner = self._strides(tensor)
        size = tensor.element_size()
        return inner == 1 and tensor.data_ptr() % UNIT == 0 and all(s > 0 and s * size % UNIT == 0 for s in outer)

    def _strides(self, tensor: torch.Tensor) -> list[int]:
        """Strides of the dimensions; for dimensions of one element, where they may be anything, a valid one."""
        *outer, inner = self.dims
        return [*(tensor.stride(dim) if tensor.shape[dim] > 1 else UNIT for dim in outer), tensor.stride(inner)]

    def described(self, tensor: torch.Tensor, extent: int, size: int) -> dict[str, object]:
        """Descriptors for tiles of `size` rows of `extent`, by the names of their parameters."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape = [tensor.shape[dim] for dim in self.dims]
        shape[self.rows] = extent
        if self.whole:
            shape[-1] = self.panels[0].extent
        strides = self._strides(tensor)
        return {name: TensorDescriptor(tensor, shape, strides, block) for name, block in self.blocks(size).items()}

    def blocks(self, size: int) -> dict[str, list[int]]:
        """The shapes of tiles of `size` rows, by the names of their descriptors."""
        shapes = {}
        for panel in self.panels:
            block = [1] * len(self.dims)
            block[self.rows], block[-1] = size, panel.width
            shapes[self.parameter(panel)] = block
        return shapes


def boxes(spec: AttentionSpec, d: int, d_v: int) -> dict[str, Box]:
    """Q, K, V and the output's gradient, as far as their index maps are boxes, by their names in the kernels."""
    output = tuple(coord(name) for name in spec.output.dims)
    read = [(number, name, *spec.access(number)) for number, name in enumerate("qkv") if spec.values[number] is None]
    parts = {C: panels(d, "c"), E: panels(d_v, "e")}
    found = [_box(*each, parts[each[-1]]) for each in (*read, (None, "do", output, I, E))]
    return {box.name: box for box in found if box is not None}


def _box(
    operand: int | None, name: str, index: Sequence[Expr], row: Expr, column: Expr, parts: tuple[Panel, ...]
) -> Box | None:
    """row, column: their coordinates."""
    dims = [dim for dim, part in enumerate(index) if part is not NOTHING]
    along = [[dim for dim in dims if mark.name in coordinates(index[dim])] for mark in (row, column)]
    if any(len(found) != 1 for found in along) or along[0] == along[1] or len(dims) > MOST_DIMENSIONS:
        return None
    (rows,), (columns,) = along
    rest = integers.add(index[columns], integers.mul(-1, column))
    whole = rest is NOTHING
    padded = any(panel.inside for panel in parts)
    aligned = all(factor % UNIT == 0 for factor in integers.terms(rest).values())
    if index[rows] is not row or column.name in coordinates(rest) or not aligned or padded and not whole:
        return None
    dims = [*(dim for dim in dims if dim != columns), columns]
    starts = [NOTHING if dim == rows else rest if dim == columns else index[dim] for dim in dims]
    return Box(
        operand=operand,
        name=name,
        dims=tuple(dims),
        index=tuple(starts),
        rows=dims.index(rows),
        panels=parts,
        whole=whole,
    )


def _coordinate(writer: Writer, part: Expr) -> str:
    text = writer.value(part)
    return text if magnitude(part) < 2**31 else f"tl.cast({text}, tl.int32)"


def descriptors(
    found: Iterable[Box], tensors: Mapping[str, torch.Tensor], rows: tuple[int, int], keys: tuple[int, int]
) -> dict[str, object]:
    """Descriptors that the host passes to a launch, by the names of the parameters. rows, keys: their number, and that
    of a tile."""
    by_parameter: dict[str, object] = {}
    for box in found:
        by_parameter |= box.described(tensors[box.name], *(keys if box.size == "KEYS" else rows))
    return by_parameter
