"""Products of two tensors that sum over one index, in one form: matmul, bmm, mm, baddbmm, addmm, einsum, vecdot, and
sums of a product that is broadcast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import Expr
from fusion.lowering.numbers import is_moderate
from fusion.refusals import Reason

from .. import marks, nodes
from ..nodes import Unsupported, arguments, packet, shape
from .views import RESHAPES, Index, broadcast_index

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """An element of a product: sum over `contracted` (of size `extent`) of left[left_index] * right[right_index]."""

    left: Node
    left_index: Index
    right: Node
    right_index: Index
    extent: Expr

    def swapped(self) -> Factors:
        return replace(self, left=self.right, left_index=self.right_index, right=self.left, right_index=self.left_index)


_MATMUL = {aten.matmul, aten.bmm, aten.mm, aten.baddbmm}


ADDING = {aten.baddbmm, aten.addmm}
"""Products to which another tensor is added: beta * self + alpha * product."""


def is_contraction(node: Node) -> bool:
    """Whether `factors` may take this product apart. `addmm` with a parameter is a linear layer."""
    if node.op != "call_function" or nodes.writes(node):
        return False
    if packet(node) is aten.addmm:
        return not is_parameter(arguments(node)["mat2"])
    return packet(node) in _MATMUL or packet(node) is aten.einsum or _summed(node) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summed:
    """(left op right).sum(dim). extents: of the tensor that is summed. keepdim: with a dimension of size 1."""

    op: Any
    left: Node
    right: Node
    extents: Index
    dim: int
    keepdim: bool


def _summed(node: Node, ops: tuple[Any, ...] = (aten.mul,)) -> _Summed | None:
    """Factors of `(q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)`: each is broadcast along one dimension of the other."""
    if packet(node) is aten.linalg_vecdot:
        args = arguments(node)
        op, operands, dims, keepdim = aten.mul, (args["x"], args["y"]), args["dim"], False
    elif packet(node) in _SUMS:
        args = arguments(node)
        inner, dims, keepdim = args["self"], args.get("dim"), bool(args.get("keepdim"))
        while ops != (aten.mul,) and packet(inner) in _OF_DIFFERENCES and inner.all_input_nodes:
            inner = inner.all_input_nodes[0]
        op, operands = packet(inner), inner.args
    else:
        return None
    if op not in ops or len(operands) != 2:
        return None
    if not all(nodes.is_tensor(x) and nodes.dtype(x) is nodes.dtype(node) for x in operands):
        return None
    left, right = operands
    extents = _broadcast(shape(left), shape(right))
    if extents is None or (dim := nodes.one_dim(dims, len(extents))) is None:
        return None
    if any(len(x) < len(extents) - dim or x[dim - len(extents)] is not extents[dim] for x in map(shape, operands)):
        return None
    return _Summed(op=op, left=left, right=right, extents=extents, dim=dim, keepdim=keepdim)


_SUMS = {aten.sum, aten.linalg_vector_norm, aten.norm}
_OF_DIFFERENCES = {aten.square, aten.pow, aten.abs}
_DISTANCES = {aten.cdist, aten._cdist_forward, aten._euclidean_dist}


def is_distance(node: Node) -> bool:
    """Whether this node holds distances of all pairs of two tensors: a score to a person, although no product."""
    return packet(node) in _DISTANCES or _summed(node, (aten.sub,)) is not None


def extended_factors(node: Node) -> list[Node]:
    """Broadcast factors of a product with a vector that is written as a product and a sum, `(q * k).sum(-1)` with one
    query: the sum is over a dimension of both factors. Empty for any other node."""
    if packet(node) is not aten.sum or not nodes.is_tensor(node) or is_contraction(node):
        return []
    args = arguments(node)
    inner = args["self"]
    if packet(inner) is not aten.mul or not all(nodes.is_tensor(x) and not is_parameter(x) for x in inner.args):
        return []
    extents = shape(inner)
    if (place := nodes.one_dim(args.get("dim"), len(extents))) is None:
        return []
    dim = place - len(extents)
    if any(len(shape(x)) < -dim or shape(x)[dim] is not extents[dim] for x in inner.args):
        return []
    return [x for x in inner.args if shape(x) != extents]


def _broadcast(left: Index, right: Index) -> Index | None:
    """Extents of a pointwise operation that extends both of its operands; None where one has the result's shape."""
    one, rank = integers.integer(1), max(len(left), len(right))
    left, right = (one,) * (rank - len(left)) + left, (one,) * (rank - len(right)) + right
    pairs = list(zip(left, right, strict=True))
    if not (any(x is one is not y for x, y in pairs) and any(y is one is not x for x, y in pairs)):
        return None
    return tuple(y if x is one else x for x, y in pairs)


MOVES = {*RESHAPES, aten.permute, aten.transpose, aten.contiguous, aten.clone, aten.unsqueeze, aten.squeeze,
         aten.movedim, aten.moveaxis, aten.swapaxes, aten.swapdims, aten.t, aten.mT, aten.adjoint, aten.numpy_T,
         aten.to, aten._to_copy}  # fmt: skip
"""Views, copies and casts, as they stand behind parameters and products."""


def behind_moves(node: Node) -> Node:
    """Node behind views, copies and casts."""
    while node.op == "call_function" and packet(node) in MOVES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_parameter(node: Node) -> bool:
    """Whether a node is a parameter, up to views and casts."""
    node = behind_moves(node)
    if node.op == "get_attr":
        return True
    return node.op == "placeholder" and isinstance(
        node.meta.get("example_value", node.meta.get("val")), torch.nn.Parameter
    )


def factors(node: Node, index: Index, contracted: Expr) -> Factors:
    """Factors of element `index` of a product; raises `Unsupported` for forms it cannot express. For baddbmm and addmm
    the caller adds the input, scaled by beta, and scales by alpha."""
    if packet(node) is aten.einsum:
        return _einsum(node, index, contracted)
    if (summed := _summed(node)) is not None:
        inner = (*index[: summed.dim], contracted, *index[summed.dim + summed.keepdim :])
        return Factors(
            left=summed.left,
            left_index=broadcast_index(summed.extents, shape(summed.left), inner),
            right=summed.right,
            right_index=broadcast_index(summed.extents, shape(summed.right), inner),
            extent=summed.extents[summed.dim],
        )
    args = arguments(node)
    left, right = next((args[x], args[y]) for x, y in _FACTORS if {x, y} <= args.keys())
    left_shape, right_shape = shape(left), shape(right)
    # A vector has no dimension for rows, or columns.
    rows, columns = len(left_shape) > 1, len(right_shape) > 1
    split = len(index) - rows - columns
    batch = shape(node)[:split]
    left_batch = broadcast_index(batch, left_shape[:-2], index[:split])
    right_batch = broadcast_index(batch, right_shape[:-2], index[:split])
    return Factors(
        left=left,
        left_index=(*left_batch, *index[split : split + rows], contracted),
        right=right,
        right_index=(*right_batch, contracted, *index[split + rows :]),
        extent=left_shape[-1],
    )


_FACTORS = ("batch1", "batch2"), ("mat1", "mat2"), ("self", "mat2"), ("self", "other")
"""Names of the factors among the arguments of a product, the input that baddbmm and addmm add left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """An einsum of two operands over one index: a letter for each dimension. summed: the letter it lacks."""

    inputs: tuple[str, ...]
    output: str
    summed: str


def _parsed(equation: str, ranks: tuple[int, ...], rank: int) -> Equation:
    """The letters of an einsum whose operands and result have these ranks; raises `Unsupported` for other forms."""
    if len(ranks) != 2:
        raise Unsupported(Reason.PRODUCT_FORM, f"an einsum of {len(ranks)} operands")
    terms, arrow, output = equation.replace(" ", "").partition("->")
    inputs = tuple(_expand_ellipsis(term, own) for term, own in zip(terms.split(","), ranks, strict=True))
    if arrow:
        output = _expand_ellipsis(output, rank)
    else:  # batch dimensions, then letters that occur once, in order
        letters = "".join(inputs)
        output = "".join(sorted({x for x in letters if x.isdigit()}, reverse=True))
        output += "".join(sorted(x for x in set(letters) if letters.count(x) == 1 and not x.isdigit()))
    summed = set().union(*inputs) - set(output)
    if len(summed) != 1 or any(not summed <= set(term) or len(set(term)) != len(term) for term in inputs):
        message = f"the einsum {equation!r}, which does not sum over exactly one index of both operands"
        raise Unsupported(Reason.PRODUCT_FORM, message)
    return Equation(inputs=inputs, output=output, summed=summed.pop())


def einsum_letters(node: Node) -> tuple[Equation, list[Node]]:
    """The letters of an einsum's dimensions, and its operands; raises `Unsupported` for other forms."""
    args = arguments(node)
    ranks = tuple(len(shape(tensor)) for tensor in args["tensors"])
    return _parsed(args["equation"], ranks, len(shape(node))), args["tensors"]


def _einsum(node: Node, index: Index, contracted: Expr) -> Factors:
    equation, tensors = einsum_letters(node)
    where = dict(zip(equation.output, index, strict=True)) | {equation.summed: contracted}
    one, zero = integers.integer(1), integers.integer(0)
    broadcast = {letter for letter, extent in zip(equation.output, shape(node), strict=True) if extent is not one}
    left, right = (
        tuple(
            zero if extent is one and letter in broadcast else where[letter]
            for letter, extent in zip(term, shape(tensor), strict=True)
        )
        for term, tensor in zip(equation.inputs, tensors, strict=True)
    )
    extent, other = (shape(t)[term.index(equation.summed)] for t, term in zip(tensors, equation.inputs, strict=True))
    if (extent is one) != (other is one):
        raise Unsupported(Reason.PRODUCT_FORM, "an einsum that broadcasts the index that it sums over")
    return Factors(left=tensors[0], left_index=left, right=tensors[1], right_index=right, extent=extent)


def _expand_ellipsis(term: str, rank: int) -> str:
    """`...ij` with digits in place of the dots, counted from the right: 1 is the last batch dimension."""
    if "..." not in term:
        return term
    count = rank - (len(term) - 3)
    return term.replace("...", "".join(str(k) for k in range(count, 0, -1)))


def products_above(node: Node) -> set[Node]:
    """Products of two tensors among the ancestors of a node, up to linear layers."""
    products, seen, stack = set[Node](), set[Node](), [node]
    while stack:
        current = stack.pop()
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        if is_contraction(current) or is_distance(current):
            products.add(current)
        elif packet(current) not in (aten.linear, aten.addmm, aten.layer_norm, aten.embedding):
            stack.extend(current.all_input_nodes)
    return products


def strip_scale(node: Node) -> tuple[Node, float]:
    """`x` and the product of constants of `x * c`, `x / c` and their nestings: a scale on Q or K instead of QK^T. (c q)
    k is c (q k) where q k does not overflow; a constant that is not moderate stays with its operand."""
    scale = 1.0
    while node.op == "call_function" and packet(node) in (aten.mul, aten.div) and nodes.is_tensor(node):
        tensor, factor = node.args[:2]
        if packet(node) is aten.mul and not isinstance(tensor, Node):
            tensor, factor = factor, tensor
        factor = nodes.number(factor)
        if not isinstance(tensor, Node) or not nodes.is_tensor(tensor) or not isinstance(factor, (int, float)):
            break
        if factor == 0 or marks.stop_gradient(node) or node.kwargs or nodes.dtype(tensor) != nodes.dtype(node):
            break
        scaled = scale * factor if packet(node) is aten.mul else scale / factor
        if not is_moderate(scaled):
            break
        scale, node = scaled, tensor
    return node, scale
