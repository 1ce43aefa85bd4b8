"""The tensor that a key is read from, behind conversions of a cache: what is found, and what is not looked behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import ONE, C, J, coord, coordinates
from fusion.passes import marks
from fusion.passes.assumptions import plain_kernels
from fusion.passes.pullback.caches import Stored, behind_cache
from fusion.passes.pullback.pullback import PullBack
from tests.passes.graphs import Calls

aten = torch.ops.aten
B, N, D = coord("b0"), 6, 32


def stored(key: Node, **options: Any) -> Stored | None:
    """Stored element that an element of a key, of shape [2, N, D], is read from."""
    keys, width = integers.integer(N), integers.integer(D)
    walk = PullBack({B: integers.integer(2), J: keys}, keys)
    return behind_cache(walk, key, (B, J, C), J, C, width, options.get("accept", lambda scale: True))


class Cache(Calls):
    """A cache of int8, and conversions of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.given(torch.randint(-9, 9, (2, N, D), dtype=torch.int8), "bytes")
        self.wide = self.call(aten.to.dtype, self.bytes, torch.float32)
        self.scale = self.given(torch.rand(2, N, 1), "scale")


def test_a_cast_is_read_from_what_is_cast() -> None:
    cache = Cache()
    found = stored(cache.wide)
    assert found is not None and found.node is cache.bytes and found.index == (B, J, C)
    assert found.value is None and found.scale is ONE and found.passed == (cache.wide,)


def test_a_scale_of_keys_is_a_factor_of_scores_where_the_caller_has_one() -> None:
    cache = Cache()
    key = cache.call(aten.mul.Tensor, cache.wide, cache.scale)
    factor, element = stored(key), stored(key, accept=lambda scale: scale is ONE)
    assert factor is not None and factor.scales == {cache.scale} and factor.value is None
    assert coordinates(factor.scale) == {"b0", "j"}
    assert element is not None and element.scale is ONE and element.value is not None


def test_a_zero_point_is_part_of_the_element() -> None:
    cache = Cache()
    key = cache.call(aten.sub.Tensor, cache.wide, cache.given(torch.zeros(2, N, 1), "zero"))
    found = stored(key)
    assert found is not None and found.node is cache.bytes and found.value is not None and found.value.op == "fsub"


def test_of_pages_the_index_is_read_from_their_table() -> None:
    calls = Calls()
    pages, table = calls.given(torch.randn(9, D), "pages"), calls.given(torch.randint(9, (2, N)), "table")
    found = stored(calls.call(aten.index.Tensor, pages, [table]))
    assert found is not None and found.node is pages and found.index[0].op == "load" and found.index[1] is C


def wide_integers(cache: Cache) -> Node:
    return cache.call(aten.to.dtype, cache.given(torch.ones(2, N, D, dtype=torch.int64), "wide"), torch.float32)


def in_float64(cache: Cache) -> Node:
    return cache.call(aten.to.dtype, cache.bytes, torch.float64)


def of_a_sum(cache: Cache) -> Node:
    return cache.call(aten.cumsum.default, cache.wide, 1)


def with_scales_of_elements(cache: Cache) -> Node:
    """As many bytes as the copy has are read twice."""
    return cache.call(aten.mul.Tensor, cache.wide, cache.given(torch.rand(2, N, D), "scales"))


def no_cache(cache: Cache) -> Node:
    return cache.call(aten.mul.Tensor, cache.given(torch.rand(2, N, D), "keys"), 2.0)


@pytest.mark.parametrize("key", [wide_integers, in_float64, of_a_sum, with_scales_of_elements, no_cache])
def test_nothing_is_read_behind(key: Any) -> None:
    assert stored(key(Cache())) is None


def test_a_gathered_copy_that_is_used_elsewhere_is_read() -> None:
    calls = Calls()
    gathered = calls.call(
        aten.index.Tensor, calls.given(torch.randn(9, D)), [calls.given(torch.randint(9, (2, N)), "table")]
    )
    key = calls.call(aten.mul.Tensor, gathered, 2.0)
    assert stored(key) is not None
    calls.call(aten.sin.default, gathered)
    assert stored(key) is None


def test_kernels_that_know_no_caches_read_the_copy() -> None:
    cache = Cache()
    with plain_kernels():
        assert stored(cache.wide) is None


def test_a_gradient_is_that_of_the_copy() -> None:
    cache = Cache()
    keys = integers.integer(N)
    marks.requires_grad.set(cache.wide, True)
    walk = PullBack({B: integers.integer(2), J: keys}, keys, cache.wide)
    assert behind_cache(walk, cache.wide, (B, J, C), J, C, integers.integer(D), lambda scale: True) is None
