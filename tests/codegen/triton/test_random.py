"""Outputs and gradients of random score programs, shapes, strides and masks, and texts that only some of them have."""

from __future__ import annotations

import ast

import hypothesis
import pytest

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.triton.source import parse, spread, wrapped
from fusion.runtime.guards import failures_raised
from tests.properties import test_random_gradients as random_gradients


@pytest.fixture(autouse=True)
def _no_silent_fallback():
    with failures_raised():
        yield


@hypothesis.given(random_gradients.trained(queries=(8, 40), keys=(20, 60), widths=(5, 16, 33)))
@hypothesis.settings(max_examples=6)
def test_random_programs(case) -> None:
    """With one key the gradient of the scores is exactly 0 in eager mode, and rounding here: there are more."""
    random_gradients.check(case, draws=2)


@pytest.mark.parametrize("sign", ["=", "+=", "-="])
def test_long_statements_are_broken(sign: str) -> None:
    line = f"    total {sign} tl.sum({' + '.join(f'first_{n} * second_{n}' for n in range(20))}, 1)"
    broken = wrapped(line)
    assert max(map(len, broken.splitlines())) <= 120 < len(line)
    before, after = (ast.dump(parse(text)) for text in (line, broken))
    assert before == after


@pytest.mark.parametrize("number", ["0.0", "-1.5", "1e-30", 'float("-inf")'])
def test_numbers_fill_tiles(number: str) -> None:
    """As the gradient of a score program that is constant almost everywhere (floor)."""
    assert spread(number, "[ROWS, KEYS]") == f"tl.full([ROWS, KEYS], {number}, tl.float32)"
    assert spread("dx_2", "[ROWS, KEYS]") == "tl.broadcast_to(dx_2, [ROWS, KEYS])"
