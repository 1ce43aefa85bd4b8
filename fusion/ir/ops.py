"""Constructors of expressions that check kinds and keep expressions small, by rules that hold for floats as well.

Integers are built with `fusion.ir.integers`; the operations themselves are in `fusion.ir.primitives`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from fusion.ir import integers
from fusion.ir.expr import FALSE, TRUE, Expr, Kind, const, is_finite_const, is_number, node, walk
from fusion.ir.primitives import PRIMITIVES
from fusion.ir.ranges import may_be_moved

FLOAT, INT, BOOL = Kind.FLOAT, Kind.INT, Kind.BOOL
_FOLDED = {FLOAT: torch.float64, INT: torch.int64, BOOL: torch.bool}


def apply(name: str, *args: Expr) -> Expr:
    """A primitive applied: checked kinds, constants folded (in float64), identities removed."""
    primitive = PRIMITIVES[name]
    if name in _INTEGER:
        return _INTEGER[name](*args)
    kinds = tuple(arg.kind for arg in args)
    if kinds != primitive.args:
        raise TypeError(f"{name} takes {[k.value for k in primitive.args]}, got {[k.value for k in kinds]}")
    if all(arg.is_const for arg in args):
        values = (torch.tensor(arg.attr, dtype=_FOLDED[arg.kind]) for arg in args)
        return const(primitive.evaluate(*values).item(), primitive.result)
    simplified = _SIMPLIFY[name](*args) if name in _SIMPLIFY else None
    if simplified is None and name not in ("where", "iwhere"):
        simplified = _push_into_where(name, args)
    return simplified if simplified is not None else node(name, args, primitive.result)


def remake(expr: Expr, args: tuple[Expr, ...]) -> Expr:
    """Expression with the operation of `expr` on other arguments, through the normalising constructors."""
    if expr.op not in PRIMITIVES:
        return node(expr.op, args, expr.kind, expr.attr)
    result = apply(expr.op, *args)
    return result if expr.attr is None else rounding_to(result, str(expr.attr))


def rounding_to(value: Expr, dtype: str) -> Expr:
    """`tanh` whose value the model rounds to a dtype, beyond which it need not be exact; others unchanged."""
    return node("tanh", value.args, value.kind, dtype) if value.op == "tanh" else value


def where(condition: Expr, then: Expr, otherwise: Expr) -> Expr:
    """Selection between two values; of two BOOL values, as logic."""
    if then.kind is BOOL:
        return apply("or", apply("and", condition, then), apply("and", apply("not", condition), otherwise))
    return apply("iwhere" if then.kind is INT else "where", condition, then, otherwise)


def _where(condition: Expr, then: Expr, otherwise: Expr) -> Expr | None:
    if condition is TRUE or then is otherwise:
        return then
    if condition is FALSE:
        return otherwise
    if condition.op == "not":
        return where(condition.args[0], otherwise, then)
    if then.op in ("where", "iwhere") and then.args[2] is otherwise:  # (x if q else y) if p else y
        return where(apply("and", condition, then.args[0]), then.args[1], otherwise)
    if otherwise.op in ("where", "iwhere") and otherwise.args[1] is then:  # x if p else (x if q else y)
        return where(apply("or", condition, otherwise.args[0]), then, otherwise.args[2])
    return None


def _logic(neutral: Expr, absorbing: Expr) -> Callable[[Expr, Expr], Expr | None]:
    def simplified(left: Expr, right: Expr) -> Expr | None:
        if absorbing in (left, right):
            return absorbing
        if left is neutral or left is right:
            return right
        return left if right is neutral else None

    return simplified


_COMPLEMENT = {"ilt": "ile", "ile": "ilt"}
_EQUALITY = {"ieq": "ine", "ine": "ieq", "feq": "fne", "fne": "feq"}


def _not(value: Expr) -> Expr | None:
    if value.op == "not":
        return value.args[0]
    if value.op in ("and", "or"):  # De Morgan: negations go to the leaves, so that conjuncts are seen
        return apply("or" if value.op == "and" else "and", *(apply("not", arg) for arg in value.args))
    if value.op in _COMPLEMENT:  # not for floats: NaN compares false both ways
        return apply(_COMPLEMENT[value.op], value.args[1], value.args[0])
    if value.op in _EQUALITY:
        return apply(_EQUALITY[value.op], *value.args)
    return None


def _identity(neutral: float) -> Callable[[Expr, Expr], Expr | None]:
    return lambda left, right: left if is_number(right, neutral) else None


def _at_most(left: Expr, right: Expr, less: int = 0) -> Expr | None:
    """left <= right - less: decided where the difference is constant or of one sign (coordinates are >= 0), else
    normalised. Terms stand on the side where their coefficient is positive, so that `0 <= i - j` and `j < i + 1` are `j
    <= i`. None where they must stay: sums of large numbers wrap around, so that `j - x <= 0` is not `j <= x`."""
    if not may_be_moved(left, right):
        return None
    margin = integers.sub(integers.sub(right, left), less)
    if integers.is_nonnegative(margin):
        return TRUE
    if integers.is_nonnegative(integers.sub(integers.neg(margin), 1)):
        return FALSE
    smaller, larger, constant = _sides(margin)
    if constant >= 0:
        return node("ile", (smaller, integers.add(larger, constant)), BOOL)
    return node("ilt", (integers.add(smaller, -constant - 1), larger), BOOL)


def _sides(difference: Expr) -> tuple[Expr, Expr, int]:
    """(negative terms with their sign turned, positive terms, constant term)."""
    polynomial = integers.terms(difference)
    negative = integers.from_terms({m: -c for m, c in polynomial.items() if m and c < 0})
    positive = integers.from_terms({m: c for m, c in polynomial.items() if m and c > 0})
    return negative, positive, polynomial.get((), 0)


def _equal(left: Expr, right: Expr) -> Expr | None:
    difference = integers.sub(left, right)
    if difference.op == "const":
        return const(difference.attr == 0)
    for signed in (difference, integers.neg(difference)):
        if integers.is_nonnegative(integers.sub(signed, 1)):
            return FALSE
    return None


def _unequal(left: Expr, right: Expr) -> Expr | None:
    decided = _equal(left, right)
    return None if decided is None else const(not decided.attr)


EXACT_INTEGERS = 2**24
"""Below it every integer is a float32, and beyond it none is rounded to less."""


def _integer_comparison(name: str) -> Callable[[Expr, Expr], Expr | None]:
    """Comparison of an integer, as a float, with a constant: one of integers, of which masks get their ranges."""
    # (comparison, rounding of a constant on the right, rounding of one on the left)
    integer, right, left = {"flt": ("ilt", math.ceil, math.floor), "fle": ("ile", math.floor, math.ceil)}[name]

    def compare(a: Expr, b: Expr) -> Expr | None:
        rounding, constant = (right, b) if a.op == "to_float" else (left, a)
        if {a.op, b.op} != {"to_float", "const"} or not abs(constant.value) < EXACT_INTEGERS:
            return None
        bound = const(rounding(constant.value))
        return apply(integer, a.args[0], bound) if constant is b else apply(integer, bound, b.args[0])

    return compare


def _add(left: Expr, right: Expr) -> Expr | None:
    """(x if p else 0) + (0 if p else y) = x if p else y: the gradient of a value used on both sides of a selection."""
    for zero, other in ((left, right), (right, left)):
        if is_number(zero, 0.0):
            return other
    if left.op == right.op == "where" and left.args[0] is right.args[0]:
        _, x, nothing = left.args
        _, none, y = right.args
        if is_number(nothing, 0.0) and is_number(none, 0.0):
            return where(left.args[0], x, y)
    return None


def _multiply(left: Expr, right: Expr) -> Expr | None:
    """A product of two selections between finite constants, such as two masks of ones and zeros, is a selection."""
    if is_number(right, 1.0):
        return left
    if is_number(left, 1.0):
        return right
    if all(arg.op == "where" and all(map(is_finite_const, arg.args[1:])) for arg in (left, right)):
        condition, then, otherwise = left.args
        return where(condition, apply("fmul", then, right), apply("fmul", otherwise, right))
    return None


def _push_into_where(name: str, args: tuple[Expr, ...]) -> Expr | None:
    """f(x if p else constant, constants) = f(x, constants) if p else f(constant, constants), where that has the same
    gradient too. This turns `(1 - mask.float()) * finfo.min`, in all its spellings, into a selection between 0 and a
    fill."""
    selections = [k for k, arg in enumerate(args) if arg.op in ("where", "iwhere")]
    if len(selections) != 1 or not all(arg.is_const for k, arg in enumerate(args) if k != selections[0]):
        return None
    position = selections[0]
    condition, then, otherwise = args[position].args
    if not (then.is_const or otherwise.is_const):
        return None
    varying = otherwise if then.is_const else then
    if not (_is_linear(name, args, position) or not carries_gradient(varying)):
        return None
    return where(condition, *(apply(name, *args[:position], arm, *args[position + 1 :]) for arm in (then, otherwise)))


def _of_integers(value: Expr) -> Expr | None:
    """A multiple of a selection between integers, plus a constant, as a float: `(1 - mask.long()) * -10000` is the mask
    that it is in floats."""
    linear = integers.terms(value)
    selections = [m[0] for m in linear if len(m) == 1 and m[0].op == "iwhere"]
    if len(selections) != 1 or len(linear) > 1 + (() in linear):
        return None
    condition, *arms = selections[0].args
    scale, shift = linear[selections[0],], linear.get((), 0)
    return where(condition, *(as_float(integers.add(integers.mul(scale, arm), shift)) for arm in arms))


def _is_linear(name: str, args: tuple[Expr, ...], position: int) -> bool:
    """Whether the derivative for the argument at `position` is a finite constant, if the other argument is. For any
    other function it may be infinite where the selection does not take x, and 0 * inf is NaN."""
    if name in ("neg", "fadd", "fsub", "detach", "detach_nan") or PRIMITIVES[name].result is not FLOAT:
        return True
    if name == "fmul":
        return is_finite_const(args[1 - position])
    return name == "div" and position == 0 and is_finite_const(args[1]) and not is_number(args[1], 0.0)


@functools.lru_cache(maxsize=4096)
def carries_gradient(expr: Expr) -> bool:
    """Whether a value depends on floats that are not constants."""
    if expr.kind is not FLOAT or expr.is_const:
        return False
    if expr.op not in PRIMITIVES:
        return True
    return any(map(carries_gradient, expr.args))


_INTEGER: dict[str, Callable[..., Expr]] = {
    "add": integers.add,
    "mul": integers.mul,
    "floordiv": integers.floordiv,
    "mod": integers.mod,
}
_SIMPLIFY: dict[str, Callable[..., Expr | None]] = {
    "abs": lambda x: x if x.op == "exp" else None,
    "where": _where,
    "iwhere": _where,
    "and": _logic(TRUE, FALSE),
    "or": _logic(FALSE, TRUE),
    "not": _not,
    "fadd": _add,
    "fsub": _identity(0.0),
    "fmul": _multiply,
    "div": _identity(1.0),
    "pow": _identity(1.0),
    "flt": _integer_comparison("flt"),
    "fle": _integer_comparison("fle"),
    "ilt": lambda left, right: _at_most(left, right, less=1),
    "ile": _at_most,
    "ieq": _equal,
    "ine": _unequal,
    "to_float": _of_integers,
    "bool_to_float": lambda value: where(value, const(1.0), const(0.0)),
    "bool_to_int": lambda value: where(value, const(1), const(0)),
}


def as_float(value: Expr) -> Expr:
    return value if value.kind is FLOAT else apply("to_float" if value.kind is INT else "bool_to_float", value)


def as_int(value: Expr) -> Expr:
    """Convert to INT, truncating."""
    return value if value.kind is INT else apply("to_int" if value.kind is FLOAT else "bool_to_int", value)


def as_bool(value: Expr) -> Expr:
    """Convert to BOOL: not equal to zero."""
    if value.kind is BOOL:
        return value
    return apply("ine", value, const(0)) if value.kind is INT else apply("fne", value, const(0.0))


def conjuncts(predicate: Expr) -> list[Expr]:
    """The operands of nested `and`s."""
    if predicate.op == "and":
        return [part for arg in predicate.args for part in conjuncts(arg)]
    return [] if predicate is TRUE else [predicate]


def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` rounded to `dtype`: a cast in the model can turn finfo(float32).min into -inf."""
    if math.isnan(value):
        return value
    return torch.tensor(value, dtype=torch.float64).to(dtype).double().item()


def evaluate(
    expr: Expr,
    leaf: Callable[[Expr], Any],
    float_dtype: torch.dtype = torch.float32,
    constant: Callable[[Any, torch.dtype], Any] = lambda value, dtype: torch.tensor(value, dtype=dtype),
) -> Any:
    """Value of an expression. leaf(node): of a coordinate, size, load, score or row value; constant(value, dtype)."""
    values: dict[Expr, Any] = {}
    dtype = {FLOAT: float_dtype, INT: torch.int64, BOOL: torch.bool}
    for part in walk(expr):
        if part.op == "const":
            value = integers.in_64_bits(part.integer) if part.kind is INT else part.attr
            values[part] = constant(value, dtype[part.kind])
        elif part.op in PRIMITIVES:
            args, compute = [values[arg] for arg in part.args], PRIMITIVES[part.op].evaluate
            result = functools.reduce(compute, args) if part.op in ("add", "mul") else compute(*args)
            values[part] = result.to(float_dtype) if part.kind is FLOAT else result
        elif part.op == "load":
            values[part] = leaf(part) if not part.args else leaf(part)(*(values[arg] for arg in part.args))
        else:
            values[part] = leaf(part)
    return values[expr]
