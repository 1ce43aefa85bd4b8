"""Attention of a sequence that is sharded over several processes (docs/sequences.md).

`fusion.runtime.dtensor` asks `divide` where DTensors are sharded along the rows of Q; `fusion.sequence_parallel` calls
a function of whole sequences on such DTensors. A spec, a layout of shards and a schedule are all that is needed: no
score program is known by name.
"""

from fusion.sequences import ring  # noqa: F401  (registers torch.ops.fusion.ring_attention)
from fusion.sequences.schedules import SCHEDULES, Call, Division, divide, is_sharded
from fusion.sequences.transfers import Ring

__all__ = ["SCHEDULES", "Call", "Division", "Ring", "divide", "is_sharded"]
