"""A report as data (dicts, lists, numbers and strings), of which its text, its JSON and its page are made."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fusion.ir import AttentionSpec, integers
from fusion.ir.expr import Expr, I, J, coordinates, loads
from fusion.ir.ops import conjuncts
from fusion.ir.records import parsed
from fusion.planning.plan import Plan

if TYPE_CHECKING:
    from fusion.report.report import AttentionReport, Report, SiteReport

SITE = {"location": "at", "calling": "from", "verdict": "verdict", "reason": "reason", "stopped": "stopped",
        "advice": "to fuse", "validated": "checked", "same_as": "kernel"}  # fmt: skip
ATTENTION = {"part": "part", "program": "program", "operands": "where", "stored": "reads", "mask": "mask",
             "keys": "keys", "aux_outputs": "also", "gradients": "gradient", "schedule": "plan", "runs": "runs",
             "backward": "backward",
             "approximation": "approx", "reproducible": "cost", "kernel": "kernel"}  # fmt: skip
"""Entries of a site and of an attention that are text, in order, with the labels that text and page give them."""
_TRAFFIC = ("cache", "keys", "L2", "HBM")
_WORK = {
    "products": "matrix products", "vectors": "matrix products", "softmax": "exponentials and the score program",
    "exponentials": "exponentials", "instructions": "other instructions", "cache": "traffic between caches and memory",
    "keys": "reading the keys", "L2": "traffic to the L2 cache", "HBM": "traffic to the GPU's memory",
    "packing": "copying keys and values into panels", "output": "writing the output", "merge": "merging parts of keys",
    "staging": "copying rows", "launch": "the fixed cost of a call",
}  # fmt: skip
"""The resources of the time models, in words."""
WHOLE_TILES = "a tile with a live score is computed whole"
BY_POSITION = f"{WHOLE_TILES}, and which have one is told by positions alone, not by data (option tile_maps)"
NO_TILE = "no tile is left out, as positions do not tell which are dead"
"""Reasons why more scores are computed than live."""
WORTH_LOOKING = 0.75
"""Share of live scores below which a report names the option that skips tiles of data."""


def report_data(report: Report) -> dict[str, Any]:
    """The whole report; NaN and infinity are None."""
    first: dict[object, int] = {}
    sites = []
    for number, site in enumerate(report.sites):
        form = site.specs, *(tuple(sizes.items()) for sizes in site.sizes)  # equal layers run alike
        same = first.setdefault(form, number) if site.attentions else number
        maps = report.options.get("tile_maps", "auto") == "auto"
        sites.append(_site(site, number, None if same == number else f"the same as [{same}]", maps))
    return {
        "fused": report.fused,
        "total": len(report.sites),
        "graphs": report.graphs,
        "notes": report.remarks,
        "graph_breaks": list(report.graph_breaks),
        "sites": sites,
        "comparison": None if report.comparison is None else report.comparison.data,
    }


def report_text(report: Report) -> str:
    """The whole report; what a person prints."""
    data = report_data(report)
    lines = [f"fusion: {data['fused']} of {data['total']} attention site{'s' * (data['total'] != 1)} fused"]
    lines += [f"  note: {note}" for note in data["notes"]]
    for entry in data["graph_breaks"]:
        at, *reason = entry.splitlines()
        lines += [f"  graph break at {at}", *(f"    {line}" for line in reason)]
    if report.comparison is not None:
        lines += ["", *(f"  {line}" for line in str(report.comparison).splitlines())]
    for number, site in enumerate(data["sites"]):
        lines += ["", f"[{number}] {'fused' if site['fused'] else 'not fused'}  {site['module'] or ''}".rstrip()]
        lines += rows_text(site, SITE)
        for attention in site["attentions"] if site["same_as"] is None else ():
            lines += rows_text(attention, ATTENTION)
    return "\n".join(lines)


def rows_text(data: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """Labelled lines of the entries that are there."""
    lines = []
    for key, label in labels.items():
        text = str(data[key] or "")
        broken = textwrap.wrap(text, 97) if key == "advice" else text.splitlines()
        lines += [f"    {label if k == 0 else '':8} {line}" for k, line in enumerate(broken)]
    return lines


def _site(site: SiteReport, number: int, same_as: str | None, may_map: bool) -> dict[str, Any]:
    at = f" at {site.stopped_at}" if site.stopped_at else ""
    attentions = [
        _attention(entry, f"report.sites[{number}].sources[{k}]", may_map) for k, entry in enumerate(site.attentions)
    ]
    for k, attention in enumerate(attentions):
        count = len(attentions)
        attention["part"] = f"{k + 1} of {count} attentions, whose results are added" if count > 1 else None
    return {
        "fused": site.fused,
        "module": site.module,
        "location": site.location,
        "calling": site.calling,
        "verdict": _verdict(site.plans) if same_as is None else None,
        "reason": site.reason,
        "kind": None if site.refusal is None else site.refusal.kind.name.lower(),
        "stopped": f"by {site.stopped_by}{at}" if site.stopped_by else None,
        "stopped_by": site.stopped_by,
        "stopped_at": site.stopped_at,
        "advice": site.advice,
        "validated": site.validated if site.fused else None,
        "same_as": same_as,
        "attentions": attentions,
    }


def _verdict(plans: tuple[Plan, ...]) -> str | None:
    """One sentence on what limits a site, by the cost model."""
    times: dict[str, float] = {}
    for plan in plans:
        for name, seconds in plan.resources:
            times[name] = times.get(name, 0.0) + seconds
    total = max(sum(plan.time for plan in plans), *times.values()) if times else 0.0
    if not total:
        return None
    most = max(times, key=lambda name: times[name])
    traffic = sum(times.get(name, 0.0) for name in _TRAFFIC) / total
    text = f"limited by {_WORK[most]} ({100 * times[most] / total:.0f} % of the predicted time)"
    if most in _TRAFFIC:
        return f"{text}; it moves {plans[0].ratio:.2f} times the lower bound"
    matters = "does not limit it" if traffic < times[most] / total / 2 else "is the next"
    return f"{text}; memory traffic ({100 * traffic:.0f} %) {matters}"


def _attention(attention: AttentionReport, source: str, may_map: bool) -> dict[str, Any]:
    spec, plan, names, backward = attention.spec, attention.planned(), attention.names, attention.backward
    backward = backward if isinstance(backward, str) else backward()
    gradients = backward if isinstance(backward, str) else "\n".join(backward.explain().splitlines()[2:])
    lines = len(attention.source.splitlines())
    summary = kernel_summary(attention.source)
    return {
        "program": spec.formula(names),
        "operands": "\n".join(attention.operands) or None,
        "stored": ", ".join(f"{names[n]} in {o.dtype}" for n, o in enumerate(spec.operands) if o in spec.stored)
        or None,
        "mask": None if spec.mask is None else mask_text(spec, names, plan, may_map),
        "keys": attention.keys or None,
        "aux_outputs": "; ".join(spec.describe_aux(aux, names) for aux in spec.aux_outputs) or None,
        "gradients": attention.gradients or None,
        "schedule": plan.explain(),
        "runs": plan.runs or None,
        "backward": gradients or None,
        "approximation": attention.approximation,
        "reproducible": attention.reproducible or None,
        "kernel": f"{lines} lines: {source}, in a shell --kernel FILE\n{summary}" if lines else None,
        "kernel_lines": lines,
        "sizes": dict(attention.sizes),
        "spec": parsed(spec.to_json()),
        "plan": plan.to_dict(),
        "backward_plan": None if isinstance(backward, str) else backward.to_dict(),
    }


_LOOP = re.compile(r"\bscf\.(for|while)\b|^ *(for|while) ")
_INSTRUCTIONS = {
    "multiply-adds": re.compile(r"\bmath\.fma|\bvector\.fma|dp(?:bf|fp)16ps"),  # of vectors, or of AMX tiles
    "tile products": re.compile(r"\btl\.dot\("),
    "loads": re.compile(r"\bllvm\.load|\bvector\.load|\btl\.load\(|tileloadd"),
    "stores": re.compile(r"\bllvm\.store|\bvector\.store|\btl\.store\(|tilestored"),
}


def kernel_summary(source: str) -> str:
    """Loops of a kernel's text, MLIR or Python, and the instructions of one trip of the one that multiplies matrices:
    of the innermost ones the one with most accumulators, and then with most multiply-adds."""
    lines = source.splitlines()
    indent = [len(line) - len(line.lstrip()) if line.strip() else 1 << 20 for line in lines]
    loops = []
    for start, line in enumerate(lines):
        if _LOOP.search(line):
            after = range(start + 1, len(lines))
            loops.append(range(start, next((k for k in after if indent[k] <= indent[start]), len(lines))))
    inner = [loop for loop in loops if not any(other.start in loop[1:] for other in loops)]
    if not inner:
        return ""
    trips = [
        {name: sum(bool(form.search(lines[k])) for k in loop) for name, form in _INSTRUCTIONS.items()} for loop in inner
    ]
    accumulators = [lines[loop.start].partition("iter_args(")[2].partition(")")[0].count("=") for loop in inner]
    multiplied = [sum([*trip.values()][:2]) for trip in trips]
    *_, chosen = max((min(a, b), b, -n) for n, (a, b) in enumerate(zip(accumulators, multiplied, strict=True)))
    first, trip = inner[-chosen], trips[-chosen]
    depth = max(sum(loop.start in other for other in loops) for loop in loops)
    counts = ", ".join(f"{count} {name if count > 1 else name[:-1]}" for name, count in trip.items() if count)
    many = "s" * (len(loops) > 1)
    return f"{len(loops)} loop{many}, up to {depth} deep; in the one of products at line {first.start + 1}: {counts}"


def finite_number(value: float) -> float | None:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else None


def mask_text(spec: AttentionSpec, names: Mapping[int, str], plan: Plan, may_map: bool = False) -> str:
    """The mask as understood: e.g. `causal ∧ i - j < 512, 22 % of the scores live, 24 % computed; rows i0..i1 visit
    keys ...`. may_map: whether it is worth a word that a map of tiles can be asked for."""
    assert spec.mask is not None
    text = " ∧ ".join(_predicate(spec, part, names) for part in conjuncts(spec.mask.live))
    if (live := plan.problem.live_share(1)) < 1:
        counted, data = plan.problem.counted is not None, bool(loads(spec.mask.live))
        most = "at most " * (data and not counted)
        text += f", {most}{100 * live:.0f} % of the scores live, {100 * plan.computed:.0f} % computed"
        text += " (of these inputs)" * (counted and data)
        if plan.computed > live + 0.005:
            by_data = not data or loads(*spec.mask.live_conditions())
            text += f"; {NO_TILE if not spec.mask.skips else WHOLE_TILES if by_data else BY_POSITION}"
    low, high = spec.mask.key_lo, spec.mask.key_hi
    if low is not None or high is not None:
        text += f"; rows i0..i1 visit keys {'0' if low is None else low} ≤ j < {'Nk' if high is None else high}"
    if spec.mask.tile_live is not None:
        text += "; every call looks for tiles that are dead or full"
    elif may_map and plan.problem.counted is not None and live < WORTH_LOOKING and plan.computed == 1:
        text += '; options={"tile_maps": "always"} looks for dead tiles at every call, which is not predicted to pay'
    return text


def _predicate(spec: AttentionSpec, part: Expr, names: Mapping[int, str]) -> str:
    """One condition, in the words and the form that people use."""
    if part.op == "ile" and part.args[0] is J and part.args[1] is I:
        return "causal"
    if part.op == "ile" and part.args[0] is I:
        distance = integers.sub(part.args[1], J)
        if not coordinates(distance) & {"i", "j"}:
            return f"i - j < {spec.describe(integers.add(distance, 1), names)}"
    text = spec.describe(part, names)
    return f"({text})" if part.op == "or" else text
