"""The model put on the FlashAttention paper's own measurement (2205.14135, Fig. 2 left): 40.3 and 4.4 GB."""

import pytest

from examples.io_model.gpt2 import BYTES, PAIRS, flash, standard


def test_standard_attention_moves_forty_gigabytes():
    assert standard() == pytest.approx(20 * PAIRS, rel=0.07)  # twenty passes over N x N, and the operands
    assert standard() * BYTES == pytest.approx(40.3e9, rel=0.25)


def test_flash_attention_moves_four_gigabytes():
    assert flash() * BYTES == pytest.approx(4.4e9, rel=0.25)


def test_the_nine_times_of_the_paper():
    """The ratio of the two, which the paper's abstract rounds to nine."""
    assert standard() / flash() == pytest.approx(40.3 / 4.4, rel=0.25)
