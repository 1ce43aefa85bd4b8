"""Decoding with masks: parts share the keys that are visited at all, and rows without a live key see all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from fusion.codegen.triton import launch
from fusion.codegen.triton.launch import Kernel
from fusion.ir import Kind, Normalizer, integers
from fusion.ir.expr import coord, load
from fusion.ir.ops import apply
from fusion.machine import INTERPRETER
from fusion.planning.choice import Tile
from fusion.planning.gpu import splits_for, visited_function
from fusion.planning.gpu_layout import packed as packed_spec
from fusion.report.report import SiteReport
from tests.codegen.mlir.cases import assert_as_exact_as_eager, case, draw
from tests.codegen.triton.counting import count_products, live_tiles
from tests.codegen.triton.test_backward_stages import PLACES, understood
from tests.numerics import assert_as_exact_as_eager as assert_numbers

ROWS, KEYS = 16, 16
TILE = Tile(rows=ROWS, keys=KEYS, warps=4, stages=1)


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("name", ["causal_last_key", "causal", "window", "left_padded"])
def test_parts_share_a_range_of_keys(monkeypatch, name: str, splits: int) -> None:
    products, c = count_products(monkeypatch), understood(name)
    shape = {"B": 1, "H": 1, "Nq": 18, "Nk": 150}
    operands, sizes = draw(c, shape)
    if name == "left_padded":
        operands[3][:, :4], operands[3][:, 4] = False, True  # rows 0 to 3 are dead
    assert_as_exact_as_eager(Kernel(c.spec, TILE, splits=splits)(operands, sizes), c, operands)
    live = PLACES[name](torch.arange(18)[:, None], torch.arange(150), 18, 150).expand(1, 18, 150)
    assert products["attention_split"] == 2 * live_tiles(live, ROWS, KEYS) <= 2 * 2 * 10
    assert products["attention_combine"] == (2 * 10 if name == "left_padded" else 0)


def sliding(q, k, v, length=200):
    """The last queries of a cache, each with a window of keys; heads of queries share those of keys."""
    n_q, n_k = q.shape[2], k.shape[2]
    i, j = torch.arange(n_q)[:, None] + n_k - n_q, torch.arange(n_k)
    live = (j <= i) & (i - j < length)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live, enable_gqa=True)


def decoded(monkeypatch, function, q, k, v) -> tuple[Counter, list[tuple[str, int]], SiteReport]:
    """(products, programs by kernel, report) of a function's attention, whose result is checked, in a cache whose
    length varies, on a device of 40 processors."""
    products, programs, run = count_products(monkeypatch), [], launch.Variant.launch

    def launched(self, name, count, *arguments):
        programs.append((name, count))
        run(self, name, count, *arguments)

    monkeypatch.setattr(launch.Variant, "launch", launched)
    monkeypatch.setattr(launch, "machine_of", lambda device: replace(INTERPRETER, cores=40))
    torch._dynamo.reset()
    with torch.no_grad(), fusion.collect_reports() as reports:
        options = {"inner": "eager", "strict": True}
        out = torch.compile(function, backend="fusion", dynamic=True, options=options)(q, k, v)
    wide = function(q.double(), k.double(), v.double())
    assert_numbers(out, function(q, k, v), wide, torch.float32)
    return products, programs, reports[0].sites[0]


@pytest.mark.parametrize(("n_q", "heads"), [(3, 2), (1, 4)])
def test_windows_of_a_long_cache_are_shared(monkeypatch, n_q: int, heads: int) -> None:
    """As many parts as the window is worth, not the cache; only its tiles are visited. Rows of two heads side by
    side."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, heads, n_q, 16), torch.randn(1, 2, 900, 16), torch.randn(1, 2, 900, 16)
    products, programs, site = decoded(monkeypatch, sliding, q, k, v)
    visited = 200 + (n_q - 1)
    splits = splits_for(2, visited, KEYS, 40)
    assert splits == 3
    assert programs == [("attention_split", 2 * splits), ("attention_combine", 2)]
    assert site.runs[0].startswith("keys in 3 parts, tiles of 16 x 16, 4 warps, stages 1")
    first = (900 - visited) // KEYS
    assert products["attention_split"] == 2 * 2 * (-(-900 // KEYS) - first)


def test_how_many_keys_are_visited() -> None:
    sizes = (1, 4, 1, 4000)  # B, H, Nq, Nk
    assert visited_function(case("plain").spec)(sizes, 16) == 4000
    assert visited_function(case("causal").spec)((1, 4, 64, 4000), 16) == 64
    assert visited_function(case("causal_last_key").spec)(sizes, 16) == 4000
    assert visited_function(case("window").spec)((1, 4, 64, 4000), 16) == 32
    assert visited_function(packed_spec(case("window", group=2).spec, 2))((1, 4, 64, 4000), 16) == 24


def test_limits_that_only_data_tell() -> None:
    """A range that a loaded length bounds further is taken without it; one that depends on the head is all keys."""
    spec = case("window").spec
    length = load(3, (coord("b0"),), Kind.INT)
    low, high = spec.mask.key_lo, spec.mask.key_hi
    joined = replace(spec.mask, key_lo=apply("imax", length, low), key_hi=apply("imin", high, length))
    sizes = (1, 4, 64, 4000)
    assert visited_function(replace(spec, mask=joined))(sizes, 16) == 32
    for other in (replace(joined, key_lo=length), replace(joined, key_lo=integers.mul(low, coord("b1")))):
        assert visited_function(replace(spec, mask=other))(sizes, 16) == 64
    neither = replace(joined, key_lo=apply("imin", length, low), key_hi=length)
    assert visited_function(replace(spec, mask=neither))(sizes, 16) == 4000


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": True},
        {"off_by_one": True},
        {"normalizer": Normalizer.SAFE_SOFTMAX},
        {"normalizer": Normalizer.ZERO_SOFTMAX},
    ],
)
def test_rows_without_a_live_key(options) -> None:
    c = understood("causal_last_key", **options)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 20, "Nk": 7})
    assert_as_exact_as_eager(Kernel(c.spec, TILE, splits=2)(operands, sizes), c, operands)


def padded(q, k, v, tokens):
    scores = (q @ k.mT * 0.3).masked_fill(tokens[:, None, None, :] == 0, torch.finfo(q.dtype).min)
    return torch.softmax(scores, -1) @ v


def packed(q, k, v, tokens):
    same = tokens[:, None, -q.shape[2] :, None] == tokens[:, None, None, :]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=same)


@pytest.mark.parametrize("function", [padded, packed])
def test_parts_share_listed_tiles(monkeypatch, emits, function) -> None:
    """One batch element has no live key under padding."""
    tile = Tile(rows=32, keys=64, warps=4, stages=1)  # of the size of the map's cells
    products = count_products(monkeypatch)
    emits(lambda spec: Kernel(spec, tile, splits=3))
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 500, 16), torch.randn(2, 1, 500, 16)
    tokens = torch.stack([torch.arange(500) // 130, torch.zeros(500, dtype=torch.int64)])
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"inner": "eager", "strict": True, "tile_maps": "always"}
        out = torch.compile(function, backend="fusion", options=options)(q, k, v, tokens)
    wide = function(q.double(), k.double(), v.double(), tokens)
    assert_numbers(out, function(q, k, v, tokens), wide, torch.float32)
    live = (tokens[:, None, None] != 0) if function is padded else tokens[:, None, -2:, None] == tokens[:, None, None]
    assert products["attention_split"] == 2 * live_tiles(live.expand(2, 1, 2, 500), 32, 64)
    assert products["attention_combine"] == (2 * 8 if function is padded else 0)
