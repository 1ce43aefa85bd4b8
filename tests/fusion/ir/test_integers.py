"""The normal form of integer expressions computes what Python computes."""

import hypothesis
import hypothesis.strategies as st

from fusion.ir import integers
from fusion.ir.expr import coord, size
from fusion.ir.ops import apply, evaluate

X, Y, Z = coord("x"), coord("y"), coord("z")
H, W = size("h"), size("w")
BOUNDS = {X: integers.integer(5), Y: H, Z: integers.mul(H, W)}


@st.composite
def expressions(draw, depth=3):
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from([X, Y, Z, H, W, *map(integers.integer, range(5))]))
    left = draw(expressions(depth=depth - 1))
    kind = draw(st.sampled_from(["add", "mul", "floordiv", "mod", "imin", "imax"]))
    if kind in ("floordiv", "mod"):
        divisor = draw(st.sampled_from([H, W, integers.mul(2, H), *map(integers.integer, (1, 2, 3, 6))]))
        return getattr(integers, kind)(left, divisor, BOUNDS)
    right = draw(expressions(depth=depth - 1))
    if kind in ("imin", "imax"):
        return apply(kind, integers.sub(left, draw(st.integers(0, 3))), right)
    return getattr(integers, kind)(left, right)


def _value(expr, at):
    import torch

    return int(evaluate(expr, lambda leaf: torch.tensor(at[str(leaf.attr)])))


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=100)
def test_every_operation_is_pythons(data):
    h, w = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    at = {"h": h, "w": w}
    at |= {"x": data.draw(st.integers(0, 4)), "y": data.draw(st.integers(0, h - 1))}
    at["z"] = data.draw(st.integers(0, h * w - 1))
    left, right = data.draw(expressions()), data.draw(expressions())
    a, b = _value(left, at), _value(right, at)
    assert _value(integers.add(left, right), at) == a + b
    assert _value(integers.mul(left, right), at) == a * b
    assert _value(integers.sub(left, right), at) == a - b
    for divisor in (H, W, integers.mul(H, W), integers.integer(3), integers.mul(2, W)):
        d = _value(divisor, at)
        assert _value(integers.floordiv(left, divisor, BOUNDS), at) == a // d
        assert _value(integers.mod(left, divisor, BOUNDS), at) == a % d
    if integers.is_below(left, right, BOUNDS):
        assert 0 <= a < b
    difference = integers.sub(left, right)
    if integers.never_negative(difference, BOUNDS):
        assert a >= b
    limit = data.draw(expressions())
    if integers.is_below(difference, limit, BOUNDS):
        assert 0 <= a - b < _value(limit, at)
    for divisor in (H, integers.mul(H, W), integers.integer(3)):
        d = _value(divisor, at)
        assert _value(integers.floordiv(difference, divisor, BOUNDS), at) == (a - b) // d
        assert _value(integers.mod(difference, divisor, BOUNDS), at) == (a - b) % d


def test_a_position_in_a_table_of_distances_is_inside_it():
    length, bounds = integers.integer(7), {X: integers.integer(7), Y: integers.integer(7)}
    place = integers.add(integers.sub(Y, X), 6)
    assert integers.is_below(place, integers.integer(13), bounds)
    assert not integers.is_below(place, integers.integer(12), bounds)
    assert not integers.is_below(integers.sub(place, 1), integers.integer(13), bounds)
    assert integers.is_below(Y, length, bounds)


def test_a_reshape_and_back_is_the_coordinate():
    flat = integers.add(integers.mul(X, H), Y)
    assert integers.floordiv(flat, H, BOUNDS) is X
    assert integers.mod(flat, H, BOUNDS) is Y
    quotient, rest = integers.floordiv(Z, W, BOUNDS), integers.mod(Z, W, BOUNDS)
    assert integers.add(integers.mul(W, quotient), rest) is Z


def test_a_quotient_without_a_rest_is_the_factor():
    assert integers.floordiv(integers.mul(H, H), H) is H
    assert integers.mod(integers.mul(H, W), W) is integers.integer(0)


def test_equal_polynomials_are_one_object():
    assert integers.mul(integers.add(X, 1), integers.add(Y, 2)) is integers.add(integers.mul(X, Y), Y, X, X, 2)


def test_linear_splits_off_one_atom():
    expr = integers.add(integers.mul(3, X), integers.mul(H, X), Y, 7)
    assert integers.linear(expr, X) == (integers.add(3, H), integers.add(Y, 7))
    assert integers.linear(integers.mul(X, X), X) is None
