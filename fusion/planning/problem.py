"""What is planned: the sizes of one attention call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion.errors import ProblemError
from fusion.machine import dtype_bytes, dtype_name

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """q: [batch, heads, n_q, d], k: [batch, heads_kv, n_k, d], v: [batch, heads_kv, n_k, d_v].

    density: share of the scores that lie in live tiles, for masks that `causal` and `window` do not describe.
    causal: key j is live for query i where j <= i + diagonal.
    window: and j > i + diagonal - window.
    score_flops: operations a score costs besides scale and exponential (bias, soft-cap, ...).
    dense: tensors of an element for each score that the score program reads (biases, masks).
    stored_bytes: bytes of an element of k and v in memory (their mean) where that is not `dtype`, else 0.
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
    score_flops: int = 0
    dense: int = 0
    stored_bytes: float = 0
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
        return self.causal or self.window is not None or self.density < 1

    def live_share(self, rows: int, cols: int = 1) -> float:
        """s for tiles of `rows x cols`: keys a query block meets (blocks of keys whole), in the mean, over N_k."""
        if not (self.causal or self.window):
            return self.density
        start, end = self.key_ranges(rows)
        n_k = max(1, self.n_k)
        keys = (-(-end // cols) * cols).clip(0, n_k) - start // cols * cols
        return float(keys.clip(0, n_k).sum()) / (len(start) * n_k) * self.density

    def key_ranges(self, rows: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """First key and end of the keys that each block of `rows` queries meets, by `causal` and `window` alone."""
        import numpy as np

        n_q, n_k = max(1, self.n_q), max(1, self.n_k)
        first = np.arange(0, n_q, rows)
        last = np.minimum(first + rows, n_q) - 1
        end = np.clip(last + self.diagonal + 1, 0, n_k) if self.causal else np.full_like(first, n_k)
        start = np.zeros_like(first)
        if self.window is not None:
            start = np.minimum(np.maximum(first + self.diagonal - self.window + 1, 0), end)
        return start, end

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        mask = " causal" * self.causal + f" window {self.window}" * (self.window is not None)
        mask += f" density {self.density:g}" * (self.density < 1) + f" of {self.among} keys" * (self.among > 0)
        head_dim = f"d={self.d}" + (f" d_v={self.d_v}" if self.d_v != self.d else "")
        return f"B={self.batch} H={heads} N_q={self.n_q} N_k={self.n_k} {head_dim} {self.dtype}{mask}"
