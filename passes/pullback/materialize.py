"""Values that a program loads from a tensor of the graph, although it could compute them.

First, values that cost more than a load. Second, conditions that the model decides in another dtype than kernels
compute in: kernels compute in float32, and leave out roundings of the model. Values are then more exact; but a
comparison of slightly other numbers, or a rounding to integers, is another mask.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence, Set

import torch
from torch.fx import Node

from fusion.ir.expr import Expr, Kind, coordinates, walk
from fusion.ir.ops import rounded
from fusion.ir.primitives import cost
from fusion.lowering.numbers import feeding_comparisons

from .. import nodes

_MAX_HEAVY = 2

aten = torch.ops.aten
_ROUNDING = (aten.floor, aten.ceil, aten.trunc, aten.fix, aten.round, aten.frac, aten.sign, aten.sgn, aten.remainder,
             aten.fmod, aten.floor_divide, aten.div, aten.heaviside)  # fmt: skip
_EXACT = ("where", "neg", "abs", "minimum", "maximum", "detach", "detach_nan", "round_bfloat16", "round_float16")
"""Operations on floats whose result is one of their arguments, or what the model has rounded it to."""


def too_heavy(value: Expr, free: Container[int]) -> bool:
    """Whether a load of an expression free of scores is cheaper than computing it. Only parts that depend on both i and
    j are evaluated N_q * N_k times: more than one load or more than a couple of transcendental functions there cost
    more than one load. free: operands whose loads do not count."""
    if not {"i", "j"} <= coordinates(value):
        return False
    heavy = reads = 0
    for part in walk(value):
        weight = int(cost(part.op))
        if weight or part.op == "load":
            both = {"i", "j"} <= coordinates(part)
            heavy += weight * both
            reads += part.op == "load" and both and part.operand not in free
    return heavy > _MAX_HEAVY or (reads > 1 and value.kind is Kind.FLOAT)


def decided_otherwise(here: Node, value: Expr, pulled: Set[Node], loaded: Sequence[Node], anchor: Node | None) -> bool:
    """Whether a node decides something by floats that a kernel would compute in another way than the model.

    value: the node's pulled-back expression. pulled: nodes that are in the program now. loaded: those that it loads.
    anchor: the product with V.
    """
    has_float_input = any(nodes.is_tensor(node) and _is_float(node) for node in here.all_input_nodes)
    if not has_float_input or (_is_float(here) and nodes.packet(here) not in _ROUNDING):
        return False
    wide = torch.float64 if anchor is not None and nodes.dtype(anchor) is torch.float64 else torch.float32
    others = {dtype for dtype in _dtypes(here, pulled) if dtype is not wide}
    return any(not _is_exact(part, dtype, loaded) for dtype in others for part in feeding_comparisons(value))


def _is_exact(part: Expr, dtype: torch.dtype, loaded: Sequence[Node]) -> bool:
    """Whether a float whose arguments are exact is the same number in float32 and where `dtype` is compared: torch
    converts scalars, integers and tensors of one element to that first."""
    if part.is_const:
        return part.value == rounded(part.value, dtype) == rounded(part.value, torch.float32) or math.isnan(part.value)
    if part.op == "load":
        return dtype is not torch.float64 and nodes.dtype(loaded[part.operand]) is dtype
    return part.op in _EXACT


def _is_float(node: Node) -> bool:
    return nodes.dtype(node).is_floating_point


def _dtypes(here: Node, pulled: Set[Node]) -> Iterator[torch.dtype]:
    """Dtypes of the floats that a node is computed from within the program, and of the loaded ones among them."""

    def parents(node: Node) -> list[Node]:
        return list(filter(nodes.is_tensor, node.all_input_nodes)) if node is here or node in pulled else []

    return (nodes.dtype(node) for node in nodes.walk_up(parents(here), parents) if _is_float(node))
