"""The variants of a score program: scale times a variant is the program. Factors are powers of two: nothing rounds."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fusion.ir import MaskFacts, Normalizer
from fusion.ir.expr import SCORE, Expr, I, J, const
from fusion.ir.ops import apply, evaluate, where
from fusion.lowering.score_programs import ScorePrograms, score_programs
from tests.codegen.mlir.cases import case
from tests.numerics import assert_same

LIVE, BELOW = apply("ile", J, I), apply("ilt", J, I)
SCALED = apply("fmul", SCORE, const(0.125))
CAPPED = apply("fmul", apply("tanh", apply("div", SCORE, const(16.0))), const(16.0))
ROUNDED = apply("round_bfloat16", apply("fadd", SCALED, const(-9984.0)))
LOWEST = -3.4028234663852886e38
SCORES = torch.tensor([0.0, -0.0, 1.5, -3.25, 80.0, -1e30, math.inf, -math.inf, math.nan])


def programs(score: Expr, folded: bool, full: Expr | None = None) -> ScorePrograms:
    mask = None if full is None else MaskFacts(live=LIVE, full=full, fill=-math.inf)
    return score_programs(dataclasses.replace(case("plain").spec, score=score, mask=mask), folded)


def value(program: Expr, i: int, j: int) -> torch.Tensor:
    places = {SCORE: SCORES, I: torch.tensor(i), J: torch.tensor(j)}
    return evaluate(program, places.__getitem__).broadcast_to(SCORES.shape)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    ("score", "scale"),
    [
        (SCALED, 0.125),
        (apply("div", SCORE, const(8.0)), 0.125),
        (apply("fmul", SCALED, const(4.0)), 0.5),
        (where(LIVE, SCALED, const(-math.inf)), 0.125),
        (where(LIVE, const(-1e9), SCALED), 0.125),
        (where(LIVE, where(BELOW, SCALED, const(LOWEST)), const(-math.inf)), 0.125),
        (where(LIVE, SCALED, SCORE), 1.0),
        (apply("fmul", where(LIVE, SCALED, ROUNDED), const(4.0)), 0.5),
        (apply("fmul", SCORE, const(-0.125)), 1.0),
        (apply("fmul", SCORE, const(1e-9)), 1.0),
    ],
)
def test_scale_times_a_variant_is_the_program(score: Expr, scale: float, folded: bool) -> None:
    found = programs(score, folded)
    assert found.scale == scale
    for i, j in ((0, 0), (1, 0), (0, 1)):
        want, got = value(score, i, j), value(found.masked, i, j) * found.scale
        for unit, constant in found.fills:
            got = torch.where(got == unit * found.scale, constant, got)
        assert_same(got, want)


def test_any_product_with_a_constant_gives_its_factor_where_constants_are_folded() -> None:
    assert programs(CAPPED, folded=True).scale == 16.0
    assert programs(CAPPED, folded=False).scale == 1.0


@pytest.mark.parametrize("folded", [False, True])
def test_both_variants_share_a_scale(folded: bool) -> None:
    found = programs(where(LIVE, SCALED, const(-math.inf)), folded, full=SCALED)
    assert (found.scale, found.full) == (0.125, SCORE)
    other = programs(where(LIVE, SCALED, const(-math.inf)), folded, full=apply("fmul", SCORE, const(0.25)))
    assert other.scale == 1.0


@pytest.mark.parametrize("folded", [False, True])
def test_fills_that_would_become_equal_stay_apart(folded: bool) -> None:
    """Two fills beyond float32 in units of the scale: eager tells them apart in a row of nothing else."""
    score = where(LIVE, where(BELOW, SCALED, const(LOWEST)), const(LOWEST / 2))
    found = programs(score, folded)
    assert (found.masked, found.scale) == (score, 1.0)


def test_without_a_normaliser_nothing_is_taken_out() -> None:
    spec = dataclasses.replace(case("plain").spec, score=SCALED, normalizer=Normalizer.NONE)
    assert score_programs(spec, folded=True) == ScorePrograms(masked=SCALED, full=None)
