"""Bounds on the scores of a call's heads: the largest norms, and mean squares. From all rows, or, as an estimate, from
a few at equal distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion.approximate.cost import CAUSAL_CHUNK
from fusion.approximate.head_batches import KEPT, HeadPacker, ieee_products
from fusion.caching import BoundedCache
from fusion.codegen.reference.moments import moments

MARGIN, MOMENT_MARGIN = 1 + 1e-5, 1e-4
"""Cover the float32 rounding of norms (as a factor), and of moments (times B squared, on top)."""
TINY = 2.0**-110
"""For each coordinate, added to the square of a norm: more than what products below 2**-126, which may be taken for 0,
can be missing, there and in moments (within their margin)."""


class HeadBounds(NamedTuple):
    """Bounds on the scores of each head, infinite where inputs are not finite.

    keys: the largest norm of a key minus the mean of the keys.
    queries: the largest norm of a query.
    bounds: B, such that |score| <= B for centred keys.
    moments: a bound on the mean square score of a row over approximated keys, relative to their mean weight.
    least: a lower bound of this mean weight.
    means: [H, d], the subtracted means.
    """

    keys: list[float]
    queries: list[float]
    bounds: list[float]
    moments: list[float]
    least: list[float]
    means: Tensor


class SampledBounds(NamedTuple):
    """Bounds on the scores of one head, estimated from sampled rows; infinite or NaN where inputs are not finite.

    keys: the largest norm of a sampled key minus the mean of these.
    queries: of a sampled query.
    moment: the largest of the queries' mean square scores.
    """

    keys: float
    queries: float
    moment: float


class Inspection:
    """Inspection of the data of one spec's calls. native: by compiled kernels (on CPUs), else by torch's operations."""

    def __init__(self, gather: HeadPacker, scale: float, causal: bool, native: bool):
        self.gather, self.scale, self.causal, self.native = gather, scale, causal, native
        self._calls: dict[tuple, Any] = BoundedCache(KEPT)

    def whole(self, operands: Sequence[Tensor], sizes: Sequence[int], limit: float = math.inf) -> HeadBounds:
        """Bounds from all rows, on which a certificate may rest. limit: of the bounds of heads that are of interest;
        others get no moments."""
        segment = CAUSAL_CHUNK if self.causal else 0

        def make(d, q, k):
            from fusion.codegen.cpu.moments import MomentsCall

            most = (limit / abs(self.scale)) ** 2 if self.scale else math.inf
            return MomentsCall(d, operands[0].dtype, q, k, segment, most)

        if (call := self._call(("whole", limit), operands, sizes, make)) is not None:
            figures, *rest = call.whole(operands[0].data_ptr(), operands[1].data_ptr(), torch.get_num_threads())
            return self._figures(figures, *rest)
        heads = self.gather(operands, sizes)
        with ieee_products():
            norms, *rest = moments(heads.q, heads.k, heads.owner, segment)
        figures = torch.cat([norms, rest[1].amax(-1, keepdim=True)], 1).flatten().tolist()
        return self._figures(figures, *rest)

    def sample(self, operands: Sequence[Tensor], sizes: Sequence[int], rows: int, keys: int) -> list[SampledBounds]:
        """Bounds from about so many queries and keys of each head, as if each of these queries saw all of the keys."""

        def make(d, q, k):
            from fusion.codegen.cpu.moments import MomentsCall

            q, k = q.every(-(-q.count // rows)), k.every(-(-k.count // keys))
            return MomentsCall(d, operands[0].dtype, q, k, 0, math.inf)

        if (call := self._call(("sample", rows, keys), operands, sizes, make)) is not None:
            places = (x.data_ptr() for x in operands[:2])
            figures = call.figures(*places, threads=1)  # another would wake too late
        else:
            q, k = self.gather.sample(operands, sizes, rows, keys)
            with ieee_products():
                norms, _, squares, _ = moments(q, k, torch.arange(len(q)))
            figures = torch.cat([norms, squares.amax(-1, keepdim=True)], 1).flatten().tolist()
        sampled = []
        for n in range(0, len(figures), 4):
            keys_norm, queries_norm = (math.sqrt(x) if x < math.inf else math.inf for x in figures[n + 1 : n + 3])
            sampled.append(SampledBounds(keys_norm, queries_norm, figures[n + 3] * self.scale**2))
        return sampled

    def _call(self, what: tuple, operands: Sequence[Tensor], sizes: Sequence[int], make) -> Any:
        """Result of `make(columns, queries, keys)`, cached by sizes and strides; None if no kernel reads the rows."""
        if not self.native:
            return None
        q, k = operands[0], operands[1]
        key = (what, *sizes, q.stride(), k.stride())
        if key not in self._calls or not self.gather.fixed:
            places, native_call = self.gather.places(operands, sizes), None
            if places is not None and q.dtype == k.dtype:
                from fusion.codegen.cpu.moments import MAX_WIDTH

                native_call = make(places.d, places.q, places.k) if places.d <= MAX_WIDTH else None
            self._calls[key] = native_call
        return self._calls[key]

    def _figures(self, totals: Sequence[float], means: Tensor, squares: Tensor, slants: Tensor) -> HeadBounds:
        """Bounds of the heads. totals: for each head squares of norms, and the largest of `squares`."""
        scale, tiny = abs(self.scale), TINY * means.shape[-1]
        keys, queries = (
            [math.sqrt(x + tiny) * MARGIN if x < math.inf else math.inf for x in totals[n::4]] for n in (1, 2)
        )
        bounds = [scale * x * y for x, y in zip(keys, queries, strict=True)]
        least, largest = [1.0] * len(bounds), totals[3::4]
        if self.causal:
            weight = (slants * self.scale).exp_().div_(MARGIN)
            least = [min(x, 1.0) for x in weight.amin(-1).nan_to_num(0.0).tolist()]
            whole = (squares / weight).amax(-1).tolist()
            largest = [x if y < math.inf else y for x, y in zip(whole, largest, strict=True)]  # rows may be missing
        moments = [
            x * scale**2 + MOMENT_MARGIN * b * b / a if x < math.inf and a > 0 else math.inf
            for x, b, a in zip(largest, bounds, least, strict=True)
        ]
        return HeadBounds(keys, queries, bounds, moments, least, means)
