"""Intervals of what is made of weights."""

import math

import pytest

from fusion.ir import Normalizer
from fusion.ir.expr import ROW_SUM, WEIGHT, I, J, Kind, const, load
from fusion.ir.ops import apply
from fusion.lowering.ranges import is_ordinary, ranges
from tests.codegen.mlir.cases import case

SHARES = ranges(case("plain", d=16).spec)


@pytest.mark.parametrize(
    ("value", "ordinary"),
    [
        (apply("fadd", WEIGHT, const(1e-9)), True),
        (apply("maximum", WEIGHT, const(1e-12)), True),
        (apply("fadd", apply("fmul", WEIGHT, WEIGHT), const(1e-9)), True),
        (apply("minimum", apply("fadd", WEIGHT, const(0.5)), const(1.0)), True),
        (apply("fmul", apply("fadd", WEIGHT, const(1e-9)), const(3.0)), True),
        (WEIGHT, False),
        (apply("fadd", WEIGHT, const(1e-40)), False),
        (apply("fadd", WEIGHT, const(-1e-9)), False),
        (apply("fmul", apply("fadd", WEIGHT, const(1e-9)), const(-3.0)), False),
        (apply("maximum", WEIGHT, const(math.inf)), False),
        (apply("fadd", WEIGHT, load(3, (I, J), Kind.FLOAT)), False),
        (ROW_SUM, False),
    ],
    ids=str,
)
def test_which_values_are_ordinary(value, ordinary):
    assert is_ordinary(value, SHARES) is ordinary


def test_weights_that_are_no_shares():
    """Without a softmax, or of rows with a scale of their own, they may be anything."""
    for c in (case("sigmoid", d=16, normalizer=Normalizer.NONE), case("plain", d=16, off_by_one=True)):
        assert not is_ordinary(apply("fadd", WEIGHT, const(1e-9)), ranges(c.spec))
