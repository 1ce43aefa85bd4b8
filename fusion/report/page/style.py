"""The style sheet of the page, and the highlighting of source lines and kernels: enough to read by, and few bytes."""

from __future__ import annotations

import keyword
import re
from html import escape

_MLIR = re.compile(
    r"""(?P<c>//[^\n]*)"""
    r"""|(?P<s>"[^"\n]*")"""
    r"""|(?P<k>(?<![%\w.])[a-z_0-9]+\.[a-z_][\w.]*|\b(?:module|return|iter_args|step|to|into|else)\b)"""
    r"""|(?P<t>\b(?:vector|memref|tensor)<[^%\n]*?>(?!>)|!llvm\.[a-z]+)"""
)
_QUOTED = "|".join(
    rf"{q}(?:\\.|(?!{q})[^\\{end}])*(?:{q}|\Z)" for q, end in (('"""', ""), ("'''", ""), ('"', r"\n"), ("'", r"\n"))
)
_PYTHON = re.compile(
    rf"(?P<c>\#[^\n]*)|(?P<s>{_QUOTED})|(?P<k>\b(?:{'|'.join(keyword.kwlist)})\b)|(?P<t>\b\d[\w.]*)", re.S
)


def highlight(text: str) -> str:
    """A kernel's text as HTML, by its looks: MLIR or Python."""
    return mlir(text) if "llvm.func" in text or "func.func" in text else python(text)


def mlir(text: str) -> str:
    """Comments `i.c`, strings `i.s`, operation names `i.k`, types `i.t`."""
    return _marked(text, _MLIR)


def python(text: str) -> str:
    """Comments, strings, keywords and numbers."""
    return _marked(text, _PYTHON)


def _marked(text: str, pattern: re.Pattern[str]) -> str:
    parts, end = [], 0
    for match in pattern.finditer(text):
        word = escape(match[0], quote=False)
        parts += [escape(text[end : match.start()], quote=False), f"<i class={match.lastgroup}>{word}</i>"]
        end = match.end()
    return "".join([*parts, escape(text[end:], quote=False)])


STYLE = """
:root{color-scheme:light dark;--back:#fbfbfa;--card:#fff;--text:#1d2026;--soft:#5d6470;--line:#dfe1e5;--link:#2456c7;
--good:#137a4b;--good-back:#e2f3ea;--bad:#a8330f;--bad-back:#fbe7e0;--dead:#e9eaed;--mixed:#f0b35a;--full:#3f7fd6;
--data:#9fbfe9;--key:#8a2fb0;--string:#19723f;--type:#2a61b5;--comment:#7a808b;--mark:#fff3c9}
@media(prefers-color-scheme:dark){:root{--back:#14161a;--card:#1c1f25;--text:#e4e6ea;--soft:#9aa1ad;--line:#333842;
--link:#8db4ff;--good:#68d39b;--good-back:#173527;--bad:#ff9a78;--bad-back:#40211a;--dead:#2a2e36;--mixed:#c98a2c;
--full:#3b76c9;--data:#2d4a75;--key:#d89bf5;--string:#7fd3a0;--type:#8ab6ff;--comment:#858c99;--mark:#453c1c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1.25rem 4rem;max-width:76rem;background:var(--back);color:var(--text);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .6rem}
h3{font-size:.8rem;margin:1.4rem 0 .4rem;color:var(--soft);text-transform:uppercase;letter-spacing:.05em}
a{color:var(--link)}code,pre,.mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.85em}
.cards{display:flex;flex-wrap:wrap;gap:.75rem;margin:1.2rem 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.6rem 1rem;min-width:8.5rem}
.card b{display:block;font-size:1.45rem;font-weight:600}.card span{color:var(--soft);font-size:.85rem}
.note{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.6rem 1rem}
.note.break{background:var(--bad-back)}
header .where{color:var(--soft);font-size:.9rem;margin:.3rem 0;overflow-wrap:anywhere}
table{border-collapse:collapse}td.mono{white-space:pre-wrap;overflow-wrap:anywhere}th[scope]{vertical-align:top}
th,td{padding:.3rem .9rem .3rem 0;text-align:left;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500;font-size:.85rem}td.number,th.number{text-align:right;
font-variant-numeric:tabular-nums}
.site{background:var(--card);border:1px solid var(--line);border-radius:8px;margin:.5rem 0}
.site>summary{display:flex;flex-wrap:wrap;gap:.3rem .8rem;align-items:baseline;padding:.6rem 1rem;cursor:pointer;
list-style:none}.site>summary::-webkit-details-marker{display:none}
.site>summary::before{content:"▸";color:var(--soft);width:.8em}.site[open]>summary::before{content:"▾"}
summary:focus-visible,a:focus-visible,pre:focus-visible,.wide:focus-visible{outline:3px solid var(--link);
outline-offset:2px;border-radius:6px}
.site>div{padding:0 1rem 1rem}.site .where{color:var(--soft);margin-left:auto}
.badge{font-size:.8rem;font-weight:600;padding:.05rem .55rem;border-radius:1rem;background:var(--good-back);
color:var(--good)}
.badge.no{background:var(--bad-back);color:var(--bad)}.advice{border-left:3px solid var(--bad);
padding:.2rem 0 .2rem .9rem}
pre{margin:0;padding:.6rem .8rem;overflow:auto;background:var(--back);border:1px solid var(--line);border-radius:6px;
line-height:1.45}pre.kernel{max-height:32rem}pre mark{background:var(--mark);color:inherit;display:block}
pre .n{color:var(--comment);user-select:none}
pre i{font-style:normal}i.k{color:var(--key)}i.s{color:var(--string)}i.t{color:var(--type)}i.c{color:var(--comment)}
.wide p{margin:.3rem 0}math{font-size:1.15em}mtable.cases{border-left:1.5px solid;border-radius:5px;padding-left:.4em;
margin-left:.3em}
mtd{text-align:left}.wide{overflow-x:auto;padding:.2rem}
.columns{display:flex;flex-wrap:wrap;gap:1rem 2.5rem;align-items:flex-start}
.mask .m0{fill:var(--dead)}.mask .m1{fill:var(--mixed)}.mask .m2{fill:var(--full)}.mask .m3{fill:var(--data)}
.mask .grid{stroke:var(--card);stroke-width:1;fill:none}
.legend{list-style:none;padding:0;margin:0;font-size:.9rem}.legend svg{vertical-align:-2px;margin-right:.5rem}
.bar{max-width:100%;height:auto}figure{margin:0}
.bar rect{fill:var(--full)}.bar .bound{fill:var(--good)}.bar .back{fill:var(--dead)}
.bar text{fill:var(--text);font:13px system-ui,sans-serif}
.graph{max-width:none}.graph .edges path{fill:none;stroke:var(--soft);stroke-width:1.2}
.box rect{fill:var(--back);stroke:var(--line)}.box text{fill:var(--text);
font:12px ui-monospace,Menlo,Consolas,monospace;
text-anchor:middle}.box .shape{fill:var(--soft);font-size:9.5px}
.box.input rect{stroke-dasharray:4 3;stroke:var(--soft)}.box.product rect{fill:var(--data);stroke:var(--full)}
.box.fused rect{fill:var(--good-back);stroke:var(--good);stroke-width:2}
.box.blame rect{fill:var(--bad-back);stroke:var(--bad);stroke-width:2}
footer{margin-top:2.5rem;color:var(--soft);font-size:.85rem}
@media(prefers-reduced-motion:no-preference){html{scroll-behavior:smooth}}
"""
