"""Heads of scores or weights that a model mixes ("talking heads"): a linear layer whose features are the heads, a
convolution of one element whose channels they are, an einsum with a matrix.

The value of head g is `mix(matrix[g, h], value[h], g, value[g])`, the sum over h of the product of the first two, where
h is the coordinate that the node names: "h" and the number of sums that it stands in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import C, Expr, Kind, coord, coordinates, node
from fusion.refusals import Reason

from .. import nodes
from ..nodes import Unsupported, arguments, is_tensor, packet, shape
from .contractions import einsum_letters, factors, is_contraction
from .reductions import depends_on_product
from .views import Index, source

if TYPE_CHECKING:
    from .pullback import PullBack

aten = torch.ops.aten
T = TypeVar("T")
MOST_HEADS = 32
"""Kernels hold a row of scores of every head."""
_MAX_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSum:
    """A node whose element of head g is the sum over h of matrix[g, h] * mixed[h], plus bias[g].

    dims: for each dimension of `mixed` its dimension in the result; None for h.
    to: the dimension of g in the result.
    order: for each dimension of the matrix, whether it is g ("to") or h ("of"); None for one of size 1.
    """

    mixed: Node
    dims: tuple[int | None, ...]
    matrix: Node
    order: tuple[str | None, ...]
    to: int
    bias: Node | None = None

    @property
    def extent(self) -> Expr:
        """Number of heads that are mixed."""
        return shape(self.mixed)[self.dims.index(None)]

    def mixed_index(self, index: Sequence[T], head: T) -> tuple[T, ...]:
        """Index in `mixed` of a head's value for an element of the result."""
        return tuple(head if place is None else index[place] for place in self.dims)

    def matrix_index(self, index: Sequence[T], head: T, zero: T) -> tuple[T, ...]:
        """Index in the matrix of that head's factor."""
        return tuple({"to": index[self.to], "of": head, None: zero}[name] for name in self.order)


def head_sum(here: Node) -> HeadSum | None:
    """A node as a sum over a batch dimension of a product, such as the heads of scores or weights; else None."""
    return next((candidate for candidate in _sums(here) if is_batch(candidate.mixed, candidate.dims.index(None))), None)


def _sums(here: Node) -> Iterator[HeadSum]:
    """A linear layer, a convolution of one element, or an einsum with a matrix as a sum over anything."""
    kind = packet(here)
    if kind is aten.linear and is_tensor(here):
        args, last = arguments(here), len(shape(here)) - 1
        order, dims = ("to", "of"), (*range(last), None)
        yield HeadSum(mixed=args["input"], dims=dims, matrix=args["weight"], order=order, to=last, bias=args["bias"])
    elif kind is aten.conv2d:
        yield from _convolution(here)
    elif kind is aten.einsum:
        yield from _einsum(here)


def _convolution(here: Node) -> Iterator[HeadSum]:
    args, one = arguments(here), integers.integer(1)
    moved = args["padding"] not in ("same", "valid") and any(args["padding"])
    kernel, alike = shape(args["weight"])[2:], shape(here)[2:] == shape(args["input"])[2:]
    if kernel != (one, one) or len(shape(here)) != 4 or args["groups"] != 1 or moved or not alike:
        return
    order, dims = ("to", "of", None, None), (0, None, 2, 3)
    yield HeadSum(mixed=args["input"], dims=dims, matrix=args["weight"], order=order, to=1, bias=args["bias"])


def _einsum(here: Node) -> Iterator[HeadSum]:
    try:
        equation, tensors = einsum_letters(here)
    except Unsupported:
        return
    for (matrix, letters), (mixed, others) in (pairs := list(zip(tensors, equation.inputs, strict=True)), pairs[::-1]):
        rest = [letter for letter in letters if letter != equation.summed]
        if len(letters) != 2 or len(rest) != 1 or rest[0] in others or len(others) != len(equation.output):
            continue
        if any(shape(mixed)[k] is not shape(here)[equation.output.index(x)]
               for k, x in enumerate(others) if x != equation.summed):  # fmt: skip
            continue
        dims = tuple(None if x == equation.summed else equation.output.index(x) for x in others)
        order = tuple("of" if x == equation.summed else "to" for x in letters)
        yield HeadSum(mixed=mixed, dims=dims, matrix=matrix, order=order, to=equation.output.index(rest[0]))


def is_batch(here: Node, dim: int) -> bool:
    """Whether a dimension of a tensor is a batch dimension of the product that the tensor is computed from."""
    if not is_tensor(here):
        return False
    extents = shape(here)
    index: Index = tuple(coord(f"r{k}") for k in range(len(extents)))
    summed, bounds = index[dim].name, dict(zip(index, extents, strict=True))
    for _ in range(_MAX_STEPS):
        mixing = next((candidate for candidate in _sums(here) if summed in coordinates(index[candidate.to])), None)
        if mixing is not None:  # heads that were mixed before
            here, index = mixing.mixed, mixing.mixed_index(index, index[mixing.to])
            continue
        if is_contraction(here):
            return _is_in_both(here, index, summed)
        if (moved := source(here, index, bounds)) is None:
            alike = (p for p in here.all_input_nodes if _has_dimension(p, here, index, summed))
            if here.op != "call_function" or (origin := next(alike, None)) is None:
                return False
            moved = origin, index
        here, index = moved
    return False


def _is_in_both(product: Node, index: Index, name: str) -> bool:
    """Whether a coordinate of a product's element is one of its batch."""
    if packet(product) is not aten.einsum:
        batch, rest = (set().union(*map(coordinates, part)) for part in (index[:-2], index[-2:]))
        return name in batch - rest
    try:
        parts = factors(product, index, C)
    except Unsupported:
        return False
    return all(name in set().union(*map(coordinates, at)) for at in (parts.left_index, parts.right_index))


def _has_dimension(origin: Node, here: Node, index: Index, name: str) -> bool:
    """Whether an input of an operation has the dimension at which a coordinate stands, with as many elements."""
    if not is_tensor(origin) or len(shape(origin)) != len(index):
        return False
    pairs = zip(shape(origin), shape(here), index, strict=True)
    return all(extent is its for extent, its, entry in pairs if name in coordinates(entry))


def sum_of_heads(pullback: PullBack, here: Node, index: Index) -> Expr | None:
    """Element at an index of a node that mixes heads of scores or weights; None for any other node."""
    if (summed := head_sum(here)) is None:
        return None
    for extent in (nodes.fake(summed.mixed).shape[summed.dims.index(None)], nodes.fake(here).shape[summed.to]):
        nodes.specialize(extent)
    if not (extent := summed.extent).is_const or not extent.integer <= MOST_HEADS:
        raise Unsupported(Reason.HEADS_MIXED, f"{extent} heads are mixed; kernels mix up to {MOST_HEADS}", None, here)
    within = {name for entry in index for name in coordinates(entry) if name.startswith("h")}
    head = coord(f"h{len(within)}")
    pullback.bounds[head] = extent
    value = pullback.value(summed.mixed, summed.mixed_index(index, head))
    matrix = pullback.value(summed.matrix, summed.matrix_index(index, head, integers.integer(0)))
    if not depends_on_product(value) or depends_on_product(matrix):
        return None
    if index[summed.to].op != "coord":
        raise Unsupported(Reason.HEADS_MIXED, "the mixed dimension is not one of heads alone", None, here)
    own_value = pullback.value(summed.mixed, summed.mixed_index(index, index[summed.to]))
    result = node("mix", (matrix, value, index[summed.to], own_value), Kind.FLOAT, head.name)
    return result if summed.bias is None else result + pullback.value(summed.bias, (index[summed.to],))
