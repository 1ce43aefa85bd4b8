"""Index of a view's element in its input, computed by running the operation itself.

Views are run on a tensor without data: torch's own strides and offset then say which element is which. Operations that
copy elements along single dimensions (repeat, flip, roll) are run on the numbers of one dimension at a time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.ir.results import packed_strides
from fusion.passes.pullback import views
from fusion.torch_private.tensors import shares_storage

aten = torch.ops.aten
ALONG_DIMENSIONS = {aten.repeat, aten.tile, aten.repeat_interleave, aten.flip, aten.roll}
RESHAPES = {
    *views.RESHAPES, *views.EXPANSIONS, aten.permute, aten.transpose, aten.swapaxes, aten.swapdims, aten.t, aten.mT,
    aten.numpy_T, aten.adjoint, aten.movedim, aten.moveaxis, aten.unsqueeze, aten.squeeze, aten.slice, aten.narrow,
    aten.select, aten.unfold, aten.diagonal,
}  # fmt: skip

Index = tuple[Tensor, ...]


def number_of(index: Index, shape: Sequence[int]) -> Tensor:
    """The number of an element in a packed tensor."""
    return _sum([entry * stride for entry, stride in zip(index, packed_strides(shape), strict=True)])


def _sum(parts: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, parts) if parts else torch.zeros(1, dtype=torch.int64)


def of_view(run: Callable[[Tensor], Any], shape: Sequence[int], item: int | None) -> Callable[[Index], Index] | None:
    """Map from indices of a view to those of its input; None where the operation copies instead. run: the operation on
    a tensor of `shape`. item: the number of the result, where there are several."""
    base = torch.empty(tuple(shape), dtype=torch.float32, device="meta")
    result = run(base)
    result = result if item is None else operator.getitem(result, item)
    if not shares_storage(result, base) or result.dtype is not base.dtype:
        return None
    entries = [
        _entry(extent, stride, result.shape, result.stride(), result.storage_offset())
        for extent, stride in zip(shape, packed_strides(shape), strict=True)
    ]
    return lambda index: tuple(entry(index) for entry in entries)


def _entry(
    extent: int, stride: int, shape: Sequence[int], strides: Sequence[int], offset: int
) -> Callable[[Index], Tensor]:
    """Index along one dimension (its extent and stride) of a packed tensor, from indices of a view of it. Only the
    indices that it depends on are read: one that views broadcast would have the size of all others together."""
    whole = max(extent, 1) * stride
    terms = [(k, s) for k, s in enumerate(strides) if shape[k] > 1 and s % whole]
    offset %= whole
    if offset % stride + sum((shape[k] - 1) * s for k, s in terms if s % stride) < stride:  # carries nothing
        terms, offset = [(k, s // stride) for k, s in terms if s % stride == 0], offset // stride
        whole, stride = whole // stride, 1
    within = offset + sum((shape[k] - 1) * s for k, s in terms) < whole
    if within and (offset, stride) == (0, 1) and [s for _, s in terms] == [1]:
        return lambda index: index[terms[0][0]]

    def entry(index: Index) -> Tensor:
        number = _sum([index[k] * s for k, s in terms]) + offset
        place = torch.div(number, stride, rounding_mode="floor") if stride > 1 else number
        return place if within else place % max(extent, 1)

    return entry


def along_dimensions(run: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Callable[[Index], Index]:
    """Map from indices of the result to those of the input, for an operation that moves elements along each dimension
    separately."""
    tables = []
    for dim, extent in enumerate(shape):
        numbers = torch.arange(extent).view([-1 if k == dim else 1 for k in range(len(shape))])
        tables.append(_line(run(numbers), dim - len(shape)))

    def moved(index: Index) -> Index:
        last = index[len(index) - len(shape) :]
        return tuple(table[entry] for table, entry in zip(tables, last, strict=True))

    return moved


def _line(result: Tensor, dim: int) -> Tensor:
    """The elements of a result along one dimension, from the end, where all others are at 0."""
    for k in range(-result.dim(), 0):
        if k != dim:
            result = result.narrow(k, 0, 1)
    return result.flatten()
