"""Ranges of what kernels compute, and over what the gradient of a load is summed."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.ir import Normalizer, integers
from fusion.ir.expr import ROW_SUM, WEIGHT, Expr, I, J, Kind, const, coord, load, size
from fusion.ir.ops import apply, evaluate
from fusion.ir.ranges import LARGEST_SIZE
from fusion.lowering.gradients import Axes, summed_over, wanted_loads
from fusion.lowering.numbers import is_ordinary, magnitude, shares
from tests.codegen.mlir.cases import case

HEAD = coord("b1")
DISTANCE = integers.sub(I, J)
BOUNDED = {
    "difference": DISTANCE,
    "product": integers.mul(I, 3),
    "distance": apply("imin", apply("iabs", DISTANCE), const(7)),
    "chunk": integers.floordiv(I, 16),
    "every third": integers.mod(integers.add(I, J), 3),
    "bucket": apply("iwhere", apply("ilt", I, J), integers.add(DISTANCE, 8), DISTANCE),
    "flag": apply("bool_to_int", apply("ilt", I, J)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_magnitudes_are_bounds_at_the_largest_coordinates(name: str) -> None:
    bound, largest = magnitude(BOUNDED[name]), LARGEST_SIZE - 1
    assert math.isfinite(bound)
    for i in (0, 1, 17, largest):
        for j in (0, 5, largest):
            value = evaluate(BOUNDED[name], {I: torch.tensor(i), J: torch.tensor(j)}.__getitem__)
            assert abs(int(value)) <= bound, (i, j)


def test_nothing_is_known_of_what_is_read() -> None:
    assert magnitude(load(3, (I,), Kind.INT)) >= 2**63
    assert magnitude(apply("imin", apply("iabs", load(3, (I,), Kind.INT)), const(7))) >= 2**63
    assert magnitude(size("N")) == LARGEST_SIZE
    # Kernels hash in 32 bits, whatever the key is.
    assert magnitude(apply("hash", load(3, (), Kind.INT), integers.add(integers.mul(I, size("N")), J))) < 2**31


@pytest.mark.parametrize(
    ("index", "axes"),
    [
        ((HEAD,), Axes.BOTH),
        ((HEAD, I), Axes.KEYS),
        ((J,), Axes.QUERIES),
        ((HEAD, I, J), Axes.NEITHER),
        ((BOUNDED["distance"],), Axes.NEITHER),
    ],
)
def test_gradients_are_summed_over_the_axes_that_a_load_is_free_of(index: tuple[Expr, ...], axes: Axes) -> None:
    assert summed_over(load(3, index, Kind.FLOAT)) is axes


def test_integers_and_operands_that_need_none_have_no_gradient() -> None:
    bias, document = load(3, (I, J), Kind.FLOAT), load(4, (J,), Kind.INT)
    program = apply("fadd", bias, apply("to_float", document))
    assert wanted_loads((True,) * 5, program) == [bias]
    assert wanted_loads((True, True, True, False, True), program) == []


SHARES = shares(case("plain", d=16).spec)


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
        assert not is_ordinary(apply("fadd", WEIGHT, const(1e-9)), shares(c.spec))
