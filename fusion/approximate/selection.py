"""Selection of the tiles of heads that are computed, by bounds of their scores; the rest is bounded in sum. See
`sparse`.

On CPUs heads are processed one by one, in pieces that stay in the cache, and a question is evaluated when its answer is
needed. On GPUs all heads are processed together, and all questions about them are read at once: each read makes the
host wait.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.approximate import cost
from fusion.approximate.blocks import (
    Summaries,
    causal_tiles,
    lower_by_means,
    lower_by_scores,
    row_bounds,
    tile_bounds,
    tiles_of_rows,
)

FEW, PROMISING = 4, 0.6
"""Number of keys of the sample that are taken to share most of the weight; the share of the blocks that it must rule
out for bounds of whole tiles to be tried before anything else."""
SAMPLES, SAMPLED_BLOCKS, SAMPLED_TILES = 16, 4, 32
"""Rows that are looked at in full; of how many key blocks, and of how many row tiles, one is tried before all are."""
HOPEFUL, WORTHWHILE, COARSE = 0.2, 0.6, 0.2
"""Shares of the keys that a perfect choice would need, and of the tiles that the bounds leave, up to which it pays; of
the tiles that bounds of whole tiles leave, up to which nothing better is looked for."""
TILES_TOGETHER = 64
ELEMENTS_TOGETHER = 2**26
"""Row tiles of a head that is taken alone (large temporaries cost a page fault for every 4 KiB at every call); elements
of the largest temporary of heads that are taken together."""
MARGIN = 0.99
"""Share of epsilon that bounds may use; the rest is for their rounding in float32."""
LARGEST = 2.0**20
"""Largest score, bounded by the largest coordinates: beyond it float32 does not hold the exponents of weights."""


class Answers:
    """Answers to questions about h heads, each a tensor [h]. at_once: computed and read together."""

    def __init__(self, questions: Mapping[str, Callable[[], Tensor]], at_once: bool):
        self._questions, self._known = questions, {}
        if at_once:
            answers = torch.stack([ask().float() for ask in questions.values()]).tolist()
            self._known = dict(zip(questions, answers, strict=True))

    def __call__(self, question: str, head: int) -> float:
        if question not in self._known:
            self._known[question] = self._questions[question]().tolist()
        return self._known[question][head]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Choice of tiles for the heads of one spec.

    rows, keys: of a tile; row tiles come in multiples of `sets`.
    scale, causal: of the attention.
    always: leave out every tile that can be, whether it pays or not.
    together: heads are processed together.
    """

    rows: int
    keys: int
    sets: int
    scale: float
    causal: bool
    epsilon: float
    always: bool
    together: bool

    def marks(
        self, q: Tensor, k: Tensor, v: Tensor, shares: Mapping[int, float], fine: bool
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Marks of the heads in which it pays, in their order: (bool [row tiles, key tiles], the tiles to compute; the
        share of the normaliser that is left out).

        q, k, v: [H, N_q, d], [H, N_k, d] and [H, N_k, d_v].
        shares: of the blocks that a sample could rule out, for the heads to be tried.
        fine: whether bounds of every row pay at this length.
        """
        every, marked = [*shares], {}
        for group in [every] if self.together else [[head] for head in every]:
            marked |= self._marks(chosen(q, group), chosen(k, group), chosen(v, group), group, shares, fine)
        return dict(sorted(marked.items()))

    def _marks(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Sequence[int], shares: Mapping[int, float], fine: bool
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Marks of heads that are processed together: by bounds of whole tiles where these suffice, else of every
        row."""
        finite, ways, marked = self._finite(q, k, v), {}, {}
        q, k = q.float() * self.scale, k.float()
        blocks = functools.cache(lambda: Summaries(k, self.keys))
        questions = {"finite": lambda: finite, "coarse": lambda: self._sampled(q, blocks(), True)}
        if fine and not self.always:
            questions |= {"bounded": lambda: self._bounded(q, k), "fine": lambda: self._sampled(q, blocks(), False)}
        answers = Answers(questions, self.together)
        for place, head in enumerate(heads):
            if (way := self._way(answers, place, shares[head], fine)) is not None:
                ways.setdefault(way, []).append(place)
        for coarse, places in ways.items():
            marks, dropped = self.select(chosen(q, places), blocks().of(places), coarse=coarse)
            marked |= {heads[place]: (marks[n], dropped[n]) for n, place in enumerate(places)}
        return marked

    def _finite(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[h]: whether nothing is NaN or infinite, and no score can be too large."""
        score, values = q.shape[-1] * self.scale, v.abs().amax((1, 2))
        for x in (q, k):
            score = score * x.abs().amax((1, 2)).float()
        return (score < LARGEST) & (values < math.inf)

    def _way(self, answers: Answers, head: int, share: float, fine: bool) -> bool | None:
        """Whether tiles of a head are chosen by bounds of whole tiles, or by bounds of every row; None: not at all.
        share: of the blocks that a sample could rule out."""
        if not answers("finite", head):
            return None
        simple = self.always or share >= PROMISING
        if not simple and not (fine and answers("bounded", head)):
            return None
        if answers("coarse", head) <= COARSE:
            return True
        if not self.always:
            if not fine or (simple and not answers("bounded", head)):
                return None
            if answers("fine", head) > WORTHWHILE:
                return None
        return False

    def _bounded(self, q: Tensor, k: Tensor) -> Tensor:
        """[h]: whether few keys have a weight above epsilon / N_k, so that a perfect choice could leave out the others,
        and the boxes of blocks could separate them; judged by a sample of rows and, for the boxes, of blocks."""
        n_q, n_k, device = q.shape[1], k.shape[1], q.device
        rows = torch.linspace(n_q // 2, n_q - 1, SAMPLES, dtype=torch.float32, device=device).long()
        some = q[:, rows]
        scores = some @ k.mT
        if self.causal:
            scores.masked_fill_(rows[:, None] < torch.arange(n_k, device=device), -math.inf)
        total = scores.logsumexp(-1, keepdim=True)
        hopeful = (scores > total + math.log(self.epsilon / n_k)).float().mean((1, 2)) <= HOPEFUL
        if not (self.together or hopeful.any()):
            return hopeful
        whole = k[:, : n_k // self.keys * self.keys].unflatten(1, (-1, self.keys))
        blocks = Summaries(whole[:, ::SAMPLED_BLOCKS].flatten(1, 2), self.keys)
        upper = torch.cat([some.clamp_min(0), some.clamp_max(0), -total], 2) @ blocks.boxes
        share = upper.add_(math.log(self.keys * SAMPLED_BLOCKS)).sort(-1).values.exp_().cumsum(-1)
        return hopeful & ((share > self.epsilon / 2).float().mean((1, 2)) <= WORTHWHILE)

    def _sampled(self, q: Tensor, blocks: Summaries, coarse: bool) -> Tensor:
        """[h]: of the tiles that exact attention computes, the share that is left of some row tiles."""
        marks, _ = self.select(q, blocks, SAMPLED_TILES, coarse)
        if not self.causal:
            return marks.float().mean((1, 2))
        return marks.sum((1, 2)) / int(causal_tiles(marks.shape, self.rows, self.keys, SAMPLED_TILES).sum())

    def select(self, q: Tensor, blocks: Summaries, every: int = 1, coarse: bool = False) -> tuple[Tensor, Tensor]:
        """(marks [h, row tiles, key tiles], the share of the normaliser left out at most [h]), of every n-th row tile
        of each head.

        q: [h, N_q, d], scaled, float32.
        blocks: of the keys.
        coarse: by bounds of whole tiles instead of rows, which are a 30th of the work.
        """
        tiles = tiles_of_rows(q, self.rows * self.sets).unflatten(1, (-1, self.rows))[:, ::every]
        together = TILES_TOGETHER * (1 + 3 * coarse)
        if self.together:
            scores = cost.CANDIDATES * self.keys * (self.rows + q.shape[-1])
            together = max(1, ELEMENTS_TOGETHER // (len(q) * max(scores, blocks.count * (1 if coarse else self.rows))))
        pieces = [
            self._select(tiles[:, first : first + together], blocks, first, every, coarse)
            for first in range(0, tiles.shape[1], together)
        ]
        marks, dropped = zip(*pieces, strict=True)
        return torch.cat(marks, 1), torch.stack(dropped).amax(0)

    def _select(self, tiles: Tensor, blocks: Summaries, first: int, every: int, coarse: bool) -> tuple[Tensor, Tensor]:
        """Marks and shares of some row tiles [h, t, rows, d], from number `first` * `every` on."""
        device = tiles.device
        first_row = (first + torch.arange(tiles.shape[1], device=device)) * (every * self.rows)
        if not blocks.whole.shape[1]:
            lower = tiles.new_full(tiles.shape[:3], -math.inf)
        elif self.causal or not coarse:
            lower = lower_by_scores(tiles, blocks, first_row if self.causal else None, cost.CANDIDATES)
        else:
            lower = lower_by_means(tiles, blocks, cost.CANDIDATES)
        share = (tile_bounds if coarse else row_bounds)(tiles, lower, blocks).add_(math.log(self.keys))
        if self.causal:
            first_key = torch.arange(blocks.count, device=device) * self.keys
            share.masked_fill_(first_key > first_row[:, None] + self.rows - 1, -math.inf)
        ascending, order = share.sort(-1)
        total = ascending.exp_().cumsum(-1)
        computed = ~(total <= self.epsilon * MARGIN / 2)
        largest = total.masked_fill_(computed, 0.0).amax((1, 2)) / MARGIN
        return torch.zeros_like(computed).scatter_(-1, order, computed), largest


def chosen(x: Tensor, heads: Sequence[int]) -> Tensor:
    """x [H, ..] of these heads; a view for all heads, or for one."""
    if len(heads) == 1:
        return x[heads[0]][None]
    return x if len(heads) == len(x) else x[[*heads]]
