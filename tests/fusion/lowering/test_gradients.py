"""Gradients that are NaN at keys which a mask hides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusion.ir.expr import SCORE, const
from fusion.ir.ops import apply, where
from fusion.lowering.gradients import hides_nan
from fusion.passes.specify.masks import understand
from tests.codegen.mlir.cases import CAUSAL, HEAD, case, read

FACTOR, FILL = read(HEAD), const(-math.inf)
HIDDEN = where(CAUSAL, SCORE, FILL)
TRAINED = (True, True, True, True)


def spec_of(score):
    masked = where(CAUSAL, score, const(-1e9))
    return replace(case("temperature").spec, score=masked, mask=understand(masked))


@pytest.mark.parametrize(
    ("score", "hides"),
    [
        (apply("fmul", HIDDEN, FACTOR), True),
        (apply("fmul", apply("neg", HIDDEN), FACTOR), True),
        (apply("fmul", apply("fadd", HIDDEN, const(1.0)), apply("exp", FACTOR)), True),
        (apply("fmul", FACTOR, where(CAUSAL, const(2.0), FILL)), True),
        (where(CAUSAL, apply("fmul", SCORE, FACTOR), FILL), False),
        (apply("fmul", where(CAUSAL, SCORE, const(-1e9)), FACTOR), False),
        (apply("fadd", HIDDEN, FACTOR), False),
        (apply("fmul", apply("exp", HIDDEN), FACTOR), False),
        (apply("fmul", apply("tanh", HIDDEN), FACTOR), False),
        (apply("fmul", SCORE, apply("exp", where(CAUSAL, FACTOR, FILL))), False),
    ],
    ids=str,
)
def test_infinite_numbers_that_a_gradient_is_multiplied_by(score, hides) -> None:
    spec = spec_of(score)
    assert spec.mask is not None and spec.mask.skips
    assert hides_nan(spec, TRAINED) == hides


def test_gradients_that_nobody_needs_and_keys_that_nobody_skips() -> None:
    spec = spec_of(apply("fmul", HIDDEN, FACTOR))
    assert not hides_nan(spec, (True, True, True, False))
    assert not hides_nan(replace(spec, mask=None), TRAINED)
    everywhere = apply("fmul", SCORE, where(CAUSAL, const(2.0), FILL))
    assert hides_nan(spec_of(everywhere), (True, False, True, False))
    assert not hides_nan(spec_of(everywhere), (False, False, True, False))
