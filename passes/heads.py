"""Heads of scores or weights that a model mixes ("talking heads"): a linear layer whose features are the heads, or a
convolution of one element whose channels they are.

The value of head g is `mix(matrix[g, h], value[h])`, the sum over h of their product, where h is the coordinate that
the node names: "h" and the number of sums that it stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import HEAD, SCORE, WEIGHT, Expr, Kind, coord, coordinates, node, substitute
from fusion.ir.ops import apply
from fusion.passes.contractions import is_contraction
from fusion.passes.nodes import Unsupported, arguments, is_tensor, packet, shape
from fusion.passes.over_keys import depends_on_product
from fusion.passes.shifts import has
from fusion.passes.views import Index, source
from fusion.refusals import Ground

if TYPE_CHECKING:
    from fusion.passes.operands import Access
    from fusion.passes.pullback import PullBack
    from fusion.passes.recognize import Core

aten = torch.ops.aten
MOST_HEADS = 32
"""Kernels hold a row of scores of every head."""
_MAX_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A sum over heads in the weights or scores of an attention.

    head: the coordinate that is summed over.
    matrix: what each head is multiplied by.
    program: of scores what is mixed; of weights what becomes of the sum, in WEIGHT.
    """

    head: Expr
    matrix: Expr
    program: Expr

    def mapped(self, change: Callable[[Expr], Expr]) -> Mixed:
        """With both expressions changed."""
        return replace(self, matrix=change(self.matrix), program=change(self.program))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSum:
    """Element [.., g, ..] of a linear layer: sum over h of matrix[matrix_index] * mixed[.., h, ..], plus bias[g]. dim:
    of the heads."""

    mixed: Node
    dim: int
    matrix: Node
    rest: Index
    bias: Node | None


def head_sum(here: Node) -> HeadSum | None:
    """A linear layer, or a convolution of one element that is none; None for other nodes."""
    if packet(here) is aten.linear:
        args = arguments(here)
        return HeadSum(mixed=args["input"], dim=-1, matrix=args["weight"], rest=(), bias=args["bias"])
    if packet(here) is not aten.conv2d:
        return None
    args, one = arguments(here), integers.integer(1)
    moved = args["padding"] not in ("same", "valid") and any(args["padding"])
    rest, alike = shape(args["weight"])[2:], shape(here)[2:] == shape(args["input"])[2:]
    if rest != (one, one) or len(shape(here)) != 4 or args["groups"] != 1 or moved or not alike:
        return None
    first = integers.integer(0)
    return HeadSum(mixed=args["input"], dim=1, matrix=args["weight"], rest=(first, first), bias=args["bias"])


def mixes_heads(here: Node) -> bool:
    """Whether a node sums over a batch dimension of a product, such as the heads of scores or weights."""
    return (found := head_sum(here)) is not None and _is_batch(found.mixed, found.dim)


def _is_batch(here: Node, dim: int) -> bool:
    """Whether a dimension of a tensor is one of the batch in the product that it is made of."""
    if not is_tensor(here) or len(extents := shape(here)) < 3:
        return False
    index = tuple(coord(f"r{k}") for k in range(len(extents)))
    summed, bounds = index[dim].name, dict(zip(index, extents, strict=True))
    for _ in range(_MAX_STEPS):
        if is_contraction(here):
            batch, rest = (set().union(*map(coordinates, part)) for part in (index[:-2], index[-2:]))
            return summed in batch - rest
        if (moved := source(here, index, bounds)) is None:
            alike = (p for p in here.all_input_nodes if is_tensor(p) and shape(p) == shape(here))
            if here.op != "call_function" or (origin := next(alike, None)) is None:
                return False
            moved = origin, index
        here, index = moved
    return False


def mixed(pullback: PullBack, here: Node, index: Index) -> Expr | None:
    """The element at an index of a node that mixes heads of scores or weights; None for any other node."""
    if not mixes_heads(here):
        return None
    found = head_sum(here)
    assert found is not None
    extent, dim = shape(found.mixed)[found.dim], found.dim % len(index)
    if not extent.is_const or not extent.integer <= MOST_HEADS:
        raise Unsupported(Ground.HEADS_MIXED, f"{extent} heads are mixed; kernels mix up to {MOST_HEADS}", None, here)
    within = {name for entry in index for name in coordinates(entry) if name.startswith("h")}
    head = coord(f"h{len(within)}")
    pullback.bounds[head] = extent
    value = pullback.value(found.mixed, (*index[:dim], head, *index[dim + 1 :]))
    matrix = pullback.value(found.matrix, (index[dim], head, *found.rest))
    if not depends_on_product(value) or depends_on_product(matrix):
        return None
    result = node("mix", (matrix, value), Kind.FLOAT, head.name)
    return result if found.bias is None else apply("fadd", result, pullback.value(found.bias, (index[dim],)))


# --- in what was pulled back --------------------------------------------------------------------------------------


def split_weights(weight: Expr) -> tuple[Mixed, Expr] | None:
    """(the sum over heads behind a softmax, the weights of one head); None where there is none. Raises `Unsupported`
    where it cannot be told apart."""
    if (mix := _outermost(weight, "softmax", "scaled_softmax")) is None:
        return None
    matrix, value = mix.args
    then = substitute(weight, {mix: WEIGHT})
    if has(then, "dot", "softmax", "scaled_softmax", "reduce", "mix"):
        raise Unsupported(Ground.HEADS_MIXED, "weights of mixed heads are added to others", weight)
    return Mixed(head=coord(str(mix.attr)), matrix=matrix, program=then), value


def split_scores(score: Expr) -> tuple[Mixed, Expr] | None:
    """(the sum over heads before a softmax, the score program of what is summed up); None where there is none."""
    if (mix := _outermost(score)) is None:
        return None
    matrix, value = mix.args
    then = substitute(score, {mix: SCORE})
    if has(then, "dot", "mix") or has(value, "mix"):
        raise Unsupported(Ground.HEADS_MIXED, "scores of mixed heads are added to others, or mixed twice", score)
    return Mixed(head=coord(str(mix.attr)), matrix=matrix, program=value), then


def _outermost(expr: Expr, *beyond: str) -> Expr | None:
    """The first sum over heads on the way down, not below these operations."""
    stack, seen = [expr], set[Expr]()
    while stack:
        here = stack.pop()
        if here.op == "mix":
            return here
        if here not in seen and here.op not in beyond:
            seen.add(here)
            stack += here.args
    return None


# --- in a spec ------------------------------------------------------------------------------------------------------


def named(
    core: Core, accesses: Sequence[Access], bounds: integers.Bounds
) -> tuple[Core, tuple[Access, Access, Access], int]:
    """The core and its operands Q, K and V with heads named as in `fusion.ir.spec.Mixing`, and the batch coordinate
    that they are. Raises `Unsupported` where it is not one of the batch."""
    outer = core.mixed_weights or core.mixed_scores
    assert outer is not None
    query, key, value = accesses
    inner = [*query.index, *key.index, *((core.score, *core.sinks) if core.mixed_weights else (outer.program,))]
    seen = {name for entry in inner for name in coordinates(entry)}
    found = [name for name in coordinates(outer.matrix) - seen if name.startswith("b")]
    every = [mixed for mixed in (core.mixed_weights, core.mixed_scores) if mixed is not None]
    if len(found) != 1 or any(bounds[mixed.head] is not bounds[coord(found[0])] for mixed in every):
        raise Unsupported(Ground.HEADS_MIXED, "what is mixed is no dimension of heads, as many before as after")
    own = dict.fromkeys([mixed.head for mixed in every], coord(found[0]))

    def of_head(expr: Expr) -> Expr:
        return substitute(expr, own)

    def mixed(part: Mixed | None, behind: bool) -> Mixed | None:
        if part is None:
            return None
        matrix = substitute(part.matrix, own | {part.head: HEAD})
        return replace(part, matrix=matrix, program=part.program if behind else of_head(part.program))

    heads = replace(
        core,
        score=of_head(core.score),
        weight=of_head(core.weight),
        sinks=tuple(map(of_head, core.sinks)),
        row_scale=core.row_scale and of_head(core.row_scale),
        mixed_scores=mixed(core.mixed_scores, False),
        mixed_weights=mixed(core.mixed_weights, True),
    )
    query, key = (
        replace(access, index=tuple(map(of_head, access.index)), value=access.value and of_head(access.value))
        for access in (query, key)
    )
    return heads, (query, key, value), int(found[0][1:])
