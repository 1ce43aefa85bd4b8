"""`torch.ops.fusion.table`: a table of positions, checked and normalised for attentions that read through it.

Kernels check no bounds. They read through a copy of the table in which all positions are known to lie within their
dimension. A position outside of it raises the error of eager mode, because the operation that was replaced is run on a
tensor of that extent without data. On a GPU eager mode's operations stop the device at such a position, without the
host waiting for it, and so does this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.torch_private.operators import assert_async


def table(positions: Tensor, extent: int, dim: int, operation: str) -> Tensor:
    """`positions`, within [0, extent): negative ones are counted from the end. operation: "index", which admits
    negative ones, "index_select" or "gather", which do not. Raises IndexError or RuntimeError, as it does."""
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
