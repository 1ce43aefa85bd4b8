"""The heads of one call as plain tensors, and the exact kernel for some of them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.codegen.reference.forward import Execution
from fusion.ir.expr import C, E, Expr, I, J, coord, coordinates, size, walk
from fusion.ir.spec import AttentionSpec, Operand, Output

Executor = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
HEADS = "approximate_heads"
KEPT = 64
"""Sizes for which a gatherer remembers what does not depend on the data."""


@contextlib.contextmanager
def ieee_products() -> Iterator[None]:
    """Matrix products of float32 tensors in float32: bounds would not hold in the reduced precision that
    `torch.set_float32_matmul_precision` may have asked for."""
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    if before in ("none", "ieee"):
        yield
        return
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


@dataclass(slots=True)
class Heads:
    """q: [H, N_q, d] for the H heads (all batch coordinates as one); k: [U, N_k, d], v: [U, N_k, d_v] for the U
    distinct key heads; owner: [H] int64, the key head of each head. In the dtypes of the operands."""

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

    def coordinates(self, heads: Tensor) -> tuple[tuple[int, ...], ...]:
        """Batch coordinates of these heads."""
        return _coordinates(tuple(heads.tolist()), self.batch)

    def store(self, out: Tensor) -> Tensor:
        """[H, N_q, d_v] in the dimensions and layout that the spec asks for."""
        return self.execution.store(out.view(*self.batch, self.n_q, out.shape[-1]))


@functools.lru_cache(maxsize=256)
def _coordinates(heads: tuple[int, ...], batch: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    found = torch.unravel_index(torch.tensor(heads), batch) if batch else ()
    return tuple(zip(*(axis.tolist() for axis in found), strict=True)) if batch else ((),)


class Gatherer:
    """Q, K and V of the calls of one spec, head by head. What depends on the sizes alone is kept."""

    def __init__(self, spec: AttentionSpec):
        self.spec = spec
        self.fixed = not any(part.op == "load" for part in walk(*spec.k, *spec.v))
        self._known: dict[tuple[int, ...], tuple[Execution, Tensor, Tensor]] = {}

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Heads:
        spec, key = self.spec, tuple(sizes)
        if (known := self._known.get(key)) is None:
            execution = Execution(spec, operands, sizes)
            owner, firsts = _owners(execution, (*spec.k, *spec.v))
            if self.fixed:
                if len(self._known) >= KEPT:
                    self._known.clear()
                empty = copy.copy(execution)
                empty.operands = ()
                self._known[key] = empty, owner, firsts
        else:
            execution, owner, firsts = known
            execution = copy.copy(execution)
            execution.operands = operands
        batch, d, d_v = execution.batch, execution.d, execution.d_v
        q = self._rows(execution, 0, I, execution.n_q, C, d).reshape(-1, execution.n_q, d)
        k = self._rows(execution, 1, J, execution.n_k, C, d)
        v = self._rows(execution, 2, J, execution.n_k, E, d_v)
        if len(firsts) < len(q):
            at = torch.unravel_index(firsts, batch)
            k, v = k[at], v[at]
        return Heads(
            q=q, k=k.reshape(-1, execution.n_k, d), v=v.reshape(-1, execution.n_k, d_v), owner=owner, batch=batch,
            execution=execution,
        )  # fmt: skip

    def _rows(self, execution: Execution, number: int, rows: Expr, n: int, columns: Expr, width: int) -> Tensor:
        """[b.., n, width], a view where the index allows one, in the operand's own dtype."""
        index, operand = (self.spec.q, self.spec.k, self.spec.v)[number], execution.operands[number]
        shape, names = (*execution.batch, n, width), (*execution.axes, rows, columns)
        if len(index) == len(names) and set(index) == set(names):  # the usual case, without what the general one costs
            found = operand.permute([index.index(name) for name in names])
            if found.shape == shape:
                return found
        dtype, execution.dtype = execution.dtype, operand.dtype
        found = execution.gather(number, index, rows, n, columns, width)
        execution.dtype = dtype
        return found


def _owners(execution: Execution, index: tuple[Expr, ...]) -> tuple[Tensor, Tensor]:
    """(owner of every head, a first head of every owner): heads whose K and V are the same rows share one."""
    heads = math.prod(execution.batch)
    every = torch.arange(heads)
    positions, batch = [], execution.batch
    for expr in index:
        names = coordinates(expr)
        if not names & {"j", "c", "e"}:
            positions.append(execution.value(expr, {}).expand(*batch, 1, 1).reshape(-1) if batch else every * 0)
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
    """The exact kernel of a spec for heads given as plain tensors: the same score program over other operands."""

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
