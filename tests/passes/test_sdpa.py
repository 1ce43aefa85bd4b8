"""Calls of `scaled_dot_product_attention` as attention: scores, masks and grouped heads; and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.ir import Normalizer, integers
from fusion.ir.expr import E, I, coord, walk
from fusion.passes.nodes import Unsupported
from fusion.passes.recognize.sdpa import is_sdpa, pull_back_sdpa
from tests.passes.graphs import Calls

aten = torch.ops.aten
INDEX = (coord("b0"), coord("b1"), I, E)


def attention(calls: Calls, heads=4, kv_heads=4, mask=None, **options):
    q = calls.given(torch.randn(2, heads, 5, 16), "q")
    k, v = (calls.given(torch.randn(2, kv_heads, 6, 16), name) for name in "kv")
    mask = None if mask is None else calls.given(mask, "mask")
    return calls.call(aten.scaled_dot_product_attention.default, q, k, v, mask, **options)


def pulled(node):
    bounds = {x: integers.integer(n) for x, n in zip(INDEX, node.meta["val"].shape, strict=True)}
    found = pull_back_sdpa(node, INDEX, bounds)
    return found.core, found.value, found.pullback, found.keys


def test_the_score_is_the_scaled_product():
    calls = Calls()
    node = attention(calls)
    core, value, pullback, keys = pulled(node)
    assert is_sdpa(node) and core.normalizer is Normalizer.SAFE_SOFTMAX and keys is integers.integer(6)
    (product,) = pullback.products
    assert (product.query.node.name, product.key.node.name, value.node.name) == ("q", "k", "v")
    assert product.scale.value == 1 / math.sqrt(16)


def test_a_scale_that_is_given_takes_the_place_of_the_default():
    calls = Calls()
    *_, pullback, _ = pulled(attention(calls, scale=0.75))
    assert pullback.products[0].scale.value == 0.75


def test_causal_scores_end_at_the_diagonal():
    calls = Calls()
    core, *_ = pulled(attention(calls, is_causal=True))
    assert core.score.op == "where" and str(core.score.args[0]) == "j ≤ i"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_are_read_at_their_own_index(dtype):
    calls = Calls()
    core, _, pullback, _ = pulled(attention(calls, mask=torch.ones(2, 1, 5, 6).to(dtype)))
    (load,) = (part for part in walk(core.score) if part.op == "load")
    assert list(map(str, load.args)) == ["b0", "0", "i", "j"] and pullback.loaded[0].name == "mask"
    assert core.score.op == ("where" if dtype is torch.bool else "fadd")


def test_grouped_heads_read_the_key_head_of_their_group():
    calls = Calls()
    _, value, pullback, _ = pulled(attention(calls, kv_heads=2, enable_gqa=True))
    assert str(pullback.products[0].key.index[1]) == str(value.index[1]) == "b1 // 2"


def test_dropout_without_a_seed_is_refused():
    calls = Calls()
    with pytest.raises(Unsupported, match="dropout of a kind, or with a probability, that is not known"):
        pulled(attention(calls, dropout_p=0.3))


def test_other_calls_are_none():
    calls = Calls()
    assert not is_sdpa(calls.call(aten.neg.default, calls.given(torch.randn(3))))
