"""`FUSION_LOGS=info` (or debug, warning): our log messages on standard error, without touching torch's."""

from __future__ import annotations

import logging
import os

LEVELS = ("debug", "info", "warning", "error")


def configure(value: str | None = None) -> None:
    """Apply FUSION_LOGS. A value that is no level is reported, and changes nothing."""
    value = os.environ.get("FUSION_LOGS", "") if value is None else value
    if not value:
        return
    log = logging.getLogger("fusion")
    if value.lower() not in LEVELS:
        log.warning("FUSION_LOGS=%r is not a level; use one of %s", value, ", ".join(LEVELS))
        return
    log.setLevel(value.upper())
    if not any(isinstance(handler, _Handler) for handler in log.handlers):
        log.addHandler(_Handler())


class _Handler(logging.StreamHandler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
