"""Masks that are data on GPUs: kernels that visit listed tiles, in Triton's interpreter, through the whole backend.

What is computed is compared with eager in float64, and the tiles that were visited are counted against brute force.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel
from fusion.planning.choice import Tile
from tests.codegen.triton.counting import count_products, fully_differentiated, kernels_of_backward, live_tiles
from tests.numerics import assert_as_exact_as_eager

ROWS, KEYS = 32, 64
TILE = Tile(rows=ROWS, keys=KEYS, warps=4, stages=1)
OPTIONS = {"inner": "eager", "strict": True, "tile_maps": "always"}
LOWEST = torch.finfo(torch.float32).min
N_Q, N_K = 150, 200


@pytest.fixture
def products(monkeypatch, emits):
    """Attention is run by GPU kernels in the interpreter; returns a count of the products of each of them."""
    counts = count_products(monkeypatch)
    emits(lambda spec: Kernel(spec, TILE), lambda spec: Differentiable(spec, TILE))
    return counts


def tiles_with_a_second_pass(live, softmax):
    """Tiles with a live score, and all tiles once more of blocks where a row has none."""
    dead = ~live.any(3) & softmax
    count = live_tiles(live, ROWS, KEYS)
    blocks = live.reshape(-1, *live.shape[2:]).split(ROWS, 1)
    for rows, none in zip(blocks, dead.reshape(-1, live.shape[2]).split(ROWS, 1), strict=True):
        for head in torch.where(none.any(1))[0].tolist():
            met, across = live_tiles(rows[head], ROWS, KEYS), -(-live.shape[3] // KEYS)
            count += across * (met < across)
    return count


def random_blocks(heads, n_q, n_k, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, -(-n_q // 32), -(-n_k // 32))
    kind = torch.randint(0, 4, shape, generator=generator).repeat_interleave(32, 2).repeat_interleave(32, 3)
    noise = torch.rand(2, heads, n_q, n_k, generator=generator) > 0.5
    kind = kind[:, :, :n_q, :n_k]
    return torch.where(kind == 0, noise, kind >= 2)


def masked(q, k, v, keep):
    return torch.softmax((q @ k.mT * 0.3).masked_fill(~keep, -math.inf), -1) @ v


def masked_finite(q, k, v, keep):
    return torch.softmax((q @ k.mT).masked_fill(~keep, torch.finfo(q.dtype).min), -1) @ v


def added(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.3 + bias, -1) @ v


def sdpa(q, k, v, keep):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def packed(q, k, v, numbers):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    keep = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (j <= i)
    return torch.softmax((q @ k.mT).masked_fill(~keep, -math.inf), -1) @ v


def padded(q, k, v, tokens):
    return masked_finite(q, k, v, tokens[:, None, None, :] != 0)


def causal_padded(q, k, v, tokens):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return masked_finite(q, k, v, (j <= i) & (tokens[:, None, None, :] != 0))


def sigmoid(q, k, v, keep):
    return torch.where(keep, torch.sigmoid(q @ k.mT), 0.0) @ v


def cases():
    """name -> (function, mask, what it keeps alive, [b, h, n_q, n_k], n_q)."""
    causal = torch.ones(N_K, N_K, dtype=torch.bool).tril()
    dense, per_head = random_blocks(1, N_Q, N_K, 0), random_blocks(2, N_Q, N_K, 1)
    numbers = torch.stack([torch.arange(N_K) // 50, torch.arange(N_K) // 64])
    left, right = torch.ones(2, N_K, dtype=torch.int64), torch.ones(2, N_K, dtype=torch.int64)
    left[0, :70], left[1, :5], right[0, 130:] = 0, 0, 0
    bias = torch.zeros(dense.shape).masked_fill(~dense, LOWEST)
    same = (numbers[:, None, :, None] == numbers[:, None, None, :]) & causal
    soft = torch.where(dense & (torch.arange(N_K) > 100), -0.5, bias)
    return {
        "dense": (masked, dense, dense, N_Q),
        "dense, finite fill": (masked_finite, dense, dense, N_Q),
        "dense, a mask per head": (masked, per_head, per_head, N_Q),
        "dense to sdpa": (sdpa, dense, dense, N_Q),
        "additive": (added, bias, dense, N_Q),
        "additive, soft": (added, soft, dense, N_Q),
        "documents": (packed, numbers, same, N_K),
        "padding left": (padded, left, left.bool()[:, None, None].expand(2, 1, N_Q, N_K), N_Q),
        "padding right": (padded, right, right.bool()[:, None, None].expand(2, 1, N_Q, N_K), N_Q),
        "padding left, causal": (causal_padded, left, left.bool()[:, None, None] & causal, N_K),
        "no normaliser": (sigmoid, dense, dense, N_Q),
    }


CASES = [(name, torch.float32) for name in cases()] + [("dense", torch.bfloat16), ("padding left", torch.bfloat16)]


def inputs_for(mask, n_q, dtype=torch.float32):
    """As many heads as the mask has: `test_grouped_heads` has heads that share one."""
    heads = mask.shape[1] if mask.ndim == 4 else 1
    torch.manual_seed(0)
    mask = mask.to(dtype).clamp(min=torch.finfo(dtype).min) if mask.is_floating_point() else mask
    return torch.randn(2, heads, n_q, 16).to(dtype), *(torch.randn(2, heads, N_K, 16).to(dtype) for _ in "kv"), mask


def wide(values):
    return [x.double() if x.is_floating_point() else x for x in values]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_forward_visits_live_tiles_only(products, name, dtype):
    function, mask, live, n_q = cases()[name]
    inputs = inputs_for(mask, n_q, dtype)
    torch._dynamo.reset()
    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options=OPTIONS)(*inputs)
        assert_as_exact_as_eager(actual, function(*inputs), function(*wide(inputs)), dtype)
    assert reports[0].sites[0].spec.mask.tile_live is not None
    live = live.expand(2, inputs[0].shape[1], n_q, N_K)
    assert products == {"attention_forward": 2 * tiles_with_a_second_pass(live, function is not sigmoid)}


def assert_differentiated(products, tiles):
    """So many tiles are visited by each kernel of the backward."""
    for kernel, count in kernels_of_backward(products).items():
        assert products[kernel] == count * tiles


def tiles_to_differentiate(live):
    """Tiles with a live score, and all tiles of blocks of rows in which a row has none."""
    return live_tiles(live, ROWS, KEYS, ~live.any(-1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_backward_visits_live_tiles_only(products, name, dtype):
    function, mask, live, n_q = cases()[name]
    *qkv, mask = inputs_for(mask, n_q, dtype)
    qkv = [x.requires_grad_() for x in qkv]
    torch._dynamo.reset()
    out = torch.compile(function, backend="fusion", options=OPTIONS)(*qkv, mask)
    grad = torch.randn(out.shape).to(dtype)
    found = torch.autograd.grad(out, qkv, grad)
    eager = torch.autograd.grad(function(*qkv, mask), qkv, grad)
    exact = torch.autograd.grad(function(*(wide_inputs := wide([*qkv, mask]))), wide_inputs[:3], grad.double())
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        assert_as_exact_as_eager(ours, theirs, true, dtype)
    live = live.expand(*out.shape[:3], N_K)
    dead = ~live.any(3) & (function is not sigmoid)
    expected = live_tiles(live, ROWS, KEYS, dead)
    del products["attention_forward"]
    products.pop("attention_backward_delta", None)  # of the few blocks with a large weight, by no list
    kernels = kernels_of_backward(products)
    assert products == {kernel: count * expected for kernel, count in kernels.items()}
    full = live & (mask == 0) if mask.is_floating_point() else live
    unmasked = fully_differentiated(full, ROWS, KEYS, dead, listed=True)
    for kernel, count in kernels.items():
        assert products.full[kernel] == count * unmasked[kernel]
    assert all(unmasked.values()) == (name != "documents")


def attend(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


@pytest.mark.parametrize(
    "tile", [Tile(rows=64, keys=16, warps=4, stages=1), Tile(rows=16, keys=128, warps=4, stages=1)]
)
def test_other_tiles(products, emits, tile):
    """Tiles that are smaller than the map's cells, and larger."""
    emits(lambda spec: Kernel(spec, tile), lambda spec: Differentiable(spec, tile))
    for name in ("dense", "documents"):
        function, mask, _, n_q = cases()[name]
        *qkv, mask = inputs_for(mask, n_q)
        qkv = [x.requires_grad_() for x in qkv]
        torch._dynamo.reset()
        out = torch.compile(function, backend="fusion", options=OPTIONS)(*qkv, mask)
        double = wide([*qkv, mask])
        assert_as_exact_as_eager(out, function(*qkv, mask), function(*double), torch.float32)
        found, exact = torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(function(*double).sum(), double[:3])
        eager = torch.autograd.grad(function(*qkv, mask).sum(), qkv)
        for ours, theirs, true in zip(found, eager, exact, strict=True):
            assert_as_exact_as_eager(ours, theirs, true, torch.float32)
    assert all(name.startswith("attention_") for name in products), products


def test_grouped_heads(products):
    """Query heads that share keys: each is looked up in the lists of its own batch element."""
    torch.manual_seed(0)
    keep = random_blocks(1, N_Q, N_K, 3)
    q, k, v = (torch.randn(2, heads, n, 16, requires_grad=True) for heads, n in ((4, N_Q), (2, N_K), (2, N_K)))

    def function(q, k, v, keep):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)

    torch._dynamo.reset()
    out = torch.compile(function, backend="fusion", options=OPTIONS)(q, k, v, keep)
    double = wide([q, k, v, keep])
    found, exact = torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(function(*double).sum(), double[:3])
    eager = torch.autograd.grad(function(q, k, v, keep).sum(), (q, k, v))
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        assert_as_exact_as_eager(ours, theirs, true, torch.float32)
    assert_differentiated(products, tiles_to_differentiate(keep.expand(2, 4, N_Q, N_K)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_batch_and_sizes_of_run_time(products, dynamic):
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 16, requires_grad=True) for n in (N_Q, N_K, N_K))
    keep = random_blocks(1, N_Q, N_K, 4)[0, 0] | (torch.arange(N_K) == 77)
    torch._dynamo.reset()
    out = torch.compile(masked, backend="fusion", options=OPTIONS, dynamic=dynamic)(q, k, v, keep)
    double = wide([q, k, v, keep])
    assert_as_exact_as_eager(out, masked(q, k, v, keep), masked(*double), torch.float32)
    found, exact = torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(masked(*double).sum(), double[:3])
    for triple in zip(found, torch.autograd.grad(masked(q, k, v, keep).sum(), (q, k, v)), exact, strict=True):
        assert_as_exact_as_eager(*triple, torch.float32)
    assert_differentiated(products, tiles_to_differentiate(keep))


def sinks_and_window(q, k, v):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return torch.softmax((q @ k.mT * 0.3).masked_fill(~((j <= i) & ((i - j < 20) | (j < 5))), -math.inf), -1) @ v


def local_and_global(q, k, v):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    keep = ((i - j).abs() < 20) | (j < 5) | (i < 3)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@pytest.mark.parametrize("function", [sinks_and_window, local_and_global])
def test_alternatives_of_positions_are_listed(products, function):
    """Keys in two places: the first ones, and those around each query."""
    torch.manual_seed(0)
    qkv = [torch.randn(1, 1, 320, 16, requires_grad=True) for _ in "qkv"]
    torch._dynamo.reset()
    out = torch.compile(function, backend="fusion", options=OPTIONS)(*qkv)
    double = wide(qkv)
    assert_as_exact_as_eager(out, function(*qkv), function(*double), torch.float32)
    found, exact = torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(function(*double).sum(), double)
    for triple in zip(found, torch.autograd.grad(function(*qkv).sum(), qkv), exact, strict=True):
        assert_as_exact_as_eager(*triple, torch.float32)
    i, j = torch.arange(320)[:, None], torch.arange(320)
    live = ((j <= i) & ((i - j < 20) | (j < 5))) if function is sinks_and_window else (i - j).abs() < 20
    live = live if function is sinks_and_window else live | (j < 5) | (i < 3)
    expected = live_tiles(live[None], ROWS, KEYS)
    assert products["attention_forward"] == 2 * expected < 2 * 50
    assert_differentiated(products, expected)
