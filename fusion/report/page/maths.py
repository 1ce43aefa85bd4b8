"""Expressions and specs as MathML, which browsers set without help."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from fusion.ir import AttentionSpec, Normalizer
from fusion.ir.expr import Expr, const
from fusion.ir.primitives import ATOM, PRIMITIVES
from fusion.ir.printing import LETTERS, number_text

_SIGNS = {"*": "·", "-": "−", "%": "mod"}
"""Signs of the printed form that mathematics writes otherwise."""
_SUPERSCRIPT = 8


def spec_to_mathml(spec: AttentionSpec) -> str:
    """The attention of a spec: what one row of the result is, and the score program in it."""
    names = spec.names
    total = '<munder><mo movablelimits="false">∑</mo><mi>j</mi></munder>'
    weight = "" if spec.weight is const(1.0) else _grouped(spec.weight, names) + "<mo>·</mo>"
    value = _sub("<mi>v</mi>", "<mi>j</mi>")
    lines = [_equation(_sub("<mi>out</mi>", "<mi>i</mi>"), f"{total}{weight}{_weight(spec, names)}<mo>·</mo>{value}")]
    lines.append(_equation(_pair("x"), _mathml(spec.score, names)[0]))
    if any(part == "s" for part in spec.formula().replace("(", " ").replace(")", " ").split()):
        dot = f"{_sub('<mi>q</mi>', '<mi>i</mi>')}<mo>·</mo>{_sub('<mi>k</mi>', '<mi>j</mi>')}"
        lines.append(_equation("<mi>s</mi>", dot))
    return "".join(lines)


def expression_to_mathml(expr: Expr, names: Mapping[int, str]) -> str:
    """One expression as a formula of its own."""
    return f"<p><math>{_mathml(expr, names)[0]}</math></p>"


def _weight(spec: AttentionSpec, names: Mapping[int, str]) -> str:
    if spec.normalizer is Normalizer.NONE:
        return _pair("x")
    function = _sub("<mi>softmax</mi>", "<mi>j</mi>")
    sinks = "".join(f"<mo>,</mo>{_mathml(sink, names)[0]}" for sink in spec.sinks)
    text = f"{function}<mo>(</mo>{_pair('x')}{sinks}<mo>)</mo>"
    if spec.row_scale is not None and spec.scales_rows:
        exponential = f"<msup><mi>e</mi><mrow>{_pair('x')}<mo>−</mo>{_sub('<mi>m</mi>', '<mi>i</mi>')}</mrow></msup>"
        text = f"{exponential}<mo>·</mo>{_grouped(spec.row_scale, names)}"
    return text


def _equation(left: str, right: str) -> str:
    return f'<p><math displaystyle="true"><mrow>{left}<mo>=</mo>{right}</mrow></math></p>'


def _sub(base: str, index: str) -> str:
    return f"<msub>{base}<mrow>{index}</mrow></msub>"


def _pair(letter: str) -> str:
    return _sub(f"<mi>{letter}</mi>", "<mi>i</mi><mi>j</mi>")


def _grouped(expr: Expr, names: Mapping[int, str]) -> str:
    text, level = _mathml(expr, names)
    return text if level > 6 else _brackets(text)


def _brackets(text: str) -> str:
    return f"<mrow><mo>(</mo>{text}<mo>)</mo></mrow>"


def _mathml(expr: Expr, names: Mapping[int, str]) -> tuple[str, int]:
    if expr.op == "const":
        text = number_text(expr.attr)
        sign, digits = ("<mo>−</mo>", text[1:]) if text.startswith("-") else ("", text)
        digits = "<mi>∞</mi>" if digits == "inf" else f"<mn>{digits}</mn>" if digits[0].isdigit() else _word(digits)
        return sign + digits, 7 if sign else ATOM
    if expr.op in ("coord", "size"):
        return _symbol(expr.name), ATOM
    if expr.op in LETTERS:
        return f"<mi>{LETTERS[expr.op]}</mi>", ATOM
    if expr.op == "load":
        index = "<mo>,</mo>".join(_mathml(arg, names)[0] for arg in expr.args)
        return _sub(_word(names.get(expr.operand, f"t{expr.attr}")), index), ATOM
    return _operation(expr, [_mathml(arg, names) for arg in expr.args])


def _operation(expr: Expr, args: list[tuple[str, int]]) -> tuple[str, int]:
    primitive, texts = PRIMITIVES[expr.op], [text for text, _ in args]
    if "{0}" in (primitive.mathml, primitive.text):  # shown as its argument
        return args[0]
    level = primitive.precedence
    if primitive.mathml is not None and expr.op != "neg":
        raised = primitive.mathml.startswith("<msup>")
        if expr.op == "pow" and args[0][1] != ATOM:
            texts[0] = _brackets(texts[0])
        return primitive.mathml.format(*texts), _SUPERSCRIPT if raised else ATOM
    if level == ATOM:
        name = primitive.text.partition("(")[0]
        return f"<mrow>{_word(name)}<mo>(</mo>{'<mo>,</mo>'.join(texts)}<mo>)</mo></mrow>", ATOM
    shown = [
        _brackets(text) if own < level or (own == level and position and not primitive.associative) else text
        for position, (text, own) in enumerate(args)
    ]
    if len(args) == 1:
        return ("<mo>−</mo>" if expr.op == "neg" else "<mo>¬</mo>") + shown[0], level
    if expr.op == "mul" and texts[0] == "<mo>−</mo><mn>1</mn>":
        return "<mo>−</mo>" + _joined(expr.op, shown[1:]), level
    return _joined(expr.op, shown), level


def _joined(op: str, texts: list[str]) -> str:
    """Operands with signs between them; a sum with a negative term is a difference."""
    result, written = texts[0], PRIMITIVES[op].text.split()[1]
    sign = escape(_SIGNS.get(written, written))
    for text in texts[1:]:
        minus = op in ("add", "fadd") and text.startswith("<mo>−</mo>")
        result += text if minus else f"<mo>{sign}</mo>{text}"
    return f"<mrow>{result}</mrow>"


def _symbol(name: str) -> str:
    """`b0` and `Nq` with their second part below."""
    return f"<mi>{name}</mi>" if len(name) == 1 else _sub(f"<mi>{name[0]}</mi>", f"<mi>{escape(name[1:])}</mi>")


def _word(name: str) -> str:
    return f"<mi>{escape(name)}</mi>"
