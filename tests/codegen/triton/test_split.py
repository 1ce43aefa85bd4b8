"""Decoding with masks: parts share the keys that are visited at all, and rows without a live key see all of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion import runtime
from fusion.codegen.triton.launch import Kernel
from fusion.codegen.triton.tiles import Tile
from fusion.ir import Normalizer
from tests.codegen.mlir.cases import assert_as_exact_as_eager, draw
from tests.codegen.triton.counting import count_products, live_tiles
from tests.codegen.triton.test_backward_stages import PLACES, understood
from tests.numerics import assert_as_exact_as_eager as assert_close

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
    assert_as_exact_as_eager(Kernel(c.spec, TILE, splits=splits)(operands, sizes), c.spec, operands, sizes)
    live = PLACES[name](torch.arange(18)[:, None], torch.arange(150), 18, 150).expand(1, 18, 150)
    assert products["attention_split"] == 2 * live_tiles(live, ROWS, KEYS) <= 2 * 2 * 10
    assert products["attention_combine"] == (2 * 10 if name == "left_padded" else 0)


@pytest.mark.parametrize("options", [{"sinks": True}, {"off_by_one": True}, {"normalizer": Normalizer.SAFE_SOFTMAX}])
def test_rows_without_a_live_key(options) -> None:
    c = understood("causal_last_key", **options)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 20, "Nk": 7})
    assert_as_exact_as_eager(Kernel(c.spec, TILE, splits=2)(operands, sizes), c.spec, operands, sizes)


def padded(q, k, v, tokens):
    scores = (q @ k.mT * 0.3).masked_fill(tokens[:, None, None, :] == 0, torch.finfo(q.dtype).min)
    return torch.softmax(scores, -1) @ v


def packed(q, k, v, tokens):
    same = tokens[:, None, -q.shape[2] :, None] == tokens[:, None, None, :]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=same)


@pytest.mark.parametrize("function", [padded, packed])
def test_parts_share_listed_tiles(monkeypatch, function) -> None:
    """One batch element has no live key under padding."""
    tile = Tile(rows=32, keys=64, warps=4, stages=1)  # of the size of the map's cells
    products = count_products(monkeypatch)
    monkeypatch.setattr(runtime, "_compile", lambda spec, device: Kernel(spec, tile, splits=3))
    monkeypatch.setattr(runtime, "_executors", {})
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 500, 16), torch.randn(2, 1, 500, 16)
    tokens = torch.stack([torch.arange(500) // 130, torch.zeros(500, dtype=torch.int64)])
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"inner": "eager", "strict": True, "tile_maps": "always"}
        out = torch.compile(function, backend="fusion", options=options)(q, k, v, tokens)
    wide = function(q.double(), k.double(), v.double(), tokens)
    assert_close(out, function(q, k, v, tokens), wide, torch.float32)
    live = (tokens[:, None, None] != 0) if function is padded else tokens[:, None, -2:, None] == tokens[:, None, None]
    assert products["attention_split"] == 2 * live_tiles(live.expand(2, 1, 2, 500), 32, 64)
    assert products["attention_combine"] == (2 * 8 if function is padded else 0)
