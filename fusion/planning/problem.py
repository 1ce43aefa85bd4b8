"""What is planned: the sizes of one attention call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion.errors import ProblemError
from fusion.machine import dtype_bytes, dtype_name

if TYPE_CHECKING:
    import numpy

    from fusion.planning.key_ranges import KeyRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """q: [batch, heads, n_q, d], k: [batch, heads_kv, n_k, d], v: [batch, heads_kv, n_k, d_v].

    density: share of the scores that lie in live tiles, for masks that neither `causal` and `window` nor `ranges` tell.
    causal: key j is live for query i where j <= i + diagonal.
    window: and j > i + diagonal - window.
    ranges: of the keys that rows visit, of an attention's own mask, in place of `causal` and `window`.
    score_flops: operations a score costs besides scale and exponential (bias, soft-cap, ...).
    dense: tensors of an element for each score that the score program reads (biases, masks).
    stored_bytes: bytes of an element of k and v in memory (their mean) where that is not `dtype`, else 0.
    together: query heads whose rows lie side by side, in one head: row r is row r // together of each of them.
    training: the forward keeps the log-sum-exp for a backward pass.
    among: of how many keys the n_k are, where `heads` are queries with a set each (`AttentionSpec.among`); else 0.

    Sizes of 0 are planned as 1 (an empty call runs no kernel, but its caller wants a plan).
    """

    n_q: int
    n_k: int
    d: int
    d_v: int
    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    dtype: str = "float32"
    density: float = 1.0
    causal: bool = False
    diagonal: int = 0
    window: int | None = None
    ranges: KeyRanges | None = None
    score_flops: int = 0
    dense: int = 0
    stored_bytes: float = 0
    together: int = 1
    training: bool = False
    among: int = 0

    def __post_init__(self) -> None:
        for name in ("n_q", "n_k", "d", "d_v", "batch", "heads", "heads_kv", "score_flops"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ProblemError(f"{name}={value!r}: sizes are non-negative integers; give the size the call has")
        if self.heads_kv and self.heads % self.heads_kv:
            raise ProblemError(
                f"{self.heads} query heads do not divide over {self.heads_kv} key heads; heads must be a multiple"
            )
        if not 0 <= self.density <= 1:
            raise ProblemError(f"density={self.density}: the share of live tiles lies between 0 and 1")
        if self.window is not None and self.window < 1:
            raise ProblemError(f"window={self.window}: a window holds at least one key")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of q, k, v, as they are multiplied."""
        return dtype_bytes(self.dtype)

    @property
    def key_bytes(self) -> float:
        """Bytes of one element of k and v in memory."""
        return self.stored_bytes or self.element_bytes

    @property
    def problems(self) -> int:
        """Independent attention problems: batch x query heads."""
        return max(1, self.batch) * max(1, self.heads)

    @property
    def masked(self) -> bool:
        """Whether a tile can be dead."""
        return self.bounded or self.density < 1

    @property
    def bounded(self) -> bool:
        """Whether rows visit a range of keys that is known."""
        return self.causal or self.window is not None or self.ranges is not None

    def live_share(self, rows: int, cols: int = 1) -> float:
        """s for tiles of `rows x cols`: keys a query block meets (blocks of keys whole), in the mean, over N_k."""
        if not self.bounded:
            return self.density
        start, end = self.all_key_ranges(rows)
        n_k = max(1, self.n_k)
        keys = (-(-end // cols) * cols).clip(0, n_k) - start // cols * cols
        return float(keys.clip(0, n_k)[start < end].sum()) / (start.size * n_k) * self.density

    def needed(self) -> tuple[float, float]:
        """Rows of a head, and keys, that take part in a live score; a mean over heads."""
        import numpy as np

        n_q, n_k = max(1, self.n_q), max(1, self.n_k)
        if not self.bounded:
            return n_q * min(1.0, self.density), n_k * self.density
        start, end = self.all_key_ranges(1)
        live = start < end
        edges = np.zeros((len(start), n_k + 1), dtype=np.int64)  # where ranges begin, less where they end
        head = np.broadcast_to(np.arange(len(start))[:, None], start.shape)
        np.add.at(edges, (head[live], start[live]), 1)
        np.add.at(edges, (head[live], end[live]), -1)
        keys = (edges[:, :-1].cumsum(axis=1) > 0).sum()
        return live.sum() / len(start) * min(1.0, self.density), keys / len(start) * self.density

    def with_heads_together(self) -> Problem:
        """This problem, in which the query heads that read the same keys are one head of as many times the rows."""
        group = max(1, self.heads) // max(1, self.heads_kv)
        heads = max(1, self.heads_kv)
        return replace(self, n_q=max(1, self.n_q) * group, heads=heads, heads_kv=heads, together=self.together * group)

    def key_ranges(self, rows: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """First key and end of the keys that each block of `rows` queries of a head meets: of the first one, where
        heads differ."""
        start, end = self.all_key_ranges(rows)
        return start[0], end[0]

    def all_key_ranges(self, rows: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """First key and end of the keys that each block of `rows` queries meets: [heads that differ, blocks]."""
        import numpy as np

        n_q, n_k = max(1, self.n_q), max(1, self.n_k)
        first = np.arange(0, n_q, rows)
        last = np.minimum(first + rows, n_q) - 1
        first, last = first // self.together, last // self.together
        if self.ranges is not None:
            return self.ranges.of_rows(first, last, n_k)
        end = np.clip(last + self.diagonal + 1, 0, n_k) if self.causal else np.full_like(first, n_k)
        start = np.zeros_like(first)
        if self.window is not None:
            start = np.minimum(np.maximum(first + self.diagonal - self.window + 1, 0), end)
        return start[None], end[None]

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        mask = " causal" * self.causal + f" window {self.window}" * (self.window is not None)
        mask += " masked" * (self.ranges is not None)
        mask += f" density {self.density:g}" * (self.density < 1) + f" of {self.among} keys" * (self.among > 0)
        head_dim = f"d={self.d}" + (f" d_v={self.d_v}" if self.d_v != self.d else "")
        return f"B={self.batch} H={heads} N_q={self.n_q} N_k={self.n_k} {head_dim} {self.dtype}{mask}"
