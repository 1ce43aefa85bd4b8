"""A call of attention that leaves out what provably does not matter, in two steps.

*Without looking.* Keys are taken in blocks, queries in tiles. For a query row and a key block, the block's box
(coordinate-wise minimum and maximum of its keys) and its ball (mean and radius) bound every score in the block from
above. The exact scores of the few blocks whose means score highest bound the logarithm of the row's normaliser from
below. A block's share of the normaliser is then at most

    keys in it * exp(upper - lower)

and a row tile leaves out the blocks of least share as long as these add up to half of epsilon for each of its rows. The
ball about a tile's rows gives such bounds for all of them at once, in a 30th of the time: rows are looked at one by one
where that leaves too much. Attempted for heads where a sample of rows and of tiles says that it pays.

*By looking.* The kernel computes the scores of what remains, and omits exponentials and the product with V of tiles in
which no key can have more than epsilon / (2 N_k) of its row's sum (`codegen/mlir/sparse_kernel.py`). Nearly free.

The certificate is what was left out, summed up for each row; the largest sum counts.

Heads in which nothing can be left out without looking run in fewer bfloat16 planes instead, where that is certified
(`rounding`); the others run exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fusion.approximate import cost
from fusion.approximate.blocks import (
    Summaries,
    causal_tiles,
    lower_by_means,
    row_bounds,
    tile_bounds,
    tiles_of_rows,
)
from fusion.approximate.certificates import Certificate, output_error, record
from fusion.approximate.eligible import Plain, canonical
from fusion.approximate.head_batches import KEPT, ExactHeads, Executor, HeadPacker, Heads, ieee_products, problem_of
from fusion.approximate.rounding import TwoPlanes
from fusion.approximate.score_bounds import Inspection
from fusion.ir.spec import AttentionSpec
from fusion.kept import Kept
from fusion.machine import Machine, with_cores

METHOD = "certified_sparse"
UNCERTIFIED = "too many keys have weight, rounding is not certified, or inputs are not finite"
GLANCED, OPTIMISM = (16, 128, 4), 0.85
"""Rows, keys and blocks of each head that are looked at before more are; by how much norms of so few are lowered."""
FEW, PROMISING = 4, 0.6
"""How many keys of the sample are taken to share most of the weight; the share of the blocks that it must rule out for
bounds of whole tiles to be tried before anything else."""
BOUNDED = 0.5
"""Share of the exact kernel's time that bounds may be predicted to take."""
SAMPLES, SAMPLED_BLOCKS, SAMPLED_TILES = 16, 4, 32
"""Rows that are looked at in full; of how many key blocks, and of how many row tiles, one is tried before all are."""
HOPEFUL, WORTHWHILE, COARSE = 0.2, 0.6, 0.2
"""Shares of the keys that a perfect choice would need, and of the tiles that the bounds leave, up to which it pays; of
the tiles that bounds of whole tiles leave, up to which nothing better is looked for."""
TILES_TOGETHER = 64
MARGIN = 0.99
"""Of epsilon, for the float32 rounding of the bounds."""


def refusal(spec: AttentionSpec, plain: Plain, emitter: str) -> str | None:
    """Why there is no selective kernel for an admitted spec, or None."""
    if emitter == "reference":
        return "the reference interpreter skips nothing"
    if plain.scale <= 0:
        return "the scale is not positive"
    from fusion.codegen import mlir

    found = mlir.supports(spec, Machine.detect())
    return None if found is None else found.message


class _Rounding(NamedTuple):
    """How products are rounded.

    errors: of the weights of each head in two planes, or none.
    means: [H, d], what is taken away from the keys for that, where it is needed.
    """

    errors: list[float]
    means: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """rows: Q, K and V of every head. Heads that leave out tiles, with (marks, share left out unseen) of those that do
    so without looking; heads whose products are rounded, and how."""

    rows: Sequence[Tensor]
    selective: list[int]
    rounded: list[int]
    rounding: _Rounding
    marks: dict[int, tuple[Tensor, Tensor]]


class _Likely(NamedTuple):
    """selective: the heads in which tiles may be left out, with the share of the blocks that a glance could rule out.
    rounded: whether any head may do with two planes."""

    selective: dict[int, float]
    rounded: bool

    def __bool__(self) -> bool:
        return bool(self.selective) or self.rounded


def _by_head(heads: Heads) -> list[Tensor]:
    """Q, K and V of every head, shared keys repeated."""
    return [heads.q, *(x[heads.owner] if len(x) < len(heads.q) else x for x in (heads.k, heads.v))]


def _is_finite(x: Tensor) -> bool:
    """Whether all of a tensor is: nothing is certified of NaN and infinities."""
    return bool(x.abs().amax() < math.inf)


class SparseAttention:
    """The executor of an eligible spec; arguments as of `PolynomialAttention`."""

    def __init__(
        self, spec: AttentionSpec, plain: Plain, exact: Executor, build: Callable[[AttentionSpec], Executor],
        machine: Machine, epsilon: float, *, always: bool = False,
    ):  # fmt: skip
        from fusion.codegen.mlir.sparse_call import SparseKernel

        self.plain, self.exact, self.epsilon, self.always, self.spec = plain, exact, epsilon, always, spec
        self.machine, self._known = machine, Kept(KEPT)
        self.some, self.gather = ExactHeads(spec, build), HeadPacker(spec)
        self.look = Inspection(self.gather, plain.scale, plain.causal, native=True)
        self.kernel = SparseKernel(canonical(self.some.spec, plain), machine)
        self.rounding = (
            TwoPlanes(spec, self.some.spec, plain.scale, machine) if TwoPlanes.admits(spec, machine) else None
        )

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        exact, beyond, selecting, fine = self._known.get(tuple(sizes)) or self._decide_exact(operands, sizes)
        likely = None if exact is not None or self.always else self._inspect(operands, sizes, selecting, fine)
        if exact is not None or (likely is not None and not likely):
            record(exact or beyond)
            return self.exact(operands, sizes)
        likely = likely or _Likely(dict.fromkeys(range(len(beyond.heads)), 1.0), self.rounding is not None)
        rounding = self._rounding(operands, sizes) if likely.rounded else _Rounding([], None)
        if not likely.selective and min(rounding.errors, default=math.inf) > self.epsilon * MARGIN:
            record(beyond)
            return self.exact(operands, sizes)
        with ieee_products():
            heads = self.gather(operands, sizes)
            parts = self._parts(heads, likely.selective, rounding, fine)
            if len(parts.rounded) == len(heads.q) and rounding.means is None:
                assert self.rounding is not None
                out = self.rounding.whole(operands, sizes)
                self._certify(heads, parts.rounded, [rounding.errors[head] for head in parts.rounded])
                return out
            if parts.selective or parts.rounded:
                return self._run(heads, sizes, parts, UNCERTIFIED)
        record(beyond)
        return self.exact(operands, sizes)

    def _rounding(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> _Rounding:
        """What rounding all heads would do: to the keys as they are where that is certified."""
        assert self.rounding is not None
        found = self.look.whole(operands, sizes, second=False, limit=self.rounding.limit(self.epsilon))
        errors = self.rounding.errors(found.queries, found.raw)
        if max(errors) <= self.epsilon * MARGIN:
            return _Rounding(errors, None)
        return _Rounding(self.rounding.errors(found.queries, found.keys), found.means)

    def _decide_exact(
        self, operands: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[Certificate | None, Certificate, bool, bool]:
        """What the sizes alone say: the certificate of such a call, where the exact kernel runs whatever the data are;
        the certificate of a call where a glance at the data ends the matter; whether leaving out tiles can pay,
        and by bounds of every row."""
        heads, reason = self.gather(operands, sizes), None
        selecting, fine, every = True, True, torch.arange(len(heads.q))
        if not (heads.n_q and heads.n_k and heads.q.shape[-1] and heads.v.shape[-1] and len(heads.q)):
            reason = "the call is empty"
        elif self.plain.causal and heads.n_q != heads.n_k:
            reason = "causal with unequal numbers of queries and keys"
        elif not self.always:
            machine = with_cores(self.machine, torch.get_num_threads())
            problem = problem_of(heads.extents, self.spec.dtype, self.plain.causal)
            limit = BOUNDED * cost.exact_seconds(machine, problem)
            tile = self.kernel.rows, self.kernel.keys
            selecting, fine = (cost.selection_seconds(machine, problem, *tile, fine) <= limit for fine in (False, True))
            if not cost.worth_a_look(machine, problem):
                reason = "looking at the data would cost too much of the exact kernel's time at this length"
            elif not selecting and self.rounding is None:
                reason = "bounds of the scores would cost as much as the exact kernel"
        exact = reason and self._exact(heads, every, reason)
        found = self._known[tuple(sizes)] = exact or None, self._exact(heads, every, UNCERTIFIED), selecting, fine
        return found

    def _inspect(self, operands: Sequence[Tensor], sizes: Sequence[int], selecting: bool, fine: bool) -> _Likely:
        """What a few rows and keys leave hope for; looking at all of them costs more."""
        hopeful = self._sampled_mass(operands, sizes, fine) if selecting else {}
        if self.rounding is None:
            return _Likely(hopeful, False)
        found = self.look.sample(operands, sizes, *GLANCED[:2], second=False)
        keys = [OPTIMISM * min(head.raw, head.keys) for head in found]
        return _Likely(hopeful, min(self.rounding.errors([x.queries for x in found], keys)) <= self.epsilon * MARGIN)

    def _sampled_mass(self, operands: Sequence[Tensor], sizes: Sequence[int], fine: bool) -> dict[int, float]:
        """Heads in which the boxes of a few blocks could rule out most of them, if few keys had most of the weight;
        the share of the blocks."""
        # A row's sum is then as many weights like the highest as FEW of the sampled keys stand for.
        gap = -math.log(self.epsilon / 2 * FEW / GLANCED[1])
        shares = self.look.ruled_out(operands, sizes, (*GLANCED, self.kernel.keys), gap)
        return {head: x for head, x in enumerate(shares) if x >= (1 - WORTHWHILE if fine else PROMISING)}

    def _parts(self, heads: Heads, likely: dict[int, float], rounding: _Rounding, fine: bool) -> _Parts:
        """What is done with each head. likely: heads in which tiles may be left out; fine: see `_marks`."""
        q, k, v = rows = _by_head(heads)
        marks = {}
        for head, share in likely.items():
            finite = all(_is_finite(x[head]) for x in rows)
            if finite and (found := self._marks(q[head], k[head], share, fine)) is not None:
                marks[head] = found
        selective = [*marks]
        certified = [head for head, error in enumerate(rounding.errors) if error <= self.epsilon * MARGIN]
        rounded = [head for head in certified if head not in marks and _is_finite(v[head])]
        return _Parts(rows=rows, selective=selective, rounded=rounded, rounding=rounding, marks=marks)

    def _run(self, heads: Heads, sizes: Sequence[int], parts: _Parts, reason: str) -> Tensor:
        every, out = torch.arange(len(heads.q)), None
        left = set(every.tolist())
        if parts.selective and (found := self._select_tiles(heads, sizes, parts)) is not None:
            left -= set(parts.selective)
            if not left:
                return heads.store(found)
            out = found.new_empty(len(every), *found.shape[1:])
            out[parts.selective] = found
        for chosen, runner in ((parts.rounded, self.rounding), (sorted(left.difference(parts.rounded)), None)):
            if not chosen:
                continue
            q, k, v = (x[chosen] for x in parts.rows)
            if runner is not None and parts.rounding.means is not None:
                k = k.float() - parts.rounding.means[chosen, None]
            found = (self.some if runner is None else runner.some)(q, k, v, sizes)
            out = found.new_empty(len(every), *found.shape[1:]) if out is None else out
            out[chosen] = found
            if runner is None:
                record(self._exact(heads, every[chosen], reason))
            else:
                self._certify(heads, chosen, [parts.rounding.errors[head] for head in chosen])
        assert out is not None
        return heads.store(out)

    def _select_tiles(self, heads: Heads, sizes: Sequence[int], parts: _Parts) -> Tensor | None:
        """The output of the selective heads, or None where they turn out to need the exact kernel."""
        chosen = parts.selective
        q, k, v = parts.rows if len(chosen) == len(heads.q) else (x[chosen] for x in parts.rows)
        marks = torch.ones(len(q), *self._tiles(q.shape[1], k.shape[1]), dtype=torch.uint8)
        unseen = torch.zeros(len(q))
        for number, head in enumerate(chosen):
            if head in parts.marks:
                marks[number], unseen[number] = parts.marks[head]
        found = self.kernel(q, k, v, [*sizes, len(q)], marks, self.epsilon * MARGIN / 2 / heads.n_k)
        if found is None:
            return None
        self._certify(heads, chosen, (unseen + found[1] / MARGIN).tolist(), found[2].tolist())
        return found[0]

    def _tiles(self, n_q: int, n_k: int) -> tuple[int, int]:
        """Row tiles, in whole work items, and key tiles."""
        return -(-n_q // (self.kernel.rows * self.kernel.sets)) * self.kernel.sets, -(-n_k // self.kernel.keys)

    def _marks(self, q: Tensor, k: Tensor, share: float, fine: bool) -> tuple[Tensor, Tensor] | None:
        """Of a head: (uint8 [row tiles, key tiles], the tiles to look at; the share left out unseen), where it pays. By
        bounds of whole tiles where these suffice, else of every row, where fine says that they pay at this length.
        share: of the blocks that a glance could rule out."""
        q, k = q.float() * self.plain.scale, k.float()
        simple = self.always or share >= PROMISING
        if not simple and not (fine and self._bounded(q, k)):
            return None
        blocks = Summaries(k, self.kernel.keys)
        if self._live(self.select(q, blocks, SAMPLED_TILES, coarse=True)[0], SAMPLED_TILES) <= COARSE:
            return self.select(q, blocks, coarse=True)
        if not self.always:
            if not fine or (simple and not self._bounded(q, k)):
                return None
            if self._live(self.select(q, blocks, SAMPLED_TILES)[0], SAMPLED_TILES) > WORTHWHILE:
                return None
        return self.select(q, blocks)

    def _bounded(self, q: Tensor, k: Tensor) -> bool:
        """Whether few keys of a head have a weight above epsilon / N_k, so that a perfect choice could leave out the
        others, and the boxes of blocks could tell them; judged by a sample of rows and, for the boxes, of blocks."""
        n_q, n_k, keys = len(q), len(k), self.kernel.keys
        rows = torch.linspace(n_q // 2, n_q - 1, SAMPLES).long()
        some = q[rows]
        scores = some @ k.T
        if self.plain.causal:
            scores.masked_fill_(rows[:, None] < torch.arange(n_k), -math.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if float((scores > total + math.log(self.epsilon / n_k)).float().mean()) > HOPEFUL:
            return False
        blocks = Summaries(k[: n_k // keys * keys].view(-1, keys, k.shape[-1])[::SAMPLED_BLOCKS].flatten(0, 1), keys)
        upper = torch.cat([some.clamp_min(0), some.clamp_max(0), -total], 1) @ blocks.boxes
        share = upper.add_(math.log(keys * SAMPLED_BLOCKS)).sort(-1).values.exp_().cumsum(-1)
        return float((share > self.epsilon / 2).float().mean()) <= WORTHWHILE

    def _live(self, marks: Tensor, every: int = 1) -> float:
        """The share of the tiles of one head that exact attention computes."""
        if not self.plain.causal:
            return float(marks.float().mean())
        return float(marks.sum() / causal_tiles(marks.shape, self.kernel.rows, self.kernel.keys, every).sum())

    def select(
        self, q: Tensor, blocks: Summaries, every: int = 1, coarse: bool = False
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(marks [row tiles, key tiles], the share of the normaliser left out at most), of every n-th row tile of one
        head. Worked on in pieces that stay in the cache (and in the allocator: large temporaries cost a page fault for
        every 4 KiB at every call).

        q: [N_q, d], scaled, float32.
        blocks: of the keys.
        coarse: by bounds of whole tiles instead of rows, which are a 30th of the work.
        """
        rows = self.kernel.rows
        tiles = tiles_of_rows(q, rows * self.kernel.sets).view(-1, rows, q.shape[-1])[::every]
        marks, dropped, together = [], torch.zeros(()), TILES_TOGETHER * (1 + 3 * coarse)
        for first in range(0, len(tiles), together):
            piece, largest = self._select(tiles[first : first + together], blocks, first, every, coarse)
            marks.append(piece)
            dropped = torch.maximum(dropped, largest)
        return torch.cat(marks), dropped

    def _select(self, tiles: Tensor, blocks: Summaries, first: int, every: int, coarse: bool) -> tuple[Tensor, Tensor]:
        """The same of some row tiles [t, rows, d] of one head, number `first` * `every` and on."""
        rows, keys = self.kernel.rows, self.kernel.keys
        first_row = (first + torch.arange(len(tiles))) * (every * rows)
        lower = (
            self._lower(tiles, blocks, first_row)
            if self.plain.causal or not coarse
            else lower_by_means(tiles, blocks, cost.CANDIDATES)
        )
        share = (tile_bounds if coarse else row_bounds)(tiles, lower, blocks).add_(math.log(keys))
        if self.plain.causal:
            share.masked_fill_(torch.arange(blocks.count) * keys > first_row[:, None] + rows - 1, -math.inf)
        ascending, order = share.sort(-1)
        total = ascending.exp_().cumsum(-1)
        kept = ~(total <= self.epsilon * MARGIN / 2)
        largest = total.masked_fill_(kept, 0.0).max() / MARGIN
        return torch.zeros_like(kept).scatter_(-1, order, kept), largest

    def _lower(self, tiles: Tensor, blocks: Summaries, first_row: Tensor) -> Tensor:
        """[t, rows]: a lower bound of the logarithm of each row's normaliser: the exact scores of the few blocks whose
        means have the highest scores with the tile's mean."""
        rows, keys = self.kernel.rows, self.kernel.keys
        count = min(cost.CANDIDATES, len(blocks.whole))
        if count == 0:
            return torch.full(tiles.shape[:2], -math.inf)
        likely = tiles.mean(1) @ blocks.mean[: len(blocks.whole)].T
        if self.plain.causal:
            likely.masked_fill_(torch.arange(len(blocks.whole)) * keys > first_row[:, None], -math.inf)
        best = likely.topk(count, -1).indices
        wanted = blocks.whole[best].view(len(tiles), count * keys, -1)
        scores = torch.bmm(tiles, wanted.transpose(1, 2))
        if self.plain.causal:
            position = (best[..., None] * keys + torch.arange(keys)).flatten(1)
            line = first_row[:, None] + torch.arange(rows)
            scores.masked_fill_(position[:, None] > line[..., None], -math.inf)
        highest = scores.amax(-1, keepdim=True)
        return (scores - highest).exp_().sum(-1).log_().add_(highest[..., 0])

    def _certify(
        self, heads: Heads, chosen: Sequence[int], errors: Sequence[float], computed: Sequence[float] | None = None
    ) -> None:
        """Record what is certified of these heads. computed: tiles of each; where not given, they ran in two planes."""
        shape = (-(-heads.n_q // self.kernel.rows), -(-heads.n_k // self.kernel.keys))
        tiles = shape[0] * shape[1]
        if self.plain.causal:
            tiles = int(causal_tiles(shape, self.kernel.rows, self.kernel.keys, 1).sum())
        largest = heads.v.float().norm(dim=-1).amax(-1)[heads.owner].tolist()
        for number, (head, error) in enumerate(zip(chosen, errors, strict=True)):
            record(
                Certificate(
                    method=METHOD, ran=METHOD, heads=heads.coordinates(torch.tensor([head])), epsilon=self.epsilon,
                    n_q=heads.n_q, n_k=heads.n_k, weight_error=error, output_error=output_error(error, largest[head]),
                    live=None if computed is None else computed[number] / tiles, planes=2 if computed is None else None,
                )
            )  # fmt: skip

    def _exact(self, heads: Heads, chosen: Tensor, reason: str) -> Certificate:
        return Certificate(
            method=METHOD, ran="exact", heads=heads.coordinates(chosen), epsilon=self.epsilon, n_q=heads.n_q,
            n_k=heads.n_k, reason=reason,
        )  # fmt: skip
