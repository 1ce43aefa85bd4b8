"""Short calls and decoding on a CPU, in turns in one process.

    python -m benchmarks.cpu.decode decode [--lengths 512 16384] [--cases 1/1 32/8] [--dtype bfloat16]
    python -m benchmarks.cpu.decode caches [--lengths 2048] [--cases int8 paged order]
    python -m benchmarks.cpu.decode short [--lengths 16 32 64 128]

decode: one query over a cache, cases are query heads / key heads; "reading" is a loop that reads K and V and does
nothing else, so that its last column is the share of that loop's speed. caches: keys and values as models keep them,
quantised or in pages; of those that are not quantised also with a mask that leaves an eighth of the keys. short: as
many queries as keys, 8 heads. "SDPA" is the bare call, without a compiled function around it. Everybody runs untimed
before each sample, until threads of the one before have stopped spinning.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import peak
from benchmarks.common.compare import Case, Function, compiled, contestants, draw, main
from benchmarks.common.rows import ROWS, Problem, Row, sdpa_call
from fusion.torch_private.tensors import tree_flatten, tree_unflatten

HEADS = ("1/1", "2/2", "4/4", "8/8", "8/2", "32/32", "32/8")
D, PAGE = 64, 16


def of_row(name: str, row: Row, problem: Problem) -> Case:
    tensors = list(problem.tensors(row))
    attend = compiled(functools.partial(F.scaled_dot_product_attention, enable_gqa=row.group != 1), "inductor")
    bare = sdpa_call(row, tuple(tensors))
    functions: dict[str, Function | None] = {
        **contestants(row.plain), "Inductor, SDPA": attend, "SDPA": bare and (lambda *_: bare())
    }  # fmt: skip
    if row.queries is not None:
        read = peak.reading(tensors[1:3], torch.get_num_threads())
        functions["reading"] = lambda *_: read()
    return Case(name=name, tensors=tensors, functions=functions, plain=row.plain)


def short(options: argparse.Namespace) -> Iterator[Case]:
    for n in options.lengths or [16, 32, 64, 128]:
        problem = Problem(H=options.heads or 8, N=n, d=D, dtype=getattr(torch, options.dtype))
        yield of_row(f"{problem.H} heads, N = {n}", ROWS["full"], problem)


def decode(options: argparse.Namespace) -> Iterator[Case]:
    for heads in options.cases or HEADS:
        queries, keys = map(int, heads.split("/"))
        plain = ROWS["full"] if queries == keys else ROWS["decode"]
        row = replace(plain, group=queries // keys, queries=1)
        for n in options.lengths or [512, 2048, 8192, 16384]:
            problem = Problem(H=queries, N=n, d=D, dtype=getattr(torch, options.dtype))
            yield of_row(f"{heads} heads, {n} keys", row, problem)


Stored = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Stored tensors: of K, of V, and of both."""


@dataclass(frozen=True)
class Cache:
    """title: for tables. draw: [1, heads, keys, columns] and a dtype -> what is stored. keys: what is stored of K or V,
    and what they share, -> [1, heads, keys, columns]."""

    title: str
    draw: Callable[[tuple[int, ...], torch.dtype], Stored]
    keys: Callable[..., Tensor]

    def attention(
        self, q: Tensor, k: list[Tensor], v: list[Tensor], shared: list[Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Attention over the cache; query heads in groups."""
        keys, values = self.keys(q.dtype, *k, *shared), self.keys(q.dtype, *v, *shared)
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=q.shape[1] != keys.shape[1])


def _bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _of_keys(shape: tuple[int, ...], dtype: torch.dtype, zero_points: bool = False) -> Stored:
    def one() -> list[Tensor]:
        scale, zero = torch.rand(*shape[:3], 1).mul(0.02).to(dtype), torch.randint(-8, 9, (*shape[:3], 1)).to(dtype)
        return [_bytes(*shape), scale, *([zero] if zero_points else [])]

    return one(), one(), []


def _packed(shape: tuple[int, ...], dtype: torch.dtype, group: int = 32) -> Stored:
    *lead, d = shape

    def one() -> list[Tensor]:
        scale, zero = (torch.rand(*lead, d // group, 1) for _ in range(2))
        nibbles = torch.randint(0, 256, (*lead, d // 2), dtype=torch.uint8)
        return [nibbles, scale.mul(0.1).to(dtype), zero.mul(8).to(dtype)]

    return one(), one(), []


def _in_order_already(shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
    return [torch.randn(shape).to(dtype)], [torch.randn(shape).to(dtype)], []


def _pages(shape: tuple[int, ...], dtype: torch.dtype, quantised: bool = False, by_head: bool = False) -> Stored:
    batch, heads, keys, d = shape
    count = batch * keys // PAGE
    page = (heads, PAGE) if by_head else (PAGE, heads)

    def one() -> list[Tensor]:
        if quantised:
            return [_bytes(2 * count, *page, d), torch.rand(2 * count, *page, 1).mul(0.02).to(dtype)]
        return [torch.randn(2 * count, *page, d).to(dtype)]

    return one(), one(), [torch.randperm(2 * count)[:count].view(batch, -1)]


def _from_nibbles(dtype: torch.dtype, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    wide = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(dtype)
    return ((wide.unflatten(-1, (scale.shape[-2], -1)) - zero) * scale).flatten(-2)


def _in_order(pages: Tensor, table: Tensor) -> Tensor:
    return pages[table].flatten(1, 2).transpose(1, 2)


CACHES = {
    "int8": Cache("int8, scale per key", _of_keys, lambda dtype, x, scale: x.to(dtype) * scale),
    "int8z": Cache("int8, zero point", functools.partial(_of_keys, zero_points=True),
                   lambda dtype, x, scale, zero: (x.to(dtype) - zero) * scale),
    "int4": Cache("int4 in groups of 32", _packed, _from_nibbles),
    "order": Cache("in order", _in_order_already, lambda dtype, x: x),
    "paged": Cache(f"pages of {PAGE}", _pages, lambda dtype, pages, table: _in_order(pages, table)),
    "by_head": Cache(f"pages of {PAGE}, by head", functools.partial(_pages, by_head=True),
                     lambda dtype, pages, table: pages[table].transpose(1, 2).flatten(2, 3)),
    "paged8": Cache(f"int8 in pages of {PAGE}", functools.partial(_pages, quantised=True),
                    lambda dtype, pages, scale, table: _in_order(pages, table).to(dtype) * _in_order(scale, table)),
}  # fmt: skip


def caches(options: argparse.Namespace) -> Iterator[Case]:
    for heads in HEADS:
        queries, keys = map(int, heads.split("/"))
        for name in options.cases or CACHES:
            for n in options.lengths or [512, 2048, 8192, 16384]:
                cache, (q,) = CACHES[name], draw(options, (1, queries, 1, D))
                stored = cache.draw((1, keys, n, D), q.dtype)
                for live in (n, n // 8) if name in ("order", "paged", "by_head") else (n,):
                    masks = [] if live == n else [(torch.arange(n) < live)[None, None, None]]
                    tensors, tree = tree_flatten([q, *stored, *masks])
                    plain = functools.partial(_unflattened, cache, tree)
                    title = f"{cache.title}, {heads} heads, {live} of {n} keys"
                    yield Case(name=title, tensors=tensors, functions=contestants(plain), plain=plain)


def _unflattened(cache: Cache, tree, *tensors: Tensor) -> Tensor:
    return cache.attention(*tree_unflatten(list(tensors), tree))


STUDIES = {f.__name__: f for f in (decode, caches, short)}

if __name__ == "__main__":
    raise SystemExit(main(__doc__, STUDIES, settle=6e-3))
