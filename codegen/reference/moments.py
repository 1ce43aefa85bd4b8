"""Norms and moments that bound the scores of heads, in torch operations: the reference of
`codegen/mlir/approximate/moments.py`, and the fall-back where there is no such kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Moments of H heads, before any scale, in float32, with keys k_j minus their mean but for the first of `norms`.
    squares,
    slants: [H, N_q], for every query the means of (q.k_j)^2 and of q.k_j over the keys before it (0 where there are
    none): all keys, or those of earlier segments."""

    norms: Tensor  # [H, 3], squares of the largest (key, key minus the mean, query)
    means: Tensor  # [H, d], the means of the keys
    squares: Tensor
    slants: Tensor


def moments(q: Tensor, k: Tensor, owner: Tensor, segment: int = 0) -> Moments:
    """Moments of some heads.

    q: [H, N_q, d].
    k: [U, N_k, d].
    owner: [H], the keys of each head.
    segment: keys that become visible together where attention is causal (query i sees those of earlier segments); 0:
        all of them are visible.
    """
    q, k = q.float(), k.float()
    n_q, n_k, d = q.shape[1], k.shape[1], q.shape[2]
    means = torch.bmm(k.new_full((1, 1, n_k), 1 / n_k).expand(len(k), 1, n_k), k)
    keys = k - means
    largest = [x.square().sum(-1).amax(-1) for x in (k, keys, q)]
    norms = torch.stack([largest[0][owner], largest[1][owner], largest[2]], 1)
    if not segment:
        gram, total = torch.bmm(keys.mT, keys).div_(n_k)[owner], keys.mean(1)[owner]
        slants = torch.bmm(q, total[..., None])[..., 0]
        return Moments(norms, means[owner, 0], torch.bmm(q, gram).mul_(q).sum(-1), slants)
    whole = (n_k - 1) // segment * segment
    chunks = keys[:, :whole].reshape(len(k), -1, segment, d)
    before = torch.arange(1, chunks.shape[1] + 1, device=q.device)[:, None, None] * segment
    gram = (chunks.mT @ chunks).cumsum_(1).div_(before)[owner]
    total = chunks.sum(2, keepdim=True).cumsum_(1).div_(before)[owner]
    rows = torch.cat([q[:, segment:], q.new_zeros(len(q), -n_q % segment, d)], 1)
    rows = rows[:, : chunks.shape[1] * segment].view(len(q), -1, segment, d)
    found = [(rows @ gram).mul_(rows).sum(-1).flatten(1), (rows * total).sum(-1).flatten(1)]
    first = q.new_zeros(len(q), min(segment, n_q))
    squares, slants = (torch.cat([first, x], 1)[:, :n_q] for x in found)
    return Moments(norms, means[owner, 0], squares, slants)
