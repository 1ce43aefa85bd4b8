"""Blocks of keys and tiles of rows: what is kept of a block to bound its scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def causal_tiles(shape: Sequence[int], rows: int, keys: int, every: int) -> Tensor:
    """[row tiles, key tiles]: whether any row of a tile sees any key of it."""
    last_row = (torch.arange(shape[-2]) * every + 1) * rows - 1
    return torch.arange(shape[-1]) * keys <= last_row[:, None]


def tiles_of_rows(x: Tensor, multiple: int) -> Tensor:
    """x [N, d] with its last row repeated until N is a multiple."""
    missing = -len(x) % multiple
    return x if not missing else torch.cat([x, x[-1:].expand(missing, -1)])


class Summaries:
    """What is kept of the blocks of keys k [N_k, d] of one head.

    whole: [full blocks, keys, d], the keys themselves; mean: [blocks, d]. boxes: [2 d + 1, blocks], the largest and the
    smallest of each coordinate, and ones; times (positive part of q, negative part, x) they give upper bounds of the
    scores plus x. balls: [d + 2, blocks], the mean, the radius about it, and ones, for (q, |q|, x).
    """

    def __init__(self, k: Tensor, keys: int):
        self.whole = k[: len(k) // keys * keys].view(-1, keys, k.shape[-1])
        blocks = tiles_of_rows(k, keys).view(-1, keys, k.shape[-1])
        self.count, self.mean = len(blocks), blocks.mean(1)
        radius = (blocks - self.mean[:, None]).norm(dim=-1).amax(-1, keepdim=True) * (1 + 1e-5)
        one = torch.ones_like(radius)
        self.boxes = torch.cat([blocks.amax(1), blocks.amin(1), one], 1).T.contiguous()
        self.balls = torch.cat([self.mean, radius, one], 1).T.contiguous()
