"""torch's structured log (TORCH_TRACE). Without it, `tlparse` shows nothing of this package."""

from __future__ import annotations

import torch


def is_on() -> bool:
    """Whether the log is enabled."""
    return bool(torch._logging._internal.trace_log.handlers)


def write(name: str, text: str) -> None:
    """Add a text to the log, under a name. Does nothing where the log is not enabled."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text
    )
