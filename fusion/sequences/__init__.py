"""Attention of a sequence that is sharded over several processes (docs/sequences.md).

`fusion.runtime.dtensor` asks `split` where DTensors are sharded along the rows of Q; `fusion.sequence_parallel` calls
a function of whole sequences on such DTensors. A spec, a layout of shards and a schedule are all that is needed: no
score program is known by name.
"""

from fusion.sequences.operators import moved  # registers torch.ops.fusion.ring_attention
from fusion.sequences.schedules import SCHEDULES, ring_of, sizes_of, split, split_of_keys

__all__ = ["SCHEDULES", "moved", "ring_of", "sizes_of", "split", "split_of_keys"]
