"""Grids with the mark `one_in`: a usual run has every n-th diagonal, and each value of every axis."""

import pytest

RAN: set[tuple[str, int]] = set()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("letter", ["a", pytest.param("b", id="second"), "c"])
@pytest.mark.parametrize(("number", "other"), [(0, 1), (1, 1), (2, 0)])
def test_a_case_of_a_diagonal(number, other, letter, request):
    RAN.add((letter, number))
    assert request.config.option.markexpr or not ("abc".index(letter) + number) % 2


def test_every_value_is_on_a_diagonal(request):
    if not request.config.option.markexpr and request.config.option.keyword == "" and len(RAN) > 1:
        assert {letter for letter, _ in RAN} == set("abc") and {number for _, number in RAN} == {0, 1, 2}
