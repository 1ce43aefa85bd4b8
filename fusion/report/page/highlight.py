"""Highlighting of the two languages that kernels come in, and of source lines: enough to read by, and few bytes."""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from html import escape

_MLIR = re.compile(
    r"""(?P<c>//[^\n]*)"""
    r"""|(?P<s>"[^"\n]*")"""
    r"""|(?P<k>(?<![%\w.])[a-z_0-9]+\.[a-z_][\w.]*|\b(?:module|return|iter_args|step|to|into|else)\b)"""
    r"""|(?P<t>\b(?:vector|memref|tensor)<[^%\n]*?>(?!>)|!llvm\.[a-z]+)"""
)


def highlight(text: str) -> str:
    """A kernel's text as HTML, by its looks: MLIR or Python."""
    return mlir(text) if "llvm.func" in text or "func.func" in text else python(text)


def mlir(text: str) -> str:
    """Comments `i.c`, strings `i.s`, operation names `i.k`, types `i.t`."""
    parts, done = [], 0
    for match in _MLIR.finditer(text):
        parts += [escape(text[done : match.start()], quote=False), _span(str(match.lastgroup), match[0])]
        done = match.end()
    return "".join([*parts, escape(text[done:], quote=False)])


def python(text: str) -> str:
    """Comments, strings and keywords; text that is no whole Python (a line out of a function) as far as it goes."""
    lines = text.splitlines(keepends=True)
    spans: list[tuple[int, int, int, int, str]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = {tokenize.COMMENT: "c", tokenize.STRING: "s", tokenize.NUMBER: "t"}.get(token.type)
            if token.type == tokenize.NAME and keyword.iskeyword(token.string):
                kind = "k"
            if kind:
                spans.append((*token.start, *token.end, kind))
    except (tokenize.TokenError, SyntaxError):
        pass  # what was read so far is highlighted
    return _marked(lines, spans)


def _marked(lines: list[str], spans: list[tuple[int, int, int, int, str]]) -> str:
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text, parts, done = "".join(lines), [], 0
    for row, column, end_row, end_column, kind in spans:
        begin, end = starts[row - 1] + column, starts[end_row - 1] + end_column
        parts += [escape(text[done:begin], quote=False), _span(kind, text[begin:end])]
        done = end
    return "".join([*parts, escape(text[done:], quote=False)])


def _span(kind: str, text: str) -> str:
    return f"<i class={kind}>{escape(text, quote=False)}</i>"
