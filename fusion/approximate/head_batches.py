"""Heads of one call as plain tensors, and the exact kernel for some of them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fusion.approximate.certificates import Certificate
from fusion.caching import BoundedCache
from fusion.codegen.reference.forward import Execution
from fusion.ir.expr import C, E, Expr, I, J, coord, coordinates, size, walk
from fusion.ir.spec import AttentionSpec, Operand, Output
from fusion.planning.problem import Problem

if TYPE_CHECKING:
    from fusion.codegen.cpu.moments import Rows

Executor = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
HEADS = "approximate_heads"
KEPT = 64
"""Sizes for which is remembered what does not depend on the data."""


@contextlib.contextmanager
def ieee_products() -> Iterator[None]:
    """Float32 products in float32, whatever `torch.set_float32_matmul_precision` says: else bounds would not hold."""
    settings = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = [setting.fp32_precision for setting in settings]
    if all(precision in ("none", "ieee") for precision in before):
        yield
        return
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


class Extents(NamedTuple):
    """Numbers of heads, key heads, queries and keys, and widths of Q and K, and of V."""

    heads: int
    heads_kv: int
    n_q: int
    n_k: int
    d: int
    d_v: int


def problem_of(extents: Extents, dtype: str, causal: bool) -> Problem:
    """Planner's problem for these extents."""
    shared = extents.heads % extents.heads_kv == 0
    return Problem(
        n_q=extents.n_q, n_k=extents.n_k, d=extents.d, d_v=extents.d_v, heads=extents.heads,
        heads_kv=extents.heads_kv if shared else extents.heads, dtype=dtype, causal=causal,
    )  # fmt: skip


@dataclass(slots=True)
class Heads:
    """The operands of one call, head by head, in their own dtypes.

    q: [H, N_q, d] for the H heads (all batch coordinates as one).
    k, v: [U, N_k, d] and [U, N_k, d_v] for the U distinct key heads.
    owner: [H] int64, the key head of each head.
    batch: extents of the batch coordinates.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    owner: Tensor
    batch: tuple[int, ...]
    execution: Execution

    @property
    def n_q(self) -> int:
        return self.q.shape[1]

    @property
    def n_k(self) -> int:
        return self.k.shape[1]

    @property
    def extents(self) -> Extents:
        return Extents(len(self.q), len(self.k), self.n_q, self.n_k, self.q.shape[-1], self.v.shape[-1])

    def coordinates(self, heads: Tensor) -> tuple[tuple[int, ...], ...]:
        """Batch coordinates of these heads."""
        return _coordinates(tuple(heads.tolist()), self.batch)

    def unfit(self, causal: bool) -> str | None:
        """Reason why such a call runs exact whatever the data are, or None."""
        if 0 in self.extents:
            return "the call is empty"
        unequal = causal and self.n_q != self.n_k
        return "causal with unequal numbers of queries and keys" if unequal else None

    def exact(self, method: str, epsilon: float, heads: Tensor, reason: str, bound: float | None = None) -> Certificate:
        """Certificate of the exact kernel for these heads."""
        return Certificate(
            method=method, ran="exact", heads=self.coordinates(heads), epsilon=epsilon, n_q=self.n_q, n_k=self.n_k,
            reason=reason, bound=bound,
        )  # fmt: skip

    def store(self, out: Tensor) -> Tensor:
        """[H, N_q, d_v] in the dimensions and layout of the spec's output."""
        return self.execution.store(out.view(*self.batch, self.n_q, out.shape[-1]))


@functools.lru_cache(maxsize=256)
def _coordinates(heads: tuple[int, ...], batch: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    result = torch.unravel_index(torch.tensor(heads), batch) if batch else ()
    return tuple(zip(*(axis.tolist() for axis in result), strict=True)) if batch else ((),)


class HeadSlices(NamedTuple):
    """Offsets and strides of the queries and of the keys of each head, which heads may share. d: columns of a row."""

    q: Rows
    k: Rows
    d: int


class HeadPacker:
    """Q, K and V of the calls of one spec, head by head. Values that depend on the sizes alone are cached."""

    def __init__(self, spec: AttentionSpec):
        self.spec = spec
        self.fixed = not any(part.op == "load" for part in walk(*spec.k, *spec.v))
        self._known: dict[tuple[int, ...], tuple[Execution, Tensor, Tensor]] = BoundedCache(KEPT)

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Heads:
        execution, owner, firsts = self._execution(operands, sizes)
        q, k = self._queries_and_keys(execution, firsts)
        v = self._keys(execution, 2, E, execution.d_v, firsts)
        return Heads(
            q=q.reshape(-1, execution.n_q, execution.d), k=k.reshape(-1, execution.n_k, execution.d),
            v=v.reshape(-1, execution.n_k, execution.d_v), owner=owner, batch=execution.batch, execution=execution,
        )  # fmt: skip

    def sample(self, operands: Sequence[Tensor], sizes: Sequence[int], rows: int, keys: int) -> tuple[Tensor, Tensor]:
        """About so many queries [H, .., d] and keys of each head, at equal distances."""
        execution, owner, firsts = self._execution(operands, sizes)
        q, k = self._queries_and_keys(execution, firsts)
        q, k = (x[..., :: -(-x.shape[-2] // most), :] for x, most in ((q, rows), (k, keys)))
        q, k = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
        return q, k if len(k) == len(q) else k[owner]

    def places(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> HeadSlices | None:
        """Slices of queries and keys, or None where they are not an offset for each head and one stride."""
        from fusion.codegen.cpu.moments import Rows

        execution, owner, firsts = self._execution(operands, sizes)
        rows = []
        for x, operand in zip(self._queries_and_keys(execution, firsts), operands[:2], strict=True):
            if x.untyped_storage().data_ptr() != operand.untyped_storage().data_ptr():
                return None
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                return None
            offsets = torch.tensor(x.storage_offset() - operand.storage_offset())
            for extent, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True):
                offsets = offsets[..., None] + torch.arange(extent) * stride
            rows.append(Rows(offsets=offsets.reshape(-1), stride=x.stride(-2), count=x.shape[-2]))
        q, k = rows
        if len(firsts) != len(owner):
            k = dataclasses.replace(k, offsets=k.offsets[owner].contiguous())
        return HeadSlices(q, k, execution.d)

    def _queries_and_keys(self, execution: Execution, firsts: Tensor) -> tuple[Tensor, Tensor]:
        q = self._rows(execution, 0, I, execution.n_q, C, execution.d)
        return q, self._keys(execution, 1, C, execution.d, firsts)

    def _execution(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Execution, Tensor, Tensor]:
        """(sizes and operands of the call, owner of every head, a first head of every owner)."""
        spec, key = self.spec, tuple(sizes)
        if (known := self._known.get(key)) is not None:
            execution, owner, firsts = known
            execution = copy.copy(execution)
            execution.operands = operands
            return execution, owner, firsts
        execution = Execution(spec, operands, sizes)
        owner, firsts = _owners(execution, (*spec.k, *spec.v))
        if self.fixed:
            empty = copy.copy(execution)
            empty.operands = ()
            self._known[key] = empty, owner, firsts
        return execution, owner, firsts

    def _keys(self, execution: Execution, number: int, columns: Expr, width: int, firsts: Tensor) -> Tensor:
        """K or V, [.., n_k, width], one for each owner; a view where the index allows one."""
        index, operand = (self.spec.q, self.spec.k, self.spec.v)[number], execution.operands[number]
        names = (*execution.axes, J, columns)
        shared = [e.args[0] if e.op == "floordiv" and e.args[1].is_const else e for e in index]
        # Owners are numbered in the order of the index, which must be that of the batch coordinates.
        if len(shared) == len(names) and [e for e in shared if e in names[:-2]] == [*names[:-2]]:
            if set(shared) == set(names):
                result = operand.permute([shared.index(name) for name in names])
                if result.shape[:-2].numel() == len(firsts) and result.shape[-2:] == (execution.n_k, width):
                    return result
        result = self._rows(execution, number, J, execution.n_k, columns, width)
        if len(firsts) == math.prod(execution.batch):
            return result
        return result[torch.unravel_index(firsts, execution.batch)]

    def _rows(self, execution: Execution, number: int, rows: Expr, n: int, columns: Expr, width: int) -> Tensor:
        """[b.., n, width], a view where the index allows one, in the operand's own dtype."""
        index, operand = (self.spec.q, self.spec.k, self.spec.v)[number], execution.operands[number]
        shape, names = (*execution.batch, n, width), (*execution.axes, rows, columns)
        if len(index) == len(names) and set(index) == set(names):  # the usual case, without what the general one costs
            result = operand.permute([index.index(name) for name in names])
            if result.shape == shape:
                return result
        dtype, execution.dtype = execution.dtype, operand.dtype
        result = execution.gather(number)
        execution.dtype = dtype
        return result


def _owners(execution: Execution, index: tuple[Expr, ...]) -> tuple[Tensor, Tensor]:
    """(owner of every head, a first head of every owner): heads whose K and V are the same rows share one."""
    heads = math.prod(execution.batch)
    every = torch.arange(heads)
    positions, batch = [], execution.batch
    for expr in index:
        names = coordinates(expr)
        if not names & {"j", "c", "e"}:
            positions.append(execution.value(expr, {}).expand(*batch, 1, 1).reshape(-1).cpu() if batch else every * 0)
        elif any(name.startswith("b") for name in names):
            return every, every  # rows that move with the head: all are taken for different
    if not positions:
        return every * 0, every[:1]
    distinct, owner = torch.unique(torch.stack(positions, 1), dim=0, return_inverse=True)
    if len(distinct) == heads:
        return every, every
    firsts = torch.full((len(distinct),), heads).scatter_reduce(0, owner, every, "amin")
    return owner, firsts


class ExactHeads:
    """Exact kernel of a spec for heads given as plain tensors: an equal score program over other operands."""

    def __init__(self, spec: AttentionSpec, build: Callable[[AttentionSpec], Executor]):
        b0 = coord("b0")
        plain = [Operand(dtype=o.dtype, rank=3, name=o.name) for o in spec.operands[:3]]
        self.spec = dataclasses.replace(
            spec, sizes=(*spec.sizes, HEADS), batch=(size(HEADS),), operands=tuple(plain), q=(b0, I, C), k=(b0, J, C),
            v=(b0, J, E), output=Output(dims=("b0", "i", "e"), order=("b0", "i", "e")),
        )  # fmt: skip
        self._build, self._run = build, None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> Tensor:
        """[h, N_q, d], [h, N_k, d], [h, N_k, d_v] to [h, N_q, d_v]. sizes: those of the call."""
        if self._run is None:
            self._run = self._build(self.spec)
        return self._run([q, k, v], [*sizes, len(q)])
