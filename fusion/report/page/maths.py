"""Expressions and specs as MathML, which browsers set without help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fusion.ir import AttentionSpec, Normalizer
from fusion.ir.expr import SCORE, Expr, const, contains
from fusion.ir.printing import Notation, printed

_SIGNS = {"*": "·", "-": "−", "%": "mod"}
"""Signs of the printed form that mathematics writes otherwise."""


def _name(name: str) -> str:
    return f"<mi>{escape(name)}</mi>"


def _sub(base: str, index: str) -> str:
    return f"<msub>{base}<mrow>{index}</mrow></msub>"


def _brackets(text: str) -> str:
    return f"<mrow><mo>(</mo>{text}<mo>)</mo></mrow>"


def _cases(rows: Sequence[tuple[str, str]], otherwise: str) -> str:
    lines = [*((value, f"<mtext>if&#160;</mtext>{when}") for value, when in rows)]
    lines.append((otherwise, "<mtext>otherwise</mtext>"))
    table = "".join(f"<mtr><mtd>{value}</mtd><mtd>{when}</mtd></mtr>" for value, when in lines)
    return f'<mtable class="cases" columnalign="left">{table}</mtable>'  # braces would need a mathematical font


_NOTATION = Notation(
    minus="<mo>−</mo>",
    number=lambda text: "<mi>∞</mi>" if text == "inf" else f"<mn>{text}</mn>" if text[0].isdigit() else _name(text),
    name=_name,
    symbol=lambda name: _name(name) if len(name) == 1 else _sub(_name(name[0]), _name(name[1:])),  # `b0`, `Nq`
    element=lambda name, index: _sub(_name(name), "<mo>,</mo>".join(index)),
    call=lambda name, args: f"<mrow>{_name(name)}{_brackets('<mo>,</mo>'.join(args))}</mrow>",
    brackets=_brackets,
    sign=lambda sign: f"<mo>{escape(_SIGNS.get(sign, sign))}</mo>",
    template=lambda primitive: primitive.mathml,
    cases=_cases,
)


def spec_to_mathml(spec: AttentionSpec, names: Mapping[int, str]) -> str:
    """The attention of a spec: what one row of the result is, and the score program in it. names: of its operands."""
    total = '<munder><mo movablelimits="false">∑</mo><mi>j</mi></munder>'
    weight = "" if spec.weight is const(1.0) else _factor(spec.weight, names) + "<mo>·</mo>"
    value = _sub("<mi>v</mi>", "<mi>j</mi>")
    lines = [_equation(_sub("<mi>out</mi>", "<mi>i</mi>"), f"{total}{weight}{_weight(spec, names)}<mo>·</mo>{value}")]
    lines.append(_equation(_pair("x"), printed(spec.score, names, _NOTATION)[0]))
    if any(contains(program, SCORE) for program in spec.programs()):
        dot = f"{_sub('<mi>q</mi>', '<mi>i</mi>')}<mo>·</mo>{_sub('<mi>k</mi>', '<mi>j</mi>')}"
        lines.append(_equation("<mi>s</mi>", dot))
    return "".join(lines)


def expression_to_mathml(expr: Expr, names: Mapping[int, str]) -> str:
    """One expression as a formula of its own."""
    return f"<p><math>{printed(expr, names, _NOTATION)[0]}</math></p>"


def _weight(spec: AttentionSpec, names: Mapping[int, str]) -> str:
    if spec.normalizer is Normalizer.NONE:
        return _pair("x")
    if spec.row_scale is not None and spec.scales_rows:
        exponential = f"<msup><mi>e</mi><mrow>{_pair('x')}<mo>−</mo>{_sub('<mi>m</mi>', '<mi>i</mi>')}</mrow></msup>"
        return f"{exponential}<mo>·</mo>{_factor(spec.row_scale, names)}"
    inputs = "<mo>,</mo>".join([_pair("x"), *(printed(sink, names, _NOTATION)[0] for sink in spec.sinks)])
    return f"{_sub('<mi>softmax</mi>', '<mi>j</mi>')}{_brackets(inputs)}"


def _equation(left: str, right: str) -> str:
    return f'<p><math displaystyle="true"><mrow>{left}<mo>=</mo>{right}</mrow></math></p>'


def _pair(letter: str) -> str:
    return _sub(f"<mi>{letter}</mi>", "<mi>i</mi><mi>j</mi>")


def _factor(expr: Expr, names: Mapping[int, str]) -> str:
    text, level = printed(expr, names, _NOTATION)
    return text if level > 6 else _brackets(text)
