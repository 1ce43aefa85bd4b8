"""The tensors that the operands of a product are read from.

Besides views, copies and constant scales, an operand may be *stored* in a narrower dtype than the one that it is
multiplied in: a float8 cache of keys, `k8.to(q.dtype) * k_scale`. Such a cast is exact, so that it can be part of the
read, and the widened copy is never made. What the operand is multiplied by on the way, and is the same for all columns
of a row, is returned as a scale: of scores for Q and K, of weights or rows of the output for V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from fusion.ir import integers
from fusion.ir.expr import ONE, C, Expr, Kind, const, coordinates, walk
from fusion.ir.ops import apply
from fusion.ir.spec import Normalizer
from fusion.passes import casts, marks, nodes
from fusion.passes.contractions import strip_scale
from fusion.passes.nodes import Unsupported, packet, shape
from fusion.passes.views import Index, broadcast_index
from fusion.refusals import Ground

if TYPE_CHECKING:
    from fusion.passes.pullback import PullBack

aten = torch.ops.aten
CASTS = (aten.to, aten._to_copy, aten.type_as)
_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)
_STORED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes all of whose values every dtype of products holds exactly."""

_OPAQUE = (marks.mutations, marks.attention_root, marks.stop_gradient)
_MOST_STEPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One operand of a product: the tensor it is read from, the index in each of its dimensions, and the dtype in which
    it is multiplied, which may be wider than the tensor's."""

    node: Node
    index: Index
    dtype: torch.dtype


def is_float8(dtype: torch.dtype) -> bool:
    """Whether values of a dtype are floats of one byte, of any format."""
    return dtype.is_floating_point and dtype.itemsize == 1


def mark_stored(graph: Graph, reads: Callable[[torch.dtype, torch.device], bool]) -> None:
    """`marks.stored` on tensors that attentions may read in their narrow dtype. reads: whether kernels on a device can.

    Not on those whose gradient is asked for: it would be that of the widened copy, rounded.
    """
    for node in graph.nodes:
        if nodes.is_tensor(node) and nodes.dtype(node) in _STORED and not marks.requires_grad(node):
            marks.stored.set(node, reads(nodes.dtype(node), nodes.value(node).device))


def locate(
    walk: PullBack,
    here: Node,
    index: Index,
    row: Expr,
    column: Expr,
    extent: Expr,
    accept: Callable[[Expr], bool] = lambda scale: True,
) -> tuple[Access, Expr]:
    """(the tensor that an operand of a product is read from, the scale that was passed over).

    Goes no further than the index stays linear in `row` and `column` (< extent): a window partition, say, is read
    from the tensor that it makes. accept: whether the caller has a place for the scale of a stored operand.
    """
    bounds = walk.bounds | {column: extent}
    dtype = nodes.dtype(here)
    if (stored := _stored(walk, here, index, row, column, bounds)) is not None and accept(stored[1]):
        access, scale, passed = stored
        walk.interior |= dict.fromkeys(passed)
        return access, scale
    found, scale, found_scale = None, 1.0, 1.0
    while True:
        if _linear_in(index, row, column):
            found, found_scale = Access(node=here, index=index, dtype=dtype), scale
        opaque = marks.mutations(here) or marks.attention_root(here)
        stripped, factor = (here, 1.0) if opaque else strip_scale(here)
        if stripped is not here and column is C and not _changes(passed := _between(here, stripped), walk.anchor):
            walk.interior |= dict.fromkeys(passed)
            here, scale = stripped, scale * factor
            continue
        if (moved := walk.step(here, index, bounds)) is None:
            break
        walk.interior[here] = None
        here, index = moved
    if found is None:
        raise Unsupported(
            Ground.LAYOUT, "an operand of the product is indexed in a way that is not linear in its row and column"
        )
    return found, const(found_scale)


def _between(here: Node, origin: Node) -> list[Node]:
    """The nodes from here down to an origin that a chain of scales leads to, without it."""
    passed = []
    while here is not origin:
        passed.append(here)
        here = next(arg for arg in here.args if nodes.is_tensor(arg))  # type: ignore[assignment]
    return passed


def _changes(passed: Iterable[Node], anchor: Node | None) -> bool:
    """Whether what one of these nodes reads changes in place after it and before the product with V: the values that it
    made must then be read themselves."""
    read = ((node, parent) for node in passed for parent in node.all_input_nodes)
    later = (by for node, parent in read for by in marks.mutations(parent) if node < by)
    return any(anchor is None or by < anchor for by in later)


def scales_rows(scale: Expr, normalizer: Normalizer, trained: bool) -> bool:
    """Whether a scale of V is one of the rows of the output: the same for all keys. (There are no kernels for the
    gradient of other row scales than one over the sum, nor are there row scales without a sum.)"""
    return not trained and normalizer is not Normalizer.NONE and "j" not in coordinates(scale)


def scale_of_values(here: Node, normalizer: Normalizer, trained: bool) -> Callable[[Expr], bool]:
    """`accept` for V. A scale that is not one of rows multiplies the weights, and float16 holds small ones badly."""
    narrow = nodes.dtype(here) is torch.float16
    return lambda scale: scale is ONE or not narrow or scales_rows(scale, normalizer, trained)


@dataclass(slots=True, kw_only=True)
class _Path:
    """From an operand up to a stored tensor: nodes passed, and (op "fmul" or "div", factor, its index) on the way."""

    node: Node
    index: Index
    passed: list[Node]
    factors: list[tuple[str, Any, Index]]


def _stored(
    walk_: PullBack, here: Node, index: Index, row: Expr, column: Expr, bounds: integers.Bounds
) -> tuple[Access, Expr, list[Node]] | None:
    """The narrow tensor that an operand is the widened copy of, its scale, and the nodes passed; None if it is none."""
    dtype = nodes.dtype(here)
    if dtype not in _PRODUCTS:
        return None
    path = _path(walk_, here, index, bounds, column)
    if path is None:
        return None
    found: tuple[Node, Index, int] | None = None
    here, index, passed = path.node, path.index, list(path.passed)
    while True:
        if _linear_in(index, row, column):
            found = here, index, len(passed)
        if (moved := walk_.step(here, index, bounds)) is None:
            break
        passed.append(here)
        here, index = moved
    if found is None or _changes(passed[: found[2]], walk_.anchor):
        return None
    scale = ONE
    for op, factor, at in path.factors:
        value = walk_.value(factor, at) if isinstance(factor, Node) else const(float(factor))
        scale = apply(op, scale, casts.operand(value, Kind.FLOAT))
    if any(part.op in ("dot", "softmax", "reduce") for part in walk(scale)):
        return None
    return Access(node=found[0], index=found[1], dtype=dtype), scale, passed[: found[2]]


def _path(walk_: PullBack, here: Node, index: Index, bounds: integers.Bounds, column: Expr) -> _Path | None:
    """The way through views, casts between floats and factors free of `column`; nothing is evaluated on it."""
    stack = [_Path(node=here, index=index, passed=[], factors=[])]
    for _ in range(_MOST_STEPS):
        if not stack:
            return None
        path = stack.pop()
        here, index = path.node, path.index
        if marks.stored(here):
            return path
        if here.op != "call_function" or any(mark(here) for mark in _OPAQUE):
            continue
        if (moved := walk_.step(here, index, bounds)) is not None:
            stack.append(_Path(node=moved[0], index=moved[1], passed=[*path.passed, here], factors=path.factors))
        elif packet(here) in CASTS:
            origin = nodes.arguments(here)["self"]
            if nodes.dtype(origin).is_floating_point and _same_device(origin, here):
                stack.append(_Path(node=origin, index=index, passed=[*path.passed, here], factors=path.factors))
        else:
            for op, tensor, factor in _scaled(here):
                at = () if not isinstance(factor, Node) else broadcast_index(shape(here), shape(factor), index)
                if not any(column.name in coordinates(entry) for entry in at):
                    factors = [(op, factor, at), *path.factors]
                    stack.append(_Path(node=tensor, index=index, passed=[*path.passed, here], factors=factors))
    return None


def _scaled(here: Node) -> list[tuple[str, Node, Any]]:
    """(op, x, factor) for every way to read x * factor or x / factor, x as large as the result."""
    if packet(here) not in (aten.mul, aten.div) or here.kwargs or len(here.args) != 2:
        return []
    left, right = here.args
    pairs = [("fmul", left, right), ("fmul", right, left)] if packet(here) is aten.mul else [("div", left, right)]
    found = []
    for op, tensor, factor in pairs:
        factor = nodes.number(factor)
        if not (isinstance(tensor, Node) and nodes.is_tensor(tensor) and shape(tensor) == shape(here)):
            continue
        if isinstance(factor, Node):
            usable = nodes.is_tensor(factor) and _same_device(factor, here)
        else:
            usable = isinstance(factor, (int, float)) and not (op == "div" and factor == 0)
        if usable:
            found.append((op, tensor, factor))
    return found


def _same_device(one: Node, other: Node) -> bool:
    return nodes.value(one).device == nodes.value(other).device


def _linear_in(index: Index, row: Expr, column: Expr) -> bool:
    """Whether every entry is a constant times `row` plus a constant times `column` plus a function of the batch."""
    for entry in index:
        for atom in (row, column):
            parts = integers.linear(entry, atom)
            if parts is None or not parts[0].is_const:
                return False
            entry = parts[1]
        if coordinates(entry) & {"i", "j", "c", "e"}:
            return False
    return True
