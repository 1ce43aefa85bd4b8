"""The page: summary, comparison, and one row per attention that opens to everything known about it."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING

from fusion.ir import AttentionSpec
from fusion.planning.plan import Plan
from fusion.planning.texts import bytes_text, number_text, seconds_text, tile_text
from fusion.report.page import graph_view, mask_map
from fusion.report.page.highlight import highlight, python
from fusion.report.page.maths import expression_to_mathml, spec_to_mathml
from fusion.report.page.style import STYLE

if TYPE_CHECKING:
    from fusion.report.report import Report, SiteReport

CONTEXT = 3
"""Lines of the user's source on either side of the one in question."""
KERNEL_BYTES = 1_200_000
"""Of highlighted kernels in one page; the rest is cut, and the report has it whole."""


def to_html(report: Report) -> str:
    total = len(report.sites)
    body = [
        "<header><h1>fusion report</h1></header><main>",
        _summary(report),
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
        *(f'<p class="note">graph break at {escape(found)}</p>' for found in report.graph_breaks),
        _comparison(report),
        f"<h2>{total} attention{'' if total == 1 else 's'}</h2>" if total else "",
        *_sites(report),
        "</main><footer>Every number of a plan is predicted by the cost model; nothing here is measured unless a table "
        "says so. Enter or the space bar opens and closes a row.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>fusion report</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


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
    return (
        '<div class="cards">' + "".join(f'<p class="card"><b>{b}</b><span>{s}</span></p>' for b, s in cards) + "</div>"
    )


def _comparison(report: Report) -> str:
    found = report.comparison
    if found is None:
        return ""
    heads = ("", "time", "speed-up", "peak memory", "error", "allowed")
    rows = [_cells("th", heads)]
    rows += [_cells("td", cells) for cells in found.table()]
    return f"<h2>Measured</h2><table>{''.join(rows)}</table><p>{escape(found.conditions)}</p>"


def _cells(tag: str, cells: Iterable[str]) -> str:
    first, *rest = map(escape, cells)
    numbers = "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in rest)
    return f"<tr><{tag}>{first}</{tag}>{numbers}</tr>"


def _sites(report: Report) -> list[str]:
    shown: dict[object, int] = {}
    left = KERNEL_BYTES
    rows = []
    for number, site in enumerate(report.sites):
        first = shown.setdefault(site.alike, number) if site.specs else number
        if first == number:
            details, used = _details(site, number, left)
            left -= used
        else:
            link = f'<a href="#site-{first}">the same as [{first}]</a>'
            details = _source(site.location) + f"<p>Program, mask, plan, kernel and graph are {link}.</p>"
        # a page with a single row, and what was not fused, is open at once
        opened = " open" if len(report.sites) == 1 or not site.fused else ""
        rows.append(
            f'<details class="site" id="site-{number}"{opened}><summary>{_title(site, number)}</summary>'
            f"<div>{details}</div></details>"
        )
    return rows


def _title(site: SiteReport, number: int) -> str:
    badge = '<span class="badge">fused</span>' if site.fused else '<span class="badge no">not fused</span>'
    plan = f'<span class="mono">{escape(site.plan.schedule)}</span>' if site.plan else ""
    where = place[1] if (place := _place(site.location)) else ""
    return (
        f"<span>[{number}]</span>{badge}<b>{escape(site.module or '')}</b>{plan}"
        f'<span class="where mono">{escape(where)}</span>'
    )


def _details(site: SiteReport, number: int, budget: int) -> tuple[str, int]:
    parts = [_source(site.location), _reason(site)]
    for found in site.attentions:
        plan = found.planned()
        parts.append(f'<h3>Program</h3><div class="wide" tabindex="0">{spec_to_mathml(found.spec)}</div>')
        parts.append(_mask(found.spec, found.sizes, plan))
        parts.append(_plan(plan))
    parts.append(_graphs(site, number))
    used = 0
    for position, source in enumerate(site.sources):
        text = _kernel(source, f"report.sites[{number}].sources[{position}]", budget - used)
        used += len(text)
        parts.append(text)
    return "".join(parts), used


_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+) in (?P<function>\S+): (?P<code>.*)", re.S)


def _place(location: str | None) -> tuple[re.Match[str], str] | None:
    """The parts of a source location, and its short form "file.py:12"."""
    if location is None or (match := _PLACE.match(location)) is None:
        return None
    return match, f"{PurePath(match['file']).name}:{match['line']}"


def _source(location: str | None) -> str:
    """The user's lines around a location, as they are in the file now."""
    if (place := _place(location)) is None:
        return f"<h3>Source</h3><pre>{escape(location)}</pre>" if location else ""
    match, _ = place
    head = f"<h3>Source</h3><p class=mono>{escape(match['file'])}:{match['line']} in {escape(match['function'])}</p>"
    centre = int(match["line"])
    lines = linecache.getlines(match["file"])
    if not 0 < centre <= len(lines):
        return head + f"<pre><mark>{python(match['code'])}</mark></pre>"
    first = max(1, centre - CONTEXT)
    shown = []
    for number in range(first, min(len(lines), centre + CONTEXT) + 1):
        text = f'<span class="n">{number:5d}  </span>{python(lines[number - 1].rstrip())}'
        shown.append(f"<mark>{text}</mark>" if number == centre else text + "\n")
    return f'{head}<pre tabindex="0">{"".join(shown)}</pre>'


def _reason(site: SiteReport) -> str:
    if site.reason is None:
        return ""
    parts = [f"<h3>Why not</h3><p>{escape(site.reason)}</p>"]
    if site.stopped_by:
        parts.append(f"<p>Stopped by <code>{escape(site.stopped_by)}</code></p>")
        parts.append(_source(site.stopped_at).replace("<h3>Source</h3>", ""))
    if site.advice:
        parts.append(f'<h3>What would make it fusable</h3><p class="advice">{escape(site.advice)}</p>')
    return "".join(parts)


def _mask(spec: AttentionSpec, sizes: Mapping[str, int], plan: Plan) -> str:
    found = mask_map.mask_map(spec, sizes, (plan.B_r, plan.B_c))
    if found is None or spec.mask is None:
        return ""
    kinds = [kind for kind in mask_map.NAMES if found.shares[kind] or kind != mask_map.DATA]
    swatch = (
        '<svg class="mask" width="14" height="14" aria-hidden="true"><rect class="m{}" width="14" height="14"/></svg>'
    )
    legend = "".join(f"<li>{swatch.format(kind)}{mask_map.NAMES[kind]} {found.shares[kind]:.0%}</li>" for kind in kinds)
    told = f"{found.n_q} queries (down) by {found.n_k} keys; a cell is {found.rows} by {found.columns}."
    told += " Batch element 0." if mask_map.is_positional(spec) else ""
    told += " Evenly spaced rows and columns of each cell were looked at." if found.sampled else ""
    return (
        f'<h3>Mask</h3><div class="wide" tabindex="0">{expression_to_mathml(spec.mask.live, spec.names)}</div>'
        f'<div class="columns">{mask_map.to_svg(found)}<div><ul class="legend">{legend}</ul><p>{told}</p></div></div>'
    )


def _plan(plan: Plan) -> str:
    rows = [
        ("problem", str(plan.problem)),
        ("schedule", f"{plan.schedule} {tile_text(plan.tile)}"),
        *([("runs", plan.runs)] if plan.runs else []),
        ("I/O per head", plan.symbolic),
        ("", f"= {plan.formula}"),
        ("all heads", f"{number_text(plan.io)} elements = {bytes_text(plan.io_bytes)}"),
        (
            "lower bound",
            f"{number_text(plan.bound)} elements for M = {plan.capacity}; I/O is {plan.ratio:.2f} times that",
        ),
        ("fast memory", f"{number_text(plan.footprint)} of {plan.capacity} elements"),
        ("predicted", f"{seconds_text(plan.time)}, limited by {plan.limited_by}"),
    ]
    cells = "".join(f'<tr><th scope="row">{escape(a)}</th><td class="mono">{escape(b)}</td></tr>' for a, b in rows)
    bars = _bars(
        "elements moved",
        [("I/O", plan.io, number_text(plan.io), ""), ("bound", plan.bound, number_text(plan.bound), "bound")],
    )
    resources = [(name, value, seconds_text(value), "") for name, value in plan.resources]
    times = _bars("predicted time by resource", resources) if resources else ""
    return f'<h3>Plan</h3><div class="wide" tabindex="0"><table>{cells}</table></div>' + (
        f'<div class="columns">{bars}{times}</div>'
    )


def _bars(title: str, entries: list[tuple[str, float, str, str]]) -> str:
    """Horizontal bars with their values: (name, length, text, class)."""
    largest = max((value for _, value, _, _ in entries), default=0) or 1
    height = 24 * len(entries)
    parts = []
    for row, (name, value, text, kind) in enumerate(entries):
        y = 24 * row
        parts.append(
            f'<text x="0" y="{y + 15}">{escape(name)}</text>'
            f'<rect class="back" x="120" y="{y + 3}" width="200" height="16"/>'
            f'<rect class="{kind}" x="120" y="{y + 3}" width="{200 * value / largest:.1f}" height="16"/>'
            f'<text x="328" y="{y + 15}">{escape(text)}</text>'
        )
    label = f"{title}: " + ", ".join(f"{name} {text}" for name, _, text, _ in entries)
    return (
        f'<figure style="margin:0"><h3>{title}</h3><svg class="bar" role="img" aria-label="{escape(label)}" '
        f'width="440" height="{height}">{"".join(parts)}</svg></figure>'
    )


def _graphs(site: SiteReport, number: int) -> str:
    parts = []
    for title, region in (("Graph before", site.before), ("Graph after", site.after)):
        if region is None or not region.nodes:
            continue
        drawn = graph_view.to_svg(region, f"{title} the rewrite of attention {number}, {len(region.nodes)} nodes")
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
        f"<h3>Kernel</h3><details><summary>{len(lines)} lines</summary>{cut}"
        f'<pre class="kernel" tabindex="0">{shown}</pre></details>'
    )
