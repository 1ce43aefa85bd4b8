"""A report as one self-contained HTML page: no script, no network, light and dark, usable with the keyboard alone.

It has a summary, the comparison, and one row per attention that opens to everything known about it.
"""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Iterable
from html import escape
from importlib.metadata import version
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fusion.planning.plan import Plan
from fusion.planning.texts import bytes_text, seconds_text
from fusion.report.data import ATTENTION, SITE
from fusion.report.page import drawings
from fusion.report.page.maths import expression_to_mathml, spec_to_mathml
from fusion.report.page.style import STYLE, highlight, python

if TYPE_CHECKING:
    from fusion.report.report import AttentionReport, Report, SiteReport

CONTEXT = 3
"""Lines of the user's source on either side of the one in question."""
KERNEL_BYTES = 1_200_000
"""The most of highlighted kernels in one page; the rest is cut, and the report has it whole."""
_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+) in (?P<function>\S+): (?P<code>.*)", re.S)


def to_html(report: Report) -> str:
    data = report.data
    name = getattr(report.function, "__name__", type(report.function).__name__) if report.function else ""
    title = escape(f"fusion report{': ' * bool(name)}{name}")
    about = [f"<code>{escape(report.command)}</code>"] if report.command else []
    about += [escape(f"options {dict(report.options)}")] if report.options else []
    about += [time.strftime("%Y-%m-%d %H:%M"), f"fusion {_version()}, torch {version('torch')}"]
    body = [
        f'<header><h1>{title}</h1><p class="where">{" · ".join(about)}</p></header><main>',
        _summary(report),
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
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


def _version() -> str:
    import fusion

    return fusion.__version__


def _summary(report: Report) -> str:
    plans = [plan for site in report.sites for plan in site.plans]
    cards = [
        (f"{report.fused} of {len(report.sites)}", "attentions fused"),
        (f"{report.graphs}", "graph" if report.graphs == 1 else "graphs"),
    ]
    if plans:
        cards.append((seconds_text(sum(plan.time for plan in plans)), "predicted, all fused attentions"))
        cards.append((bytes_text(sum(plan.io_bytes for plan in plans)), "predicted traffic"))
        cards.append((escape(plans[0].machine.name), "machine"))
    text = "".join(f'<p class="card"><b>{figure}</b><span>{what}</span></p>' for figure, what in cards)
    return f'<div class="cards">{text}</div>'


def _comparison(report: Report) -> str:
    if (measured := report.comparison) is None:
        return ""
    rows = [_cells("th", ("", "time", "speed-up", "peak memory", "error", "allowed"))]
    rows += [_cells("td", cells) for cells in measured.table()]
    table = f'<div class="wide" tabindex="0"><table>{"".join(rows)}</table></div>'
    return f"<h2>Measured</h2>{table}<p>{escape(measured.conditions)}</p>"


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
    parts = [_source(site.location)]
    labels = {"verdict": "verdict", "validated": SITE["validated"]}
    if site.reason is not None:
        parts.append(f"<h3>Why not</h3><p>{escape(site.reason)}</p>")
        if site.stopped_by:
            parts.append(f"<p>Stopped by <code>{escape(site.stopped_by)}</code></p>{_source(site.stopped_at, '')}")
        parts.append(f'<h3>What would make it fusable</h3><p class="advice">{escape(site.advice or "")}</p>')
    parts.append(_table([(label, data[key]) for key, label in labels.items() if data[key]]))
    drawn = ("program", "schedule", "kernel")
    for attention, entries in zip(site.attentions, data["attentions"], strict=True):
        program = spec_to_mathml(attention.spec, attention.names)
        parts.append(f'<h3>Program</h3><div class="wide" tabindex="0">{program}</div>')
        rows = [(label, entries[key]) for key, label in ATTENTION.items() if entries[key] and key not in drawn]
        parts += [_table(rows), _mask(attention), _plan(attention.planned())]
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
        return head + f"<pre><mark>{python(place['code'])}</mark></pre>"
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
    about += " The first batch element and head." if spec.batch else ""
    about += " Evenly spaced rows and columns of each square were looked at." if shown.sampled else ""
    formula = expression_to_mathml(spec.mask.live, attention.names)
    return (
        f'<h3>Mask</h3><div class="wide" tabindex="0">{formula}</div><div class="columns">{drawings.mask_svg(shown)}'
        f'<div><ul class="legend">{legend}</ul><p>{about}</p></div></div>'
    )


def _plan(plan: Plan) -> str:
    lines = plan.explain().splitlines()
    rows = [(line[:11].strip(), line[11:]) for line in lines]
    moved = [("I/O", plan.io, f"{plan.io:,.0f}", ""), ("bound", plan.bound, f"{plan.bound:,.0f}", "bound")]
    bars = drawings.bars_svg("elements moved", moved)
    if resources := [(name, value, seconds_text(value), "") for name, value in plan.resources if value]:
        bars += drawings.bars_svg("predicted time by resource", resources)
    return f'<h3>Plan</h3>{_table(rows)}<div class="columns">{bars}</div>'


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
        f"<h3>Kernel</h3><details><summary>{len(lines):,} lines</summary>{cut}"
        f'<pre class="kernel" tabindex="0">{shown}</pre></details>'
    )
