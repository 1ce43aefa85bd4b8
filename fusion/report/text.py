"""The report as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from fusion.ir import AttentionSpec, integers
from fusion.ir.expr import Expr, I, J, coordinates
from fusion.ir.ops import conjuncts
from fusion.planning.plan import Plan

if TYPE_CHECKING:
    from fusion.report.report import Report, SiteReport


def to_text(report: Report) -> str:
    """The whole report; what a person prints."""
    total = len(report.sites)
    lines = [f"fusion: {report.fused} of {total} attention site{'s' if total != 1 else ''} fused"]
    lines += [f"  note: {note}" for note in report.notes]
    for found in report.graph_breaks:
        at, *reason = found.splitlines()
        lines += [f"  graph break at {at}", *(f"    {line}" for line in reason)]
    if report.comparison is not None:
        lines += ["", *(f"  {line}" for line in str(report.comparison).splitlines())]
    shown: dict[object, int] = {}
    for number, site in enumerate(report.sites):
        lines.append("")
        lines.append(f"[{number}] {'fused' if site.fused else 'not fused'}  {site.module or ''}".rstrip())
        if site.location:
            lines.append(f"    at       {site.location}")
        if site.reason:
            lines.append(f"    reason   {site.reason}")
        if site.stopped_by:
            lines.append(f"    stopped  by {site.stopped_by}" + (f" at {site.stopped_at}" if site.stopped_at else ""))
        if site.advice:
            lines += textwrap.wrap(site.advice, 110, initial_indent="    to fuse  ", subsequent_indent=" " * 13)
        lines += _indented("checked", site.validated or "")
        lines += _attentions(site, number, shown)
    return "\n".join(lines)


def _attentions(site: SiteReport, number: int, shown: dict[object, int]) -> list[str]:
    if not site.attentions:
        return []
    same = shown.setdefault(site.alike, number)
    if same != number:
        return [f"    kernel   the same as [{same}]"]
    lines = []
    for position, found in enumerate(site.attentions):
        spec, plan = found.spec, found.planned()
        lines.append(f"    program  {spec.formula()}")
        if spec.stored:
            lines.append(f"    reads    {', '.join(f'{o.name} in {o.dtype}' for o in spec.stored)}")
        if spec.mask is not None:
            lines.append(f"    mask     {mask_text(spec, plan)}")
        lines += _indented("keys", found.keys)
        lines += _indented("also", "; ".join(map(spec.describe_further, spec.further)))
        lines += _indented("gradient", found.gradients)
        lines += _indented("plan", plan.explain().partition("\nothers")[0])
        lines += _indented("runs", plan.runs)
        lines += _indented("approx", found.approximation or "")
        if found.source:
            count = len(found.source.splitlines())
            lines.append(f"    kernel   {count} lines: report.sites[{number}].sources[{position}]")
    return lines


def mask_text(spec: AttentionSpec, plan: Plan | None) -> str:
    """The mask as understood: e.g. `causal ∧ i - j < 512, 22 % of the scores live, 24 % computed; rows i0..i1 visit
    keys ...`."""
    assert spec.mask is not None
    parts = [_predicate(spec, part) for part in conjuncts(spec.mask.live)]
    text = " ∧ ".join(parts)
    if plan is not None and (live := plan.problem.live_share(1)) < 1:
        text += f", {100 * live:.0f} % of the scores live, {100 * plan.computed:.0f} % computed"
    low, high = spec.mask.key_lo, spec.mask.key_hi
    if low is not None or high is not None:
        text += f"; rows i0..i1 visit keys {'0' if low is None else low} ≤ j < {'Nk' if high is None else high}"
    if spec.mask.tile_live is not None:
        text += "; dead and full tiles of the data are found at every call"
    return text


def _predicate(spec: AttentionSpec, part: Expr) -> str:
    """One condition, in the words and the form that people use."""
    if part.op == "ile" and part.args[0] is J and part.args[1] is I:
        return "causal"
    if part.op == "ile" and part.args[0] is I:
        distance = integers.sub(part.args[1], J)
        if not coordinates(distance) & {"i", "j"}:
            return f"i - j < {spec.describe(integers.add(distance, 1))}"
    text = spec.describe(part)
    return f"({text})" if part.op == "or" else text


def _indented(title: str, text: str) -> list[str]:
    return [f"    {title if k == 0 else '':8} {line}" for k, line in enumerate(text.splitlines())]
