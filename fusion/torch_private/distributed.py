"""Process groups by name, which operators in a graph carry."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["group_of"]


def group_of(name: str) -> dist.ProcessGroup:
    """Process group with this `group_name`."""
    return _resolve_process_group(name)  # pyright: ignore[reportArgumentType]
