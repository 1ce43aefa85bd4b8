"""Decoding over caches of keys and values as models keep them: quantised, packed, in pages.

`CACHES[name].draw(shape, dtype)` draws what is stored, `CACHES[name].attention(q, *stored)` is the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

PAGE = 16


@dataclass(frozen=True)
class Cache:
    """title: for tables. draw: (batch.. of heads, keys, columns, dtype) -> what is stored, K's and V's in turns, and
    what both share. keys: what is stored of one of them, and what they share, -> K or V [1, heads, keys, columns]."""

    title: str
    draw: Callable[[tuple[int, int, int, int], torch.dtype], tuple[list[Any], list[Any]]]
    keys: Callable[..., torch.Tensor]

    def attention(self, q: torch.Tensor, k: list[Any], v: list[Any], shared: list[Any]) -> torch.Tensor:
        """Attention over the cache; query heads in groups."""
        keys, values = self.keys(q.dtype, *k, *shared), self.keys(q.dtype, *v, *shared)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] != keys.shape[1])


def _of_keys(shape: tuple[int, int, int, int], dtype: torch.dtype):
    def one():
        return [torch.randint(-128, 128, shape, dtype=torch.int8), torch.rand(*shape[:3], 1).mul(0.02).to(dtype)]

    return [one(), one()], []


def _with_zero_points(shape: tuple[int, int, int, int], dtype: torch.dtype):
    pairs, _ = _of_keys(shape, dtype)
    return [[*pair, torch.randint(-8, 9, (*shape[:3], 1)).to(dtype)] for pair in pairs], []


def _packed(shape: tuple[int, int, int, int], dtype: torch.dtype, group: int = 32):
    *lead, d = shape

    def one():
        scale, zero = (torch.rand(*lead, d // group, 1) for _ in range(2))
        packed = torch.randint(0, 256, (*lead, d // 2), dtype=torch.uint8)
        return [packed, scale.mul(0.1).to(dtype), zero.mul(8).to(dtype)]

    return [one(), one()], []


def _pages(shape: tuple[int, int, int, int], dtype: torch.dtype):
    batch, heads, keys, d = shape
    count = batch * keys // PAGE
    stored = [[torch.randn(2 * count, PAGE, heads, d).to(dtype)] for _ in range(2)]
    return stored, [torch.randperm(2 * count)[:count].view(batch, -1)]


def _pages_of_bytes(shape: tuple[int, int, int, int], dtype: torch.dtype):
    batch, heads, keys, d = shape
    count = batch * keys // PAGE

    def one():
        scale = torch.rand(2 * count, PAGE, heads, 1).mul(0.02).to(dtype)
        return [torch.randint(-128, 128, (2 * count, PAGE, heads, d), dtype=torch.int8), scale]

    return [one(), one()], [torch.randperm(2 * count)[:count].view(batch, -1)]


def _from_nibbles(dtype: torch.dtype, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    wide = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(dtype)
    return ((wide.unflatten(-1, (scale.shape[-2], -1)) - zero) * scale).flatten(-2)


def _in_order(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return pages[table].flatten(1, 2).transpose(1, 2)


CACHES = {
    "int8": Cache("int8, scale per key", _of_keys, lambda dtype, x, scale: x.to(dtype) * scale),
    "int8z": Cache("int8, zero point", _with_zero_points, lambda dtype, x, scale, zero: (x.to(dtype) - zero) * scale),
    "int4": Cache("int4 in groups of 32", _packed, _from_nibbles),
    "paged": Cache(f"pages of {PAGE}", _pages, lambda dtype, pages, table: _in_order(pages, table)),
    "paged8": Cache(
        f"int8 in pages of {PAGE}",
        _pages_of_bytes,
        lambda dtype, pages, scale, table: _in_order(pages, table).to(dtype) * _in_order(scale, table),
    ),
}
