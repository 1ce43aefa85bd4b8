"""Failures of a pass at one attention, which leave the other attentions of the graph fused."""

from __future__ import annotations

import logging

from fusion.errors import FusionError
from fusion.refusals import Reason, Refusal

log = logging.getLogger(__name__)


def defect(problem: Exception) -> Refusal:
    """Refusal of a site at which a pass failed; raises errors that are meant for the user."""
    if isinstance(problem, FusionError):
        raise problem
    log.error("a defect of fusion: an attention stays as it was", exc_info=problem)
    first, *_ = str(problem).strip().splitlines() or [""]
    return Refusal(Reason.DEFECT, f"its analysis failed ({type(problem).__name__}: {first})")
