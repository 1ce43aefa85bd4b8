"""Primitive operations of the score language, each with all of its properties in one entry.

Every emitter must know how to emit each primitive. Everything else a model may write (silu, gelu, lerp, ...) is
composed of primitives by the pull-back (`passes.pullback.pointwise`); adding an operation there needs no change in any
emitter. A new primitive is one entry in this table and one line in the lowering table of each emitter; tests name
missing ones.

Derivatives are written in torch's order of operations, which decides where 0 * inf occurs. At kinks they are fixed (0
for |x| at 0, halves for ties of min and max), by torch's conventions, with which validation compares compositions
(`fusion.validation.samples`). Selections select gradients instead of multiplying by 0 and 1, so that an infinity or
NaN on the side not taken goes nowhere, as in torch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion.ir import transfer
from fusion.ir.expr import ONE, ZERO, Expr, Kind, operation
from fusion.ir.transfer import Range, Transfer, by_ends, by_points, rising

FLOAT, INT, BOOL = Kind.FLOAT, Kind.INT, Kind.BOOL
ATOM = 9
"""The precedence of what never needs brackets."""

Derivative = Callable[..., "Expr | tuple[Expr | None, ...]"]
"""(gradient g of the result, the result y, the arguments) -> the gradient of each argument, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """One primitive.

    args, result: kinds of the arguments and of the result.
    evaluate: its meaning on torch tensors, which the reference interpreter executes.
    transfer: the range of its result, from those of its arguments.
    text: its printed form, with {0}, {1}, ... for the arguments.
    precedence: of the printed form, ATOM at most.
    derivative: None where it is piecewise constant, or has no float argument or result.
    tame: its result is finite where its arguments are, but for overflow.
    cost: of one evaluation, in exponentials; below 1 for a division, 0 for a single instruction.
    """

    args: tuple[Kind, ...]
    result: Kind
    evaluate: Callable[..., torch.Tensor]
    transfer: Transfer
    text: str
    precedence: int = ATOM
    derivative: Derivative | None = None
    tame: bool = False
    cost: float = 0.0

    @property
    def associative(self) -> bool:
        """Whether (x + y) + z needs no brackets on either side."""
        return not any(sign in self.text for sign in (" - ", " / ", " // ", " % ", " ^ "))


ANY = {FLOAT: Range(-math.inf, math.inf, True), INT: Range(-(2**63), 2**63 - 1), BOOL: Range(False, True)}
"""The range of a value of which nothing is known."""


@functools.lru_cache(maxsize=1024)
def is_bounded(op: str) -> bool:
    """Whether an operation of an expression has a bounded float for a result, whatever its arguments are."""
    if op not in PRIMITIVES or PRIMITIVES[op].result is not FLOAT:
        return False
    result = PRIMITIVES[op].transfer(*(ANY[kind] for kind in PRIMITIVES[op].args))
    return max(-result.low, result.high) < math.inf


def is_tame(op: str) -> bool:
    """Whether an operation of a score program, a constant or the score is finite where its arguments are."""
    return PRIMITIVES[op].tame if op in PRIMITIVES else op in ("const", "score")


def is_step(op: str) -> bool:
    """Whether an operation jumps with one of its arguments: comparisons of floats, and roundings to integers."""
    result = PRIMITIVES.get(op) if op != "detach" else None
    return result is not None and Kind.FLOAT in result.args and result.derivative is None


def cost(op: str) -> float:
    """The cost of an operation of an expression; 0 for leaves."""
    return PRIMITIVES[op].cost if op in PRIMITIVES else 0.0


HASH_SPREAD = 0x9E3779B9
HASH_MULTIPLIERS = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Steps (shift s, multiplier m) of x = (x ^ x >> s) * m mod 2**32: a bijection of 32-bit words in which every bit of
the input changes every bit of the result with probability near one half."""


def hashed(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Pseudo-random integer in [0, 2**31) of two integers, of which the lower 32 bits count. It is equal in every
    kernel, thread and tile, which dropout needs: forward, backward and recomputation compute the same mask from the
    seed and the coordinates, and none is stored."""
    word = 0xFFFFFFFF
    x = (key & word) ^ _multiply_words(counter & word, HASH_SPREAD)
    for shift, multiplier in HASH_MULTIPLIERS:
        x = _multiply_words(x ^ (x >> shift), multiplier)
    return (x ^ (x >> 16)) >> 1


def _multiply_words(x: torch.Tensor, multiplier: int) -> torch.Tensor:
    """x * multiplier mod 2**32 without running over 64 bits."""
    low, high = multiplier & 0xFFFF, multiplier >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & 0xFFFFFFFF


def _truncating_int(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64)


def _where(condition: Expr, then: Expr, otherwise: Expr) -> Expr:
    return operation("where", condition, then, otherwise)


def _of_abs(g: Expr, y: Expr, x: Expr) -> Expr:
    """Product with the sign, which is NaN where an infinite gradient meets 0: a root of |x|, say."""
    down = _where(operation("flt", x, ZERO), -ONE, ZERO)
    return g * _where(operation("flt", ZERO, x), ONE, down)


def _of_extremum(order: str) -> Derivative:
    def derivative(g: Expr, y: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
        tied, half = operation("feq", a, b), g * 0.5
        below, above = operation("flt", a, b), operation("flt", b, a)  # neither of NaN, where both get it all
        a_loses, b_loses = (below, above) if order == "maximum" else (above, below)
        return _where(tied, half, _where(a_loses, ZERO, g)), _where(tied, half, _where(b_loses, ZERO, g))

    return derivative


def _of_power(g: Expr, y: Expr, base: Expr, exponent: Expr) -> tuple[Expr, Expr]:
    steeper = operation("pow", base, exponent - 1.0)
    to_base = _where(operation("feq", exponent, ZERO), ZERO, g * (exponent * steeper))
    flat = operation("and", operation("feq", base, ZERO), operation("fle", ZERO, exponent))
    return to_base, _where(flat, ZERO, g * (y * operation("log", base)))


def _primitive(
    args: tuple[Kind, ...],
    result: Kind,
    evaluate: Callable[..., torch.Tensor],
    text: str,
    derivative: Derivative | None = None,
    transfer: Transfer | None = None,
    critical: tuple[float, ...] = (),
    **traits: Any,
) -> Primitive:
    """A primitive by its function. critical: points between which one of floats is monotone in each argument."""
    transfer = transfer or by_points(evaluate, *critical)
    return Primitive(
        args=args, result=result, evaluate=evaluate, text=text, derivative=derivative, transfer=transfer, **traits
    )


_unary, _binary = (functools.partial(_primitive, (FLOAT,) * count, FLOAT) for count in (1, 2))
_integer, _logic = (functools.partial(_primitive, (kind, kind), kind) for kind in (INT, BOOL))


def _rounding(dtype: torch.dtype) -> Primitive:
    """Rounding of a number to a dtype. Kernels do not round its gradient (`fusion.lowering.gradients.rounds`)."""
    name = str(dtype).removeprefix("torch.")
    return _unary(lambda x: x.to(dtype).to(x.dtype), name + "({0})", lambda g, y, x: g, tame=True)


def _comparisons(kind: Kind) -> dict[str, Primitive]:
    table = {"eq": (torch.eq, "="), "ne": (torch.ne, "≠"), "lt": (torch.lt, "<"), "le": (torch.le, "≤")}
    prefix = "f" if kind is FLOAT else "i"
    return {
        prefix + name: _primitive(
            (kind, kind), BOOL, evaluate, f"{{0}} {sign} {{1}}", transfer=transfer.comparison(name), precedence=4
        )
        for name, (evaluate, sign) in table.items()
    }


ROUNDED = {torch.bfloat16: "round_bfloat16", torch.float16: "round_float16"}
"""Primitives that round to a narrower dtype: dtype -> name."""

_WAVE = transfer.between(-1.0, 1.0)

PRIMITIVES: dict[str, Primitive] = {
    "neg": _unary(torch.neg, "-{0}", lambda g, y, x: -g, precedence=7, tame=True),
    "abs": _unary(torch.abs, "|{0}|", _of_abs, critical=(0,), tame=True),
    "detach": _unary(lambda x: x.detach(), "detach({0})", tame=True),
    "detach_nan": _unary(
        lambda x: torch.where(x == x, x, x.detach()), "{0}", lambda g, y, x: _where(operation("feq", x, x), g, ZERO),
        tame=True,
    ),
    "floor": _unary(torch.floor, "floor({0})"),
    "ceil": _unary(torch.ceil, "ceil({0})"),
    "trunc": _unary(torch.trunc, "trunc({0})"),
    "round": _unary(torch.round, "round({0})"),
    **{name: _rounding(dtype) for dtype, name in ROUNDED.items()},
    "sqrt": _unary(torch.sqrt, "sqrt({0})", lambda g, y, x: g * 0.5 / y, critical=(0,), cost=1),
    "rsqrt": _unary(
        torch.rsqrt, "rsqrt({0})", lambda g, y, x: g * -0.5 * (y * (y * y)), critical=(0,), cost=1
    ),
    "exp": _unary(torch.exp, "exp({0})", lambda g, y, x: g * y, cost=1),
    "log": _unary(torch.log, "log({0})", lambda g, y, x: g / x, critical=(0,), cost=2),
    "log1p": _unary(torch.log1p, "log1p({0})", lambda g, y, x: g / (x + 1.0), critical=(-1,), cost=2),
    "expm1": _unary(torch.expm1, "expm1({0})", lambda g, y, x: g * (y + 1.0), cost=2),
    "sin": _unary(torch.sin, "sin({0})", lambda g, y, x: g * operation("cos", x), _WAVE, tame=True, cost=3),
    "cos": _unary(torch.cos, "cos({0})", lambda g, y, x: -(g * operation("sin", x)), _WAVE, tame=True, cost=3),
    "tanh": _unary(torch.tanh, "tanh({0})", lambda g, y, x: g * (1.0 - y * y), tame=True, cost=1),
    "sigmoid": _unary(torch.sigmoid, "sigmoid({0})", lambda g, y, x: g * y * (1.0 - y), tame=True, cost=1),
    "erf": _unary(
        torch.erf, "erf({0})", lambda g, y, x: g * (2 / math.sqrt(math.pi)) * operation("exp", -(x * x)),
        tame=True, cost=2,
    ),
    "atan": _unary(torch.atan, "atan({0})", lambda g, y, x: g / (x * x + 1.0), cost=3),
    "fadd": _binary(torch.add, "{0} + {1}", lambda g, y, a, b: (g, g), precedence=5, tame=True),
    "fsub": _binary(torch.sub, "{0} - {1}", lambda g, y, a, b: (g, -g), precedence=5, tame=True),
    "fmul": _binary(
        torch.mul, "{0} * {1}", lambda g, y, a, b: (g * b, g * a), critical=(0,), precedence=6, tame=True
    ),
    "div": _binary(
        torch.div, "{0} / {1}", lambda g, y, a, b: (g / b, -(g * (y / b))), critical=(0,), precedence=6,
        cost=0.5,
    ),
    "minimum": _binary(torch.minimum, "min({0}, {1})", _of_extremum("minimum"), tame=True),
    "maximum": _binary(torch.maximum, "max({0}, {1})", _of_extremum("maximum"), tame=True),
    "pow": _binary(torch.pow, "{0} ^ {1}", _of_power, transfer.power, precedence=8, cost=3),
    **_comparisons(FLOAT),
    **_comparisons(INT),
    # Integer arithmetic is n-ary and normalised: build it with fusion.ir.integers.
    "add": _integer(torch.add, "{0} + {1}", transfer=rising(operator.add), precedence=5),
    "mul": _integer(torch.mul, "{0} * {1}", transfer=by_ends(operator.mul), precedence=6),
    "floordiv": _integer(
        torch.floor_divide, "{0} // {1}", transfer=transfer.floor_division, precedence=6, cost=0.5
    ),
    "mod": _integer(torch.remainder, "{0} % {1}", transfer=transfer.remainder, precedence=6, cost=0.5),
    "imin": _integer(torch.minimum, "min({0}, {1})", transfer=rising(transfer.least)),
    "imax": _integer(torch.maximum, "max({0}, {1})", transfer=rising(transfer.greatest)),
    "iabs": _primitive((INT,), INT, torch.abs, "|{0}|", transfer=transfer.absolute),
    "hash": _integer(hashed, "hash({0}, {1})", transfer=lambda key, counter: Range(0, 2**31 - 1)),
    "and": _logic(torch.logical_and, "{0} ∧ {1}", transfer=rising(operator.and_), precedence=2),
    "or": _logic(torch.logical_or, "{0} ∨ {1}", transfer=rising(operator.or_), precedence=1),
    "not": _primitive((BOOL,), BOOL, torch.logical_not, "¬{0}", transfer=transfer.negation, precedence=3),
    "to_float": _primitive(
        (INT,), FLOAT, lambda x: x.to(torch.float64), "float({0})", transfer=rising(float), tame=True
    ),
    "bool_to_float": _primitive(
        (BOOL,), FLOAT, lambda x: x.to(torch.float32), "float({0})", transfer=rising(float), tame=True
    ),
    "bool_to_int": _primitive((BOOL,), INT, _truncating_int, "int({0})", transfer=rising(int)),
    "to_int": _primitive((FLOAT,), INT, _truncating_int, "int({0})", transfer=transfer.truncation),
    "where": Primitive(
        args=(BOOL, FLOAT, FLOAT), result=FLOAT, evaluate=torch.where, transfer=transfer.selection,
        text="{1} if {0} else {2}", precedence=0, tame=True,
        derivative=lambda g, y, p, a, b: (None, _where(p, g, ZERO), _where(p, ZERO, g)),
    ),
    "iwhere": Primitive(
        args=(BOOL, INT, INT), result=INT, evaluate=torch.where, transfer=transfer.selection,
        text="{1} if {0} else {2}", precedence=0,
    ),
}  # fmt: skip
"""Comparisons of floats are `feq fne flt fle`, of integers `ieq ine ilt ile`; greater-than swaps the arguments."""
