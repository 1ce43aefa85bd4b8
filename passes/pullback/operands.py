"""Tensors that the operands of a product are read from.

The search passes views, copies and constant scales, and the conversion of a cache's stored rows to the operand
(`caches`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from fusion.ir.expr import ONE, C, Expr, const, coordinates
from fusion.ir.spec import Normalizer
from fusion.lowering.numbers import is_moderate
from fusion.refusals import Reason

from .. import marks, nodes
from ..nodes import Unsupported
from ..trace.aliases import changes
from .caches import behind_cache
from .contractions import strip_scale
from .views import Index, linear_in

if TYPE_CHECKING:
    from .pullback import PullBack

_STORED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes all of whose values every dtype of products holds exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One operand of a product: the tensor it is read from, the index in each of its dimensions, the dtype in which it
    is multiplied, which may differ from the tensor's, and the multiplied value where that is not the element."""

    node: Node
    index: Index
    dtype: torch.dtype
    value: Expr | None = None


def is_float8(dtype: torch.dtype) -> bool:
    """Whether values of a dtype are floats of one byte, of any format."""
    return dtype.is_floating_point and dtype.itemsize == 1


def mark_stored(graph: Graph, reads: Callable[[torch.dtype, torch.device], bool]) -> None:
    """Set `marks.stored` on tensors that attentions may read in their narrow dtype. reads: whether kernels on a device
    can. Tensors with a gradient are left out: it would be that of the widened copy, rounded."""
    for node in graph.nodes:
        if nodes.is_tensor(node) and nodes.dtype(node) in _STORED and not marks.requires_grad(node):
            marks.stored.set(node, reads(nodes.dtype(node), nodes.fake(node).device))


def locate(
    walk: PullBack,
    here: Node,
    index: Index,
    row: Expr,
    column: Expr,
    extent: Expr,
    accept: Callable[[Expr], bool] = lambda scale: True,
) -> tuple[Access, Expr]:
    """(the tensor that an operand of a product is read from, the scale that was stripped). Loads in its index and value
    are numbered as those of `walk` are.

    Goes no further than the index stays linear in `row` and `column` (< extent): a window partition, say, is read from
    the tensor that it computes. accept: whether the caller can apply the scale of a stored operand.
    """
    bounds, dtype = walk.bounds | {column: extent}, nodes.dtype(here)
    cached: Any = None
    cached = behind_cache(walk, here, index, row, column, extent, accept)
    if cached is not None and not changes(cached.passed, walk.anchor):
        walk.interior |= dict.fromkeys(cached.passed)
        walk.scales |= cached.scales
        return Access(node=cached.node, index=cached.index, dtype=dtype, value=cached.value), cached.scale
    access, scale, access_scale = None, 1.0, 1.0
    while True:
        if linear_in(index, row, column):
            access, access_scale = Access(node=here, index=index, dtype=dtype), scale
        stripped, scaled = _without_scale(here, scale) if column is C else (here, scale)
        if stripped is not here and not changes(passed := _between(here, stripped), walk.anchor):
            walk.interior |= dict.fromkeys(passed)
            here, scale = stripped, scaled
            continue
        if (moved := walk.step(here, index, bounds)) is None:
            break
        walk.interior[here] = None
        here, index = moved
    if access is None:
        raise Unsupported(
            Reason.LAYOUT, "an operand of the product is indexed in a way that is not linear in its row and column"
        )
    return access, const(access_scale)


def _without_scale(here: Node, scale: float) -> tuple[Node, float]:
    """Node without constant factors, and `scale` times these; the node itself where that is far from 1."""
    if marks.mutations(here) or marks.attention_root(here):
        return here, scale
    stripped, factor = strip_scale(here)
    return (stripped, scale * factor) if is_moderate(scale * factor) else (here, scale)


def _between(here: Node, origin: Node) -> list[Node]:
    """The nodes from here down to an origin that a chain of scales leads to, without it."""
    passed = []
    while here is not origin:
        passed.append(here)
        here = next(arg for arg in here.args if nodes.is_tensor(arg))  # type: ignore[assignment]
    return passed


def is_row_scale(scale: Expr, normalizer: Normalizer, trained: bool) -> bool:
    """Whether a scale of V is one of the rows of the output: the same for all keys. (There are no kernels for the
    gradient of other row scales than one over the sum, nor for row scales without a sum.)"""
    return not trained and normalizer is not Normalizer.NONE and "j" not in coordinates(scale)


def scale_of_values(here: Node, normalizer: Normalizer, trained: bool) -> Callable[[Expr], bool]:
    """`accept` for V. A scale that is not one of rows multiplies the weights, and float16 holds small ones badly."""
    narrow = nodes.dtype(here) is torch.float16
    return lambda scale: scale is ONE or not narrow or is_row_scale(scale, normalizer, trained)
