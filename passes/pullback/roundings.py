"""Roundings to narrow dtypes that are part of a program: kernels compute in float32, and leave out all others.

First, those that a model asks for, by a cast to a dtype with fewer digits than that of the product of weights and V:
`x.to(torch.float8_e4m3fn).to(x.dtype)` everywhere, `x.bfloat16().float()` in float32 and float16. Other narrow dtypes
are those that the model computes in, and kernels are more exact.

Second, overflow (`Narrow`). A program that adds a mask of finfo.min to another one, or scales it, reaches the end of
the range of float16 or bfloat16, whose neighbour is infinity. In float32 twice bfloat16's lowest value is a number, and
so is float32's lowest value that was cast to bfloat16; both are -inf in the model. Rows without a live key show it. So
an expression whose values may lie outside of the range is rounded as the model rounds it. Only fills of masks are that
large: constants, and tensors that differ between rows or keys and are not computed from parameters alone. Scores and
scalars count as ordinary, so that programs without fills stay as they are.

Third, values that are loaded from a tensor of the graph, although a program could compute them: conditions that the
model decides in a narrower dtype. Slightly other numbers, or another rounding to integers, give another mask. (And
values that cost more than a load, `too_heavy`.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterator, Sequence, Set

import torch
from torch.fx import Node

from fusion.ir.expr import Expr, Kind, coordinates, walk
from fusion.ir.ops import apply, rounded, where
from fusion.ir.primitives import PRIMITIVES, ROUNDED, cost
from fusion.lowering.numbers import feeding_comparisons
from fusion.refusals import Reason

from .. import marks, nodes
from .casts import FILL
from .reductions import depends_on_product

DtypeOf = Callable[[Expr], torch.dtype]
"""The dtype of the tensor that a load reads."""


def is_coarser(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a dtype is a floating one with fewer digits than another one."""
    if not dtype.is_floating_point:
        return False
    return dtype.itemsize == 1 or torch.finfo(dtype).eps > torch.finfo(than).eps


def rounded_at(here: Node, value: Expr, precision: torch.dtype, dtype_of: DtypeOf) -> Expr | None:
    """Float rounded to the dtype that a node narrows it to; None where no kernel rounds to that. Values computed from
    such floats in the dtype are rounded likewise, except for scores and weights, which are more exact than the model's.
    precision: the dtype of the product of weights and V."""
    dtype = nodes.dtype(here)
    if not is_coarser(dtype, precision):
        return value
    dtypes = (nodes.dtype(x) for x in here.all_input_nodes if nodes.is_tensor(x))
    narrowed = any(origin.is_floating_point and is_coarser(dtype, origin) for origin in dtypes)
    of_scores = depends_on_product(value)
    if not narrowed and (of_scores or all(part.op != ROUNDED.get(dtype) for part in walk(value))):
        return value
    if marks.requires_grad(here) and not of_scores:
        return None  # its gradient is rounded when all of it has been added up
    return narrowed_to(value, dtype, precision, dtype_of)


def narrowed_to(value: Expr, dtype: torch.dtype, precision: torch.dtype, dtype_of: DtypeOf) -> Expr | None:
    """Float rounded to a coarser dtype; None where no primitive rounds to that. Raises Unsupported for scores of
    float64: no kernel rounds them, and scores of -1e9 that differ are equal after that."""
    if precision is torch.float64 and depends_on_product(value):
        raise nodes.Unsupported(Reason.DTYPE, f"scores of float64 are rounded to {dtype}", value)
    return _rounded(value, dtype, dtype_of)


def _rounded(value: Expr, dtype: torch.dtype, dtype_of: DtypeOf) -> Expr | None:
    if value.is_const or value.op == ROUNDED.get(dtype) or (value.op == "load" and dtype_of(value) is dtype):
        return value
    if value.op == "where":
        arms = [_rounded(arm, dtype, dtype_of) for arm in value.args[1:]]
        return None if None in arms else where(value.args[0], *arms)  # type: ignore[arg-type]
    return apply(ROUNDED[dtype], value) if dtype in ROUNDED else None


Span = tuple[float, float]
"""The least and the largest finite value."""

ORDINARY, INDICATOR = (-1.0, 1.0), (0.0, 1.0)
ROOM = 2.0**15
"""A sum that comes this close to the end of a range may be taken beyond it by the score in it."""
MAX_STEPS = 32
"""Nodes above a tensor that are looked at."""
_SELECTIONS = ("where", "minimum", "maximum")
_DTYPES = {name: dtype for dtype, name in ROUNDED.items()}


def first_infinite(dtype: torch.dtype) -> float:
    """Smallest number that rounds to infinity."""
    limits = torch.finfo(dtype)
    return math.ldexp(1 - limits.eps / 4, math.frexp(limits.max)[1])


class Narrow:
    """Rounding of expressions to a narrow dtype. integers: the range of an INT expression. tensor: that of a load."""

    def __init__(self, dtype: torch.dtype, integers: Callable[[Expr], tuple[int, int]], tensor: Callable[[Expr], Node]):
        self.dtype, self._integers, self._tensor = dtype, integers, tensor
        self._end = first_infinite(dtype)
        self._spans: dict[Expr, Span | None] = {}

    def __call__(self, value: Expr) -> Expr:
        """The value, rounded where it may be infinite in the dtype and is not in float32."""
        if value.op == "where":
            return where(value.args[0], *map(self, value.args[1:]))
        span = self._span(value)
        if span is None:
            return value
        room = ROOM if value.op in ("fadd", "fsub") else 0.0
        return apply(ROUNDED[self.dtype], value) if max(-span[0], span[1]) >= self._end - room else value

    def _span(self, value: Expr) -> Span | None:
        """Range of the finite values of an expression; None for weights, and for shifts that `recognize` removes."""
        if value not in self._spans:
            for part in walk(value):
                if part.kind is Kind.FLOAT and part not in self._spans:
                    self._spans[part] = self._of(part)
        return self._spans[value]

    def _of(self, part: Expr) -> Span | None:
        if part.op == "const":
            return (part.value, part.value) if math.isfinite(part.value) else (0.0, 0.0)
        if part.op == "to_float":
            integer = part.args[0]
            if any(p.op == "load" for p in walk(integer)):
                return INDICATOR
            low, high = self._integers(integer)
            return float(low), float(high)
        if part.op == "load":
            return self._of_load(part)
        if part.op in ("reduce", "softmax", "log_softmax"):
            return None
        if part.op not in PRIMITIVES:
            return ORDINARY
        spans = [self._spans[arg] for arg in part.args if arg.kind is Kind.FLOAT]
        if None in spans:
            return None
        return _result(part.op, spans)  # type: ignore[arg-type]

    def _of_load(self, part: Expr) -> Span:
        """Range of a loaded value. bfloat16 ends within 0.2 % of float32: a value beyond one is beyond both."""
        tensor = self._tensor(part)
        tensor_dtype = nodes.dtype(tensor)
        bare = not coordinates(part) & {"i", "j"} or is_learned(tensor)
        if bare or tensor_dtype is self.dtype is torch.bfloat16:
            return ORDINARY
        largest = min(torch.finfo(tensor_dtype).max, torch.finfo(torch.float32).max)
        return -largest, largest


def is_learned(node: Node) -> bool:
    """Whether a tensor is computed from parameters alone, as a relative position bias is, without a mask's fill."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in seen or not nodes.is_tensor(current) or not nodes.dtype(current).is_floating_point:
            continue
        seen.add(current)
        numbers = [arg for arg in (*current.args, *current.kwargs.values()) if isinstance(arg, (int, float))]
        if len(seen) > MAX_STEPS or any(number <= FILL for number in numbers):
            return False
        tensors = [parent for parent in current.all_input_nodes if nodes.is_tensor(parent)]
        if not tensors and not isinstance(current.meta.get("example_value"), torch.nn.Parameter):
            return False
        stack += tensors
    return bool(seen)


def _result(op: str, spans: list[Span]) -> Span:
    """Span of a result: of its values at the ends of the arguments' spans, where every primitive has its extrema."""
    if op in _SELECTIONS:  # an infinity hides in a span of zeros, and leaves the other argument
        return min(low for low, _ in spans), max(high for _, high in spans)
    if op in _DTYPES:
        limits = torch.finfo(_DTYPES[op])
        return max(spans[0][0], limits.min), min(spans[0][1], limits.max)
    if not spans:
        return INDICATOR
    corners = torch.tensor(list(itertools.product(*spans)), dtype=torch.float64).unbind(1)
    values = PRIMITIVES[op].evaluate(*corners)
    values = values[values.isfinite()].tolist() or [0.0]
    return min(values), max(values)


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
