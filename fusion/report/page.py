"""A report as one self-contained HTML page: no script, no network, light and dark, usable with the keyboard alone.

It has a summary, the comparison, and one row per attention that opens to everything known about it.
"""

from __future__ import annotations

import keyword
import linecache
import re
import time
from collections.abc import Iterable
from html import escape
from importlib.metadata import version
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fusion.machine.processors import bytes_text, seconds_text
from fusion.planning.plan import Plan
from fusion.report import drawings
from fusion.report.data import ATTENTION, SITE, kernel_summary

if TYPE_CHECKING:
    from fusion.report.report import AttentionReport, Report, SiteReport

CONTEXT = 3
"""Lines of the user's source on either side of the one in question."""
KERNEL_BYTES = 1_200_000
"""The most of highlighted kernels in one page; the rest is cut, and the report has it whole."""
_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+) in (?P<function>[^\s:]+)(?:: (?P<code>.*))?", re.S)


def to_html(report: Report) -> str:
    import fusion

    data = report.data
    name = getattr(report.function, "__name__", type(report.function).__name__) if report.function else ""
    title = escape(f"fusion report{': ' * bool(name)}{name}")
    about = [f"<code>{escape(report.command)}</code>"] if report.command else []
    about += [escape(f"options {dict(report.options)}")] if report.options else []
    about += [time.strftime("%Y-%m-%d %H:%M"), f"fusion {fusion.__version__}, torch {version('torch')}"]
    body = [
        f'<header><h1>{title}</h1><p class="where">{" · ".join(about)}</p></header><main>',
        _summary(report),
        *(f'<p class="note">{escape(note)}</p>' for note in report.remarks),
        *(f'<p class="note break">graph break at {escape(entry)}</p>' for entry in report.graph_breaks),
        _comparison(report),
        f"<h2>{data['total']} attention{'s' * (data['total'] != 1)}</h2>" if data["total"] else "",
        *_sites(report, data["sites"]),
        "</main><footer>Every number of a plan is predicted by the cost model; nothing here is measured unless a table "
        "says so. Enter or the space bar opens and closes a row.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _summary(report: Report) -> str:
    plans = [plan for site in report.sites for plan in site.plans]
    parts = [part for site in report.sites for part in site.attentions]
    cards = [
        (f"{report.fused} of {len(report.sites)}", "attentions fused"),
        (f"{report.graphs}", "graph" if report.graphs == 1 else "graphs"),
    ]
    if plans:
        cards.append((seconds_text(sum(plan.time for plan in plans)), "predicted, all fused attentions"))
        if backward := [part.backward() for part in parts if not isinstance(part.backward, str)]:
            cards.append((seconds_text(sum(plan.time for plan in backward)), "predicted, their backward"))
        cards.append((bytes_text(sum(plan.io_bytes for plan in plans)), "predicted traffic"))
        cards.append((escape(plans[0].machine.name), "machine"))
    text = "".join(f'<p class="card"><b>{figure}</b><span>{what}</span></p>' for figure, what in cards)
    return f'<div class="cards">{text}</div>'


def _comparison(report: Report) -> str:
    if (measured := report.comparison) is None:
        return ""
    rows = [_cells("th", ("", "time", "speed-up", "peak", "error", "allowed"))]
    rows += [_cells("td", cells) for cells in measured.table()]
    table = f'<div class="wide" tabindex="0"><table>{"".join(rows)}</table></div>'
    return f"<h2>Measured</h2>{table}<p>{escape(measured.conditions)}</p><p>{escape(measured.optimum)}</p>"


def _cells(tag: str, cells: Iterable[str]) -> str:
    first, *rest = map(escape, cells)
    numbers = "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in rest)
    return f"<tr><{tag}>{first}</{tag}>{numbers}</tr>"


def _sites(report: Report, sites: list[dict[str, Any]]) -> list[str]:
    total, left, rows = sum(plan.time for site in report.sites for plan in site.plans), KERNEL_BYTES, []
    for number, (site, data) in enumerate(zip(report.sites, sites, strict=True)):
        if data["same_as"] is None:
            details, used = _details(site, data, number, left)
            left -= used
        else:
            same = data["same_as"].removeprefix("the same as [").rstrip("]")
            link = f'<a href="#site-{same}">{data["same_as"]}</a>'
            details = _source(site.location) + f"<p>Program, mask, plan, kernel and graph are {link}.</p>"
        opened = " open" if number == 0 or not site.fused else ""
        rows.append(
            f'<details class="site" id="site-{number}"{opened}><summary>{_title(site, number, total)}</summary>'
            f"<div>{details}</div></details>"
        )
    return rows


def _title(site: SiteReport, number: int, total: float) -> str:
    badge = '<span class="badge">fused</span>' if site.fused else '<span class="badge no">not fused</span>'
    own = sum(plan.time for plan in site.plans)
    cost = f"<span>{seconds_text(own)}, {own / total:.0%}</span>" if own else ""
    where = f"{PurePath(place['file']).name}:{place['line']}" if (place := _place(site.location)) else ""
    return (
        f"<span>[{number}]</span>{badge}<b>{escape(site.module or '')}</b>{cost}"
        f'<span class="where mono">{escape(where)}</span>'
    )


def _details(site: SiteReport, data: dict[str, Any], number: int, budget: int) -> tuple[str, int]:
    """(everything about a site, the size of its kernels). budget: for these."""
    parts = [_source(site.location), _source(site.calling, "<h3>Called from</h3>")]
    labels = {"verdict": "verdict", "validated": SITE["validated"]}
    if site.reason is not None:
        parts.append(f"<h3>Why not</h3><p>{escape(site.reason)}</p>")
        if site.stopped_by:
            parts.append(f"<p>Stopped by <code>{escape(site.stopped_by)}</code></p>{_source(site.stopped_at, '')}")
        parts.append(f'<h3>What would make it fusable</h3><p class="advice">{escape(site.advice or "")}</p>')
    parts.append(_table([(label, data[key]) for key, label in labels.items() if data[key]]))
    for attention, entries in zip(site.attentions, data["attentions"], strict=True):
        drawn = ("schedule", "kernel", "backward" if entries["backward_plan"] else "")
        rows = [(label, entries[key]) for key, label in ATTENTION.items() if entries[key] and key not in drawn]
        parts += ["<h3>Program</h3>", _table(rows), _mask(attention), _plan(attention.planned())]
        if not isinstance(attention.backward, str):
            parts.append(_plan(attention.backward(), "Plan of the backward"))
        parts.append(_LEGEND)
    parts.append(_graphs(site, number))
    used = 0
    for position, source in enumerate(site.sources):
        text = _kernel(source, f"report.sites[{number}].sources[{position}]", budget - used)
        used += len(text)
        parts.append(text)
    return "".join(parts), used


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Labelled texts, with thousands apart."""
    apart = [(label, re.sub(r"(?<![\w.:])\d{5,}(?![\w.])", lambda m: f"{int(m[0]):,}", text)) for label, text in rows]
    cells = "".join(f'<tr><th scope="row">{escape(a)}</th><td class="mono">{escape(b)}</td></tr>' for a, b in apart)
    return f'<div class="wide" tabindex="0"><table>{cells}</table></div>' if cells else ""


def _place(location: str | None) -> re.Match[str] | None:
    return _PLACE.match(location) if location else None


def _source(location: str | None, head: str = "<h3>Source</h3>") -> str:
    """The user's lines around a location, as they are in the file now."""
    if (place := _place(location)) is None:
        return f"{head}<pre>{escape(location)}</pre>" if location else ""
    head += f"<p class=mono>{escape(place['file'])}:{place['line']} in {escape(place['function'])}</p>"
    centre, lines = int(place["line"]), linecache.getlines(place["file"])
    if not 0 < centre <= len(lines):
        return head + f"<pre><mark>{python(place['code'] or '')}</mark></pre>"
    shown = []
    for number in range(max(1, centre - CONTEXT), min(len(lines), centre + CONTEXT) + 1):
        text = f'<span class="n">{number:5d}  </span>{python(lines[number - 1].rstrip())}'
        shown.append(f"<mark>{text}</mark>" if number == centre else text + "\n")
    return f'{head}<pre tabindex="0">{"".join(shown)}</pre>'


def _mask(attention: AttentionReport) -> str:
    spec = attention.spec
    shown = drawings.mask_map(spec, attention.sizes, attention.values)
    if shown is None or spec.mask is None:
        return ""
    kinds = [kind for kind in drawings.NAMES if shown.shares[kind] or kind != drawings.DATA]
    swatch = (
        '<svg class="mask" width="14" height="14" aria-hidden="true"><rect class="m{}" width="14" height="14"/></svg>'
    )
    legend = "".join(f"<li>{swatch.format(k)}{drawings.NAMES[k]} {shown.shares[k]:.0%}</li>" for k in kinds)
    about = f"{shown.n_q:,} queries (down) by {shown.n_k:,} keys; a square is {shown.cell} by {shown.cell}."
    about += " The mask of these inputs." if attention.values else ""
    whose = f"<p>Drawn for {shown.whose}:</p>" if shown.whose else ""
    about += " Evenly spaced rows and columns of each square were looked at." if shown.sampled else ""
    return (
        f'<h3>Mask</h3><div class="columns">{drawings.mask_svg(shown)}'
        f'<div>{whose}<ul class="legend">{legend}</ul><p>{about}</p></div></div>'
    )


def _plan(plan: Plan, title: str = "Plan") -> str:
    lines = plan.explain().splitlines()
    rows = [(line[:11].strip(), line[11:]) for line in lines]
    moved = [("I/O", plan.io, f"{plan.io:,.0f}", ""), ("bound", plan.bound, f"{plan.bound:,.0f}", "bound")]
    bars = drawings.bars_svg("elements moved", moved)
    if resources := [(name, value, seconds_text(value), "") for name, value in plan.resources if value]:
        bars += drawings.bars_svg("predicted time by resource", resources)
    return f'<h3>{title}</h3>{_table(rows)}<div class="columns">{bars}</div>'


_LEGEND = """<details><summary>What the words mean</summary><ul>
<li>In turn: one after the other, so the time is the sum. Side by side: the units work at the same time, so the one that
is busy longest counts, and what cannot hide behind it.</li>
<li>A bound that is compulsory is what is needed, moved once: no schedule moves less, and the ratio is the distance from
the optimum. An order, with the constant 1, is a theorem that tells how traffic grows with the sizes, not how much it
is: the ratio compares schedules, and even the best one may be some times above it.</li>
<li>live: the share of tiles that the mask leaves; M: the elements of the fast memory.</li></ul></details>"""


def _graphs(site: SiteReport, number: int) -> str:
    parts = []
    for title, region in (("Graph before", site.before), ("Graph after", site.after)):
        if region is None or not region.nodes:
            continue
        drawn = drawings.graph_svg(region, f"{title} the rewrite of attention {number}, {len(region.nodes)} nodes")
        more = f"<p>{region.left_out} nodes further up are not drawn.</p>" if region.left_out else ""
        parts.append(f'<div class="wide" tabindex="0"><h3>{title}</h3>{drawn}{more}</div>')
    return f'<div class="columns">{"".join(parts)}</div>' if parts else ""


def _kernel(source: str, name: str, budget: int) -> str:
    if not source:
        return "<h3>Kernel</h3><p>The reference interpreter runs it.</p>"
    lines = source.splitlines()
    shown, cut = highlight(source), ""
    if len(shown) > max(budget, 0):
        kept = max(40, len(lines) * max(budget, 0) // len(shown))
        shown, cut = highlight("\n".join(lines[:kept])), f"<p>The first {kept} lines; <code>{name}</code> has all.</p>"
    return (
        f"<h3>Kernel</h3><p>{escape(kernel_summary(source))}</p><details><summary>{len(lines):,} lines</summary>{cut}"
        f'<pre class="kernel" tabindex="0">{shown}</pre></details>'
    )


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
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.6rem 1rem;margin:0;
min-width:8.5rem}
.card b{display:block;font-size:1.45rem;font-weight:600}.card span{color:var(--soft);font-size:.85rem}
.note{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.6rem 1rem}
.note.break{background:var(--bad-back)}
header .where{color:var(--soft);font-size:.9rem;margin:.3rem 0;overflow-wrap:anywhere}
table{border-collapse:collapse}td.mono{white-space:pre-wrap;overflow-wrap:anywhere}th[scope]{vertical-align:top}
th,td{padding:.3rem .9rem .3rem 0;text-align:left;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500;font-size:.85rem}td.number,th.number{text-align:right;
font-variant-numeric:tabular-nums;white-space:nowrap}
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
.wide p{margin:.3rem 0}.wide{overflow-x:auto;padding:.2rem}
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
@media(max-width:30rem){body{padding:1.25rem .75rem 3rem}th,td{padding-right:.4rem;font-size:.8rem}}
@media(prefers-reduced-motion:no-preference){html{scroll-behavior:smooth}}
"""
