"""Softmaxes and reductions over the keys: one element of the result, from the scores of all keys.

Their nodes have, besides the score at key J, the scores of further columns (sinks), a constant few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import ZERO, Expr, J, Kind, coordinates, node, rebuild, substitute, walk
from fusion.ir.ops import apply
from fusion.ir.primitives import ROUNDED
from fusion.refusals import Reason, Refusal

from .. import nodes
from ..nodes import arguments, packet, shape
from .casts import FILL
from .contractions import is_contraction, products_above
from .pointwise import is_pointwise
from .views import Index, is_view

if TYPE_CHECKING:
    from .pullback import PullBack

aten = torch.ops.aten
MAX_SINKS = 4


def _softmax(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """A softmax whose dimension `dim` is at key J (further columns, which the product never reads, are sinks)."""
    origin = args["self"]
    dim = nodes.normalize_dim(args["dim"], len(index))
    # With a single key, J is 0, and a reshape may have said so.
    single = pullback.keys is integers.integer(1) and index[dim].is_const
    offset = index[dim] if single else integers.sub(index[dim], J)
    columns = _columns(pullback, origin, index, dim, offset.integer) if offset.is_const else None
    if columns is None:
        return None
    if (dtype := args.get("dtype")) is not None:  # the scores are cast before the softmax
        columns = _cast(pullback, columns, dtype)
        if columns is None:
            return None
    kind = "safe_softmax" if packet(here) is aten._safe_softmax else "softmax"
    return node("softmax", columns, Kind.FLOAT, kind)


def _log_softmax(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """A separate "log_softmax" node: the logarithm of a weight that vanishes is another number, and has no gradient."""
    inner = _softmax(pullback, here, args, index)
    return node("log_softmax", (inner,), Kind.FLOAT) if inner is not None else None


def _cast(pullback: PullBack, columns: tuple[Expr, ...], dtype: torch.dtype) -> tuple[Expr, ...] | None:
    """The columns in another dtype; None where no kernel rounds to it."""
    cast_columns = tuple(cast for column in columns if (cast := pullback.cast(column, dtype)) is not None)
    return cast_columns if len(cast_columns) == len(columns) else None


def _columns(pullback: PullBack, origin: Node, index: Index, dim: int, offset: int) -> tuple[Expr, ...] | None:
    """Value at key J, then those of the columns before and after the keys' (a constant few)."""
    further = integers.sub(shape(origin)[dim], pullback.keys)
    count = further.integer if further.is_const else -1
    if count > MAX_SINKS:
        pullback.limit = f"{count} columns of the softmax beside the keys, more than {MAX_SINKS}"
    if not 0 <= offset <= count <= MAX_SINKS:
        return None

    def at(position: int | Expr) -> Expr:
        return pullback.value(origin, (*index[:dim], integers.integer(position), *index[dim + 1 :]))

    before = [at(column) for column in range(offset)]
    after = [at(integers.add(pullback.keys, offset + column)) for column in range(count - offset)]
    return (at(integers.add(J, offset)), *before, *after)


def reduction(
    pullback: PullBack, name: str, here: Node, index: Index, of_each: Callable[[Expr], Expr] = lambda column: column
) -> Expr | None:
    """A sum, maximum or logsumexp over one dimension, assumed to be over the keys (else nothing will match it)."""
    args = arguments(here)
    origin = args["self"]
    dim = nodes.one_dim(args.get("dim"), len(shape(origin)))
    if pullback.keys is integers.integer(1):  # a broadcast over a single key is none, and has left J
        index = tuple(substitute(part, {J: integers.integer(0)}) for part in index)
    if dim is None or any("j" in coordinates(part) for part in index):
        return None
    inner = index if args.get("keepdim") else (*index[:dim], integers.integer(0), *index[dim:])
    further = integers.sub(shape(origin)[dim], pullback.keys)
    if not further.is_const:
        return None
    # Sinks stand before or after the keys: whichever resolves.
    for offset in sorted({0, further.integer}):
        columns = _columns(pullback, origin, inner, dim, offset)
        if columns is not None and (dtype := args.get("dtype")) is not None:
            columns = _cast(pullback, columns, dtype)
        if columns is not None and depends_on_product(columns[0]):
            reduced = node("reduce", tuple(map(of_each, columns)), Kind.FLOAT, name)
            if name == "logsumexp":
                return _rounded_where_far(reduced, nodes.dtype(here))
            return _attached(pullback, reduced) if name == "max" else reduced
    return None


def _rounded_where_far(log_sum: Expr, dtype: torch.dtype) -> Expr:
    """log_sum, rounded to a narrow dtype if a row may hold nothing but fills: the rounding loses the logarithm of the
    sum there. Beside the largest fills float32 loses it as well."""
    constants = (part.value for part in walk(*log_sum.args) if part.is_const and part.kind is Kind.FLOAT)
    lost = dtype in ROUNDED and any(-(2.0**28) < value <= FILL for value in constants)
    return apply(ROUNDED[dtype], log_sum) if lost else log_sum


def detached_maximum(maximum: Expr) -> Expr | None:
    """A maximum over the keys through which no gradient flows; None for another reduction."""
    if "max" not in str(maximum.attr):
        return None
    return node("reduce", maximum.args, Kind.FLOAT, "detached max")


def without_gradient(value: Expr) -> Expr:
    """Value through which no gradient flows; for weights, the same weights of detached scores."""
    ops = {part.op for part in walk(value)}
    return apply("detach", value) if "softmax" not in ops or "reduce" in ops else rebuild(value, _detached_weights)


def _detached_weights(part: Expr) -> Expr | None:
    if part.op == "softmax":
        return node("softmax", tuple(apply("detach", column) for column in part.args), Kind.FLOAT, part.attr)
    return apply("detach", part) if part.op in ("load", "dot") and part.kind is Kind.FLOAT else None


def _attached(pullback: PullBack, maximum: Expr) -> Expr:
    """Maximum of scores as if nothing in them were detached; a softmax that it shifts has the same value and gradient.
    Where all of them are detached, the maximum of the attached scores is detached instead."""
    bare = tuple(rebuild(column, _behind) for column in maximum.args)
    if bare == maximum.args:
        return maximum
    alone = (rebuild(column, lambda part: ZERO if part.op == "detach" else None) for column in maximum.args)
    attached = node("reduce", bare, Kind.FLOAT, "max")
    if not any(map(depends_on_product, alone)):
        return node("reduce", bare, Kind.FLOAT, "detached max")
    pullback.partly_detached = True
    return attached


def _behind(part: Expr) -> Expr | None:
    return rebuild(part.args[0], _behind) if part.op == "detach" else None


def _norm(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """The norm of order 1: a sum of magnitudes."""
    if args["ord"] != 1 or args.get("dtype") is not None:
        return None
    return reduction(pullback, "sum", here, index, partial(apply, "abs"))


def _all(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """Whether a predicate holds for all scores of a row."""
    reduced = reduction(pullback, "all", here, index)
    return None if reduced is None else node("reduce", reduced.args, Kind.BOOL, "all")


def _reduce(name: str) -> Callable[[PullBack, Node, dict[str, Any], Index], Expr | None]:
    return lambda pullback, here, args, index: reduction(pullback, name, here, index)


OPERATIONS: dict[Any, Callable[[PullBack, Node, dict[str, Any], Index], Expr | None]] = {
    aten.softmax: _softmax, aten._softmax: _softmax, aten.special_softmax: _softmax, aten._safe_softmax: _softmax,
    aten.log_softmax: _log_softmax, aten._log_softmax: _log_softmax, aten.special_log_softmax: _log_softmax,
    aten.sum: _reduce("sum"), aten.amax: _reduce("max"), aten.logsumexp: _reduce("logsumexp"),
    aten.special_logsumexp: _reduce("logsumexp"), aten.linalg_vector_norm: _norm, aten.all: _all,
}  # fmt: skip
"""Operation -> the element at an index of its result, from its arguments; None where it is to be loaded."""


def is_reduction(node: Node) -> bool:
    """Whether a node reduces whole rows or columns of scores, or is a softmax over these."""
    return packet(node) in OPERATIONS and min(nodes.dims_of(node)) >= len(shape(arguments(node)["self"])) - 2


def reduction_refusal(node: Node, extents: Sequence[Expr | None]) -> Refusal | None:
    """Reason against a reduction of scores, or a softmax of them: along rows or columns, which have these extents, or
    along the dimensions before them; None for other operations."""
    if packet(node) not in (*OPERATIONS, aten.mean, aten.max, aten.min, aten.amin):
        return None
    over = shape(arguments(node)["self"])
    if is_reduction(node):
        rows = any(over[dim] in extents for dim in nodes.dims_of(node))
        message = f"the weights depend on {node.target} of whole rows or columns of scores"
        return Refusal(Reason.FURTHER_REDUCTION, message) if rows else None
    message = f"scores of different heads are combined by {node.target}"
    return Refusal(Reason.HEADS_COMBINED, message) if max(nodes.dims_of(node)) < len(over) - 2 else None


def blocking_op(node: Node, products: set[Node]) -> Node | None:
    """First operation from products down to a node, that included, which reads more than one element. An operation
    without any rule is preferred to softmaxes and sums over keys, which may have been followed."""
    below = lambda here: [parent for parent in here.all_input_nodes if products & products_above(parent)]
    way = nodes.walk_up([node], lambda here: [] if is_contraction(here) else below(here))
    taken = [here for here in way if not (is_pointwise(here) or is_view(here) or is_contraction(here))]
    return min(taken, key=lambda here: (is_reduction(here), here), default=None)


_made_from_product: WeakKeyDictionary[Expr, bool] = WeakKeyDictionary()


def depends_on_product(expr: Expr) -> bool:
    """Whether an expression contains a "dot" leaf; cached for the operands, so that nothing is walked twice."""
    depends = _made_from_product.get(expr)
    if depends is None:
        depends = _made_from_product[expr] = expr.op == "dot" or any(map(depends_on_product, expr.args))
    return depends
