"""Expressions and specs as MathML, which browsers set without help."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from fusion.ir import AttentionSpec, Normalizer
from fusion.ir.expr import ROW_SUM, Expr, Kind, const, node
from fusion.ir.printing import number_text

_ATOMIC = 9
_LEVELS = {
    "or": 1, "and": 2, "not": 3, "feq": 4, "fne": 4, "flt": 4, "fle": 4, "ieq": 4, "ine": 4, "ilt": 4, "ile": 4,
    "fadd": 5, "fsub": 5, "add": 5, "fmul": 6, "mul": 6, "mod": 6, "neg": 7, "pow": 8,
}  # fmt: skip
_SIGNS = {"or": "∨", "and": "∧", "feq": "=", "fne": "≠", "flt": "<", "fle": "≤", "ieq": "=", "ine": "≠", "ilt": "<",
          "ile": "≤", "fadd": "+", "fsub": "−", "add": "+", "fmul": "·", "mul": "·", "mod": "mod"}  # fmt: skip
_GREEK = {"sigmoid": "σ"}


def spec_to_mathml(spec: AttentionSpec) -> str:
    """The attention of a spec: what one row of the result is, and the score program in it."""
    names = {number: operand.name for number, operand in enumerate(spec.operands)}
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
    if spec.row_scale is not None and spec.row_scale is not node("div", (const(1.0), ROW_SUM), Kind.FLOAT):
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
        return sign + digits, 7 if sign else _ATOMIC
    if expr.op in ("coord", "size"):
        return _symbol(expr.name), _ATOMIC
    if expr.op in ("score", "row_max", "row_sum"):
        letter = {"score": "s", "row_max": "m", "row_sum": "l"}[expr.op]
        return f"<mi>{letter}</mi>", _ATOMIC
    if expr.op == "load":
        index = "<mo>,</mo>".join(_mathml(arg, names)[0] for arg in expr.args)
        return _sub(_word(names.get(expr.operand, f"t{expr.attr}")), index), _ATOMIC
    return _operation(expr, [_mathml(arg, names) for arg in expr.args])


def _operation(expr: Expr, args: list[tuple[str, int]]) -> tuple[str, int]:
    op, texts = expr.op, [text for text, _ in args]
    if op in ("where", "iwhere"):
        rows = [(texts[1], f"<mtext>if&#160;</mtext>{texts[0]}"), (texts[2], "<mtext>otherwise</mtext>")]
        cells = "".join(f"<mtr><mtd>{value}</mtd><mtd>{when}</mtd></mtr>" for value, when in rows)
        return f'<mtable class="cases" columnalign="left">{cells}</mtable>', _ATOMIC  # braces need a mathematical font
    if op == "div":
        return f"<mfrac><mrow>{texts[0]}</mrow><mrow>{texts[1]}</mrow></mfrac>", _ATOMIC
    if op == "floordiv":
        quotient = f"<mfrac><mrow>{texts[0]}</mrow><mrow>{texts[1]}</mrow></mfrac>"
        return f"<mrow><mo>⌊</mo>{quotient}<mo>⌋</mo></mrow>", _ATOMIC
    if op in ("sqrt", "rsqrt"):
        root = f"<msqrt>{texts[0]}</msqrt>"
        return (root if op == "sqrt" else f"<mfrac><mn>1</mn>{root}</mfrac>"), _ATOMIC
    if op == "exp":
        return f"<msup><mi>e</mi><mrow>{texts[0]}</mrow></msup>", 8
    if op == "pow":
        base = texts[0] if args[0][1] == _ATOMIC else _brackets(texts[0])
        return f"<msup><mrow>{base}</mrow><mrow>{texts[1]}</mrow></msup>", 8
    if op in ("abs", "iabs"):
        return f"<mrow><mo>|</mo>{texts[0]}<mo>|</mo></mrow>", _ATOMIC
    if op in ("to_float", "bool_to_float", "bool_to_int"):
        return (texts[0], args[0][1]) if op == "to_float" else (f"<mrow><mo>[</mo>{texts[0]}<mo>]</mo></mrow>", _ATOMIC)
    level = _LEVELS.get(op, _ATOMIC)
    if level == _ATOMIC:
        name = _GREEK.get(op, op.removeprefix("i") if op in ("imin", "imax") else op)
        return f"<mrow>{_word(name)}<mo>(</mo>{'<mo>,</mo>'.join(texts)}<mo>)</mo></mrow>", _ATOMIC
    strict = op in ("fsub", "mod")
    shown = [
        _brackets(text) if own < level or (own == level and position and strict) else text
        for position, (text, own) in enumerate(args)
    ]
    if op in ("neg", "not"):
        return ("<mo>−</mo>" if op == "neg" else "<mo>¬</mo>") + shown[0], level
    if op == "mul" and texts[0] == "<mo>−</mo><mn>1</mn>":
        return "<mo>−</mo>" + _joined(op, shown[1:]), level
    return _joined(op, shown), level


def _joined(op: str, texts: list[str]) -> str:
    """Operands with signs between them; a sum with a negative term is a difference."""
    result = texts[0]
    for text in texts[1:]:
        minus = op in ("add", "fadd") and text.startswith("<mo>−</mo>")
        result += text if minus else f"<mo>{escape(_SIGNS[op])}</mo>{text}"
    return f"<mrow>{result}</mrow>"


def _symbol(name: str) -> str:
    """`b0` and `Nq` with their second part below."""
    return f"<mi>{name}</mi>" if len(name) == 1 else _sub(f"<mi>{name[0]}</mi>", f"<mi>{escape(name[1:])}</mi>")


def _word(name: str) -> str:
    return f"<mi>{escape(name)}</mi>"
