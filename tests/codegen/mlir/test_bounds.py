"""Scores near a centre that the norms of queries and keys show: the rule, polynomials and kernels that use it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir import Normalizer
from fusion.ir.expr import SCORE, Expr, I, J, const
from fusion.ir.ops import apply, evaluate, where
from fusion.lowering.bounded_scores import (
    EXPONENTS,
    FILL,
    LARGEST_SCORE,
    TANH_ERROR,
    TANH_NEAR,
    bounded_scores,
    tanh_polynomial,
)
from fusion.lowering.numbers import LOG2E
from fusion.planning.register_tiles import Target, tilings_for
from tests import emulation
from tests.codegen.mlir.cases import HERE, Case, assert_as_exact_as_eager, case, draw, on_threads
from tests.numerics import assert_same, assert_within

BELOW = apply("ilt", I, J)


def scaled(x: Expr, factor: float) -> Expr:
    return apply("fmul", x, const(factor))


def capped(cap: float, factor: float = 0.125) -> Expr:
    return scaled(apply("tanh", scaled(SCORE, factor / cap)), cap)


PROGRAMS = {
    "plain": scaled(SCORE, 0.125),
    "negative": apply("neg", scaled(SCORE, 0.125)),
    "shifted": apply("fadd", scaled(SCORE, 0.125), const(7.0)),
    "divided": apply("div", apply("fsub", const(1.0), SCORE), const(8.0)),
    "capped": capped(20.0),
    "capped twice": scaled(apply("tanh", scaled(capped(30.0), 1 / 40)), 40.0),
    "filled": where(BELOW, const(-math.inf), scaled(SCORE, 0.125)),
    "finite": where(BELOW, const(-1e9), capped(50.0)),
    "penalty": where(BELOW, apply("fadd", scaled(SCORE, 0.125), const(-3.0)), scaled(SCORE, 0.125)),
    "added": apply("fadd", scaled(SCORE, 0.125), where(BELOW, const(-math.inf), const(0.0))),
    "two values": where(BELOW, const(-5.0), scaled(SCORE, 0.125)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_exponents_in_other_units(name: str, scale: float) -> None:
    plain, other = bounded_scores([PROGRAMS[name]], scale), bounded_scores([PROGRAMS[name]], scale, 128, 127)
    assert plain is not None and other is not None
    (first,), (second,) = plain.exponents.values(), other.exponents.values()
    assert bool(plain.filled) == bool(other.filled) == (name in ("filled", "finite", "added"))
    s = torch.linspace(-plain.bound, plain.bound, 1001, dtype=torch.float64)
    for i, j in ((0, 1), (1, 0)):
        places = {SCORE: s, I: torch.tensor(i), J: torch.tensor(j)}
        x, y = (torch.as_tensor(evaluate(e, places.__getitem__)) for e in (first, second))
        if (x > FILL).any():
            assert_within((y / 128 - 127 - x).abs(), 2 * TANH_ERROR)
        else:
            assert (y <= 128 * FILL + 128 * 127).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_exponents_are_those_of_the_program_and_in_range(name: str, scale: float) -> None:
    program = PROGRAMS[name]
    found = bounded_scores([program], scale)
    assert found is not None
    s = torch.linspace(-found.bound, found.bound, 1001, dtype=torch.float64)
    for i, j in ((0, 1), (1, 0)):
        places = {SCORE: s, I: torch.tensor(i), J: torch.tensor(j)}
        x = evaluate(program, places.__getitem__).broadcast_to(s.shape) * scale * LOG2E
        y = evaluate(found.exponents[program], places.__getitem__).broadcast_to(s.shape)
        expected = x - found.centre * scale * LOG2E
        if float(x.max()) <= FILL * LOG2E:  # a fill has no weight, whatever it is
            assert float(y.max()) < -1000
            continue
        error = max(str(program).count("tanh"), 1) * TANH_ERROR
        assert_within((y - expected).abs(), error)
        assert_within(y.abs(), EXPONENTS + error)


@pytest.mark.parametrize(
    "program",
    [
        apply("exp", SCORE),
        apply("fmul", SCORE, SCORE),
        apply("fadd", SCORE, const(math.inf)),
        scaled(apply("tanh", apply("fadd", SCORE, const(2.0))), 3.0),
        apply("div", const(1.0), SCORE),
    ],
)
def test_ranges_that_do_not_follow_from_the_score(program: Expr) -> None:
    found = bounded_scores([program], 1.0)
    assert found is None


@pytest.mark.parametrize(
    "program",
    [
        where(BELOW, const(-1500.0), apply("fadd", SCORE, const(-2000.0))),
        where(BELOW, const(-500.0), apply("fadd", SCORE, const(-2000.0))),
        where(BELOW, apply("fadd", scaled(SCORE, 1000.0), const(-1e4)), SCORE),
        where(BELOW, const(1e9), apply("neg", SCORE)),
        scaled(where(BELOW, const(-1e4), SCORE), 0.01),
        apply("fadd", where(BELOW, const(-math.inf), SCORE), scaled(where(BELOW, const(-1e9), SCORE), 0.5)),
    ],
)
def test_constants_beside_the_scores(program: Expr) -> None:
    """For every score that is let through, an exponent is right and in range, or a fill far below."""
    found = bounded_scores([program], 1.0)
    for s in () if found is None else (-found.bound, found.bound):
        for i in (0, 1):
            places = {SCORE: torch.tensor(s, dtype=torch.float64), I: torch.tensor(i), J: torch.tensor(1)}
            x, y = (float(evaluate(e, places.__getitem__)) for e in (program, found.exponents[program]))
            expected = (x - found.centre) * LOG2E
            if y > -2 * EXPONENTS:
                assert_within(abs(y - expected), 1e-6 * abs(expected) + 1e-9)
                assert_within(abs(y), 1.001 * EXPONENTS)
            else:
                assert max(y, expected) <= FILL + 2 * EXPONENTS


def test_fills_are_low_beside_the_scores(target: Target) -> None:
    """A centre of -2000, and keys at -1500 that take all of the weight."""
    c = case("far_below", "bfloat16", 40, 24)
    run, general = kernels(c, target)
    operands, sizes = draw(c, SHAPES[0])
    assert_as_exact_as_eager(run(operands, sizes), c, operands)
    assert_same(run(operands, sizes), general(operands, sizes))


def test_programs_must_share_a_centre() -> None:
    assert bounded_scores([SCORE, apply("fadd", SCORE, const(1.0))], 1.0) is None


def test_tiny_scales_stay_within_powers_that_are_numbers() -> None:
    found = bounded_scores([scaled(SCORE, 1e-9)], 1.0)
    assert found is not None
    assert found.bound == LARGEST_SCORE


@pytest.mark.parametrize("error", [1e-3, 2.0**-11 / 50, 1e-7])
def test_tanh_polynomial(error: float) -> None:
    x = np.linspace(-TANH_NEAR, TANH_NEAR, 4001)
    coefficients = tanh_polynomial(error)
    found = np.abs(x * np.polyval(coefficients[::-1], x * x) - np.tanh(x)).max()
    assert_within(found, 1.01 * error)  # which is that at fewer points
    shorter = tanh_polynomial(error * 20)
    assert len(shorter) < len(coefficients)


SHAPES = (
    {"B": 2, "H": 2, "Nq": 100, "Nk": 100},
    {"B": 1, "H": 3, "Nq": 33, "Nk": 301},
    {"B": 1, "H": 1, "Nq": 130, "Nk": 7},
)


@pytest.fixture(params=["AMX", "pairs"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Kernels for tiles where there are, and for pairs anywhere."""
    if request.param == "AMX" and not HERE.amx:
        pytest.skip("this processor has no tiles (AMX); pairs are tested on any")
    found = HERE if request.param == "AMX" else emulation.PAIRS
    with emulation.compiling(found):
        yield found


def kernels(c: Case, target: Target):
    """The kernel of a case, and one that never looks at norms."""
    pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")
    from fusion.codegen.cpu.launch import Kernel

    class General(Kernel):
        def variant(self, *args):
            with mock.patch("fusion.codegen.mlir.kernel.score_bounds", lambda tiles: None):
                return super().variant(*args)

    return Kernel(c.spec, tilings_for(c.spec, target), target), General(c.spec, tilings_for(c.spec, target), target)


@pytest.mark.parametrize(
    "name",
    ["plain", "causal", "left_padded", "left_padded_inf", "bool_mask", "padding", "soft_cap", "documents", "dilated"],
)
def test_near_scores(name: str, target: Target) -> None:
    c = case(name, "bfloat16", 40, 24)
    run, general = kernels(c, target)
    for shape in SHAPES:
        operands, sizes = draw(c, shape)
        out = run(operands, sizes)
        assert_as_exact_as_eager(out, c, operands)
        operands[0] *= 1000  # far from near
        assert_same(run(operands, sizes), general(operands, sizes))


WIDTHS = [(8, 16), (80, 48), (128, 128), (288, 272), (32, 160), (160, 96), (40, 176), (96, 224), (224, 192)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("d", "d_v"), WIDTHS)
@pytest.mark.parametrize("name", ["plain", "causal", "window"])
def test_near_scores_of_other_widths(name: str, d: int, d_v: int, target: Target) -> None:
    """How many pieces a product takes of a step's keys follows from its width; tiles are full, partly masked, or at the
    end."""
    c = case(name, "bfloat16", d, d_v)
    run, general = kernels(c, target)
    for shape in (*SHAPES, {"B": 1, "H": 1, "Nq": 96, "Nk": 640}):
        operands, sizes = draw(c, shape)
        operands[0] /= math.sqrt(d)
        out = run(operands, sizes)
        assert_as_exact_as_eager(out, c, operands)
        # By another exponential, unless a row has no live key, so that its item is computed again.
        again = name == "window" and shape["Nk"] == 7
        assert torch.equal(out, general(operands, sizes)) == again


@pytest.mark.parametrize(("d", "d_v"), WIDTHS)
def test_near_scores_of_other_widths_in_training(d: int, d_v: int) -> None:
    c = case("plain", "bfloat16", d, d_v)
    run = TrainingKernel(c.spec, tilings_for(c.spec, HERE), HERE)
    operands, sizes = draw(c, {"B": 1, "H": 2, "Nq": 96, "Nk": 200})
    operands[0] /= math.sqrt(d)
    assert_as_exact_as_eager(run.outputs(operands, sizes)[0], c, operands)


@pytest.mark.parametrize("normalizer", [Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX])
@pytest.mark.parametrize("name", ["left_padded_inf", "bool_mask"])
def test_rows_without_a_live_key(name: str, normalizer: Normalizer, target: Target) -> None:
    c = case(name, "bfloat16", 40, 24, normalizer=normalizer, sinks=name == "bool_mask")
    run, _ = kernels(c, target)
    operands, sizes = draw(c, SHAPES[0])
    if name == "bool_mask":
        operands[3][:, :, 5:9] = False
    assert_as_exact_as_eager(run(operands, sizes), c, operands)


def test_the_decision_is_by_item_and_reaches_all_that_it_should(target: Target) -> None:
    c = case("soft_cap", "bfloat16")
    run, general = kernels(c, target)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 512, "Nk": 300})
    operands[0][:, :, :64] *= 100
    one, other = run(operands, sizes), general(operands, sizes)
    assert_same(one[:, :, :64], other[:, :, :64])
    assert not torch.equal(one[:, :, 64:], other[:, :, 64:])  # by another polynomial
    for out in (one, other):
        assert_as_exact_as_eager(out, c, operands)


@pytest.mark.parametrize("value", [2.0**70, 2.0**-70, math.nan, math.inf])
def test_extreme_values(value: float, target: Target) -> None:
    c = case("plain", "bfloat16")
    run, general = kernels(c, target)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 64, "Nk": 100})
    operands[2] *= value
    assert_same(run(operands, sizes), general(operands, sizes))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_not_a_number(number: int, sign: float, target: Target) -> None:
    c = case("causal", "bfloat16")
    run, _ = kernels(c, target)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 64, "Nk": 64})
    operands[number][0, 0, 5, 3] = math.copysign(math.nan, sign)
    out = run(operands, sizes)
    # A key reaches the rows from 5 on; a value also those whose weight for it is zero, as in eager mode.
    reached = [out[:, :, 5:6], out[:, :, 5:], out[..., 3:4]][number]
    assert torch.isnan(reached).all()
    assert torch.isnan(out).sum() == reached.numel()


def test_results_do_not_depend_on_what_a_thread_did_before(target: Target) -> None:
    c = case("causal", "bfloat16")
    run, _ = kernels(c, target)
    operands, sizes = draw(c, {"B": 1, "H": 3, "Nq": 1000, "Nk": 1000})
    operands[1][:, :, 700:] *= 3  # from there on other norms
    outs = on_threads(run, operands, sizes)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
