"""Derivatives of expressions, by reverse accumulation: what a score program hands back to the score and to its tensors.

`adjoints(program, seed, targets)` takes the gradient that arrives at the program's value (an expression, usually a
leaf) and returns the gradient at each target. `PULLBACKS` has, for every primitive of `fusion.ir.ops`, the one place
where its derivative is written, in torch's order of operations, which decides where 0 * inf is met; conventions at
kinks are torch's (0 for |x| at 0, halves for ties of min and max).
Selections select gradients instead of multiplying by 0 and 1, so that an infinity or NaN on the side not taken goes
nowhere, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from fusion.ir.expr import ZERO, Expr, Kind, const, node, walk
from fusion.ir.ops import PRIMITIVES, ROUNDED, apply, where

UPSTREAM = node("upstream", (), Kind.FLOAT)
"""The leaf that stands for the gradient arriving at a score program's value."""

WEIGHT_UPSTREAM = node("upstream", (), Kind.FLOAT, "weight")
"""Likewise for the weight program."""

SINK_UPSTREAM = node("upstream", (), Kind.FLOAT, "row")
"""Likewise for a sink."""

Pullback = Callable[[Expr, Expr, tuple[Expr, ...]], tuple[Expr | None, ...]]
"""(gradient g of the result, the result, the arguments) -> the gradient of each argument; None where there is none."""


def adjoints(program: Expr, seed: Expr, targets: Iterable[Expr]) -> dict[Expr, Expr]:
    """The gradient at each target (leaves or loads) for the gradient `seed` at `program`; ZERO where it does not
    depend on it."""
    order = list(walk(program))
    arriving: dict[Expr, Expr] = {program: seed}
    for part in reversed(order):
        gradient = arriving.get(part)
        if gradient is None or part.op not in PRIMITIVES:
            continue
        for arg, term in zip(part.args, PULLBACKS[part.op](gradient, part, part.args), strict=True):
            if term is not None and arg.kind is Kind.FLOAT and not arg.is_const:
                arriving[arg] = apply("fadd", arriving[arg], term) if arg in arriving else term
    return {target: arriving.get(target, ZERO) for target in targets}


# --- the table --------------------------------------------------------------------------------------------------


def _mul(*factors: Expr) -> Expr:
    total = factors[0]
    for factor in factors[1:]:
        total = apply("fmul", total, factor)
    return total


def _neg(x: Expr) -> Expr:
    return apply("neg", x)


def _square(x: Expr) -> Expr:
    return apply("fmul", x, x)


def _flat(g: Expr, y: Expr, args: tuple[Expr, ...]) -> tuple[Expr | None, ...]:
    """Piecewise constant, or no float on one of the sides: no gradient."""
    return (None,) * len(args)


def _unary(rule: Callable[[Expr, Expr, Expr], Expr]) -> Pullback:
    """From g, y = f(x) and x to the gradient of x."""
    return lambda g, y, args: (rule(g, y, args[0]),)


def _abs(g: Expr, y: Expr, x: Expr) -> Expr:
    return where(apply("flt", ZERO, x), g, where(apply("flt", x, ZERO), _neg(g), ZERO))


def _one_minus(x: Expr) -> Expr:
    return apply("fsub", const(1.0), x)


def _quotient(g: Expr, y: Expr, args: tuple[Expr, ...]) -> tuple[Expr | None, ...]:
    return apply("div", g, args[1]), _neg(_mul(g, apply("div", y, args[1])))


def _extremum(order: str) -> Pullback:
    def pull(g: Expr, y: Expr, args: tuple[Expr, ...]) -> tuple[Expr | None, ...]:
        a, b = args
        tied, half = apply("feq", a, b), _mul(g, const(0.5))
        loses = apply("flt", a, b) if order == "maximum" else apply("flt", b, a)
        return where(tied, half, where(loses, ZERO, g)), where(tied, half, where(loses, g, ZERO))

    return pull


def _power(g: Expr, y: Expr, args: tuple[Expr, ...]) -> tuple[Expr | None, ...]:
    base, exponent = args
    steeper = apply("pow", base, apply("fsub", exponent, const(1.0)))
    to_base = where(apply("feq", exponent, ZERO), ZERO, _mul(g, _mul(exponent, steeper)))
    flat = apply("and", apply("feq", base, ZERO), apply("fle", ZERO, exponent))
    return to_base, where(flat, ZERO, _mul(g, _mul(y, apply("log", base))))


PULLBACKS: dict[str, Pullback] = {
    "neg": _unary(lambda g, y, x: _neg(g)),
    "abs": _unary(_abs),
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), _flat),
    **dict.fromkeys(ROUNDED.values(), _unary(lambda g, y, x: g)),
    "sqrt": _unary(lambda g, y, x: apply("div", _mul(g, const(0.5)), y)),
    "rsqrt": _unary(lambda g, y, x: _mul(g, const(-0.5), _mul(y, _square(y)))),
    "exp": _unary(lambda g, y, x: _mul(g, y)),
    "log": _unary(lambda g, y, x: apply("div", g, x)),
    "log1p": _unary(lambda g, y, x: apply("div", g, apply("fadd", x, const(1.0)))),
    "expm1": _unary(lambda g, y, x: _mul(g, apply("fadd", y, const(1.0)))),
    "sin": _unary(lambda g, y, x: _mul(g, apply("cos", x))),
    "cos": _unary(lambda g, y, x: _neg(_mul(g, apply("sin", x)))),
    "tanh": _unary(lambda g, y, x: _mul(g, _one_minus(_square(y)))),
    "sigmoid": _unary(lambda g, y, x: _mul(g, y, _one_minus(y))),
    "erf": _unary(lambda g, y, x: _mul(g, const(2 / math.sqrt(math.pi)), apply("exp", _neg(_square(x))))),
    "atan": _unary(lambda g, y, x: apply("div", g, apply("fadd", _square(x), const(1.0)))),
    "fadd": lambda g, y, args: (g, g),
    "fsub": lambda g, y, args: (g, _neg(g)),
    "fmul": lambda g, y, args: (_mul(g, args[1]), _mul(g, args[0])),
    "div": _quotient,
    "minimum": _extremum("minimum"),
    "maximum": _extremum("maximum"),
    "pow": _power,
    "where": lambda g, y, args: (None, where(args[0], g, ZERO), where(args[0], ZERO, g)),
    **{
        name: _flat
        for name, primitive in PRIMITIVES.items()
        if primitive.result is not Kind.FLOAT or Kind.FLOAT not in primitive.args
    },
}
"""Every primitive; those that make or take no float have no gradient."""
