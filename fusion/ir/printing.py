"""Expressions as mathematics that a person can read, e.g. `s * 0.125 + slope[b1] * (j - i) if j ≤ i else -inf`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusion.ir.expr import Expr, Kind, const, node, walk
from fusion.ir.ops import apply, remake, where
from fusion.ir.primitives import ATOM, PRIMITIVES, Primitive

LETTERS = {"score": "s", "row_max": "m", "row_sum": "l", "weight": "w"}
MANY = 300
"""Operations of an expression's text, those of repeated parts counted again, beyond which it is cut."""
WORTH_A_NAME = 12
_NEGATIVE = 7
"""The precedence of a sign."""
ARGUMENTS = tuple(node("coord", (), Kind.FLOAT, f"argument{n}") for n in range(2))
COMPOSITIONS: dict[str, Callable[[], Expr]] = {}
"""Makers of the functions that are compositions of primitives, of `ARGUMENTS`, by the name under which they are
printed. They come from where they are composed (`fusion.passes.pullback.functions`)."""


def to_text(expr: Expr, names: Mapping[int, str] | None = None) -> str:
    """The expression on one line; `names` are the operands' names (default `t0`, `t1`, ...). Its length is bounded: the
    inner part of a long one is `...`."""
    return _printed(shortened(expr), names or {})[0]


def _length(expr: Expr) -> int:
    """Number of operations in an expression's text."""
    lengths: dict[Expr, int] = {}
    for part in walk(expr):
        lengths[part] = 1 + sum(lengths[arg] for arg in part.args)
    return lengths[expr]


@functools.lru_cache(maxsize=1024)
def _outer(expr: Expr, levels: int) -> Expr:
    """The outer levels of an expression, with `...` for what is inside."""
    if not expr.args:
        return expr
    if not levels:
        return node("coord", (), expr.kind, "...")
    return node(expr.op, tuple(_outer(arg, levels - 1) for arg in expr.args), expr.kind, expr.attr)


@functools.lru_cache(maxsize=256)
def shortened(expr: Expr) -> Expr:
    """An expression with the same values, whose conditions do not repeat what is decided before they are asked, and in
    which `COMPOSITIONS` are calls; only the outer part of one whose text would be long."""
    known: dict[tuple[Expr, frozenset[tuple[Expr, bool]]], Expr] = {}

    def under(part: Expr, facts: frozenset[tuple[Expr, bool]]) -> Expr:
        """The part where the predicates in `facts` are true or false."""
        if (part, facts) not in known:
            known[part, facts] = rewritten(part, facts)
        return known[part, facts]

    def rewritten(part: Expr, facts: frozenset[tuple[Expr, bool]]) -> Expr:
        for truth in (True, False):
            if (part, truth) in facts:
                return const(truth)
        if (call := _call(part)) is not None:
            name, arguments = call
            return node("call", tuple(under(arg, facts) for arg in arguments), Kind.FLOAT, name)
        if part.op in ("and", "or"):
            first, second = part.args
            second = under(second, facts | _implied(under(first, facts), part.op == "and"))
            return apply(part.op, under(first, facts | _implied(second, part.op == "and")), second)
        if part.op in ("where", "iwhere"):
            condition = under(part.args[0], facts)
            then = under(part.args[1], facts | _implied(condition, True))
            return where(condition, then, under(part.args[2], facts | _implied(condition, False)))
        if part.op not in PRIMITIVES or not part.args:
            return part
        args = tuple(under(arg, facts) for arg in part.args)
        return apply("pow", args[0], const(2.0)) if part.op == "fmul" and args[0] is args[1] else remake(part, args)

    if _length(expr) > MANY:
        cuts = (_outer(expr, levels) for levels in itertools.count(1))
        *_, expr = _outer(expr, 1), *itertools.takewhile(lambda cut: _length(cut) <= MANY, cuts)
    return under(expr, frozenset())


def _call(expr: Expr) -> tuple[str, tuple[Expr, ...]] | None:
    """(name, arguments) of the composition that an expression is, if it is one."""
    for name in COMPOSITIONS:
        form, arguments = _form(name), dict[Expr, Expr]()
        if form.op == expr.op and _matches(form, expr, arguments, set()):
            return name, tuple(arguments[each] for each in ARGUMENTS if each in arguments)
    return None


@functools.lru_cache(maxsize=256)
def _form(name: str) -> Expr:
    return COMPOSITIONS[name]()


def _matches(form: Expr, expr: Expr, arguments: dict[Expr, Expr], equal: set[tuple[Expr, Expr]]) -> bool:
    """Whether an expression is a form of `arguments`, which are filled in. equal: pairs that were compared before."""
    if form in ARGUMENTS:
        return arguments.setdefault(form, expr) is expr
    if form is expr or (form, expr) in equal:
        return True
    equal.add((form, expr))
    same = (form.op, form.attr, len(form.args)) == (expr.op, expr.attr, len(expr.args)) and bool(form.args)
    return same and all(_matches(a, b, arguments, equal) for a, b in zip(form.args, expr.args, strict=True))


@functools.lru_cache(maxsize=256)
def repeated(expr: Expr) -> Expr | None:
    """The longest part of an expression's text that a reader meets more than once, if it is worth a name."""
    if _length(expr) > MANY:
        return None
    whole = to_text(expr)
    named = [part for part in walk(expr) if part.args and part.kind is Kind.FLOAT and part is not expr]
    texts = {part: to_text(part) for part in named}
    often = [part for part, text in texts.items() if len(text) > WORTH_A_NAME and whole.count(text) > 1]
    return max(often, key=lambda part: len(texts[part]), default=None)


def _implied(predicate: Expr, truth: bool) -> frozenset[tuple[Expr, bool]]:
    """Predicates that are decided where this one is true, or false."""
    if predicate.op == ("and" if truth else "or"):
        return frozenset().union(*(_implied(part, truth) for part in predicate.args))
    if predicate.op == "not":
        return _implied(predicate.args[0], not truth)
    return frozenset({(predicate, truth), (apply("not", predicate), not truth)})


def number_text(value: object) -> str:
    """Constant as people write it; the ends of float32's range by name."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) > 3.4e38:
        return "-finfo.max" if value < 0 else "finfo.max"
    return f"{value:.6g}"


def _printed(expr: Expr, names: Mapping[int, str]) -> tuple[str, int]:
    """(the text of an expression, its precedence)."""
    if expr.op == "const":
        text = number_text(expr.attr)
        return text, _NEGATIVE if text.startswith("-") else ATOM
    if expr.op in ("coord", "size"):
        return expr.name, ATOM
    if expr.op in LETTERS:
        letter = LETTERS[expr.op]
        return f"log({letter})" if expr.attr == "log" else letter, ATOM
    if expr.op in ("where", "iwhere"):
        return _selection(expr, names)
    args = [_printed(arg, names) for arg in expr.args]
    texts = [text for text, _ in args]
    if expr.op == "load":
        return f"{names.get(expr.operand, f't{expr.attr}')}[{', '.join(texts)}]", ATOM
    if expr.op not in PRIMITIVES:  # on the way of the pull-back: a product, a softmax, a sum
        name = "s" if expr.op == "dot" else str(expr.attr or expr.op)
        return f"{name}({', '.join(texts)})" if texts else name, ATOM
    if PRIMITIVES[expr.op].text == "{0}":  # shown as its argument
        return args[0]
    return _operation(expr, args)


def _selection(expr: Expr, names: Mapping[int, str]) -> tuple[str, int]:
    """Selection: of the larger or smaller value as such, else with nested selections in its last branch as cases."""
    if (extremum := _extremum(expr)) is not None:
        name, *parts = extremum
        return f"{name}({', '.join(_printed(part, names)[0] for part in parts)})", ATOM
    cases = []
    while expr.op in ("where", "iwhere") and _extremum(expr) is None:
        (condition, _), (value, level) = (_printed(arg, names) for arg in expr.args[:2])
        cases.append(f"{value if level else f'({value})'} if {condition}")
        expr = expr.args[2]
    otherwise = _printed(expr, names)[0]
    if len(cases) == 1:
        return f"{cases[0]} else {otherwise}", 0
    return f"{{{'; '.join(cases)}; {otherwise} otherwise}}", ATOM


def _extremum(expr: Expr) -> tuple[Any, ...] | None:
    """("max" or "min", x, bound) or ("clamp", x, low, high) where a selection is that; NaN stays NaN, as in torch."""
    condition, taken, other = expr.args
    if condition.op in ("flt", "ilt", "fle", "ile") and set(condition.args) == {taken, other}:
        return ("max" if condition.args[1] is taken else "min"), other, taken
    if condition.op != "and" or other.op != expr.op or (inner := _extremum(other)) is None or inner[0] != "max":
        return None
    _, x, low = inner
    above = [part.args for part in condition.args if part.op != "not"]
    below = [part.args[0] for part in condition.args if part.op == "not"]
    return ("clamp", x, low, taken) if above == [(taken, x)] and below == [other.args[0]] else None


def _operation(expr: Expr, args: Sequence[tuple[str, int]]) -> tuple[str, int]:
    primitive = PRIMITIVES[expr.op]
    level, texts = primitive.precedence, [text for text, _ in args]
    if level == ATOM:
        return primitive.text.format(*texts), ATOM
    if len(args) == 1:
        weak = args[0][1] < (ATOM if expr.op == "not" else level)
        return primitive.text.format(f"({texts[0]})" if weak else texts[0]), level
    # The right operand of a non-associative operation needs brackets at equal precedence.
    shown = [
        f"({text})" if own < level or (own == level and position and _keeps_apart(primitive, arg)) else text
        for position, (arg, (text, own)) in enumerate(zip(expr.args, args, strict=True))
    ]
    if expr.op == "add":  # of integers, in any order: j - i
        first = next((k for k, text in enumerate(shown) if not text.startswith("-")), 0)
        shown.insert(0, shown.pop(first))
    if expr.op == "mul" and shown[0] == "-1":
        return "-" + _joined("*", shown[1:]), level
    return _joined(primitive.text.split()[1], shown), level


def _joined(sign: str, texts: Sequence[str]) -> str:
    """Operands with signs between them; a sum with a negative term is a difference."""
    result = texts[0]
    for text in texts[1:]:
        negative = sign == "+" and text.startswith("-")
        result += f" - {text[1:]}" if negative else f" {sign} {text}"
    return result


def _keeps_apart(primitive: Primitive, arg: Expr) -> bool:
    return not primitive.associative or (arg.op in PRIMITIVES and not PRIMITIVES[arg.op].associative)
