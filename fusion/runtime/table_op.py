"""`torch.ops.fusion.table`: a table of positions, as an attention may read through it.

Kernels look at no bounds. What they read through is a copy of the table all of whose positions were found to lie within
the dimension that they are positions in; a position that does not lie there raises what eager mode would have raised,
because the operation that was replaced is run on a tensor of that extent without data. On a GPU eager mode's operations
stop the device when they meet such a position, without waiting for it, and so does this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.torch_private.operators import assert_async


def table(positions: Tensor, extent: int, dim: int, operation: str) -> Tensor:
    """`positions`, within [0, extent): those that count from the end as those from the start. operation: "index", which
    takes them, "index_select" or "gather", which do not. Raises IndexError or RuntimeError, as that operation does."""
    least = -extent if operation == "index" else 0
    if positions.device.type != "cpu":
        assert_async(((positions >= least) & (positions < extent)).all(), "index out of bounds")
        return torch.where(positions < 0, positions + extent, positions)
    if not positions.numel():
        return positions.clone()
    low, high = (int(end) for end in positions.aminmax())
    if low < least or high >= extent:
        _run(positions, extent, dim, operation)
        raise IndexError(
            f"index {low if low < least else high} is out of bounds for dimension {dim} with size {extent}"
        )
    return positions.clone() if low >= 0 else torch.where(positions < 0, positions + extent, positions)


def _run(positions: Tensor, extent: int, dim: int, operation: str) -> None:
    """The operation on a tensor without data, along the same dimension."""
    nothing = torch.zeros((), dtype=torch.float32, device=positions.device)
    if operation == "index":
        nothing.expand(*[1] * dim, extent)[(*[slice(None)] * dim, positions)]
    elif operation == "index_select":
        nothing.expand(*[1] * dim, extent).index_select(dim, positions.flatten())
    else:
        rank = max(positions.dim(), dim + 1)
        at = positions.flatten().view([-1 if k == dim else 1 for k in range(rank)]).to(torch.int64)
        nothing.expand([extent if k == dim else 1 for k in range(rank)]).gather(dim, at)
