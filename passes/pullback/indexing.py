"""Rules for operations that pick elements of other tensors, or create tensors: one element of the result.

`PullBack` (`pullback`) looks operations up in `OPERATIONS`, and in `created` if they are in no table.

Models compute masks from positions by detours that no index arithmetic follows, such as a cumulative sum over a
comparison of `arange`s. Where sizes are fixed such a sub-graph, which depends on nothing but constants, is evaluated
once; if its values are affine in the positions (most often a constant), an expression takes its place (`folded`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusion.ir import integers
from fusion.ir.expr import FALSE, TRUE, Expr, Kind, const, load, rebuild, walk
from fusion.ir.ops import apply, where
from fusion.torch_private.operators import OpOverload
from fusion.torch_private.tensors import unset_fake_temporarily
from fusion.torch_private.tracing import disable_proxy_modes_tracing

from .. import marks, nodes
from ..nodes import arguments, packet, shape
from . import casts, pointwise, tables
from .reductions import depends_on_product
from .views import Index

if TYPE_CHECKING:
    from .pullback import PullBack

aten = torch.ops.aten


def _triangle(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    value = pullback.value(args["self"], index)
    diagonal = nodes.size_expr(args["diagonal"])
    limit = integers.add(index[-2], diagonal)
    lower = packet(here) is aten.tril
    keep = apply("ile", index[-1], limit) if lower else apply("ile", limit, index[-1])
    return where(keep, value, const(0, value.kind))


def _cumsum(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """A running sum of one constant, such as of a comparison that is false everywhere."""
    dim = nodes.normalize_dim(args["dim"], len(index))
    if nodes.dtype(here).is_floating_point or not (value := pullback.value(args["self"], index)).is_const:
        return None
    return integers.mul(value.integer, integers.add(index[dim], 1))


def _diff(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """Differences of neighbours that are the same everywhere, the one to a prepended value included."""
    origin, front = args["self"], args.get("prepend")
    dim = nodes.normalize_dim(args.get("dim", -1), len(index))
    if args.get("n", 1) != 1 or args.get("append") is not None or nodes.dtype(here).is_floating_point:
        return None

    def at(tensor: Node, place: Expr) -> Expr:
        return pullback.value(tensor, (*index[:dim], place, *index[dim + 1 :]))

    here_at = index[dim] if front is not None else integers.add(index[dim], 1)
    step = integers.sub(at(origin, here_at), at(origin, integers.sub(here_at, 1)))
    if not step.is_const or front is None:
        return step if step.is_const else None
    if shape(front)[dim] is not integers.integer(1):
        return None
    zero = integers.integer(0)
    return step if integers.sub(at(origin, zero), at(front, zero)) is step else None


_MOST_PIECES = 4


def _cat(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """Piece that the index falls into, where the bounds of the coordinates decide; for packed columns, both halves."""
    tensors = [t for t in args["tensors"] if shape(t) != (integers.integer(0),)]
    dim = nodes.normalize_dim(args.get("dim", 0), len(index))
    position = index[dim]
    for tensor in tensors:
        extent = shape(tensor)[dim]
        if integers.is_below(position, extent, pullback.bounds):
            return pullback.value(tensor, (*index[:dim], position, *index[dim + 1 :]))
        position = integers.sub(position, extent)
        if not integers.is_nonnegative(position, pullback.bounds):
            break
    extents = [shape(tensor)[dim] for tensor in tensors]
    if not pullback.reads_tables or len(tensors) > _MOST_PIECES or any(e is not extents[0] for e in extents):
        return None
    if not extents[0].is_const:
        return None
    number, within = (f(index[dim], extents[0], pullback.bounds) for f in (integers.floordiv, integers.mod))
    return _chosen(number, [pullback.value(tensor, (*index[:dim], within, *index[dim + 1 :])) for tensor in tensors])


def _stack(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    dim = nodes.normalize_dim(args.get("dim", 0), len(index))
    tensors, rest = args["tensors"], (*index[:dim], *index[dim + 1 :])
    if index[dim].is_const:
        return pullback.value(tensors[index[dim].integer], rest)
    if not pullback.reads_tables or len(tensors) > _MOST_PIECES:
        return None
    return _chosen(index[dim], [pullback.value(tensor, rest) for tensor in tensors])


def _chosen(number: Expr, pieces: list[Expr]) -> Expr:
    """Piece of that number."""
    result = pieces[-1]
    for k in reversed(range(len(pieces) - 1)):
        result = where(apply("ieq", number, integers.integer(k)), pieces[k], result)
    return result


def _pad(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    origin, pad = args["self"], args["pad"]
    extents, moved = shape(origin), list(index)
    inside = const(True)
    for k in range(len(pad) // 2):
        dim = len(index) - 1 - k
        low, high = (nodes.size_expr(p) for p in pad[2 * k : 2 * k + 2])
        zero = integers.integer(0)
        if low is zero and high is zero:
            continue
        moved[dim] = integers.sub(index[dim], low)
        inside = apply("and", inside, _is_within(pullback, moved[dim], extents[dim]))
    kind = casts.kind_of(nodes.dtype(here))
    if args.get("mode", "constant") != "constant" or kind in (None, Kind.BOOL):
        return None
    fill = const(args.get("value") or 0, kind)
    if inside is FALSE:
        return fill
    value = pullback.value(origin, tuple(moved))
    value = value if inside is TRUE else _readable(pullback, value, fill)
    return None if value is None else where(inside, value, fill)


def _is_within(pullback: PullBack, position: Expr, extent: Expr) -> Expr:
    """Condition for a position to be within a dimension, as far as the bounds do not decide it."""
    zero, last = integers.integer(0), integers.sub(extent, 1)

    def at_most(low: Expr, high: Expr) -> Expr:
        outcome = integers.always_at_most(low, high, pullback.bounds)
        return apply("ile", low, high) if outcome is None else const(outcome)

    return apply("and", at_most(zero, position), at_most(position, last))


def _read(value: Expr) -> set[Expr]:
    return {part for part in walk(value) if part.op in ("load", "dot")}


def _readable(pullback: PullBack, value: Expr, other: Expr) -> Expr | None:
    """The value with its loads at clamped positions, safe to evaluate where it and `other` are alternatives of a
    selection: an element outside of a tensor is not read even where it is discarded. None where the value has products
    of its own, or where no scores are concerned: the graph's tensor is read faster then."""
    known = _read(other)
    new_ops = {part.op for part in _read(value) - known}
    if "dot" in new_ops or ("load" in new_ops and not depends_on_product(other)):
        return None

    def clamped(position: Expr, extent: Expr) -> Expr:
        last = integers.sub(extent, 1)
        beyond = not integers.never_negative(integers.sub(last, position), pullback.bounds)
        if not integers.never_negative(position, pullback.bounds):
            position = apply("imax", position, integers.integer(0))
        return apply("imin", position, last) if beyond else position

    def leaf(part: Expr) -> Expr | None:
        if part in known:
            return part
        if part.op != "load":
            return None
        index = (rebuild(entry, leaf) for entry in part.args)
        extents = shape(pullback.loaded[part.operand])
        return load(part.operand, tuple(map(clamped, index, extents)), part.kind)

    return rebuild(value, leaf)


def _slice_scatter(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """`x[..., start:end] = y`: y where the index is inside of the slice, else x."""
    dim = nodes.normalize_dim(args["dim"], len(index))
    extent = shape(here)[dim]
    low = integers.integer(0) if args["start"] is None else _clamped(args["start"], extent)
    high = extent if args["end"] is None else _clamped(args["end"], extent)
    if args["step"] != 1 or low is None or high is None:
        return None
    position = integers.sub(index[dim], low)
    inside = _is_within(pullback, position, integers.sub(high, low))
    return _put(pullback, here, args, index, inside, (*index[:dim], position, *index[dim + 1 :]))


def _clamped(bound: Any, extent: Expr) -> Expr | None:
    """Bound of a slice as a position of at most `extent`; None where it may be negative at run time."""
    at = extent if bound == 2**63 - 1 else nodes.size_expr(bound)
    if at.is_const and at.integer < 0:
        at = apply("imax", integers.add(extent, at), integers.integer(0))
    elif not integers.is_nonnegative(at):
        return None
    return at if integers.is_nonnegative(integers.sub(extent, at)) else apply("imin", at, extent)


def _select_scatter(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """`x[:, at] = y`."""
    dim = nodes.normalize_dim(args["dim"], len(index))
    at = nodes.size_expr(args["index"])
    at = integers.add(shape(here)[dim], at) if at.is_const and at.integer < 0 else at
    return _put(pullback, here, args, index, apply("ieq", index[dim], at), (*index[:dim], *index[dim + 1 :]))


def _put(pullback: PullBack, here: Node, args: dict[str, Any], index: Index, inside: Expr, at: Index) -> Expr | None:
    """Element at `at` of the written tensor where `inside` holds, else of the tensor before."""
    before = pullback.value(args["self"], index)
    if inside is FALSE:
        return before
    value = pullback.value(args["src"], at)
    if inside is TRUE:  # a gradient of zero is not none
        lost = marks.requires_grad(here) and not _read(before) <= _read(value)
        return None if lost else value
    if (value := _readable(pullback, value, before)) is None:
        return None
    return pointwise.build(aten.where, casts.Call(args=(inside, value, before), kwargs={}, dtype=nodes.dtype(here)))


def _overwritten(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """Element of the result of `copy` and `fill`: the source in the dtype of the tensor that it is written to."""
    source = args["src"] if packet(here) is aten.copy else args["value"]
    value = pullback.argument(source, index, shape(here))
    return casts.cast(value if isinstance(value, Expr) else const(value), nodes.dtype(here))


def _index_put(pullback: PullBack, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
    """`scores[mask] = number`, for a mask of whole dimensions."""
    masks = [(k, t) for k, t in enumerate(args["indices"]) if t is not None]
    if len(masks) != 1 or nodes.dtype(masks[0][1]) is not torch.bool or args.get("accumulate"):
        return None
    if len(shape(args["values"])) > 0:
        return None
    first, mask = masks[0]
    chosen = pullback.value(mask, index[first : first + len(shape(mask))])
    arguments = pullback.value(args["self"], index), chosen, pullback.value(args["values"], ())
    return pointwise.build(aten.masked_fill, casts.Call(args=arguments, kwargs={}, dtype=nodes.dtype(here)))


OPERATIONS: dict[object, Callable[[PullBack, Node, dict[str, Any], Index], Expr | None]] = {
    aten.tril: _triangle, aten.triu: _triangle, aten.cumsum: _cumsum, aten.diff: _diff,
    aten.cat: _cat, aten.concat: _cat, aten.stack: _stack, aten.constant_pad_nd: _pad, aten.pad: _pad,
    aten.index: tables.indexed, aten.index_select: tables.picked, aten.gather: tables.picked,
    aten.index_put: _index_put,
    aten.slice_scatter: _slice_scatter, aten.select_scatter: _select_scatter,
    aten.copy: _overwritten, aten.fill: _overwritten,
}  # fmt: skip
"""Operation -> the element at an index of its result, from its arguments; None where it is to be loaded."""


def literal(here: Node) -> Expr | None:
    """A tensor constant of one element that the trace lifted into the graph."""
    tensor = nodes.lifted(here)
    if tensor is None or tensor.numel() != 1 or tensor.dtype.is_complex:
        return None
    return const(tensor.item(), casts.kind_of(tensor.dtype))


_FILLED = {aten.zeros: 0, aten.ones: 1, aten.zeros_like: 0, aten.ones_like: 1, aten.new_zeros: 0, aten.new_ones: 1}


def created(here: Node, index: Index) -> Expr | None:
    """Element of a created tensor: arange, zeros, full, eye, ..."""
    kind = packet(here)
    dtype = casts.kind_of(nodes.dtype(here))
    if dtype is None:
        return None
    args = arguments(here)
    if kind in _FILLED:
        return const(_FILLED[kind], dtype)
    if kind in (aten.full, aten.full_like, aten.new_full, aten.scalar_tensor):
        fill = args.get("fill_value", args.get("s"))
        if isinstance(fill, Node):
            fill = nodes.fake(fill)
        if not isinstance(fill, (bool, int, float)):
            return None
        return casts.cast(const(fill), nodes.dtype(here))
    if kind is aten.arange:
        start, step = args.get("start", 0), args.get("step", 1)
        if dtype is Kind.INT:
            return integers.add(nodes.size_expr(start), integers.mul(nodes.size_expr(step), index[0]))
        if isinstance(start, (int, float)) and isinstance(step, (int, float)):
            return apply("to_float", index[0]) * step + start
    if kind is aten.eye:
        return casts.cast(apply("ieq", *index), nodes.dtype(here))
    return None


LARGEST = 1 << 24
"""Elements of the largest tensor that is evaluated."""
_UNKNOWN = "unknown"


def folded(here: Node, index: Index) -> Expr | None:
    """Element `here[index]` as an expression of the index, or None where its value is unknown or not affine."""
    if not nodes.is_tensor(here) or (kind := casts.kind_of(nodes.dtype(here))) is None:
        return None
    if here.op != "call_function" or (value := known(here)) is None or not value.numel():
        return None
    if not marks.affine.on(here):
        marks.affine.set(here, _affine(value))
    if (affine := marks.affine(here)) is None:
        return None
    offset, steps = affine
    if not any(steps):
        return const(offset, kind)
    if kind is not Kind.INT:
        return None
    terms = [integers.mul(int(step), entry) for step, entry in zip(steps, index, strict=True)]
    return integers.add(int(offset), *terms)


def forget(graph: Graph) -> None:
    """Release the evaluated tensors, once the analysis is done."""
    for node in graph.nodes:
        marks.folded.drop(node)


def known(here: Node) -> Tensor | None:
    """Value of a tensor, if it can be computed; evaluated once per node, operands first."""
    stack = [here]
    while stack:
        node = stack[-1]
        values = [marks.folded(parent) for parent in node.all_input_nodes if marks.folded.on(parent)]
        if marks.folded.on(node):
            stack.pop()
        elif not _may_fold(node) or any(value is _UNKNOWN for value in values):
            marks.folded.set(node, _UNKNOWN)
        elif len(values) < len(node.all_input_nodes):
            stack += [parent for parent in node.all_input_nodes if not marks.folded.on(parent)]
        else:
            marks.folded.set(node, _evaluate(node))
    value = marks.folded(here)
    return None if value is _UNKNOWN else value


def _evaluate(here: Node) -> object:
    args, kwargs = map_arg((here.args, here.kwargs), marks.folded)
    try:
        with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch.no_grad():
            result = here.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # an operation that cannot run here is not known, which is no failure
        return _UNKNOWN
    return result if isinstance(result, Tensor) else _UNKNOWN


def _may_fold(here: Node) -> bool:
    """Whether a node computes a small tensor on the CPU, the same at every call, and changes nothing in place."""
    if here.op != "call_function" or not nodes.is_tensor(here) or not isinstance(here.target, OpOverload):
        return False
    fake = nodes.fake(here)
    if any(isinstance(extent, torch.SymInt) for extent in fake.shape) or fake.numel() > LARGEST:
        return False
    changing = marks.mutations(here) or nodes.writes(here)
    random = torch.Tag.nondeterministic_seeded in here.target.tags
    return fake.device.type == "cpu" and not changing and not random and not fake.is_complex()


def _affine(value: Tensor) -> tuple[float, list[float]] | None:
    """(c, steps) with value[index] = c + sum of steps[k] * index[k] everywhere, or None."""
    wide = value.to(torch.float64)
    origin = wide[(0,) * value.dim()]
    steps = [
        (wide.select(dim, 1)[(0,) * (value.dim() - 1)] - origin).item() if value.shape[dim] > 1 else 0.0
        for dim in range(value.dim())
    ]
    expected = origin.clone()
    for dim, step in enumerate(steps):
        axis = torch.arange(value.shape[dim], dtype=torch.float64) * step
        expected = expected + axis.reshape([-1 if k == dim else 1 for k in range(value.dim())])
    return (origin.item(), steps) if torch.equal(expected.expand(value.shape), wide) else None
