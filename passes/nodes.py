"""Reading FX nodes: arguments by name, shapes as integer expressions, dtypes, source locations."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import sympy
import torch
from torch.fx import Graph, Node

from fusion.ir import integers
from fusion.ir.expr import ONE, Expr, const, is_number, size
from fusion.ir.ops import apply, as_float
from fusion.ir.ranges import LARGEST_SIZE
from fusion.refusals import Reason, Refusal
from fusion.torch_private import operators, tensors, tracing
from fusion.torch_private.autograd import SET_GRAD_ENABLED
from fusion.torch_private.tensors import functions as torch_sympy

from . import assumptions

F = TypeVar("F", bound=Callable[..., Any])
UNKNOWN = 1024
"""An example of a size that is known at run time only, as that of what `nonzero` finds."""


class Unsupported(Exception):
    """A construct that the analysis cannot express.

    refusal: its reason and the message, in the user's terms.
    expr: the expression at fault.
    node: the graph node at fault, filled in where it becomes known.
    """

    def __init__(self, kind: Reason, message: str, expr: Expr | None = None, node: Node | None = None) -> None:
        super().__init__(message)
        self.refusal = Refusal(kind, message)
        self.expr = expr
        self.node = node


class Specialized(Exception):
    """A dynamic size was made a constant: shapes of the graph that were read before have to be read again."""


def fake(argument: Any) -> Any:
    """Fake value recorded for a node; any other argument is returned unchanged."""
    return argument.meta.get("val", argument.meta.get("example_value")) if isinstance(argument, Node) else argument


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(fake(node), torch.Tensor)


def is_nested(tensor: Any) -> bool:
    """Whether a value is a nested tensor. Dynamo supports jagged ones only."""
    return isinstance(tensor, torch.Tensor) and tensor.is_nested


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor of the same shape and dtype in the current fake mode; of a DTensor the global tensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def walk_up(starts: Iterable[Node], parents: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Every ancestor of the starts, these included, each once. parents: the nodes that the walk goes on with."""
    seen, todo = set[Node](), list(starts)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += parents(node)


def with_gradients(graph: Graph) -> Iterator[tuple[Node, bool]]:
    """Pairs of a node and whether gradients are enabled there."""
    enabled = torch.is_grad_enabled()
    for node in list(graph.nodes):
        if node.target is SET_GRAD_ENABLED:
            enabled = bool(node.args[0])
        yield node, enabled


def dtype(node: Node) -> torch.dtype:
    return fake(node).dtype


def number(argument: Any) -> Any:
    """Scalar argument as a Python number where it is one, or can be specialized to one.

    With dynamic=True the floats of modules (a scale, a dropout probability) are symbols. Kernels compile such values
    in: torch guards on the value, and compiles again for another one. A scalar that follows from sizes alone stays a
    symbol (see `scalar`): a new length is no reason to compile again.
    """
    recorded = fake(argument)
    if is_given_float(argument):
        return assumptions.ask(
            recorded.node.expr, tensors.shape_environment(recorded), lambda: recorded.node.guard_float(__file__, 0)
        )
    return recorded if isinstance(recorded, float) else argument


def scalar(argument: Any) -> float | Expr | None:
    """Float argument as `number` returns it, or as a FLOAT expression of sizes; None where it is neither."""
    recorded = fake(argument)
    if isinstance(recorded, torch.SymFloat) and _follows_from_sizes(recorded):
        return _float_from_sympy(assumptions.known(recorded.node.expr))
    plain = number(argument)
    return float(plain) if isinstance(plain, (int, float)) and not isinstance(plain, bool) else None


def is_given_float(argument: Any) -> bool:
    """Whether an argument is a float that Dynamo made a symbol. `number` would guard on its value."""
    recorded = fake(argument)
    return isinstance(recorded, torch.SymFloat) and recorded.node.has_hint() and not _follows_from_sizes(recorded)


def _follows_from_sizes(value: torch.SymFloat) -> bool:
    symbols = value.node.expr.free_symbols
    return bool(symbols) and all(symbol.is_integer for symbol in symbols)


def packet(node: Node) -> Any:
    """The overload packet that a node calls, or None."""
    target = node.target
    return target.overloadpacket if isinstance(target, operators.OpOverload) else None


def shape(node: Node) -> tuple[Expr, ...]:
    """The node's shape: INT expressions in constants and sizes."""
    return tuple(size_expr(extent) for extent in fake(node).shape)


def size_expr(extent: Any) -> Expr:
    """Python int, SymInt or FX node of an integer, as an INT expression."""
    extent = fake(extent)
    if isinstance(extent, torch.SymInt):
        _require_sizes(extent)
        return integers.integer(1) if _is_one(extent) else _from_sympy(assumptions.known(extent.node.expr))
    if isinstance(extent, bool) or not isinstance(extent, int):
        raise Unsupported(Reason.SIZE, f"a size that is not an integer: {extent!r}")
    return integers.integer(extent)


def _require_sizes(extent: torch.SymInt) -> None:
    """Require of every symbol of an expression what `size` assumes: at least 0 and below `LARGEST_SIZE`. A Python int
    that Dynamo made dynamic need not be in this range: torch then guards on the range, or on the value where it is
    outside. A divisor has to be other than 0: a kernel would end the process where Python raises an error."""
    env, expr = tensors.shape_environment(extent), assumptions.known(extent.node.expr)

    def holds(condition: Any) -> bool:
        return bool(assumptions.ask(condition, env, lambda: env.evaluate_expr(condition)))

    for symbol in expr.free_symbols:
        if env.bound_sympy(symbol).lower >= 0:
            continue  # the size of a tensor; of such, kernels are called for none that is too large
        if tensors.free_unbacked_symbols(symbol):
            raise Unsupported(
                Reason.RUN_TIME_SCALAR, f"an integer that is computed at run time and may be negative: {symbol}"
            )
        if not (holds(symbol >= 0) and holds(symbol < LARGEST_SIZE)):
            assumptions.fix(symbol, env)
    for division in expr.atoms(torch_sympy.FloorDiv, torch_sympy.Mod, torch_sympy.PythonMod):
        if not holds(sympy.Ne(division.args[1], 0)):
            raise Unsupported(Reason.SIZE, f"a division by zero: {division}")


def _is_one(extent: torch.SymInt) -> bool:
    """Whether an expression of sizes is 1. torch guards on this for a broadcast, and keeps the expression."""
    node = extent.node
    return not node.expr.is_symbol and node.has_hint() and node.hint == 1 and tensors.statically_known_true(extent == 1)


def _from_sympy(expr: sympy.Expr) -> Expr:
    if isinstance(expr, (sympy.Integer, int)):
        return integers.integer(int(expr))
    if isinstance(expr, sympy.Symbol):
        return size(expr.name)
    args = tuple(_from_sympy(arg) for arg in expr.args)
    if isinstance(expr, sympy.Add):
        return integers.add(*args)
    if isinstance(expr, sympy.Mul):
        return integers.mul(*args)
    if isinstance(expr, sympy.Pow) and isinstance(expr.exp, sympy.Integer) and int(expr.exp) > 0:
        return integers.mul(*[args[0]] * int(expr.exp))
    if isinstance(expr, (torch_sympy.FloorDiv, torch_sympy.CleanDiv)):
        return integers.floordiv(*args)
    if isinstance(expr, (torch_sympy.Mod, torch_sympy.PythonMod)):
        return integers.mod(*args)
    if isinstance(expr, (sympy.Max, torch_sympy.Max)):
        return functools.reduce(functools.partial(apply, "imax"), args)
    if isinstance(expr, (sympy.Min, torch_sympy.Min)):
        return functools.reduce(functools.partial(apply, "imin"), args)
    raise Unsupported(Reason.SIZE, f"a size written as {expr}")


def _float_from_sympy(expr: sympy.Expr) -> Expr:
    """Float that Python computes from sizes. Kernels compute it in float32, where sizes up to 2**24 are exact."""
    if expr.is_number:
        return const(float(expr))
    if isinstance(expr, torch_sympy.ToFloat) or expr.is_integer:
        inner = expr.args[0] if isinstance(expr, torch_sympy.ToFloat) else expr
        return as_float(_from_sympy(inner))  # type: ignore[arg-type]
    args = tuple(_float_from_sympy(arg) for arg in expr.args)  # type: ignore[arg-type]
    if isinstance(expr, (sympy.Add, sympy.Mul)):
        combine = functools.partial(apply, "fadd" if isinstance(expr, sympy.Add) else "fmul")
        return functools.reduce(combine, args)
    if isinstance(expr, (torch_sympy.FloatTrueDiv, torch_sympy.IntTrueDiv)):
        return apply("div", *args)
    if isinstance(expr, (torch_sympy.FloatPow, sympy.Pow)):
        return _power(*args)
    name = type(expr).__name__.removeprefix("OpaqueUnaryFn_")
    if name == "log2":
        return apply("log", args[0]) / math.log(2)
    if name in ("sqrt", "exp", "log", "sin", "cos", "tanh", "atan"):
        return apply(name, args[0])
    raise Unsupported(Reason.RUN_TIME_SCALAR, f"a scalar that is computed at run time ({expr})")


def _power(base: Expr, exponent: Expr) -> Expr:
    if is_number(exponent, 0.5):
        return apply("sqrt", base)
    if exponent.is_const and exponent.value < 0:
        return ONE / _power(base, const(-exponent.value))
    return base if is_number(exponent, 1.0) else apply("pow", base, exponent)


def memory_order(node: Node) -> tuple[int, ...]:
    """Dimensions of a tensor from the slowest to the fastest in memory; broadcast dimensions keep their position."""
    strides = [tensors.optimization_hint(stride, UNKNOWN) for stride in fake(node).stride()]
    for k in reversed(range(len(strides))):
        if strides[k] == 0 and k + 1 < len(strides):
            strides[k] = strides[k + 1]
    return tuple(sorted(range(len(strides)), key=lambda k: (-strides[k], k)))


def specialize(extent: Any) -> None:
    """Make a dynamic size static, as kernels need of head dimensions; raises `Specialized` if it was dynamic. All sizes
    that it follows from become static: a guard that (n + 2) // 3 is 8 would leave n open, and the size an
    expression."""
    symbols = assumptions.known(extent.node.expr).free_symbols if isinstance(extent, torch.SymInt) else ()
    for symbol in symbols:
        assumptions.fix(symbol, tensors.shape_environment(extent))
    if symbols:
        raise Specialized


def lifted(node: Node) -> torch.Tensor | None:
    """Tensor of a constant that the trace lifted into the graph; None for other nodes."""
    if not tracing.is_lifted(node):
        return None
    tensor = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return tensor if isinstance(tensor, torch.Tensor) else None


def writes(node: Node) -> bool:
    """Whether an ATen call writes into one of its arguments: `out=`, or in place."""
    return isinstance(node.target, operators.OpOverload) and operators.schema(node.target).is_mutable


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of an ATen call by their schema names, with defaults, and scalars as `number` returns them."""
    schema = operators.schema(node.target)  # type: ignore[union-attr]
    bound = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    bound |= dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    return {name: number(argument) for name, argument in (bound | node.kwargs).items()}


def is_active_dropout(node: Node) -> bool:
    """Whether a node drops elements at random: dropout in training, or SDPA with a probability."""
    if node.op != "call_function":
        return False
    if packet(node) is torch.ops.aten.dropout:
        return True  # inactive ones are gone
    if packet(node) is not torch.ops.aten.scaled_dot_product_attention:
        return False
    p = arguments(node)["dropout_p"]
    return not isinstance(p, (int, float)) or p > 0


def impurity() -> Callable[[Node], bool]:
    """`Node.is_impure`, computed once per operator. torch takes SDPA for random; here it is so with dropout only."""
    of_operator = functools.cache(operators.is_impure)

    def impure(node: Node) -> bool:
        whole = node.op == "call_function" and isinstance(node.target, operators.OpOverload)
        if packet(node) is torch.ops.aten.scaled_dot_product_attention:
            return is_active_dropout(node)
        return of_operator(node.target) if whole else node.is_impure()

    return impure


def erase_unused(graph: Graph, impure: Callable[[Node], bool]) -> None:
    """Erase pure nodes without users, in this graph alone. `Graph.eliminate_dead_code` also enters the subgraphs of
    calls, which are in Dynamo's form, and takes `s.masked_fill_(...)` there for pure (torch 2.13)."""
    for node in reversed(graph.nodes):
        if not node.users and not impure(node):
            graph.erase_node(node)


def rules(table: dict[Any, F]) -> Callable[..., Callable[[F], F]]:
    """Decorator that enters a function in a table, under each of the decorator's arguments."""

    def rule(*packets: Any) -> Callable[[F], F]:
        def register(function: F) -> F:
            table.update(dict.fromkeys(packets, function))
            return function

        return register

    return rule


def normalize_dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def normalize_dims(dims: Any, rank: int) -> list[int]:
    """Dimensions that an argument `dim` names; the argument is a number, a list or None (no dimension)."""
    return [normalize_dim(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims or ())]


def one_dim(dims: Any, rank: int) -> int | None:
    """Dimension that an argument `dim` names, as a number or as a list of one; else None."""
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return normalize_dim(dims[0], rank) if len(dims) == 1 and isinstance(dims[0], int) else None


def dims_of(node: Node) -> list[int]:
    """Dimensions that a reduction runs over, in order: by default all."""
    args = arguments(node)
    rank = len(shape(args["self"]))
    return sorted(normalize_dims(args.get("dim"), rank) or range(rank))


def copy_provenance(origin: Node, target: Node) -> None:
    """Copy the source location, module and similar metadata of a node to the one that replaces it."""
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if key in origin.meta:
            target.meta[key] = origin.meta[key]


def source_line(node: Node) -> str | None:
    """Source location of a node, as "file.py:12 in forward: code", from the stack trace that Dynamo recorded."""
    frames = tracing.stack_frames(node)
    return frames[-1].place if frames else None


def producer(node: Node) -> Node:
    """Call that returns the tuple of which a node is an item; else the node itself."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def module_path(node: Node) -> str | None:
    """Path of the nn.Module that called this operation, e.g. "encoder.layer.0.attention.self"."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path, _ = list(stack.values())[-1]
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
    return re.sub(r"^L\.fn\.|^L\.args\.0(\.|$)|^(L\.)?self\.?|^L\.|_modules\.|\.__dict__", "", path) or None


def example_sizes(graph: Graph) -> dict[str, int]:
    """Example value of every symbolic size of a graph."""
    examples: dict[str, int] = {}
    for node in graph.nodes:
        recorded = fake(node)  # of a tensor that is made here all sizes are known from others
        is_input = isinstance(recorded, torch.Tensor) and node.op == "placeholder"
        extents: Iterable[Any] = _extents(recorded) if is_input else [recorded]
        for extent in extents:
            symbolic = isinstance(extent, torch.SymInt) and extent.node.expr.is_symbol
            if symbolic and isinstance(extent.node.hint, int | None):  # else it is that of a nested tensor
                examples[str(extent.node.expr)] = tensors.optimization_hint(extent, UNKNOWN)
    return examples


def _extents(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Sizes of a tensor; of a nested tensor those of its components, since its own size is no list of integers."""
    if not is_nested(tensor):
        return tuple(tensor.shape)
    values, offsets = tensors.nested_parts(tensor)
    return (*values.shape, *offsets.shape)
