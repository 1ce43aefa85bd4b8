"""Tensors that expressions load: their numbers, and values that are the same at every call.

Models compute masks from positions by detours that no index arithmetic follows, such as a cumulative sum over a
comparison of `arange`s. Where sizes are fixed such a sub-graph, which depends on nothing but constants, is evaluated
once; where its values are affine in the positions (most often a constant), `affine_element` is an expression of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusion.ir import integers
from fusion.ir.expr import Expr, Kind, const
from fusion.ir.ops import apply
from fusion.torch_private.operators import OpOverload
from fusion.torch_private.tensors import unset_fake_temporarily
from fusion.torch_private.tracing import disable_proxy_modes_tracing

from .. import marks, nodes
from ..nodes import arguments, packet
from . import casts
from .views import Index

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Positions along a dimension of a tensor.

    positions: the tensor that holds them.
    extent, dim: the size and the number of the dimension.
    operation: "index", "index_select" or "gather", which differ in their arguments and in their errors.
    at: a node of the operation, where the positions change in place, so that another call may read others.
    call: a node of the operation.
    """

    positions: Node
    extent: Expr
    dim: int
    operation: str
    at: Node | None
    call: Node = field(compare=False)


class Numbers:
    """Numbers of the tensors in a list, to which new tensors are added. A tensor that is read as a table counts as
    another tensor; its `Table` is recorded by number."""

    def __init__(self, tensors: list[Node]):
        self.tensors, self.tables = tensors, dict[int, Table]()
        self.known: dict[tuple[Node, Table | None], int] = {}

    def __call__(self, tensor: Node, table: Table | None = None) -> int:
        if (tensor, table) not in self.known:
            self.known[tensor, table] = len(self.tensors)
            self.tensors.append(tensor)
            self.tables |= {} if table is None else {self.known[tensor, table]: table}
        return self.known[tensor, table]


def literal(here: Node) -> Expr | None:
    """A tensor constant of one element that the trace lifted into the graph."""
    tensor = nodes.lifted(here)
    if tensor is None or tensor.numel() != 1 or tensor.dtype.is_complex:
        return None
    return const(tensor.item(), casts.kind_of(tensor.dtype))


_FILLED = {aten.zeros: 0, aten.ones: 1, aten.zeros_like: 0, aten.ones_like: 1, aten.new_zeros: 0, aten.new_ones: 1}


def created_element(here: Node, index: Index) -> Expr | None:
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


def affine_element(here: Node, index: Index) -> Expr | None:
    """Element `here[index]` as an expression of the index, or None where its value is unknown or not affine."""
    if not nodes.is_tensor(here) or (kind := casts.kind_of(nodes.dtype(here))) is None:
        return None
    if here.op != "call_function" or (value := constant_value(here)) is None or not value.numel():
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


def forget_constants(graph: Graph) -> None:
    """Release the evaluated tensors, once the analysis is done."""
    for node in graph.nodes:
        marks.folded.drop(node)


def constant_value(here: Node) -> Tensor | None:
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
