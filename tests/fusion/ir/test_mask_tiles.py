"""What a mask says of a tile, against the mask itself at every score of it."""

from __future__ import annotations

import pytest
import torch

from fusion.ir import MaskFacts, integers
from fusion.ir.expr import I0, I1, J0, J1, Expr, I, J, const
from fusion.ir.ops import apply, evaluate

ROWS, KEYS, STEP = 23, 31, 3
CAUSAL = MaskFacts(live=apply("ile", J, I), key_hi=integers.add(I1, 1), full_hi=integers.add(I0, 1), fill=float("-inf"))
WINDOW = MaskFacts(
    live=apply("and", apply("ile", J, I), apply("ilt", integers.sub(I, J), const(9))),
    key_lo=integers.sub(I0, 8),
    key_hi=integers.add(I1, 1),
    full_lo=integers.sub(I1, 8),
    full_hi=integers.add(I0, 1),
    fill=float("-inf"),
)
MAPPED = MaskFacts(
    live=apply("ieq", integers.floordiv(I, STEP), integers.floordiv(J, STEP)),
    tile_live=apply("bool_to_int", apply("ieq", integers.floordiv(I0, STEP), integers.floordiv(J0, STEP))),
    tile_mixed=apply("bool_to_int", apply("ine", integers.sub(J1, J0), integers.sub(I1, I0))),
    fill=float("-inf"),
)


def holds(conditions: list[Expr], tile: dict[Expr, int]) -> bool:
    known = {name: torch.tensor(value) for name, value in tile.items()}
    return all(bool(evaluate(condition, known.__getitem__)) for condition in conditions)


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW, MAPPED], ids=["causal", "window", "mapped"])
def test_tiles_are_left_out_and_taken_whole_as_their_scores_are_live(mask: MaskFacts) -> None:
    i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None]
    live = evaluate(mask.live, {I: i, J: j}.__getitem__).broadcast_to(ROWS, KEYS)
    left_out, whole = 0, 0
    for i0 in range(0, ROWS, STEP):
        for j0 in range(0, KEYS, STEP):
            tile = {I0: i0, I1: min(i0 + STEP, ROWS) - 1, J0: j0, J1: min(j0 + STEP, KEYS) - 1}
            scores = live[tile[I0] : tile[I1] + 1, tile[J0] : tile[J1] + 1]
            if not holds(mask.live_conditions(), tile):
                left_out += 1
                assert not scores.any(), tile
            elif holds(mask.whole(), tile):
                whole += 1
                assert scores.all(), tile
    assert left_out > 10
    assert whole > 3
