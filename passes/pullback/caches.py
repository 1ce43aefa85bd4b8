"""Keys and values as caches store them: narrower than the dtype of the products, packed, in pages.

An operand `(cache[table].to(q.dtype) - zero) * scale` is read from the cache itself, not from the copy that the graph
would make of it: widening, unpacking, zero points, scales and the table become part of the read. Factors of the operand
that are the same for all columns of a row are returned as a scale: of scores for Q and K, of weights or rows of the
output for V. The rest is the element's value, an expression. If that is only a cast, the element is the stored one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fusion.ir.expr import ONE, Expr, J, coordinates, loads, rebuild, renumbered, walk
from fusion.ir.ops import apply
from fusion.ir.primitives import ROUNDED
from fusion.ir.reads import bytes_per_element

from .. import marks, nodes
from ..assumptions import are_plain
from ..nodes import Unsupported, packet
from . import indexing, pointwise, views
from .roundings import is_coarser
from .views import Index, linear_in

if TYPE_CHECKING:
    from .pullback import PullBack

aten = torch.ops.aten
_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)
_PACKED = (torch.int8, torch.uint8)
"""Integers all of which every dtype of products holds exactly."""
_READ = (*_PRODUCTS, *_PACKED, torch.int16, torch.int32, torch.int64, torch.bool)

_MOST_NODES = 64
_THROUGH = (*views.CASTS, aten.cat, aten.concat, aten.stack)
_MOST_BYTES = 1.25
"""Bytes that may be read through a table for one that a copy would have: scales and the table itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Tensor that an operand is read from.

    value: the operand's element as an expression; None where it is the stored element itself.
    scale: the factor of the products.
    scales: the tensors that the scale is read from.
    passed: the nodes between.
    """

    node: Node
    index: Index
    value: Expr | None
    scale: Expr
    scales: set[Node]
    passed: tuple[Node, ...]


def behind_cache(
    walk_: PullBack, here: Node, index: Index, row: Expr, column: Expr, extent: Expr, accept: Callable[[Expr], bool]
) -> Stored | None:
    """Stored tensor that an operand is the widened, unpacked or gathered copy of; None if there is none. accept:
    whether the caller can apply a scale."""
    if are_plain() or nodes.dtype(here) not in _PRODUCTS or not extent.is_const or not _leads_to_cache(here):
        return None
    inner = type(walk_)(walk_.bounds | {column: extent}, walk_.keys, walk_.anchor)
    inner.reads_tables = True
    try:
        operand = rebuild(inner.value(here, index), lambda part: _unrounded(part, nodes.dtype(here)))
    except Unsupported:
        return None
    unread = ("dot", "softmax", "reduce", "hash", *ROUNDED.values())
    if any(part.op in unread for part in walk(operand)) or _is_kept(inner, here):
        return None
    element, scale = _split(operand, column)
    if not accept(scale):
        element, scale = operand, ONE
    source = _Source(inner, element, here, row, column, extent)
    if not source.pays():
        return None
    access = source.access()
    node, index = inner.loaded[access.operand], tuple(_adopted(walk_, inner, entry) for entry in access.args)
    value = None if source.plain is not None else _adopted(walk_, inner, element)
    return Stored(
        node=node, index=index, value=value, scale=_adopted(walk_, inner, scale), passed=tuple(inner.interior),
        scales={inner.loaded[read.operand] for read in loads(scale)},
    )  # fmt: skip


def _adopted(walk_: PullBack, inner: PullBack, expr: Expr) -> Expr:
    """Expression of another walk, with its loads renumbered for this one."""
    return renumbered(expr, lambda old: walk_.number(inner.loaded[old], inner.tables.get(old)))


class _Source:
    """Tensors and expression behind an operand's element."""

    def __init__(self, inner: PullBack, element: Expr, here: Node, row: Expr, column: Expr, extent: Expr):
        self.inner, self.element, self.here = inner, element, here
        self.row, self.column, self.width = row, column, extent.integer
        inside = element.args[0] if element.op == "to_float" else element
        self.plain = inside if inside.op == "load" else None
        self.indirect = bool(loads(*(index for read in loads(element) for index in read.args)))

    def access(self) -> Expr:
        """Load of the tensor that most of the element's bytes come from."""
        if self.plain is not None:
            return self.plain
        indirect = {part for read in loads(self.element) for entry in read.args for part in loads(entry)}
        direct = [read for read in loads(self.element) if read not in indirect]
        return max(direct, key=lambda read: bytes_per_element(read, self._itemsize, self.column, self.width))

    def pays(self) -> bool:
        """Whether kernels can read it, and fewer bytes are read than from a copy."""
        sources = [self._node(read) for read in loads(self.element)]
        readable = all(marks.stored(node) or nodes.dtype(node) in _READ for node in sources)  # by every kernel
        if not readable or not {self.row.name, self.column.name} <= coordinates(self.element):
            return False
        trained = self.inner.anchor is not None and marks.requires_grad(self.inner.anchor)
        if self.plain is not None:
            node = self._node(self.plain)
            if not self.indirect:
                narrow = marks.stored(node) or nodes.dtype(node) in _PACKED and not trained
                return narrow and linear_in(self.plain.args, self.row, self.column)
            if not marks.stored(node) and nodes.dtype(node) not in (*_PRODUCTS, *_PACKED):
                return False
        read = bytes_per_element(self.element, self._itemsize, self.column, self.width)
        most = (_MOST_BYTES if self.indirect else 1.0) * nodes.dtype(self.here).itemsize
        looked_up = loads(*(entry for read in loads(self.element) for entry in read.args))
        columns_are_free = not any(self.column.name in coordinates(part) for part in looked_up)
        return not trained and self.row is J and read <= most and columns_are_free

    def _node(self, read: Expr) -> Node:
        return self.inner.loaded[read.operand]

    def _itemsize(self, number: int) -> int:
        return nodes.dtype(self.inner.loaded[number]).itemsize


def _unrounded(part: Expr, dtype: torch.dtype) -> Expr | None:
    """Value without roundings to the dtype of the product, or to finer ones: kernels have float32."""
    vanishes = any(part.op == name and not is_coarser(to, dtype) for to, name in ROUNDED.items())
    return rebuild(part.args[0], lambda inner: _unrounded(inner, dtype)) if vanishes else None


def _split(value: Expr, column: Expr) -> tuple[Expr, Expr]:
    """(the part that depends on the column, the factors of a value that do not)."""
    if value.op in ("fmul", "div"):
        left, right = value.args
        free = [column.name not in coordinates(arg) for arg in value.args]
        if free[1] and not free[0]:
            element, scale = _split(left, column)
            return element, apply(value.op, scale, right)
        if value.op == "fmul" and free[0] and not free[1]:
            element, scale = _split(right, column)
            return element, scale * left
    return value, ONE


def _leads_to_cache(here: Node) -> bool:
    """Whether a narrow tensor, or a read through a table, is among the ancestors; nothing is evaluated."""

    def parents(node: Node) -> list[Node]:
        through = views.is_view(node) or packet(node) in pointwise.BUILDERS or packet(node) in _THROUGH
        return list(filter(nodes.is_tensor, node.all_input_nodes)) if through else []

    above = list(itertools.islice(nodes.walk_up([here], parents), _MOST_NODES))
    gathered = any(packet(node) in indexing.READS and nodes.dtype(node).is_floating_point for node in above)
    return gathered or any(marks.stored(node) or nodes.dtype(node) in _PACKED for node in above)


def _is_kept(inner: PullBack, here: Node) -> bool:
    """Whether a gathered copy is made in any case, because another node uses it."""
    calls = {table.call for table in inner.tables.values()}
    return any(user not in inner.interior for call in calls - {here} for user in call.users)
