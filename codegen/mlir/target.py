"""What a kernel is generated for. The planner states it, since tiles follow from it."""

from __future__ import annotations

from fusion.machine.cpu import amx_enabled
from fusion.planning.register_tiles import Target, target_of

__all__ = ["Target", "amx_enabled", "target_of"]
