"""Blocks of keys and tiles of rows: summaries of a block that bound its scores."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def causal_tiles(shape: Sequence[int], rows: int, keys: int, every: int) -> Tensor:
    """[row tiles, key tiles]: whether any row of a tile sees any key of it."""
    last_row = (torch.arange(shape[-2]) * every + 1) * rows - 1
    return torch.arange(shape[-1]) * keys <= last_row[:, None]


def tiles_of_rows(x: Tensor, multiple: int) -> Tensor:
    """x [h, N, d] as [h, tiles, rows, d], with its last row repeated until N is a multiple."""
    missing = -x.shape[1] % multiple
    return x if not missing else torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1)


class Summaries:
    """Summaries of the blocks of keys k [h, N_k, d] of some heads.

    whole: [h, full blocks, keys, d], the keys themselves.
    mean: [h, blocks, d].
    boxes: [h, 2 d + 1, blocks], the largest and the smallest of each coordinate, and ones; times (positive part of q,
        negative part, x) they give upper bounds of the scores plus x.
    balls: [h, d + 2, blocks], the mean, the radius about it, and ones, for (q, |q|, x).
    pairs: [h, d + 3, blocks], the mean, its norm, the radius, and ones, for queries in a ball (its centre, its radius,
        largest |q|, x).
    """

    def __init__(self, k: Tensor, keys: int):
        self.whole = k[:, : k.shape[1] // keys * keys].unflatten(1, (-1, keys))
        blocks = tiles_of_rows(k, keys).unflatten(1, (-1, keys))
        self.count, self.mean = blocks.shape[1], blocks.mean(2)
        radius = (blocks - self.mean[:, :, None]).norm(dim=-1).amax(-1, keepdim=True) * (1 + 1e-5)
        one = torch.ones_like(radius)
        self.boxes = torch.cat([blocks.amax(2), blocks.amin(2), one], 2).mT.contiguous()
        self.balls = torch.cat([self.mean, radius, one], 2).mT.contiguous()
        distance = self.mean.norm(dim=-1, keepdim=True) * (1 + 1e-5)
        self.pairs = torch.cat([self.mean, distance, radius, one], 2).mT.contiguous()

    def of(self, heads: Sequence[int]) -> Summaries:
        """Summaries of some of the heads."""
        if len(heads) == len(self.mean):
            return self
        result = copy.copy(self)
        for name in ("whole", "mean", "boxes", "balls", "pairs"):
            setattr(result, name, getattr(self, name)[[*heads]])
        return result

    def likely(self, tiles: Tensor, causal_from: Tensor | None, count: int) -> Tensor:
        """[h, t, at most `count`]: the full blocks whose means have the highest scores with the mean of each tile.
        causal_from: the first rows of the tiles; blocks that begin after these are not seen."""
        means = self.mean[:, : self.whole.shape[1]]
        scores = tiles.mean(2) @ means.mT
        if causal_from is not None:
            first_key = torch.arange(means.shape[1], device=tiles.device) * self.whole.shape[2]
            scores.masked_fill_(first_key > causal_from[:, None], -math.inf)
        return scores.topk(min(count, means.shape[1]), -1).indices


def lower_by_means(tiles: Tensor, blocks: Summaries, count: int) -> Tensor:
    """[h, t, rows]: a lower bound of the logarithm of each row's normaliser, without scores: by convexity the weights
    of a block add up to at least as many times the exponential of its mean score. Uses the `count` likeliest blocks."""
    best = blocks.likely(tiles, None, count)
    scores = tiles @ of_heads(blocks.mean, best).mT
    return scores.logsumexp(-1).add_(math.log(blocks.whole.shape[2]))


def lower_by_scores(tiles: Tensor, blocks: Summaries, causal_from: Tensor | None, count: int) -> Tensor:
    """[h, t, rows]: the bound of `lower_by_means` from the scores of these blocks themselves. causal_from: see
    `likely`."""
    rows, keys = tiles.shape[2], blocks.whole.shape[2]
    best = blocks.likely(tiles, causal_from, count)
    scores = tiles @ of_heads(blocks.whole, best).flatten(2, 3).mT
    if causal_from is not None:
        position = (best[..., None] * keys + torch.arange(keys, device=tiles.device)).flatten(2)
        line = causal_from[:, None] + torch.arange(rows, device=tiles.device)
        scores.masked_fill_(position[:, :, None] > line[..., None], -math.inf)
    highest = scores.amax(-1, keepdim=True)
    return (scores - highest).exp_().sum(-1).log_().add_(highest[..., 0])


def of_heads(x: Tensor, chosen: Tensor) -> Tensor:
    """x [h, n, ..] at chosen [h, t, m], a number for each head: [h, t, m, ..]."""
    return x[torch.arange(len(x), device=x.device)[:, None, None], chosen]


def row_bounds(tiles: Tensor, lower: Tensor, blocks: Summaries) -> Tensor:
    """[h, t, blocks]: the largest of a tile's rows, for each the lesser of two bounds of its scores, less `lower`."""
    flat, lower = tiles.flatten(1, 2), lower.flatten(1)[..., None]
    box = torch.cat([flat.clamp_min(0), flat.clamp_max(0), -lower], 2) @ blocks.boxes
    ball = torch.cat([flat, flat.norm(dim=-1, keepdim=True), -lower], 2) @ blocks.balls
    return torch.minimum(*(x.unflatten(1, tiles.shape[1:3]).amax(2) for x in (box, ball)))


def tile_bounds(tiles: Tensor, lower: Tensor, blocks: Summaries) -> Tensor:
    """[h, t, blocks]: the bounds of `row_bounds` by balls: q.k is at most the product of the centres plus each radius
    times the other's largest norm."""
    centre = tiles.mean(2)
    radius = (tiles - centre[:, :, None]).norm(dim=-1).amax(2, keepdim=True) * (1 + 1e-5)
    norm = tiles.norm(dim=-1).amax(2, keepdim=True)
    return torch.cat([centre, radius, norm, -lower.amin(2, keepdim=True)], 2) @ blocks.pairs
