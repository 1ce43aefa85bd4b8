"""Expressions as mathematics that a person can read, e.g. `s * 0.125 + slope[b1] * (j - i) if j ≤ i else -inf`."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.ir.expr import Expr
from fusion.ir.primitives import ATOM, PRIMITIVES, Primitive

LETTERS = {"score": "s", "row_max": "m", "row_sum": "l", "weight": "w"}


def to_text(expr: Expr, names: Mapping[int, str] | None = None) -> str:
    """The expression on one line; `names` are the operands' names (default `t0`, `t1`, ...)."""
    return _text(expr, names or {})[0]


def number_text(value: object) -> str:
    """A constant as people write it; the ends of float32's range by name."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) > 3.4e38:
        return "-finfo.max" if value < 0 else "finfo.max"
    return f"{value:.6g}"


def _text(expr: Expr, names: Mapping[int, str]) -> tuple[str, int]:
    if expr.op == "const":
        text = number_text(expr.attr)
        return text, 7 if text.startswith("-") else ATOM
    if expr.op in ("coord", "size"):
        return expr.name, ATOM
    if expr.op == "weight" and expr.attr == "log":
        return "log(w)", ATOM
    if expr.op in LETTERS:
        return LETTERS[expr.op], ATOM
    if expr.op == "load":
        index = ", ".join(_text(arg, names)[0] for arg in expr.args)
        return f"{names.get(expr.operand, f't{expr.attr}')}[{index}]", ATOM
    inner = [_text(arg, names) for arg in expr.args]
    if expr.op not in PRIMITIVES:  # what the pull-back has met on the way: a product, a softmax, a sum
        name = "s" if expr.op == "dot" else str(expr.attr or expr.op)
        return f"{name}({', '.join(text for text, _ in inner)})" if inner else name, ATOM
    primitive = PRIMITIVES[expr.op]
    level = primitive.precedence
    if level == ATOM:
        return primitive.text.format(*(text for text, _ in inner)), ATOM
    # The right operand of a non-associative operation needs brackets at equal precedence.
    shown = [
        f"({text})" if own < level or (own == level and position and _not_joined(primitive, arg)) else text
        for position, (arg, (text, own)) in enumerate(zip(expr.args, inner, strict=True))
    ]
    if expr.op in ("add", "mul"):
        sign = " + " if expr.op == "add" else " * "
        return sign.join(shown).replace("+ -1 * ", "- ").replace("+ -", "- "), level
    return primitive.text.format(*shown), level


def _not_joined(primitive: Primitive, arg: Expr) -> bool:
    return not primitive.associative or (arg.op in PRIMITIVES and not PRIMITIVES[arg.op].associative)
