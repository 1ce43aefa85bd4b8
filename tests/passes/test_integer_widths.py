"""Integers of a score program are those of eager mode, which wrap around at the width of their dtype, and are rounded
where they become floats."""

import pytest
import torch

from tests.passes.exactness import EMITTERS, as_exact_as_eager

LENGTH = 19


def rows(dtype):
    return torch.arange(LENGTH, dtype=dtype)[:, None]


def keys(dtype):
    return torch.arange(LENGTH, dtype=dtype)


def less_than_nothing(s, mask):
    return s + (mask.to(torch.uint8) - 1).to(s.dtype) * 0.01


def compared_after_wrapping(s, mask):
    return s.masked_fill(keys(torch.uint8) - rows(torch.uint8) > 100, -1.0)


def positions_of_16_bits(s, mask):
    return s + (rows(torch.int16) * 3000 - keys(torch.int16) * 2000).to(s.dtype) * 1e-4


def positions_of_32_bits(s, mask):
    return s + (keys(torch.int32) * 200_000_000 + rows(torch.int32) * 7).to(s.dtype) * 1e-9


def lowest_turned_positive(s, mask):
    low = keys(torch.int8) - 128
    return s + (low.abs().to(s.dtype) + (-low).to(s.dtype)) * 0.01


def compared_with_a_number_beyond(s, mask):
    return s.masked_fill((keys(torch.uint8) > -3) | (rows(torch.int8) < 200), -1.0)


def compared_with_the_largest(s, mask):
    return s.masked_fill(keys(torch.int32) < torch.iinfo(torch.int64).max, -1.0)


def compared_with_one_element(s, mask):
    return s.masked_fill(keys(torch.uint8) < torch.arange(270)[-1] + mask.shape[-1], -1.0)


def clamped_to_a_number_beyond(s, mask):
    return s + keys(torch.uint8).clamp(-5, 16).to(s.dtype) * 0.01


def divided_by_a_number_beyond(s, mask):
    return s + (keys(torch.uint8) // 260 + rows(torch.uint8) % 259).to(s.dtype) * 0.01


def narrowed(s, mask):
    return s + (rows(torch.int64) * 50 - keys(torch.int64) * 40).to(torch.int8).to(s.dtype) * 0.01


def narrowed_from_a_float(s, mask):
    return s + (keys(torch.float32) * 7.5).to(torch.uint8).to(s.dtype) * 0.01


def products(s, mask):
    return s + (keys(torch.uint8) * rows(torch.uint8)).to(s.dtype) * 0.01


def made_narrow(s, mask):
    return s + (torch.full([LENGTH], 100, dtype=torch.int8) + keys(torch.int8) * 3).to(s.dtype) * 0.01


def loaded(s, mask):
    held = mask.to(torch.uint8).cumsum(-1, dtype=torch.uint8) * 20
    return s + (held - 30).to(s.dtype) * 0.01


def quotients(s, mask):
    distance = rows(torch.int16) - keys(torch.int16)
    divided = torch.div(distance, 3, rounding_mode="trunc") + distance // 4 + distance % 5 + distance % -3
    return s + divided.to(s.dtype) * 0.1


def truth_values(s, mask):
    wide = mask.int() * 3 - (~mask).int() + (mask ^ mask.roll(1)).int() + (mask * mask) + (mask + mask)
    return s + wide.to(s.dtype) * 0.1


def beyond_float32(s, mask):
    moved = keys(torch.int64) + 2**24
    return s + (moved.float().long() - 2**24).to(s.dtype) * 0.1 + (moved.float() - 2.0**24) * 0.1


def compared_in_half_precision(s, mask):
    far = (keys(torch.int64) * 3 + 2040).half() - (rows(torch.int64) * 3 + 2040).half() > 8
    near = (keys(torch.int64) + 250).bfloat16() == (rows(torch.int64) + 250).bfloat16()
    return s.masked_fill(far, -1.0).masked_fill(near, 2.0)


FUNCTIONS = [compared_with_a_number_beyond, compared_with_the_largest, compared_with_one_element,
             clamped_to_a_number_beyond, divided_by_a_number_beyond, less_than_nothing,
             compared_after_wrapping, positions_of_16_bits, positions_of_32_bits,
             lowest_turned_positive, narrowed, narrowed_from_a_float, products, made_narrow, loaded, quotients,
             truth_values, beyond_float32, compared_in_half_precision]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("emitter", EMITTERS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_integers_are_those_of_eager_mode(function, emitter):
    def attend(q, k, v, mask):
        return function(q @ k.mT, mask).softmax(-1) @ v

    given = [*(torch.randn(1, 2, LENGTH, 8) for _ in range(3)), torch.rand(LENGTH, LENGTH) > 0.4]
    sites = as_exact_as_eager(attend, given, emitter)
    assert [site.reason for site in sites] == [None]
