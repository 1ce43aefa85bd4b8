"""Masks that compare positions with numbers that only data says, up to the ends of their dtype: eager's integers, which
wrap around. "No limit" is often written as such a number."""

import math

import pytest
import torch

from tests.emitters import interpreted
from tests.numerics import assert_as_exact_as_eager
from tests.passes.exactness import as_exact_as_eager

MAX, MIN = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
LENGTH = 70

PROGRAMS = {
    "from": lambda i, j, t: j >= t,
    "up_to": lambda i, j, t: j <= t,
    "below": lambda i, j, t: j < t,
    "other_than": lambda i, j, t: j != t,
    "rows_from": lambda i, j, t: i >= t,
    "diagonal": lambda i, j, t: j <= i + t,
    "distance": lambda i, j, t: j - t <= 5,
    "other_side": lambda i, j, t: t - j < i,
    "band": lambda i, j, t: (j - t).abs() < 9,
    "one_key": lambda i, j, t: j - t == 3,
    "scaled": lambda i, j, t: 3 * j > 2 * t,
    "negative": lambda i, j, t: -t <= j,
    "clamped": lambda i, j, t: j < t.clamp(0, 30),
    "both": lambda i, j, t: (j >= t) & (j - t <= i),
    "cancelled": lambda i, j, t: j + t < i + t,
    "of_the_row": lambda i, j, t: j <= t.flatten().repeat(9)[: i.shape[0], None],
    "of_the_key": lambda i, j, t: t.flatten().repeat(9)[: j.shape[0]] - i < j,
    "largest_constant": lambda i, j, t: (j <= MAX) & (j >= MIN),
    "wrapping_constant": lambda i, j, t: j <= i + MAX,
    "wrapping_below": lambda i, j, t: (j > i + MIN) | (j - MIN < 3),
}


def bounds(dtype: torch.dtype) -> torch.Tensor:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.tensor([low, low + 1, low + 60, 0, 7, high - 60, high - 1, high], dtype=dtype)


def attention(live, fill: float):
    def function(q, k, v, t):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        s = (q @ k.mT) * 0.25
        return torch.softmax(s.masked_fill(~live(i, j, t.view(-1, 1, 1, 1)), fill), -1) @ v

    return function


def given(dtype: torch.dtype, queries: int) -> list[torch.Tensor]:
    return [*(torch.randn(8, 2, n, 16) for n in (queries, LENGTH, LENGTH)), bounds(dtype)]


def compared(name: str, dtype: torch.dtype, queries: int, fill: float, emitter: str = "auto") -> None:
    (site,) = as_exact_as_eager(attention(PROGRAMS[name], fill), given(dtype, queries), emitter)
    assert site.fused or name == "negative", site.reason


@pytest.mark.one_in(2)
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_64_bits(name: str, queries: int) -> None:
    compared(name, torch.int64, queries, -math.inf)


@pytest.mark.long
@pytest.mark.parametrize("fill", [-math.inf, -1e9])
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("queries", [1, 9, 40])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_dtypes(name: str, dtype: torch.dtype, queries: int, emitter: str, fill: float) -> None:
    compared(name, dtype, queries, fill, emitter)


@pytest.mark.parametrize("name", [n if n in ("from", "distance") else pytest.param(n, marks=pytest.mark.long)
                                  for n in PROGRAMS])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_kernels_for_gpus(name: str, dtype: torch.dtype) -> None:
    function, operands = attention(PROGRAMS[name], -math.inf), given(dtype, 20)
    with interpreted():
        out = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": "interpreted"})(*operands)
    wide = [x.double() if x.is_floating_point() else x for x in operands]
    assert_as_exact_as_eager(out, function(*operands), function(*wide))
