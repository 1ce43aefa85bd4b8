"""Share of the blocks of keys that their bounding boxes could rule out, in torch operations: the reference of
`codegen/mlir/key_block_bounds.py`, and the fall-back where there is no such kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ruled_out(
    q: Tensor, k: Tensor, owner: Tensor, sample: tuple[int, int, int, int], gap: float, causal: bool
) -> Tensor:
    """[H, 2]: the number of pairs of a query and a visible block that are ruled out, and that of all such pairs.

    q: [H, N_q, d].
    k: [U, N_k, d], at least a block.
    owner: [H], the keys of each head.
    sample: at most so many queries, and about so many keys and blocks; keys of a block.
    gap: by which the bound of a block is below the highest score of the query, before any scale.
    """
    rows, keys, count, size = sample
    whole = k.shape[1] // size
    k_step, block_step = -(-k.shape[1] // keys), -(-whole // count)
    q_step = max(k_step, -(-q.shape[1] // rows) // k_step * k_step)  # queries at places where keys are, too
    q = q[:, ::q_step][:, :rows].float()
    blocks = k[:, : whole * size].unflatten(1, (-1, size))[:, ::block_step]
    low, high = (x.float()[owner, None] for x in (blocks.amin(2), blocks.amax(2)))
    upper = torch.maximum(q[:, :, None] * low, q[:, :, None] * high).sum(-1)
    scores = q @ k[:, ::k_step].float()[owner].mT
    seen = torch.ones(upper.shape[1:], dtype=torch.bool, device=q.device)
    if causal:  # queries that see enough: the second half
        place = torch.arange(q.shape[1], device=q.device)[:, None] * q_step
        scores.masked_fill_(place < torch.arange(scores.shape[2], device=q.device) * k_step, -math.inf)
        seen = place >= torch.arange(upper.shape[2], device=q.device) * (block_step * size)
        seen[: q.shape[1] // 2] = False
    out = (upper <= scores.amax(-1, keepdim=True) - gap) & seen
    return torch.stack([out.sum((1, 2)), seen.sum().expand(len(q))], 1)
