"""Blocks of keys and tiles of rows: what is kept of a block to bound its scores."""

from __future__ import annotations

import math
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

    whole: [full blocks, keys, d], the keys themselves.
    mean: [blocks, d].
    boxes: [2 d + 1, blocks], the largest and the smallest of each coordinate, and ones; times (positive part of q,
        negative part, x) they give upper bounds of the scores plus x.
    balls: [d + 2, blocks], the mean, the radius about it, and ones, for (q, |q|, x).
    pairs: [d + 3, blocks], the mean, its norm, the radius, and ones, for queries in a ball (its centre, its radius,
        largest |q|, x).
    """

    def __init__(self, k: Tensor, keys: int):
        self.whole = k[: len(k) // keys * keys].view(-1, keys, k.shape[-1])
        blocks = tiles_of_rows(k, keys).view(-1, keys, k.shape[-1])
        self.count, self.mean = len(blocks), blocks.mean(1)
        radius = (blocks - self.mean[:, None]).norm(dim=-1).amax(-1, keepdim=True) * (1 + 1e-5)
        one = torch.ones_like(radius)
        self.boxes = torch.cat([blocks.amax(1), blocks.amin(1), one], 1).T.contiguous()
        self.balls = torch.cat([self.mean, radius, one], 1).T.contiguous()
        distance = self.mean.norm(dim=-1, keepdim=True) * (1 + 1e-5)
        self.pairs = torch.cat([self.mean, distance, radius, one], 1).T.contiguous()


def lower_by_means(tiles: Tensor, blocks: Summaries, count: int) -> Tensor:
    """[t, rows]: a lower bound of the logarithm of each row's normaliser, without scores: by convexity the weights of a
    block add up to at least as many times the exponential of its mean score. Of the `count` blocks
    that are likely to have most."""
    count = min(count, len(blocks.whole))
    if count == 0:
        return torch.full(tiles.shape[:2], -math.inf)
    means = blocks.mean[: len(blocks.whole)]
    best = (tiles.mean(1) @ means.T).topk(count, -1).indices
    return torch.bmm(tiles, means[best].mT).logsumexp(-1).add_(math.log(blocks.whole.shape[1]))


def row_bounds(tiles: Tensor, lower: Tensor, blocks: Summaries) -> Tensor:
    """[t, blocks]: for each row of [t, rows, d] the lesser of two bounds of its scores with a block, less `lower` [t,
    rows]; the largest of a tile."""
    flat, lower = tiles.flatten(0, 1), lower.flatten()[:, None]
    box = torch.cat([flat.clamp_min(0), flat.clamp_max(0), -lower], 1) @ blocks.boxes
    ball = torch.cat([flat, flat.norm(dim=-1, keepdim=True), -lower], 1) @ blocks.balls
    return torch.minimum(*(x.view(*tiles.shape[:2], -1).amax(1) for x in (box, ball)))


def tile_bounds(tiles: Tensor, lower: Tensor, blocks: Summaries) -> Tensor:
    """The same from the ball about a tile's rows: q.k is at most the product of the centres, plus the one radius times
    the norm of the other centre, plus the largest |q| times the other radius."""
    centre = tiles.mean(1)
    radius = (tiles - centre[:, None]).norm(dim=-1).amax(1, keepdim=True) * (1 + 1e-5)
    norm = tiles.norm(dim=-1).amax(1, keepdim=True)
    return torch.cat([centre, radius, norm, -lower.amin(1, keepdim=True)], 1) @ blocks.pairs
