"""`torch.ops.fusion.tile_map`: the pass over a mask's data that finds its live tiles.

Predicates of the query alone or of the key alone are evaluated element by element and then pooled over cells.
Predicates of both are bounded by interval arithmetic over cells; of a mask tensor [.., N_q, N_k] the least and the
greatest value in each cell are taken, the only step that reads N_q x N_k elements. On a CPU a few rows of cells are
sampled before that step: a mask in which they show next to nothing to skip (a random one, say) is not read any further.
On a GPU no decision depends on data, so that the host never waits, and the pass can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusion.ir.expr import Expr, Kind, coordinates, loads
from fusion.ir.ops import evaluate
from fusion.ir.primitives import PRIMITIVES
from fusion.ir.results import size_value
from fusion.ir.tile_map import CELL_KEYS, CELL_ROWS, MapSpec
from fusion.ir.transfer import Range
from fusion.planning.pays import SAMPLES, WORTH_SAMPLING

INT64 = torch.iinfo(torch.int64)
WORTH_READING = 1 / 16  # share of the cells looked at that need no mask or no work


def tile_map(operands: Sequence[Tensor], sizes: Sequence[int], spec: str) -> Tensor:
    """The table of `fusion.ir.tile_map`, int32, for mask data in `operands`."""
    parsed = MapSpec.from_json(spec)
    known = dict(zip(parsed.sizes, sizes, strict=True))
    *batch, lines, columns, _ = parsed.shape(known)
    n_q = size_value(parsed.n_q, known)
    table = torch.zeros([*batch, lines, columns, 2], dtype=torch.int32, device=operands[0].device)
    if 0 in batch or lines == 1 or columns == 1:
        return table
    codes = _cells(parsed, operands, known, n_q)
    if codes is None:  # all are live and none is full: r * c cells before cell (r, c)
        counts = torch.arange(lines, dtype=torch.int32)[:, None] * torch.arange(columns, dtype=torch.int32)
        return counts[:, :, None].expand(*batch, lines, columns, 2).contiguous()
    codes = codes.expand(*batch, lines - 1, columns - 1, 2)
    table[..., 1:, 1:, :] = codes.to(torch.int32).cumsum(-3, dtype=torch.int32).cumsum(-2, dtype=torch.int32)
    return table


def _cells(spec: MapSpec, operands: Sequence[Tensor], sizes: dict[str, int], n_q: int) -> Tensor | None:
    """Codes of `Cells`; None where a sample of the rows of cells shows that next to nothing can be skipped."""
    dense = [part for part in loads(spec.live, spec.full) if {"i", "j"} <= coordinates(part)]
    elements = sum(operands[part.operand].numel() for part in dense)
    if operands[0].device.type == "cpu" and elements >= WORTH_SAMPLING and n_q >= 4 * SAMPLES * CELL_ROWS:
        chosen = torch.arange(SAMPLES) * (n_q // CELL_ROWS - 1) // (SAMPLES - 1) * CELL_ROWS
        seen = Cells(spec, operands, sizes, (chosen[:, None] + torch.arange(CELL_ROWS)).flatten()).codes()
        if int(seen.sum()) > (1 - WORTH_READING / 2) * seen.numel():
            return None
    return Cells(spec, operands, sizes).codes()


class Cells:
    """Bounds over the cells of all queries, or of these rows: [b.., rows, keys], or 1 where a bound does not vary."""

    def __init__(self, spec: MapSpec, operands: Sequence[Tensor], sizes: dict[str, int], rows: Tensor | None = None):
        self.spec, self.operands, self.sizes, self.rows = spec, operands, sizes, rows
        self.rank = len(spec.batch) + 2
        self.device = operands[0].device if operands else torch.device("cpu")
        self.n_q, self.n_k = size_value(spec.n_q, sizes), size_value(spec.n_k, sizes)
        self._memo: dict[Expr, Range] = {}

    def codes(self) -> Tensor:
        """[b.., rows of cells, columns of cells, 2]: whether each cell is live, and whether it needs the mask."""
        live, full = self.interval(self.spec.live).high, self.interval(self.spec.full).low.logical_not()
        return torch.stack(torch.broadcast_tensors(live, full), -1)

    def _axis(self, name: str) -> int:
        return {"i": self.rank - 2, "j": self.rank - 1}[name] if name in "ij" else int(name[1:])

    def _coordinate(self, name: str, device: torch.device) -> Tensor:
        """Values of a coordinate, along its own axis."""
        axis = self._axis(name)
        if name == "i" and self.rows is not None:
            values = self.rows
        else:
            values = torch.arange(self._extent_of(name), device=device)
        return values.reshape([-1 if k == axis else 1 for k in range(self.rank)])

    def _extent_of(self, name: str) -> int:
        sizes = {"i": self.n_q, "j": self.n_k}
        return sizes[name] if name in sizes else size_value(self.spec.batch[self._axis(name)], self.sizes)

    def _leaf(self, part: Expr) -> Tensor | Callable[..., Tensor]:
        if part.op == "coord":
            return self._coordinate(part.name, self.device)
        if part.op == "size":
            return self._constant(self.sizes[part.name], torch.int64)
        tensor = self.operands[part.operand]
        # Not `tensor[index]`: for an index without dimensions the host would wait for the device.
        return lambda *index: _widened(torch.ops.aten.index.Tensor(tensor, index))

    def _constant(self, value: float, dtype: torch.dtype) -> Tensor:
        """Number where the data is: one on the host that gets dimensions combines with no tensor of another device."""
        return torch.full((), value, dtype=dtype, device=self.device)

    def _on_host(self, part: Expr) -> Tensor:
        """Value of an index that loads nothing, on the host."""
        if part.op == "coord":
            return self._coordinate(part.name, torch.device("cpu"))
        return torch.tensor(self.sizes[part.name])

    def _pooled(self, values: Tensor, largest: bool, done: Sequence[int] = ()) -> Tensor:
        """Least or greatest values over cells, along axes that are not 1 or `done`."""
        for axis, size in ((self.rank - 2, CELL_ROWS), (self.rank - 1, CELL_KEYS)):
            if values.shape[axis] > 1 and axis not in done:
                values = _pool(values, axis, size, largest)
        return values

    def interval(self, expr: Expr) -> Range:
        result = self._memo.get(expr)
        if result is None:
            result = self._memo[expr] = self._interval(expr)
        return result

    def _interval(self, expr: Expr) -> Range:
        if not {"i", "j"} <= coordinates(expr):
            values = evaluate(expr, self._leaf, torch.float64, self._constant)
            values = values.reshape([1] * (self.rank - values.dim()) + list(values.shape))
            return Range(self._pooled(values, False), self._pooled(values, True))
        if expr.op == "load":
            return self._dense(expr)
        parts = [self.interval(arg) for arg in expr.args]
        return functools.reduce(functools.partial(_applied, expr), parts[2:], _applied(expr, *parts[:2]))

    def _dense(self, expr: Expr) -> Range:
        """Least and greatest values of a tensor over cells."""
        tensor, pooled = self._view(expr)
        read = _widened
        if expr.kind is Kind.BOOL:  # as bytes: their extremes are found with vectors
            read = Tensor.bool
            tensor = tensor.view(torch.uint8) if tensor.dtype is torch.bool else (tensor != 0).view(torch.uint8)
        low, high = (read(self._pooled(tensor, largest, pooled)) for largest in (False, True))
        return Range(low, high)

    def _view(self, expr: Expr) -> tuple[Tensor, list[int]]:
        """Tensor of a load with its dimensions at their coordinates' axes, and those axes along which it has one
        element per cell. Copies only where an index is not a coordinate plus a constant."""
        tensor = self.operands[expr.operand]
        axes: list[int] = []
        pooled: list[int] = []
        for index in expr.args:
            names = coordinates(index)
            dim = len(axes)
            if not names:
                tensor = tensor.select(dim, int(evaluate(index, self._on_host)))
                continue
            name = next(iter(names))
            if index.op == "coord" and (name != "i" or self.rows is None):
                tensor = tensor.narrow(dim, 0, self._extent_of(name))
                axes.append(self._axis(name))
                continue
            at = evaluate(index, self._on_host).flatten()
            size = {"i": CELL_ROWS, "j": CELL_KEYS}.get(name, 1)
            stride = 1
            if size > 1 and bool((at == at[torch.arange(len(at)) // size * size]).all()):
                at, stride = at[::size], size
                pooled.append(self._axis(name))
            if len(at) == 1 or bool((at[1:] - at[:-1] == 1).all()):
                tensor = tensor.narrow(dim, int(at[0]), len(at))
            else:  # computed there again: nothing is copied from the host
                if self.device.type != "cpu":
                    at = evaluate(index, self._leaf, constant=self._constant).flatten()[::stride]
                tensor = tensor.index_select(dim, at)
            axes.append(self._axis(name))
        order = sorted(range(len(axes)), key=axes.__getitem__)
        tensor = tensor.permute(order)
        for axis in range(self.rank):
            if axis not in axes:
                tensor = tensor.unsqueeze(axis)
        return tensor, pooled


def _applied(expr: Expr, *parts: Range) -> Range:
    """Range of an operation's result. Integers near the ends of 64 bits may wrap around, to any value."""
    transfer = PRIMITIVES[expr.op].transfer
    result = transfer(*parts)
    if expr.kind is not Kind.INT:
        return result
    exact = transfer(*(Range(part.low.double(), part.high.double()) for part in parts))
    wraps = (exact.low < -(2.0**62)) | (exact.high > 2.0**62)
    return Range(result.low.masked_fill(wraps, INT64.min), result.high.masked_fill(wraps, INT64.max))


def _widened(values: Tensor) -> Tensor:
    """Values in the dtype that kernels convert an element to: integers as int64."""
    if values.dtype is torch.bool:
        return values
    return values.to(torch.float64 if values.is_floating_point() else torch.int64)


def _pool(values: Tensor, axis: int, size: int, largest: bool) -> Tensor:
    """The greatest or least of every `size` consecutive values; the last cell may be smaller."""
    reduce = torch.amax if largest else torch.amin
    whole = values.shape[axis] // size
    parts = []
    if whole:
        parts.append(reduce(values.narrow(axis, 0, whole * size).unflatten(axis, (whole, size)), axis + 1))
    if values.shape[axis] % size:
        parts.append(reduce(values.narrow(axis, whole * size, values.shape[axis] - whole * size), axis, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
