"""The report as data that JSON can hold."""

from __future__ import annotations

import math
from typing import Any

from fusion.ir.records import parsed
from fusion.planning.plan import Plan
from fusion.report.report import AttentionReport, Report, SiteReport


def to_dict(report: Report) -> dict[str, Any]:
    """What `fusion explain --json` prints: plain dicts, lists, numbers and strings; NaN is None."""
    return {
        "fused": report.fused,
        "total": len(report.sites),
        "graphs": report.graphs,
        "notes": list(report.notes),
        "graph_breaks": list(report.graph_breaks),
        "sites": [_site(site) for site in report.sites],
        "comparison": None if report.comparison is None else comparison_to_dict(report.comparison),
    }


def comparison_to_dict(comparison: Any) -> dict[str, Any]:
    """Measurements by name, and under which conditions they hold."""
    return {
        "conditions": comparison.conditions,
        "entries": {
            entry.name: {
                "seconds": _number(entry.seconds),
                "first_call_seconds": _number(entry.first),
                "peak_bytes": entry.peak,
                "error": entry.error,
                "allowed_error": entry.allowed,
                "failure": entry.failure or None,
            }
            for entry in comparison.entries
        },
    }


def _site(site: SiteReport) -> dict[str, Any]:
    return {
        "fused": site.fused,
        "reason": site.reason,
        "kind": None if site.refusal is None else site.refusal.kind.name.lower(),
        "stopped_by": site.stopped_by,
        "stopped_at": site.stopped_at,
        "advice": site.advice,
        "location": site.location,
        "module": site.module,
        "validated": site.validated,
        "attentions": [_attention(found) for found in site.attentions],
    }


def _attention(found: AttentionReport) -> dict[str, Any]:
    spec, plan = found.spec, found.planned()
    return {
        "program": spec.formula(),
        "mask": None if spec.mask is None else spec.describe(spec.mask.live),
        "keys": found.keys or None,
        "sizes": dict(found.sizes),
        "spec": parsed(spec.to_json()),
        "plan": _plan(plan),
        "runs": plan.runs or None,
        "kernel_lines": len(found.source.splitlines()),
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "machine": plan.machine.name,
        "schedule": plan.schedule,
        "tile": dict(plan.tile),
        "io_elements": plan.io,
        "io_bytes": plan.io_bytes,
        "bound_elements": plan.bound,
        "seconds": _number(plan.time),
        "limited_by": plan.limited_by,
        "formula": plan.formula,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
