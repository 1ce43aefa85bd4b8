"""Transfer functions of value ranges, against brute force: every result lies in the range that is stated for it."""

import itertools
import math
import random

import pytest
import torch

from fusion.ir import integers
from fusion.ir.expr import I, J, Kind, const, load, size
from fusion.ir.ops import apply
from fusion.ir.primitives import ANY, PRIMITIVES, is_bounded
from fusion.ir.ranges import LARGEST_SIZE, interval, range_of, transferred
from fusion.ir.transfer import Range

MIN, MAX = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
FLOATS = [-math.inf, -1.7e308, -3.4028234663852886e38, -65504.0, -3.0, -2.0, -1.5, -1.0, -0.3, -1e-42, -5e-324, -0.0,
          0.0, 5e-324, 1e-42, 2.0**-126, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 88.0, 65504.0, 3.4028234663852886e38, 1.7e308,
          math.inf]  # fmt: skip
INTEGERS = [MIN, MIN + 1, -(2**62), -(2**32), -(2**31), -7, -2, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**33, 2**62, MAX]
VALUES = {Kind.FLOAT: FLOATS, Kind.INT: INTEGERS, Kind.BOOL: [False, True]}
DTYPES = {Kind.FLOAT: torch.float64, Kind.INT: torch.int64, Kind.BOOL: torch.bool}
DIVISIONS = ("floordiv", "mod")


def drawn(draw, kind, positive):
    """(range, values in it)."""
    values = [value for value in VALUES[kind] if not positive or value > 0]
    low, high = sorted(draw.choices(values, k=2))
    inside = [value for value in values if low <= value <= high]
    if kind is not Kind.FLOAT:
        return Range(low, high), inside
    if math.isfinite(low) and math.isfinite(high):
        inside += [low + (high - low) * draw.random() for _ in range(3)] if math.isfinite(high - low) else []
    nan = draw.random() < 0.3
    only = nan and draw.random() < 0.1
    return (
        (Range(math.inf, -math.inf, True), [math.nan]) if only else (Range(low, high, nan), inside + [math.nan] * nan)
    )


def results(name, columns):
    """What torch computes of every combination of values."""
    kinds = PRIMITIVES[name].args
    combinations = [*zip(*itertools.product(*columns), strict=True)]
    tensors = [torch.tensor(column, dtype=DTYPES[kind]) for column, kind in zip(combinations, kinds, strict=True)]
    return PRIMITIVES[name].evaluate(*tensors)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_result_is_in_its_range(name):
    draw = random.Random(name)
    for _ in range(300):
        kinds = enumerate(PRIMITIVES[name].args)
        parts = [drawn(draw, kind, number == 1 and name in DIVISIONS) for number, kind in kinds]
        stated = transferred(name, *(part for part, _ in parts))
        values = results(name, [inside for _, inside in parts])
        if PRIMITIVES[name].result is Kind.FLOAT:
            values = values.double()
            assert stated.nan or not values.isnan().any(), (parts, stated)
            values = values[~values.isnan()]
        wrong = [value for value in values.tolist() if not stated.low <= value <= stated.high]
        assert not wrong, (parts, stated, wrong[:3])


@pytest.mark.parametrize("name", PRIMITIVES)
def test_what_is_unknown_stays_unknown(name):
    stated, values = transferred(name, *(ANY[kind] for kind in PRIMITIVES[name].args)), VALUES[PRIMITIVES[name].result]
    assert type(stated.low) is type(stated.high) is type(values[0])


def test_ranges_of_one_value_are_that_value():
    """Ranges that are too wide would be right, and of no use."""
    for name, primitive in PRIMITIVES.items():
        if name in ("hash", "mod", "sin", "cos"):
            continue
        values = [0.5, 2.0] if Kind.FLOAT in primitive.args else [3, 2]
        values = [True, *values[:-1], values[-1]] if name in ("where", "iwhere") else values[: len(primitive.args)]
        if Kind.BOOL in primitive.args[1:] or primitive.args == (Kind.BOOL,):
            values = [True] * len(primitive.args)
        stated = transferred(name, *(Range(value, value) for value in values))
        (result,) = results(name, [[value] for value in values]).tolist()
        assert stated.low <= result <= stated.high and not stated.nan, name
        assert stated.high - stated.low <= abs(result) * 2.0**-20, name


def test_bounded_functions():
    assert {name for name in PRIMITIVES if is_bounded(name)} == {
        "sin", "cos", "tanh", "sigmoid", "erf", "atan", "to_float", "bool_to_float",
    }  # fmt: skip


def test_ranges_of_cells_are_those_of_numbers():
    """Tensors have a range for each cell; those of numbers are computed by the same functions."""
    draw = random.Random(5)
    for name in ("add", "mul", "floordiv", "iabs", "imin", "imax", "ilt", "ile", "ieq", "ine", "and", "or", "not"):
        for _ in range(100):
            parts = []
            for number, kind in enumerate(PRIMITIVES[name].args):
                values = [value for value in VALUES[kind] if abs(value) < 2**30 and (number == 0 or value > 0)]
                parts.append(Range(*sorted(draw.choices(values, k=2))))
            stated = PRIMITIVES[name].transfer(*parts)
            cells = [Range(torch.tensor([part.low]), torch.tensor([part.high])) for part in parts]
            of_cells = PRIMITIVES[name].transfer(*cells)
            assert (of_cells.low.item(), of_cells.high.item()) == (stated.low, stated.high), (name, parts)


def test_integers_that_may_wrap_around_may_be_any():
    ends = interval(integers.add(load(3, (I,), Kind.INT), 1), {}, lambda _: (0, MAX))
    assert ends == (MIN, MAX)
    assert interval(apply("imin", apply("iabs", integers.sub(I, J)), const(7)), {}, lambda _: (0, 0)) == (0, 7)
    assert interval(size("N"), {}, lambda _: (0, 0)) == (0, LARGEST_SIZE)
    assert interval(I, {I: size("N")}, lambda _: (0, 0)) == (0, LARGEST_SIZE - 1)


def test_what_is_computed_of_numbers_that_are_known():
    score = load(3, (I, J), Kind.FLOAT)
    root = apply("sqrt", apply("fadd", apply("fmul", score, score), const(1.0)))
    assert range_of(root, {score: Range(2.0, 3.0)}.get).low > 2.0
    assert range_of(root, {score: Range(-3.0, 2.0)}.get).nan  # the two factors are taken for different numbers
    assert range_of(apply("exp", score), lambda _: None) == Range(0.0, math.inf, True)


def test_floats_are_those_of_float32():
    """float32 loses small numbers beside large ones, overflows, and has no very small numbers."""
    score = load(3, (I, J), Kind.FLOAT)
    lost = apply("fsub", apply("fadd", score, const(1.0)), const(1.0))
    assert range_of(lost, {score: Range(2.0**-30, 1.0)}.get).low <= 0.0
    assert range_of(apply("exp", score) * 2.0**-100, {score: Range(0.0, 100.0)}.get).high == math.inf
    assert range_of(apply("exp", score) * 2.0**200, {score: Range(-200.0, 0.0)}.get).low == 0.0
