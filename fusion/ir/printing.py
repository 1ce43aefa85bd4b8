"""Expressions as mathematics that a person can read, e.g. `s * 0.125 + slope[b1] * (j - i) if j ≤ i else -inf`."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.ir.expr import Expr
from fusion.ir.ops import PRIMITIVES

_ATOMIC = 9
_PRECEDENCE = {
    "where": 0, "iwhere": 0, "or": 1, "and": 2, "not": 3,
    "feq": 4, "fne": 4, "flt": 4, "fle": 4, "ieq": 4, "ine": 4, "ilt": 4, "ile": 4,
    "fadd": 5, "fsub": 5, "add": 5, "fmul": 6, "div": 6, "mul": 6, "floordiv": 6, "mod": 6, "neg": 7, "pow": 8,
}  # fmt: skip
_NOT_ASSOCIATIVE = ("fsub", "div", "floordiv", "mod", "pow")
_LEAVES = {"score": "s", "row_max": "m", "row_sum": "l"}


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
        return text, 7 if text.startswith("-") else _ATOMIC
    if expr.op in ("coord", "size"):
        return expr.name, _ATOMIC
    if expr.op in _LEAVES:
        return _LEAVES[expr.op], _ATOMIC
    if expr.op == "load":
        index = ", ".join(_text(arg, names)[0] for arg in expr.args)
        return f"{names.get(expr.operand, f't{expr.attr}')}[{index}]", _ATOMIC
    level = _PRECEDENCE.get(expr.op, _ATOMIC)
    inner = [_text(arg, names) for arg in expr.args]
    if expr.op not in PRIMITIVES:  # what the pull-back has met on the way: a product, a softmax, a sum
        name = "s" if expr.op == "dot" else str(expr.attr or expr.op)
        return f"{name}({', '.join(text for text, _ in inner)})" if inner else name, _ATOMIC
    if level == _ATOMIC:
        return PRIMITIVES[expr.op].text.format(*(text for text, _ in inner)), _ATOMIC
    # The right operand of a non-associative operation needs brackets at equal precedence.
    strict = expr.op in _NOT_ASSOCIATIVE
    shown = [
        f"({text})" if own < level or (own == level and position and (strict or arg.op in _NOT_ASSOCIATIVE)) else text
        for position, (arg, (text, own)) in enumerate(zip(expr.args, inner, strict=True))
    ]
    if expr.op in ("add", "mul"):
        sign = " + " if expr.op == "add" else " * "
        return sign.join(shown).replace("+ -1 * ", "- ").replace("+ -", "- "), level
    return PRIMITIVES[expr.op].text.format(*shown), level
