"""Sizes at which a kernel is tried, small ones off the edges of its blocks that the spec admits, and made-up operands.

Operands fulfil all contracts of the spec: they are as large as its indices need, positions lie within the dimension
that they index, and a tile map is that of the mask.

Scores rise from key to key in some rows, by little or by much, and fall in others, so that the largest one occurs
early, late, and again and again. Masks that are data leave some rows no key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fusion.ir.expr import HEAD, C, E, Expr, I, J, Kind, coord, coordinates, load, loads, walk
from fusion.ir.ops import conjuncts, evaluate
from fusion.ir.results import extents_function, leaves, size_value
from fusion.ir.spec import AttentionSpec
from fusion.ir.tile_map import CELL_KEYS, CELL_ROWS, HARD_BIAS

from ..emitter import Edges

LARGEST = 1 << 23
"""Elements of an operand of a trial, at most."""
RISE = 8.0
"""By how much scores rise over the keys, where they are divided by the root of the head dimension: kernels rescale
their sums after a few units, and let a maximum be stale before that."""
SLOPES = (1.0, 0.0, -1.0, 0.25)
"""Offsets of the rows in turn, in units of RISE."""
_OF_TILES = ("tile_live", "tile_mixed")


class NotMade(Exception):
    """The reason why operands cannot be made up."""


class Operands:
    """Operands of one call. sizes: by name. positive: whether the tensors beside Q, K and V hold positive numbers
    alone: divisors and arguments of roots mean nothing otherwise. largest: elements of an operand, at most."""

    def __init__(
        self,
        spec: AttentionSpec,
        sizes: Mapping[str, int],
        seed: int,
        positive: bool = False,
        largest: float = LARGEST,
    ):
        self.spec, self.sizes, self.positive, self.largest = spec, sizes, positive, largest
        self.draw = torch.Generator().manual_seed(seed)
        self.extents = {coord(f"b{axis}"): size_value(extent, sizes) for axis, extent in enumerate(spec.batch)}
        for coordinate, extent in ((I, spec.n_q), (J, spec.n_k), (C, spec.d), (E, spec.d_v)):
            self.extents[coordinate] = size_value(extent, sizes)
        if spec.mixing is not None:
            self.extents[HEAD] = size_value(spec.batch[spec.mixing.axis], sizes)
        names = list(self.extents)
        self.grid = {c: torch.arange(n).view([-1 if c is d else 1 for d in names]) for c, n in self.extents.items()}
        self.grid |= {coord("i0"): self.grid[I], coord("i1"): self.grid[I]}
        mask = () if spec.mask is None else [getattr(spec.mask, name) for name in _OF_TILES]
        of_tiles = [part for expr in mask if expr is not None for part in walk(expr)]
        whole = [load(number, index, Kind.FLOAT) for number, index in enumerate((spec.q, spec.k, spec.v))]
        self.map = next((part for part in of_tiles if part.op == "load"), None)
        exprs = (expr for expr in spec.expressions() if expr not in mask)
        self.reads: dict[int, list[Expr]] = {number: [] for number in range(len(spec.operands))}
        for read in loads(*whole, *exprs):
            self.reads[read.operand].append(read)
        self.indices = {part.operand for reads in self.reads.values() for r in reads for part in loads(*r.args)}
        self.made: dict[int, Tensor] = {}

    def tensors(self) -> list[Tensor]:
        """Operands in order. Raises NotMade."""
        count = len(self.spec.operands)
        order = sorted(range(count), key=lambda number: self.map is not None and number == self.map.operand)
        for number in order:
            self.tensor(number)
        self._raise_scores()
        return [self.made[number] for number in range(count)]

    def tensor(self, number: int) -> Tensor:
        if number not in self.made:
            if self.map is not None and number == self.map.operand:
                self.made[number] = self._tile_map(self.map)
            else:
                shape = self._shape(number)
                if math.prod(shape) > self.largest:
                    raise NotMade(f"an operand of the shape {shape} is too large: {self.spec.operands[number].name}")
                self.made[number] = self._values(number, shape)
        return self.made[number]

    def value(self, expr: Expr) -> Tensor:
        """Values of an expression at every place of the grid that it depends on."""
        return torch.as_tensor(evaluate(expr, leaves(self.sizes, self.grid, self._element)))

    def _element(self, part: Expr):
        tensor = self.tensor(part.operand)
        wide = tensor.double() if tensor.is_floating_point() else tensor
        wide = wide.to(torch.int64) if part.kind is Kind.INT else wide
        return (lambda *index: wide[index]) if part.args else wide

    def _shape(self, number: int) -> list[int]:
        """Smallest shape with all indices that the spec uses."""
        shape = [1] * self.spec.operands[number].rank
        for read in self.reads[number]:
            for dim, index in enumerate(read.args):
                places = self.value(index)
                if places.numel() and int(places.min()) < 0:
                    raise NotMade(f"an operand is read before its start: {self.spec.operands[number].name}")
                shape[dim] = max(shape[dim], 1 + int(places.max())) if places.numel() else shape[dim]
        return shape

    def _values(self, number: int, shape: list[int]) -> Tensor:
        operand = self.spec.operands[number]
        if operand.kind is Kind.BOOL:
            return self._mask(shape)
        if operand.kind is Kind.INT:
            return self._integers(number, shape).to(operand.torch_dtype)
        made = torch.randn(shape, generator=self.draw, dtype=torch.float32)
        stored = any(o.kind is Kind.INT for o in self.spec.operands[:3])
        if number > 2 and (self.positive or self._scales(number)):
            made = 0.5 + torch.rand(shape, generator=self.draw, dtype=torch.float32)
            made = made / 64 if stored and self._scales(number) else made
        if self.spec.mask is not None and any(x.operand == number for x in loads(self.spec.mask.live)):
            made = torch.zeros(shape, dtype=torch.float32).masked_fill(~self._mask(shape), 10 * HARD_BIAS)
            made = made.clamp(min=torch.finfo(operand.torch_dtype).min)
        return made.to(operand.torch_dtype)

    def _scales(self, number: int) -> bool:
        """Whether stored numbers are scaled by an operand."""
        return any(x.operand == number for value in self.spec.values if value is not None for x in loads(value))

    def _mask(self, shape: list[int]) -> Tensor:
        """Booleans: the first half of every other row is false, and all of every fifth."""
        made = torch.rand(shape, generator=self.draw, dtype=torch.float32) < 0.8
        if shape and len(shape) > 1:
            first = torch.arange(shape[-1]) < shape[-1] // 2
            rows = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1)
            made &= ~((rows % 2 == 1) & first) & (rows % 5 != 4)
        return made

    def _integers(self, number: int, shape: list[int]) -> Tensor:
        count = math.prod(shape)
        limits = torch.iinfo(self.spec.operands[number].torch_dtype)
        if number < 3:
            return torch.randint(limits.min, limits.max + 1, shape, generator=self.draw)
        if number in self.indices:
            return torch.randint(0, max(1, min(count, 97, limits.max + 1)), shape, generator=self.draw)
        if (side := self._bound_of_keys(number)) is not None:
            first, last = (0, self.extents[J] // 2) if side == "low" else (self.extents[J] // 2, self.extents[J] + 1)
            bounds = torch.randint(first, min(last, limits.max) + 1, shape, generator=self.draw)
            bounds.view(-1)[3::7] = self.extents[J] if side == "low" else 0  # rows without a live key
            return bounds
        if any({"i", "j"} & coordinates(read) for read in self.reads[number]):
            return torch.randint(0, 3, shape, generator=self.draw).sort(-1).values
        lengths = torch.randint(0, min(self.extents[J], limits.max) + 1, shape, generator=self.draw)
        lengths.view(-1)[1:2] = 0  # which may leave an element of the batch no key
        return lengths

    def _bound_of_keys(self, number: int) -> str | None:
        """Whether an operand holds for each row the first key that it sees ("low"), or the key where that ends."""
        for part in conjuncts(self.spec.mask.live) if self.spec.mask is not None else ():
            for low, high, side in ((0, 1, "low"), (1, 0, "high")) if part.op in ("ile", "ilt") else ():
                bound, key = part.args[low], part.args[high]
                if "j" in coordinates(key) and any(x.operand == number for x in loads(bound)) and not loads(key):
                    if {"i"} == coordinates(bound):
                        return side
        return None

    def _raise_scores(self) -> None:
        """Set the first column of Q to the slope of each row, and that of K to rising numbers."""
        (q, k), rises = (self.made[0], self.made[1]), RISE * self.extents[C] ** 0.5
        if not (q.is_floating_point() and k.is_floating_point()) or self.spec.operands[0] is self.spec.operands[1]:
            return
        for tensor, index, row in ((q, self.spec.q, I), (k, self.spec.k, J)):
            rows = next((dim for dim, part in enumerate(index) if row.name in coordinates(part)), None)
            column = next((dim for dim, part in enumerate(index) if part is C), None)
            if rows is None or column is None or rows == column:
                return
            count = tensor.shape[rows]
            ends = (
                torch.linspace(0.0, rises, count, dtype=torch.float32)
                if row is J
                else torch.tensor(SLOPES, dtype=torch.float32).repeat(count // 4 + 1)[:count]
            )
            first = tensor.select(column, 0)
            shape = [-1 if dim == rows - (rows > column) else 1 for dim in range(first.dim())]
            first.copy_(ends.view(shape).expand(first.shape) + 0.1 * first.float())

    def _tile_map(self, read: Expr) -> Tensor:
        """Table in the form of `fusion.ir.tile_map`, from the mask's predicates for each score."""
        assert self.spec.mask is not None
        parts = conjuncts(self.spec.mask.maybe_live)
        live: Tensor = torch.ones(1, dtype=torch.bool)
        for part in [p for p in parts if loads(p)] or parts:
            live = live & self.value(part)
        names = [*self.spec.axes, I, J]
        if live.dim() > 1:
            live = live.view(live.shape[: len(names)]).expand([self.extents[c] for c in names])
        *batch, line, _, _ = read.args
        over = [axis for axis, c in enumerate(names[:-2]) if c not in batch]
        bias = any(x.kind is Kind.FLOAT for x in loads(self.spec.mask.live))
        counts = []
        for cells in (live, live & (not bias)):
            keep = cells.any(over, keepdim=True) if cells is live else cells.all(over, keepdim=True)
            counts.append(keep.squeeze(over) if over else keep)
        rows = bool(coordinates(line))
        result = torch.stack([_counted(x, rows, any_) for x, any_ in zip(counts, (True, False), strict=True)], -1)
        return result.to(torch.int32)


def _counted(cells: Tensor, rows: bool, live: bool) -> Tensor:
    """[.., i, j] -> [.., lines + 1, columns + 1]: cells before each corner with a live score, or one that is not."""
    marked = cells if live else ~cells
    marked = marked if rows else marked.any(-2, keepdim=True)
    for dim, size in ((-2, CELL_ROWS if rows else 1), (-1, CELL_KEYS)):
        marked = torch.stack([part.any(dim) for part in marked.split(size, dim)], dim)
    whole = torch.zeros([*marked.shape[:-2], marked.shape[-2] + 1, marked.shape[-1] + 1], dtype=torch.int64)
    whole[..., 1:, 1:] = marked.long().cumsum(-2).cumsum(-1)
    return whole


MOST_SCORES = 1 << 22
FEW = 2
"""Extent of the batch, where nothing depends on how many there are."""
MOST_HEADS = 16


def sizes_of_trials(spec: AttentionSpec, example: Sequence[int], edges: Edges) -> list[dict[str, int]]:
    """Values of `spec.sizes`, by name. example: those of the call that the kernel is built for, which hold for sizes
    other than those of the batch, the queries and the keys."""
    known = dict(zip(spec.sizes, example, strict=True))
    *batch, n_q, n_k, _, _ = extents_function(spec)(example)
    for axis, (extent, size) in enumerate(zip(spec.batch, batch, strict=True)):
        if extent.op == "size":
            known[extent.name] = min(size, _heads(spec, size) if axis == len(batch) - 1 else FEW)
    trials = []
    for rows, keys in ((edges.rows, 2 * edges.keys + 5), (edges.rows and min(edges.rows, 5), 13)):
        rows = n_q if rows is None else rows + 3 if rows > 5 else rows
        trials.append(_with_lengths(spec, known, rows, max(rows, keys)))
    calls = map(extents_function(spec), ([trial[name] for name in spec.sizes] for trial in trials))
    return [trial for trial, extents in zip(trials, calls, strict=True) if 0 < math.prod(extents[:-2]) <= MOST_SCORES]


def _with_lengths(spec: AttentionSpec, known: Mapping[str, int], rows: int, keys: int) -> dict[str, int]:
    """Sizes with so many queries and keys, where these are sizes without other uses."""
    sizes = dict(known)
    for extent, length in ((spec.n_q, rows), (spec.n_k, keys)):
        if extent.op == "size" and not any(extent in (other, *other.args) for other in spec.batch):
            sizes[extent.name] = length
    return sizes


def _heads(spec: AttentionSpec, heads: int) -> int:
    """Two groups of heads that share keys, or a few heads that all do."""
    group = spec.heads_per_key(heads)
    if group == heads:
        return 4
    return 2 * group if 2 * group <= MOST_HEADS else heads
