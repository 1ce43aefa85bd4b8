"""Highlighting of the two languages that kernels come in, and of source lines: enough to read by, and few bytes."""

from __future__ import annotations

import io
import itertools
import keyword
import re
import tokenize
from collections.abc import Iterable
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
    return _marked(text, ((*match.span(), str(match.lastgroup)) for match in _MLIR.finditer(text)))


def python(text: str) -> str:
    """Comments, strings and keywords; text that is no whole Python (a line out of a function) as far as it goes."""
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    spans: list[tuple[int, int, str]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = {tokenize.COMMENT: "c", tokenize.STRING: "s", tokenize.NUMBER: "t"}.get(token.type)
            if token.type == tokenize.NAME and keyword.iskeyword(token.string):
                kind = "k"
            if kind:
                begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
                spans.append((begin, end, kind))
    except (tokenize.TokenError, SyntaxError):
        pass  # what was read so far is highlighted
    return _marked(text, spans)


def _marked(text: str, spans: Iterable[tuple[int, int, str]]) -> str:
    """spans: (begin, end, kind) in order."""
    parts, done = [], 0
    for begin, end, kind in spans:
        marked = f"<i class={kind}>{escape(text[begin:end], quote=False)}</i>"
        parts += [escape(text[done:begin], quote=False), marked]
        done = end
    return "".join([*parts, escape(text[done:], quote=False)])
