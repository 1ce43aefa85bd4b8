"""The sizes of one attention call, which the planner goes by: of a spec, or given by themselves."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fusion.errors import ProblemError
from fusion.ir.expr import I0, I1, SCORE, C, E, Expr, I, J, Kind, const, coord, coordinates, walk
from fusion.ir.integers import add, floordiv, integer
from fusion.ir.mask_facts import MaskFacts
from fusion.ir.ops import apply, evaluate, where
from fusion.ir.primitives import PRIMITIVES
from fusion.ir.reads import dense_loads, distance_parts, stored_bytes
from fusion.ir.results import leaves, size_value
from fusion.ir.spec import AttentionSpec, Normalizer, Operand, Output
from fusion.machine import dtype_bytes, dtype_name

ARITHMETIC = frozenset({"const", "add", "mul", "floordiv", "mod", "imin", "imax"})
"""Operations of limits that are computed before a call (see `fusion.ir.results.size_function`)."""

MOST_HEADS = 1024
"""Batch elements and heads with ranges of their own that are counted one by one at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRanges:
    """Keys that rows i0..i1 of one head visit: low <= j < high, where these depend on sizes and coordinates alone.

    low, high: INT expressions in b.., i0, i1 and sizes; None where unbounded.
    sizes: (name, value) of the sizes.
    batch: (coordinate, extent) of those that low or high depend on.
    """

    low: Expr | None
    high: Expr | None
    sizes: tuple[tuple[str, int], ...]
    batch: tuple[tuple[str, int], ...] = ()

    def of_rows(self, first: np.ndarray, last: np.ndarray, n_k: int) -> tuple[np.ndarray, np.ndarray]:
        """First key and end for each block of rows first..last: [heads, blocks], a line for every combination of the
        batch coordinates that matter."""
        starts, ends = [], []
        rows = {coord("i0"): torch.from_numpy(first), coord("i1"): torch.from_numpy(last)}
        for values in itertools.product(*(range(extent) for _, extent in self.batch)):
            head = {coord(name): torch.tensor(at) for (name, _), at in zip(self.batch, values, strict=True)}
            leaf = leaves(dict(self.sizes), head | rows)
            start = np.zeros_like(first) if self.low is None else evaluate(self.low, leaf).numpy()
            end = np.full_like(first, n_k) if self.high is None else evaluate(self.high, leaf).numpy()
            ends.append(np.broadcast_to(end, first.shape).clip(0, n_k))
            starts.append(np.minimum(np.broadcast_to(start, first.shape).clip(0), ends[-1]))
        return np.stack(starts), np.stack(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counts of a mask that is data, on the values of an example: the share of the scores that live, and rows and keys
    of a head that take part in a live score, as means over heads."""

    scores: float
    rows: float
    keys: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A load of an element for each score (of a bias, a mask). bytes: of an element. copies: batch elements and heads
    with elements of their own, as far as known; 0 where rows and keys, or other loads, may share elements."""

    bytes: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """q: [batch, heads, n_q, d], k: [batch, heads_kv, n_k, d], v: [batch, heads_kv, n_k, d_v].

    density: share of the scores that lie in live tiles, for masks that neither `causal` and `window` nor `ranges` tell.
    causal: key j is live for query i where j <= i + diagonal.
    window: and j > i + diagonal - window.
    ranges: of the keys that rows visit, of an attention's own mask, in place of `causal` and `window`.
    score_flops: operations a score costs besides the exponential (bias, soft-cap, ...); of a problem that is given by
        its sizes, besides those of its scale and mask.
    dense: tensors of an element for each score that the score program reads (biases, masks), by the time of kernels.
    tables: the same, with indices into further tensors, by what they move.
    stored_bytes: bytes of an element of k and v in memory (their mean) where that is not `dtype`, else 0.
    together: query heads whose rows lie side by side, in one head: row r is row r // together of each of them.
    n_k_total: number of keys that the n_k are selected from, where `heads` are queries with a set each; else 0.
    counted: of a mask whose data is known.

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
    tables: tuple[Table, ...] = ()
    stored_bytes: float = 0
    together: int = 1
    n_k_total: int = 0
    counted: Counted | None = None

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
        if self.counted is not None and rows == cols == 1:
            return self.counted.scores
        if not self.bounded:
            return self.density
        return float(self._visited(rows, cols).mean()) / max(1, self.n_k) * self.density

    def computed_share(self, rows: int, cols: int) -> float:
        """Share of the scores in the tiles of `rows x cols` that `live_share` counts; tiles at the edge are smaller."""
        if not self.bounded:
            return self.density
        n_q, visited = max(1, self.n_q), self._visited(rows, cols)
        edges = np.append(np.arange(0, n_q, rows), n_q)
        return float((visited * np.diff(edges)).sum()) / (len(visited) * n_q * max(1, self.n_k)) * self.density

    def _visited(self, rows: int, cols: int) -> np.ndarray:
        """Keys that each block of `rows` queries meets: [heads that differ, blocks]."""
        start, end = self.all_key_ranges(rows)
        keys = (-(-end // cols) * cols).clip(0, max(1, self.n_k)) - start // cols * cols
        return np.where(start < end, keys.clip(0, max(1, self.n_k)), 0)

    def needed(self) -> tuple[float, float]:
        """Rows of a head, and keys, that take part in a live score; a mean over heads."""
        if self.counted is not None:
            return self.counted.rows, self.counted.keys
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

    def key_ranges(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """First key and end of the keys that each block of `rows` queries of a head meets: of the first one, where
        heads differ."""
        start, end = self.all_key_ranges(rows)
        return start[0], end[0]

    def all_key_ranges(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """First key and end of the keys that each block of `rows` queries meets: [heads that differ, blocks]."""
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
        mask += f" offset {self.diagonal}" * (self.diagonal != 0)
        mask += " masked" * (self.ranges is not None)
        mask += f" density {self.density:.3g}" * (self.density < 1) + f" of {self.n_k_total} keys" * (
            self.n_k_total > 0
        )
        head_dim = f"d={self.d}" + (f" d_v={self.d_v}" if self.d_v != self.d else "")
        return f"B={self.batch} H={heads} N_q={self.n_q} N_k={self.n_k} {head_dim} {self.dtype}{mask}"


def problem_of(spec: AttentionSpec, sizes: Mapping[str, int] | Sequence[int] | None) -> Problem:
    """The sizes of a call as a `Problem`. `sizes`: values of `spec.sizes`, by name or in order. Rows visit the keys of
    the spec's closed-form ranges; masks that load data count as dense, since what they hold is known only at run time.
    Raises ProblemError where sizes are missing."""
    values = dict(zip(spec.sizes, sizes or (), strict=False)) if not isinstance(sizes, Mapping) else dict(sizes)
    missing = [name for name in spec.sizes if name not in values]
    if missing:
        raise ProblemError(f"the spec has the sizes {list(spec.sizes)}; values for {missing} are missing: give sizes=")
    n_q, n_k, d, d_v = (size_value(e, values) for e in (spec.n_q, spec.n_k, spec.d, spec.d_v))
    batch = [size_value(extent, values) for extent in spec.batch]
    heads, (score_flops, tables) = batch[-1] if batch else 1, _of_programs(*spec.programs())
    if (mixing := spec.mixing) is not None:  # a multiply-add for every head
        score_flops += batch[mixing.axis] * sum(matrix is not None for matrix in (mixing.scores, mixing.weights))
    return Problem(
        batch=math.prod(batch[:-1]),
        heads=heads,
        heads_kv=max(1, heads // spec.heads_per_key(heads)),
        n_q=n_q,
        n_k=n_k,
        d=d,
        d_v=d_v,
        dtype=spec.dtype,
        ranges=key_ranges(spec, values) if n_q and n_k else None,
        stored_bytes=_stored_bytes(spec, d, d_v, n_k, values),
        n_k_total=0 if spec.n_k_total is None else size_value(spec.n_k_total, values),
        score_flops=score_flops,
        dense=sum(part.kind is not Kind.INT for part in tables),
        tables=tuple(
            Table(bytes=spec.operands[part.operand].torch_dtype.itemsize, copies=_copies(part, tables[:n], batch))
            for n, part in enumerate(tables)
        ),
    )


@functools.lru_cache(maxsize=256)
def _of_programs(*programs: Expr | None) -> tuple[int, list[Expr]]:
    """(`Problem.score_flops`, loads of `Problem.tables`): looked for once, as every new length asks."""
    operations = sum(part.op in PRIMITIVES and part.kind is Kind.FLOAT for part in walk(*programs))
    return operations, dense_loads(*programs, but=distance_parts(*programs), kinds=(*Kind,))


def _copies(table: Expr, others: Sequence[Expr], batch: Sequence[int]) -> int:
    """`Table.copies`, without elements that another load may read. Batch coordinates count where one is an index."""
    own = [coordinates(index) & {"i", "j"} for index in table.args]
    if not ({"i"} in own and {"j"} in own) or any(other.operand == table.operand for other in others):
        return 0
    alone = {index.name for index in table.args if index.op == "coord"}
    return math.prod(extent for n, extent in enumerate(batch) if f"b{n}" in alone)


def _stored_bytes(spec: AttentionSpec, d: int, d_v: int, n_k: int, sizes: Mapping[str, int]) -> float:
    """Mean bytes of an element of k and v in memory; 0 where both are stored as they are multiplied, in no table."""
    as_is = not spec.tables and all(spec.values[n] is None and spec.operands[n] not in spec.stored for n in (1, 2))
    return 0 if as_is else stored_bytes(spec, d, d_v, n_k, sizes)


def key_ranges(spec: AttentionSpec, sizes: Mapping[str, int]) -> KeyRanges | None:
    """The ranges of a spec's mask at these sizes; None where every row visits all keys, or only data tells."""
    mask = spec.mask
    extents = {f"b{n}": size_value(extent, sizes) for n, extent in enumerate(spec.batch)}
    names = (*spec.sizes, "i0", "i1")
    heads = () if math.prod(extents.values()) > MOST_HEADS else tuple(extents)
    low = None if mask is None else known_part(mask.key_lo, "imax", (*names, *heads))
    high = None if mask is None else known_part(mask.key_hi, "imin", (*names, *heads))
    if low is None and high is None:
        return None
    used = set().union(*(coordinates(limit) for limit in (low, high) if limit is not None))
    batch = tuple((name, extent) for name, extent in extents.items() if name in used)
    return KeyRanges(low=low, high=high, sizes=tuple(sizes.items()), batch=batch)


def known_part(limit: Expr | None, joined: str, names: Sequence[str]) -> Expr | None:
    """The part of a limit that sizes and coordinates of these names tell. joined: how limits that hold together are."""
    if limit is None:
        return None
    if all(part.op in ARITHMETIC or part.op in ("size", "coord") and part.attr in names for part in walk(limit)):
        return limit
    if limit.op == joined:
        parts = [part for arg in limit.args if (part := known_part(arg, joined, names)) is not None]
        return functools.reduce(functools.partial(apply, joined), parts) if parts else None
    return None


def attention_of(problem: Problem) -> AttentionSpec:
    """softmax(q k^T / sqrt(d)) v with the problem's heads, and its causal and window masks: what a model that writes it
    out is recognised as."""
    batch, head = coord("b0"), coord("b1")
    scaled = SCORE * problem.d**-0.5
    live = _live(problem)
    key_head = floordiv(head, problem.heads // problem.heads_kv)
    dims = ("b0", "b1", "i", "e")
    return AttentionSpec(
        sizes=(),
        batch=(integer(problem.batch), integer(problem.heads)),
        n_q=integer(problem.n_q),
        n_k=integer(problem.n_k),
        d=integer(problem.d),
        d_v=integer(problem.d_v),
        operands=tuple(Operand(name=name, dtype=problem.dtype, rank=4) for name in "qkv"),
        q=(batch, head, I, C),
        k=(batch, key_head, J, C),
        v=(batch, key_head, J, E),
        score=functools.reduce(lambda score, part: where(part, score, const(-math.inf)), live, scaled),
        mask=_mask(problem, live, scaled),
        normalizer=Normalizer.SOFTMAX,
        dtype=problem.dtype,
        out_dtype=problem.dtype,
        output=Output(dims=dims, order=dims),
    )


def _live(problem: Problem) -> list[Expr]:
    """Conditions under which key j is live for row i."""
    conditions = []
    if problem.causal:
        conditions.append(apply("ile", J, add(I, problem.diagonal)))
    if problem.window is not None:
        conditions.append(apply("ilt", add(I, problem.diagonal - problem.window), J))
    return conditions


def _mask(problem: Problem, live: list[Expr], scaled: Expr) -> MaskFacts | None:
    """The closed form of the mask, as `passes.masks.understand` finds it in the scores."""
    if not live:
        return None
    window = problem.window
    low = lambda row: None if window is None else add(row, problem.diagonal - window + 1)
    high = lambda row: add(row, problem.diagonal + 1) if problem.causal else None
    return MaskFacts(
        live=functools.reduce(functools.partial(apply, "and"), reversed(live)),
        key_lo=low(I0),
        key_hi=high(I1),
        full=scaled,
        full_lo=low(I1),
        full_hi=high(I0),
        fill=-math.inf,
    )
