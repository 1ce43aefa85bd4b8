"""Masks of positions in the backward kernels: full tiles are differentiated without the mask, the others with it.

Gradients are compared with autograd through the reference in float64; tiles of both kinds are counted in Triton's
interpreter and equal a count by brute force.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton.gradients import gradients_of
from fusion.ir import MaskFacts, integers
from fusion.ir.expr import SCORE, TRUE, I, J, const
from fusion.ir.ops import apply, where
from fusion.passes.specify.masks import understand
from fusion.planning.choice import Tile
from tests.codegen.mlir.cases import CAUSAL, FMIN, Case, case, masked
from tests.codegen.triton.counting import count_products, fully_differentiated, kernels_of_backward, live_tiles
from tests.codegen.triton.test_backward import check

ROWS, KEYS = 32, 16
TILE = Tile(rows=ROWS, keys=KEYS, warps=4, stages=1)
PLACES = {
    "plain": lambda i, j, n_q, n_k: (i < n_q) & (j < n_k),
    "causal": lambda i, j, n_q, n_k: j <= i,
    "causal_last_key": lambda i, j, n_q, n_k: j <= i + n_k - n_q,
    "window": lambda i, j, n_q, n_k: (j <= i) & (i - j < 60),
    "alibi": lambda i, j, n_q, n_k: j <= i,
    "left_padded": lambda i, j, n_q, n_k: j <= i,
}
"""What masks say of positions; also data (padding) bounds nothing."""
SHAPES = (
    {"B": 1, "H": 1, "Nq": 64, "Nk": 64},
    {"B": 1, "H": 1, "Nq": 75, "Nk": 83},
    {"B": 1, "H": 1, "Nq": 90, "Nk": 40},
)


def understood(name: str, **options) -> Case:
    """A case whose mask is known as the front end would know it."""
    torch.manual_seed(1)
    c = case(name, d=16, **options)
    if name == "window":  # a longer one, in which tiles are full
        live = apply("and", CAUSAL, apply("ilt", integers.sub(I, J), const(60)))
        score = where(live, apply("fmul", SCORE, const(0.25)), const(FMIN))
        program = replace(c.program, eager=lambda s, i, j: masked(s, (j <= i) & (i - j < 60), FMIN))
        c = replace(c, spec=replace(c.spec, score=score), program=program)
    return replace(c, spec=replace(c.spec, mask=understand(c.spec.score)))


@pytest.mark.parametrize("name", PLACES)
def test_only_tiles_at_the_edge_evaluate_the_mask(monkeypatch, name: str) -> None:
    """Sizes that fill tiles, odd ones, and more queries than keys: rows that meet no live key."""
    products, c = count_products(monkeypatch), understood(name)
    assert name == "plain" or c.spec.mask.full is not None
    if name == "left_padded":  # whose rows' deaths depend on data
        c = replace(c, program=replace(c.program, tensors=lambda n: [torch.arange(n["Nk"])[None] % 5 < 4]))
    shapes = SHAPES if name == "causal_last_key" else SHAPES[:2]
    check(c, tile=TILE, shapes=shapes)
    tiles = Counter()
    for shape in shapes:
        n_q, n_k = shape["Nq"], shape["Nk"]
        live = PLACES[name](torch.arange(n_q)[:, None], torch.arange(n_k), n_q, n_k).expand(1, n_q, n_k)
        dead = ~live.any(2)
        tiles["live"] += live_tiles(live, ROWS, KEYS, dead)
        tiles.update(fully_differentiated(live, ROWS, KEYS, dead))
    for kernel, count in kernels_of_backward(products).items():
        assert products[kernel] == count * tiles["live"]
        assert products.full[kernel] == count * tiles[kernel] > 0


@pytest.mark.parametrize(("full", "group"), [(True, 2), (False, 1)])
def test_only_blocks_with_dead_rows_meet_all_keys(monkeypatch, full: bool, group: int) -> None:
    """Padding on the left, of one batch element longer than a block of rows: its blocks are visited beside those that
    the mask leaves alive, and none between."""
    products, c = count_products(monkeypatch), understood("left_padded", group=group)
    if not full:
        c = replace(c, spec=replace(c.spec, mask=replace(c.spec.mask, full=None, full_lo=None, full_hi=None)))
    n, padding = 100, torch.tensor([[37], [0]])
    c = replace(c, program=replace(c.program, tensors=lambda n: [torch.arange(n["Nk"])[None] >= padding]))
    check(c, tile=TILE, shapes=({"B": 2, "H": 1, "Nq": n, "Nk": n},))
    causal = (torch.arange(n) <= torch.arange(n)[:, None]).expand(2, n, n)
    dead = torch.arange(n)[None] < padding
    expected = live_tiles(causal, ROWS, KEYS, dead)
    assert expected < live_tiles(causal, ROWS, KEYS, dead.any(1, keepdim=True).expand_as(dead))
    for kernel, count in kernels_of_backward(products).items():
        assert products[kernel] == count * group * expected


def test_dead_rows_at_the_end(monkeypatch) -> None:
    """Rows after a window's last key, and keys that no row meets otherwise."""
    products, c = count_products(monkeypatch), understood("window")
    shape = {"B": 1, "H": 1, "Nq": 200, "Nk": 70}
    check(c, tile=TILE, shapes=(shape,))
    live = PLACES["window"](torch.arange(200)[:, None], torch.arange(70), 200, 70).expand(1, 200, 70)
    for kernel, count in kernels_of_backward(products).items():
        assert products[kernel] == count * live_tiles(live, ROWS, KEYS, ~live.any(2))


@pytest.mark.parametrize("options", [{"group": 2}, {"weight": True, "sinks": True}], ids=str)
def test_gradients_of_more_than_q_k_and_v(options) -> None:
    check(understood("alibi", **options), tile=TILE, shapes=SHAPES[1:2])


def test_a_bias_that_the_simpler_program_leaves_out_keeps_its_gradient() -> None:
    """An additive mask that is told to be zero in full tiles, and is asked for its gradient."""
    c = case("bias", d=16)
    simpler = apply("fmul", SCORE, const(0.25))
    facts = MaskFacts(live=TRUE, full=simpler, full_lo=integers.integer(32), fill=-math.inf)
    c = replace(c, spec=replace(c.spec, mask=facts))
    assert gradients_of(c.spec, (True,) * 4).program is None
    assert gradients_of(c.spec, (True, True, True, False)).program is simpler
    zero = replace(c.program, tensors=lambda n: [torch.zeros(n["H"], n["Nq"], n["Nk"])])
    check(replace(c, program=zero), tile=TILE, shapes=SHAPES[1:2])
